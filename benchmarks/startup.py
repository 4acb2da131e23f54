"""Startup: how long `bridge run` takes until its server is ready and until its first step, with cold and warm caches.

    python -m benchmarks.startup --model 7b --rounds 3
    python -m benchmarks.startup --model tiny --rounds 3 --optimizer adamw
    python -m benchmarks.startup --model 7b --before ../before

Two sides alternate. `stock` starts vLLM like `vllm serve`, after the trainer's own imports, spawns its processes, and
compiles the training step once vLLM is ready. `ours` is an unmodified `bridge run`. `first` is a run with empty caches
(vLLM's, Triton's, torch's), as on a new host; `second` is a run right after it with the same caches. Each side has its
own caches. Weights are dummies. With `--before`, `stock` is replaced by `bridge run` from another checkout.

Seconds count from the start of the command. `ready` has a resolution of one second, from the server's log; `first step`
is the line that `--json` prints. `imports` and `compiling` are parts of the server's time according to its log, from
the end of the trainer's checks. All results so far are written after every run. A run starts only if the longest run of
its kind so far would end in time.

Not covered: reading files from a disk; they are read once before the first run.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import _results, _sides, _stamped
from benchmarks._models import DUMMY, SIZES
from benchmarks._results import say
from benchmarks._sides import Side, Work
from bridge.checkpoints.run_directory import RunDirectory
from bridge.processes import server_log

STOCK = """
import contextlib
from bridge.processes import preload
from bridge_cli.started_servers import StartedServers
preload.plugin_module = lambda name: None
StartedServers._compiling_ahead = lambda *_: contextlib.nullcontext()
from bridge_cli.main import main
main()
"""
"""Runs `bridge run` so that it does nothing while it waits: vLLM is not imported early, and nothing is compiled."""
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
NUMBERS = ("first", "second")
"""The order of runs in a round, each on both sides; the most informative ones come first, in case time runs out."""
WARM = "import vllm.entrypoints.cli.serve, vllm.v1.engine.core, bridge.run.trainer"
"""Imports that fill the page cache before the first run, which would otherwise read most files for all runs."""
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
READY = re.compile(r"vLLM is ready after (\d+) s(: .*)?")
PHASE = re.compile(r"([a-zA-Z ]+) (\d+) s")
SPAWNED = re.compile(r"We must use the `spawn`.*Reasons: (.*)")


def main() -> None:
    """Measure round after round, and write all results so far after every run."""
    options = _flags().parse_args()
    with TemporaryDirectory(prefix="bridge-startup-") as scratch:
        bench = Bench(options, Path(scratch), deadline=time.monotonic() + options.limit_s)
        subprocess.run([sys.executable, "-c", WARM], check=True)
        for _ in range(options.rounds):
            for kind in bench.rows:
                bench.measure(kind)


def _flags() -> argparse.ArgumentParser:
    flags = _results.parser(__doc__)
    flags.add_argument("--model", default="7b", help=f"{', '.join(SIZES)}: dummy weights; or a model's folder")
    flags.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    flags.add_argument(
        "--optimizer", default="adamw-8bit --gradient-checkpointing", help='"OPTIMIZER [flags of bridge run]"'
    )
    flags.add_argument("--before", type=Path, help="checkout to compare with, in place of stock")
    flags.add_argument("--share", type=float, default=0.3, help="share of the GPU for vLLM")
    flags.add_argument("--run-limit-s", type=float, default=300, help="seconds of one run")
    flags.add_argument("--limit-s", type=float, default=480, help="seconds of everything")
    flags.add_argument("--keep-logs", type=Path, help="folder for the logs of every run")
    return flags


@dataclass
class Bench:
    """Options and results so far."""

    options: argparse.Namespace
    scratch: Path
    deadline: float
    rows: dict[str, list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.rival = "stock" if self.options.before is None else "before"
        self.rows = {f"{side} {number}": [] for number in NUMBERS for side in ("ours", self.rival)}

    def measure(self, kind: str) -> None:
        """Run one kind, if it would end in time."""
        left_s = self.deadline - time.monotonic()
        name, number = kind.partition(" ")[0], len(self.rows[kind])
        longest_s = max((row["seconds"] for row in self.rows[kind]), default=30.0)
        caches = self.scratch / f"caches-{name}-{number}"  # shared with the first run of this round
        if left_s < longest_s or (kind.endswith("second") and not caches.exists()):
            say(f"{kind}: no time was left")
            return
        folder = self.scratch / f"{kind.replace(' ', '-')}-{number}"
        folder.mkdir()
        self.rows[kind].append(self._run(name, folder, caches, min(left_s, self.options.run_limit_s)))
        self._keep_logs(folder)
        path = _results.write("startup", self._results(), self.options.out)
        say(f"{kind}: {self.rows[kind][-1]}\n{_results.table(list(self._table()))}\nin {path}")

    def _run(self, name: str, folder: Path, caches: Path, limit_s: float) -> dict[str, Any]:
        work = Work(completions=16, group=8, tokens=64, share=self.options.share)
        side = Side("bridge", self.options.optimizer, ("--load-format", DUMMY) if self.options.model in SIZES else ())
        argv = side.argv(work, self._model(), folder, 1)
        environment = _sides.environment(work) | {key: str(caches / value) for key, value in CACHES.items()}
        environment.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
        tree = None
        if name == "stock":
            argv[2] = STOCK
            environment |= SPAWN
        elif name == "before":
            tree = self.options.before.absolute()
            argv, environment = _sides.of_checkout(tree, argv, environment)
        begun, began_at = time.perf_counter(), time.time()
        run = _stamped.run(argv, environment, folder / "log", num_lines=1, limit_s=limit_s, cwd=tree)
        first_step_s = run.stamps[0] - begun if run.stamps else None
        row = {"first_step_s": first_step_s, "seconds": run.seconds, "failure": run.failure}
        return row | server_times(folder / "log", RunDirectory(folder / "run").server_log, began_at)

    def _model(self) -> Path:
        if self.options.model not in SIZES:
            return Path(self.options.model)
        folder = self.scratch / "model"
        if not folder.exists():
            command = [sys.executable, "-m", "benchmarks._models", self.options.model, str(folder), DUMMY]
            subprocess.run(command, check=True)
        return folder

    def _keep_logs(self, folder: Path) -> None:
        if (kept := self.options.keep_logs) is not None:
            kept.mkdir(parents=True, exist_ok=True)
            for log in (folder / "log", RunDirectory(folder / "run").server_log):
                if log.exists():
                    (kept / f"{folder.name}-{log.stem}.log").write_bytes(log.read_bytes())

    def _results(self) -> dict[str, Any]:
        return {"model": self.options.model, "cores": os.cpu_count(), "medians": self._medians(), "runs": self.rows}

    def _medians(self) -> dict[str, dict[str, float]]:
        medians = {}
        for kind, rows in self.rows.items():
            whole = [row for row in rows if row["failure"] is None]
            names = ("ready_s", "first_step_s") if whole else ()
            medians[kind] = {name: statistics.median(row[name] or 0.0 for row in whole) for name in names}
        return medians

    def _table(self) -> Iterator[tuple[str, ...]]:
        yield "median, s", "runs", "ready", "first step", f"of {self.rival}"
        medians = self._medians()
        for kind, values in medians.items():
            rival = medians[f"{self.rival} {kind.partition(' ')[2]}"]
            cells = [f"{value:.1f}" for value in values.values()] or ["-", "-"]
            ratio = values["first_step_s"] / rival["first_step_s"] if values and rival else None
            yield kind, str(len(self.rows[kind])), *cells, f"{ratio:.2f}" if ratio else "-"


def server_times(log: Path, server_log_file: Path, began_at: float) -> dict[str, Any]:
    """Return when the server was ready, its phases, and why vLLM spawned instead of forking, from both logs.

    All values are in seconds; `ready_s` counts from `began_at`, a value of `time.time`.
    """
    ready = READY.search(log.read_text(errors="replace")) if log.exists() else None
    text = server_log_file.read_text(errors="replace") if server_log_file.exists() else ""
    started = re.search(rf"^{server_log.START}started, (.*) ===$", text, re.MULTILINE)
    spawned = SPAWNED.search(text)
    times: Mapping[str, Any] = {"ready_s": None, "server_s": None, "phases_s": {}}
    if ready is not None and started is not None:
        started_at = time.mktime(time.strptime(started[1], "%Y-%m-%d %H:%M:%S"))
        phases = {name.strip(): int(seconds) for name, seconds in PHASE.findall(ready[2] or "")}
        server_s = int(ready[1])
        times = {"ready_s": started_at - began_at + server_s, "server_s": server_s, "phases_s": phases}
    return {**times, "spawned_because": spawned and spawned[1]}


if __name__ == "__main__":
    main()
