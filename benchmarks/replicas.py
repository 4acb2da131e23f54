"""Replicas stay equal and survive failures: two tests of runs on several GPUs of a host, or in several CPU processes.

    python -m benchmarks.replicas --gpus 2
    python -m benchmarks.replicas --gpus 4 --parts 2 --proofs stays_equal
    python -m benchmarks.replicas --gpus 4 --size tiny                     # also without a GPU

- `stays_equal`: at least 200 steps. The weights of all replicas have equal digests after each step (if there is only
  one replica, nothing is compared), GPU and process memory does not grow, and `bridge verify` passes before an
  interrupt ends the run.
- `outlives_losses`: 60 steps with `--restarts 1`, in which first a server and then a rank is killed. In the end all
  steps have been trained.

Not covered: several hosts; speed (`node.py`).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from benchmarks import _digests, _gpu_memory, _models, _results, _sides
from benchmarks._results import say
from bridge.core.address import free_port
from bridge_cli.rank_process import MAIN

STEPS = 200
FAULT_STEPS = 60
KILL_SERVER_AT, KILL_RANK_AT = 10, 30
WARM_UP = 50
"""Number of steps before memory is first read."""
LOOK_EVERY = 25
"""Number of steps between memory readings, since reading all processes' memory takes seconds."""
MIB = 2**20


def main() -> None:
    """Run each proof, and write all results so far after it."""
    options = _flags().parse_args()
    results: dict[str, Any] = {"gpus": options.gpus, "parts": options.parts, "model": options.size}
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        model = _models.make_whole_model(options.size, Path(scratch, "model"))
        for name in options.proofs:
            say(name)
            folder = Path(scratch, name)
            folder.mkdir()
            results[name] = PROOFS[name](model, folder, options.gpus, options.parts)
            say(json.dumps(results[name]))
            _results.write("replicas", results, options.out)


def _flags() -> argparse.ArgumentParser:
    flags = _results.parser(__doc__)
    flags.add_argument("--gpus", type=int, default=2, help="GPUs, or processes of a CPU")
    flags.add_argument("--parts", type=int, default=1, help="--tensor-parallel-size")
    flags.add_argument("--size", choices=_models.SIZES, default="0.5b", help="model")
    flags.add_argument(
        "--proofs", nargs="+", choices=PROOFS, default=list(PROOFS), help="proofs to run; all by default"
    )
    return flags


@dataclass
class ProofRun:
    """A `bridge run` that a test observes or disturbs between its steps."""

    model: Path
    folder: Path
    gpus: int
    parts: int = 1
    choices: Sequence[str] = ()
    output: Path = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        digests = self.folder / "digests"
        digests.mkdir()
        self.output = self.folder / "output"
        engine = ["--gpu-memory-utilization", "0.3"] if torch.cuda.is_available() else []
        argv = [
            sys.executable, "-c", _sides.BRIDGE, "run", "--model", str(self.model), "--gpus", str(self.gpus),
            "--tensor-parallel-size", str(self.parts), "--environment", f"{_digests.__file__}:Recorded",
            "--run-dir", str(self.folder / "run"), "--batch-size", str(8 * self.gpus), "--group-size", "4",
            "--max-new-tokens", "16", "--max-model-len", "512", "--port", str(free_port("127.0.0.1")), *engine,
            "--vllm-config-path", str(self.folder / "manifest.json"), *self.choices, "--", "--enforce-eager",
        ]  # fmt: skip
        environment = {**_sides.environment(_sides.Work()), _digests.FOLDER: str(digests)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(argv, env=environment, stdout=output, stderr=output)

    @property
    def steps(self) -> list[int]:
        """The steps that have metrics, in the order in which they were trained."""
        path = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, step: int, meanwhile: Callable[[int], None] = lambda _: None) -> None:
        """Wait until `step` is trained or the run has ended; call `meanwhile` after each step."""
        seen = 0
        while self.process.poll() is None and seen < step:
            if (steps := self.steps) and steps[-1] > seen:
                seen = steps[-1]
                meanwhile(seen)
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank."""
        ranks = [process for process in self.descendants() if MAIN in process.cmdline()]
        return next(process for process in ranks if process.environ()["RANK"] == str(number))

    def server_pid(self, log: Path) -> int:
        """Return the pid of the newest server, according to a rank's log."""
        return int(re.findall(r"starting vLLM \(pid (\d+)", log.read_text())[-1])

    def ended(self) -> dict[str, Any]:
        """Wait for the run to end, and return its outcome."""
        code = self.process.wait()
        steps = self.steps
        last = {} if code == 0 else {"output": self.output.read_text(errors="replace")[-2000:]}
        return {"exit_code": code, "steps": len({*steps}), **last}


