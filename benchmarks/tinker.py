"""Clients of `bridge tinker` on one GPU: four at once against one after the other, and the seconds of each call.

    python -m benchmarks.tinker --size 7b

One server trains adapters of rank 32. In each round, four clients take the same steps first one after the other, then
at once; all run in processes of their own with the real SDK. Needs the package `tinker`.

Not covered: one client against `bridge run` on the same work (`two_trees.py --tinker`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import _results, _sides, _tinker
from benchmarks._results import say
from benchmarks._sides import BRIDGE, Work
from benchmarks._tinker import BASE, MOST_ADAPTERS
from bridge.core.address import free_port
from bridge.processes import children

PARTS = ("rollout_s", "train_s", "fence_pause_s", "fence_write_s", "fence_publish_s")


def main() -> None:
    """Measure, write the results and print them."""
    options = _options()
    work = Work(share=options.share, tokens=options.tokens, completions=options.completions)
    rounds: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        model = Path(options.models or scratch, options.size)
        if not model.exists():
            say(f"{options.size}: writing the model")
            subprocess.run([sys.executable, "-m", "benchmarks._models", options.size, str(model)], check=True)
        with _server(options, work, model, Path(scratch)) as port, ExitStack() as held:
            clients = [Client(held, options, work, model, port) for _ in range(MOST_ADAPTERS)]
            for client in clients:
                client.steps(options.warm_up)
            for number in range(options.rounds):
                alone = [line for client in clients for line in client.steps(options.steps)]
                for client in clients:
                    client.start(options.steps)
                together = [line for client in clients for line in client.taken(options.steps)]
                rounds.append(_round(alone, together))
                path = _results.write("tinker", _medians(options, rounds), options.out)
                say(f"round {number + 1}: {json.dumps({**rounds[-1], 'lines': {}})}")
    results = _medians(options, rounds)
    say(f"{MOST_ADAPTERS} clients at once: {results['ratio']:.2f} times the tokens/s of one after the other, in {path}")


def _options() -> argparse.Namespace:
    parser = _results.parser(__doc__)
    parser.add_argument("--size", default="7b")
    parser.add_argument("--models", type=Path, help="folder for the model, which stays there for the next time")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.4, help="share of the GPU for vLLM; 0: Bridge chooses")
    parser.add_argument("--completions", type=int, default=Work.completions, help="completions of a client's step")
    parser.add_argument("--tokens", type=int, default=Work.tokens, help="tokens of a completion")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first round")
    parser.add_argument("--steps", type=int, default=5, help="steps of a client in a round")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


@contextmanager
def _server(options: argparse.Namespace, work: Work, model: Path, scratch: Path) -> Iterator[int]:
    """Run `bridge tinker`, and yield its port."""
    port = free_port("127.0.0.1")
    argv = [
        sys.executable, "-c", BRIDGE, "tinker", "--model", str(model), "--base-model", BASE, "--port", str(port),
        "--max-lora-rank", str(options.rank), "--max-model-len", str(work.max_model_len), "--optimizer",
        options.optimizer, "--save-path", str(scratch / "saved"),
        *(["--gpu-memory-utilization", str(work.share)] if work.share else []), "--", "--no-enable-log-requests",
    ]  # fmt: skip
    log = scratch / "tinker.log"
    child = children.start(argv, _sides.environment(work), log)
    try:
        yield port
    except BaseException:
        say(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        children.stop(child)


class Client:
    """A client that runs in a separate process."""

    def __init__(self, held: ExitStack, options: argparse.Namespace, work: Work, model: Path, port: int) -> None:
        """Start it; it ends with `held`."""
        end, output = os.pipe()
        self._lines = held.enter_context(os.fdopen(end))
        with os.fdopen(output, "w") as writing:
            entered = _tinker.client(model, work, port, output=writing, rank=options.rank)
            self._process = held.enter_context(entered)

    def steps(self, number: int) -> list[dict[str, float]]:
        """Take steps, and return their lines."""
        self.start(number)
        return self.taken(number)

    def start(self, number: int) -> None:
        """Take steps, without waiting for them."""
        _tinker.take_steps(self._process, number)

    def taken(self, number: int) -> list[dict[str, float]]:
        """Wait for steps, and return their lines."""
        lines = [line for _, line in zip(range(number), self._lines, strict=False)]
        if len(lines) < number:
            raise SystemExit(f"a client ended with exit code {self._process.wait(60)}")
        return [json.loads(line) for line in lines]


def _medians(options: argparse.Namespace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0] if name != "lines"}
    return {"size": options.size, "optimizer": options.optimizer, **medians, "rounds": rounds}


def _round(alone: list[dict[str, float]], together: list[dict[str, float]]) -> dict[str, Any]:
    """Return tokens/s of both ways, their ratio, and the medians of a client's calls while it is alone.

    A way's time is that of its steps: alone, the sum over all clients; together, from the first client's start to the
    last one's end.
    """
    alone_s = sum(line["step_s"] for line in alone)
    together_s = max(line["ended"] for line in together) - min(line["ended"] - line["step_s"] for line in together)
    num_tokens = sum(line["tokens_generated"] for line in alone)
    rates = num_tokens / alone_s, sum(line["tokens_generated"] for line in together) / together_s
    medians = {part: statistics.median(line[part] for line in alone) for part in ("step_s", *PARTS)}
    return {
        "tokens_per_s_one_after_the_other": rates[0], "tokens_per_s_at_once": rates[1], "ratio": rates[1] / rates[0],
        **medians, "lines": {"one after the other": alone, "at once": together},
    }  # fmt: skip


if __name__ == "__main__":
    main()
