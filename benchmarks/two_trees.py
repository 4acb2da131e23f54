"""Step times of two checkouts of Bridge, measured alternately on one device: does a change cost speed?

    python -m benchmarks.two_trees ../before . --size 1.5b
    python -m benchmarks.two_trees . . --library
    python -m benchmarks.two_trees . . --tinker --variant 'adamw --mode lora_only --lora-r 32'

Both run `bridge run` on the same model and the same work as `grpo.py`, at the same time: while one takes a few steps,
all processes of the other are stopped (SIGSTOP), so that changes of the host's load affect both equally. The first step
of each turn is left out. The ratios are old / new: above 1, the new tree is faster. With `--library` the new side is a
program that uses `import bridge` from the new tree (`_library.py`), and with `--tinker` a server of Tinker's API and a
client of it (`_tinker.py`), which needs the package `tinker`.

Not covered: memory, and other trainers (`grpo.py`); whether both compute the same numbers (`same_steps.py`).
"""

import argparse
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks import _library, _results, _sides, _stamped
from benchmarks._results import say
from benchmarks._sides import Side, Work
from benchmarks._stamped import Run
from bridge.processes import children

ENDLESS = 100_000
"""Number of steps of a run that is killed from outside."""
PARTS = ("step_s", "generation_s", "training_s", "optimizer_s", "sync_s")
VARIANT = "adamw-8bit --micro-batch-tokens 4352 --gradient-checkpointing"


@dataclass(kw_only=True)
class Tree:
    """The run of one checkout."""

    name: str
    """`old` or `new`."""
    run: Run = field(default_factory=Run)
    """The lines printed so far."""
    child: children.Child
    """The process of `bridge run`."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """The measured steps: seconds by part."""

    def take(self, side: Side, count: int, limit_s: float) -> None:
        """Let the run take `count` more steps, stop it, and keep all of them but the first."""
        first = len(self.run.lines)
        self.go_on()
        deadline = time.monotonic() + limit_s
        while len(self.run.lines) < first + count:
            if not self.child.is_alive() or time.monotonic() > deadline:
                why = "is out of time" if self.child.is_alive() else _stamped.reason(self.child.log)
                raise RuntimeError(f"the {self.name} tree: {why}")
            time.sleep(0.002)
        self._send(signal.SIGSTOP)
        for number in range(first + 1, first + count):
            took_s = self.run.stamps[number] - self.run.stamps[number - 1]
            self.steps.append({"step_s": took_s, **side.parts(self.run.lines[number])})

    def go_on(self) -> None:
        """Let all processes of the run continue."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        process = psutil.Process(self.child.process.pid)
        for member in [process, *process.children(recursive=True)]:
            member.send_signal(number)


def main() -> None:
    """Measure; write and print the results of all turns so far after each."""
    options = _options()
    side, work = Side("bridge", options.variant), Work(**{name: getattr(options, name) for name in ("share", "tokens")})
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        model = Path(options.models or scratch, options.size)
        if not model.exists():
            say(f"{options.size}: writing the model")
            subprocess.run([sys.executable, "-m", "benchmarks._models", options.size, str(model)], check=True)
        trees: list[Tree] = []
        try:
            for name, checkout in (("old", options.old), ("new", options.new)):
                say(f"{name}: starting {checkout}")
                if name == "new" and (options.library or options.tinker):
                    module = "benchmarks._tinker" if options.tinker else "benchmarks._library"
                    argv = _library.Program(model, work, shlex.split(options.variant), module).argv
                else:
                    argv = side.argv(work, model, Path(scratch, name), ENDLESS)
                trees.append(_start(name, checkout.absolute(), argv, scratch))
                trees[-1].take(side, options.warm_up, options.start_limit_s)
                trees[-1].steps.clear()
            deadline, turns = time.monotonic() + options.limit_s, 0
            while turns < options.turns and time.monotonic() < deadline:
                for tree in reversed(trees) if turns % 2 else trees:
                    tree.take(side, options.steps + 1, options.start_limit_s)
                turns += 1
                _report(trees, options)
        finally:
            for tree in trees:
                with suppress(psutil.Error):
                    tree.go_on()  # a stopped resource tracker would not end when its users do
                children.kill(tree.child)
                children.stop(tree.child)


def _report(trees: Sequence[Tree], options: argparse.Namespace) -> None:
    """Write and print the results of all turns so far."""
    results = _compared(trees, options.steps)
    path = _results.write("two_trees", {"size": options.size, "variant": options.variant, **results}, options.out)
    rows = [["", "old", "new", "old/new"]]
    rows += [[part, *(f"{results[part][name]:.4f}" for name in ("old", "new", "ratio"))] for part in PARTS]
    say(f"{_results.table(rows)}\n{results['turns']} turns of {options.steps} steps each, in {path}")


def _options() -> argparse.Namespace:
    parser = _results.parser(__doc__)
    parser.add_argument("old", type=Path, help="checkout to compare with")
    parser.add_argument("new", type=Path, help="checkout to measure")
    parser.add_argument("--library", action="store_true", help="the new side is a program that uses `import bridge`")
    parser.add_argument(
        "--tinker", action="store_true", help="the new side is a client of Tinker's API on the new tree"
    )
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--models", type=Path, help="folder for the model, which stays there for the next time")
    parser.add_argument("--variant", default=VARIANT, help="optimizer and flags of `bridge run`")
    parser.add_argument("--share", type=float, default=Work.share, help="share of the GPU for each vLLM")
    parser.add_argument("--tokens", type=int, default=Work.tokens, help="tokens of a completion")
    parser.add_argument("--warm-up", type=int, default=4, help="steps after each start")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a turn")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=300.0, help="time after which no turn starts")
    parser.add_argument("--start-limit-s", type=float, default=300.0)
    return parser.parse_args()


def _start(name: str, tree: Path, argv: Sequence[str], scratch: str) -> Tree:
    """Start `bridge run` from the checkout `tree`, with the task of that checkout."""
    Path(scratch, name).mkdir()
    argv, environment = _sides.of_checkout(tree, argv, _sides.environment(Work()))
    log = Path(scratch, name, "log")
    with log.open("w") as file:
        file.write(f"{shlex.join(argv)}\n")
    started = Tree(name=name, child=_stamped.start(argv, environment, log, tree))
    threading.Thread(target=_stamped.read, args=(started.child.process, started.run), daemon=True).start()
    return started


def _compared(trees: Sequence[Tree], steps: int) -> dict[str, Any]:
    """Return for each part both medians and the median of the per-turn ratios, and all measured steps."""
    old, new = (tree.steps for tree in trees)
    turns = min(len(old), len(new)) // steps
    parts: dict[str, Mapping[str, float]] = {}
    for part in PARTS:
        ratios = [
            statistics.mean(step[part] for step in old[first : first + steps])
            / statistics.mean(step[part] for step in new[first : first + steps])
            for first in range(0, turns * steps, steps)
        ]
        medians = {tree.name: statistics.median(step[part] for step in tree.steps) for tree in trees}
        parts[part] = {**medians, "ratio": statistics.median(ratios)}
    return {**parts, "turns": turns, "steps": {tree.name: tree.steps for tree in trees}}


if __name__ == "__main__":
    main()