def equal_digests(folder: Path, gpus: int, parts: int) -> dict[str, int | None]:
    """Return the number of steps, and after how many all replicas had equal weights, from the ranks' records.

    Parts are compared separately. `equal` is None if there is only one replica.
    """
    of_rank: dict[int, dict[int, int]] = {}
    for file in folder.iterdir():
        lines = map(json.loads, file.read_text().splitlines())
        of_rank[int(file.stem)] = {line["step"]: line["digest"] for line in lines}
    steps = {step for digests in of_rank.values() for step in digests}
    replicas = [range(part, gpus, parts) for part in range(parts)]
    num_equal = sum(
        all(len({of_rank.get(rank, {}).get(step) for rank in ranks}) == 1 for ranks in replicas) for step in steps
    )
    different = {*of_rank.get(0, {}).values()}
    equal = num_equal if gpus > parts else None
    return {"ranks": len(of_rank), "steps": len(steps), "equal": equal, "different_weights": len(different)}


def stays_equal(model: Path, folder: Path, gpus: int, parts: int) -> dict[str, Any]:
    """Train at least `STEPS` steps; return digests, memory growth, and the result of a concurrent `bridge verify`."""
    run = ProofRun(model, folder, gpus, parts, ["--training-steps", "100000", "--no-save-optimizer"])
    gpu_bytes = _gpu_memory.reader()
    mib: dict[str, list[float]] = {"processes": [], **({"gpu": []} if gpu_bytes else {})}
    at: list[int] = []

    def look(step: int) -> None:
        if step % LOOK_EVERY or step < WARM_UP:
            return
        say(f"step {step}")
        at.append(step)
        mib["processes"].append(sum(map(_unique_bytes, run.descendants())) / MIB)
        if gpu_bytes is not None:
            mib["gpu"].append(gpu_bytes() / MIB)

    run.wait_for(STEPS, look)
    verify = [sys.executable, "-c", _sides.BRIDGE, "verify", "--run-dir", str(folder / "run")]
    checked = subprocess.run(verify, env=_sides.environment(_sides.Work()), capture_output=True, text=True, check=False)
    run.process.send_signal(signal.SIGINT)
    growth = {name: _growth(at, figures) for name, figures in mib.items()}
    verified = {"exit_code": checked.returncode, "lines": checked.stderr.splitlines()[-20:]}
    return {
        **run.ended(),
        "digests": equal_digests(folder / "digests", gpus, parts),
        "growth_mib": growth,
        "verify": verified,
    }


def outlives_losses(model: Path, folder: Path, gpus: int, parts: int) -> dict[str, Any]:
    """Train `FAULT_STEPS` steps, while the last replica's server and then the last rank are killed."""
    choices = ["--training-steps", str(FAULT_STEPS), "--save-interval", "5", "--keep-last", "2", "--restarts", "1"]
    run = ProofRun(model, folder, gpus, parts, choices)
    first_of_last = gpus - parts
    log = folder / "run" / "ranks" / f"{first_of_last}.log" if first_of_last else run.output
    kills: dict[str, tuple[int, Callable[[], None]]] = {
        "server": (KILL_SERVER_AT, lambda: os.kill(run.server_pid(log), signal.SIGKILL)),
        "rank": (KILL_RANK_AT, lambda: run.rank(gpus - 1).kill()),
    }
    seconds: dict[str, float] = {}
    before = set[psutil.Process]()
    for name, (step, kill) in kills.items():
        run.wait_for(step)
        if run.process.poll() is None:
            before.update(run.descendants())
            kill()
            seconds[name] = _until_next_step(run)
    ended = run.ended()
    _, alive = psutil.wait_procs(before, timeout=20)
    return {
        **ended,
        "seconds_to_next_step": seconds,
        "processes_left": len(alive),
        "digests": equal_digests(folder / "digests", gpus, parts),
    }


def _until_next_step(run: ProofRun) -> float:
    start, count = time.monotonic(), len(run.steps)
    while run.process.poll() is None and len(run.steps) == count:
        time.sleep(0.05)
    return time.monotonic() - start


def _unique_bytes(process: psutil.Process) -> int:
    """Return the memory that only this process uses; 0 if it has just ended."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0


def _growth(steps: Sequence[int], mib: Sequence[float]) -> float | None:
    """Return the rise of the regression line over the steps."""
    if len(steps) < 2:
        return None
    return linear_regression(steps, mib).slope * (steps[-1] - steps[0])


PROOFS: Mapping[str, Callable[[Path, Path, int, int], dict[str, Any]]] = {
    "stays_equal": stays_equal,
    "outlives_losses": outlives_losses,
}

if __name__ == "__main__":
    main()
