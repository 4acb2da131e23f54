"""A host with several GPUs: speed on 1, 2, 4 and 8, large models, and replicas that stay equal and survive failures.

    python -m benchmarks.node --gpus 8
    python -m benchmarks.node --gpus 8 --limit-s 560                     # again, to continue after running out of time
    python -m benchmarks.node --gpus 4 --runs fixed sizes
    python -m benchmarks.node --gpus 4 --size tiny --runs fixed replicas # also without a GPU: four processes

- `fixed`, `long-tail`: `grpo.py` with completions of 256 tokens, and with lengths of a long tail in a stream, on 1, 2,
  4, ... GPUs and on two replicas of two; the work grows with the GPUs.
- `sizes`: models of 14, 32 and 72 billion parameters in as many parts as they need. The peak of a GPU's memory, without
  the KV cache, is shown next to the prediction of `bridge plan`.
- `replicas`: the proofs of `replicas.py`, on at most four GPUs.

Runs start on separate GPUs as soon as enough of them are free, the largest first. Runs with a result in the folder
`--out` are skipped, and so are runs that would not end before `--limit-s`. Weights are vLLM's dummies, except in the
proofs.

Not covered: several hosts.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import _models, _results, _sides, replicas
from benchmarks._models import DUMMY
from benchmarks._results import say
from benchmarks._sides import Side
from bridge.processes import accelerator, children
from bridge.processes.children import Child

FIXED_S, LONG_S, SIZES_S, REPLICAS_S = 130, 300, 200, 200
"""Seconds that a run of each kind takes; no run starts if less time is left."""
KEPT_GIB = 100
"""With more GPU memory than this, completions of 256 tokens are trained without recomputing activations."""
MICRO_BATCH, LONG_MICRO_BATCH = 2176, 8704
"""Tokens per micro-batch, for each GPU that shares a copy of the weights."""
REHEARSED = "--completions", "8", "--tokens", "16", "--steps", "2"
"""The work of a trial without a GPU."""
GROUPS_IN_FLIGHT, SEQUENCES = 48, 256
"""A stream's groups in flight, and vLLM's sequences, per GPU."""
LENGTHS = "lognormal:600:0.6:4096"
LARGE: Mapping[str, tuple[str, int, int, int, str]] = {
    "14b": ("14b", 2, 2, 64, "adamw"),
    "32b": ("32b", 2, 2, 32, "adamw-8bit --kv-sleep always"),
    "32b-exact": ("32b", 4, 4, 32, "adamw --kv-sleep always"),
    "72b": ("72b", 4, 8, 16, "adamw-4bit"),
}
"""For each large model: its size, the smallest and largest number of parts, completions per GPU, and settings."""
PROOF_GPUS = 4
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One benchmark run and its result."""

    kind: str
    name: str
    """Name of the row and of the folder."""
    gpus: int
    seconds: float
    """Longest expected duration."""
    argv: tuple[str, ...]
    """Arguments after `python -m`."""

    def result(self, out: Path) -> dict[str, Any] | None:
        """Return the row of the run; None if it has not run yet, or failed."""
        for file in sorted(out.joinpath(self.name).glob("*.json"), reverse=True):
            results = json.loads(file.read_text())["results"]
            if self.argv[0] == "benchmarks.replicas":
                return dict(results)
            row = next(iter(results.values()))["rows"][0]
            if not row["failures"]:
                return dict(row)
        return None


def main() -> None:
    """Run everything that has no result yet, and write all results at the end."""
    flags = _flags()
    options = flags.parse_args()
    num_gpus = len(accelerator.gpu_memory_bytes())
    if 0 < num_gpus < options.gpus:
        flags.error(f"--gpus {options.gpus}: this host has only {num_gpus} visible")
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        host = Host(gpus=options.gpus, size=options.size, models=Path(scratch), out=options.out)
        wanted = [run for kind in options.runs for run in KINDS[kind](host)]
        missing = [run for run in wanted if run.result(options.out) is None]
        for size in {argument for run in wanted for argument in run.argv if argument in _models.SIZES}:
            _models.make_dummy_model(size, host.models / f"{size}-{DUMMY}")
        side_by_side(missing, options.gpus, options.out, deadline=time.monotonic() + options.limit_s)
        results = {run.name: row for run in wanted if (row := run.result(options.out)) is not None}
        path = _results.write("node", results, options.out)
        say(f"{_results.table(list(table(wanted, results)))}\nin {path}")


def _flags() -> argparse.ArgumentParser:
    flags = _results.parser(__doc__)
    flags.add_argument("--gpus", type=_results.count, default=2, help="GPUs of the host, or processes of a CPU")
    flags.add_argument("--runs", nargs="+", choices=KINDS, default=list(KINDS), help="what to run; all by default")
    flags.add_argument(
        "--size", choices=_models.SIZES, help="one model for everything; default: 7b, those of `sizes`, 0.5b for proofs"
    )
    flags.add_argument("--limit-s", type=float, default=3600, help="seconds of everything")
    return flags


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host, the measurements and their folders."""

    gpus: int
    size: str | None
    """The only model; None: each kind has its own."""
    models: Path
    """Folder of the models."""
    out: Path
    """Folder of the results."""

    def counts(self) -> Iterator[tuple[int, int]]:
        """Yield (number of GPUs, number of parts): 1, 2, 4, ... replicas, and two replicas of two parts."""
        yield from ((count, 1) for count in (1, 2, 4, 8) if count <= self.gpus)
        if self.gpus >= 4:
            yield 4, 2

    def fixed(self) -> Iterator[Measurement]:
        """Yield the runs with completions of equal length."""
        kept = "" if _sides.gpu_gib() > KEPT_GIB else " --gradient-checkpointing"
        for count, parts in self.counts():
            choices = f"adamw-8bit --micro-batch-tokens {MICRO_BATCH * parts}{kept}{_several(count, parts)}"
            yield self._grpo("fixed", _name("fixed", count, parts), "7b", choices, seconds=FIXED_S)

    def long_tail(self) -> Iterator[Measurement]:
        """Yield the runs with a stream of completions whose lengths have a long tail."""
        for count, parts in self.counts():
            choices = f"adamw-8bit --micro-batch-tokens {LONG_MICRO_BATCH * parts} --gradient-checkpointing"
            choices += f" --max-staleness 8 --groups-in-flight {GROUPS_IN_FLIGHT * count}{_several(count, parts)}"
            choices += f" -- --max-num-seqs {SEQUENCES * parts}"
            more = "--lengths", LENGTHS, "--warm-up", "8", "--steps", "16"
            yield self._grpo("long-tail", _name("long-tail", count, parts), "7b", choices, *more, seconds=LONG_S)

    def sizes(self) -> Iterator[Measurement]:
        """Yield the runs of large models in parts."""
        for name, (size, least, most, completions, optimizer) in LARGE.items():
            if least <= self.gpus:
                parts = min(most, self.gpus)
                choices = f"{optimizer} --micro-batch-tokens 4352 --gradient-checkpointing{_several(parts, parts)}"
                more = "--completions", str(completions), "--steps", "4"
                yield self._grpo("sizes", name, size, choices, *more, seconds=SIZES_S)

    def replicas(self) -> Iterator[Measurement]:
        """Yield the proofs."""
        count = min(self.gpus, PROOF_GPUS)
        for proof in replicas.PROOFS:
            argv = "benchmarks.replicas", "--gpus", str(count), "--proofs", proof, "--size", self.size or "0.5b"
            to_folder = "--out", str(self.out / proof)
            yield Measurement(kind="replicas", name=proof, gpus=count, seconds=REPLICAS_S, argv=(*argv, *to_folder))

    def _grpo(self, kind: str, name: str, size: str, choices: str, *more: str, seconds: float) -> Measurement:
        size, folder, side = self.size or size, self.out / name, Side("bridge", choices)
        work = more if accelerator.gpu_memory_bytes() else REHEARSED
        argv = "benchmarks.grpo", "--dummy-weights", "--models", str(self.models), "--sizes", size, "--trl", "--ours"
        to_folder = "--run-limit-s", str(2 * seconds), "--keep-logs", str(folder / "logs"), "--out", str(folder)
        return Measurement(
            kind=kind, name=name, gpus=side.gpus, seconds=seconds, argv=(*argv, choices, *work, *to_folder)
        )


def _name(kind: str, count: int, parts: int) -> str:
    return f"{kind}-{count}" + (f"-in-{count // parts}-replicas" if parts > 1 else "")


def _several(count: int, parts: int) -> str:
    return (f" --gpus {count}" if count > 1 else "") + (f" --tensor-parallel-size {parts}" if parts > 1 else "")


KINDS: Mapping[str, Callable[[Host], Iterator[Measurement]]] = {
    "fixed": Host.fixed,
    "long-tail": Host.long_tail,
    "sizes": Host.sizes,
    "replicas": Host.replicas,
}


def side_by_side(runs: Sequence[Measurement], gpus: int, out: Path, *, deadline: float) -> None:
    """Start the runs, the largest first, each on its own GPUs, and print how each one ended."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    free = shown.split(",")[:gpus] if shown else [str(number) for number in range(gpus)]
    waiting = sorted(runs, key=lambda run: -run.gpus)
    running: dict[Measurement, tuple[Child, list[str]]] = {}
    try:
        while waiting or running:
            for run in [run for run in waiting if time.monotonic() + run.seconds > deadline]:
                say(f"{run.name}: no time was left")
                waiting.remove(run)
            for run in [*waiting]:
                if run.gpus <= len(free):
                    taken, free = free[: run.gpus], free[run.gpus :]
                    waiting.remove(run)
                    running[run] = _start(run, taken, out), taken
            for run, (child, taken) in [*running.items()]:
                if not child.is_alive():
                    del running[run]
                    children.stop(child)  # reaped
                    free += taken
                    say(f"{run.name}: {'done' if run.result(out) is not None else f'failed, see {child.log}'}")
            time.sleep(POLL_S)
    finally:
        children.stop(*(child for child, _ in running.values()))


def _start(run: Measurement, taken: Sequence[str], out: Path) -> Child:
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{run.name}: on GPU {', '.join(taken)}")
    environment = {**_sides.environment(_sides.Work()), "CUDA_VISIBLE_DEVICES": ",".join(taken)}
    return children.start([sys.executable, "-m", *run.argv], environment, folder / "log")


def table(runs: Sequence[Measurement], results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for every run of `grpo.py`: speed relative to one GPU, and measured and planned memory."""
    yield "", "GPUs", "tokens/s", "step s", "of one GPU", "peak GiB", "planned"
    for run in runs:
        row = results.get(run.name, {})
        if rate := row.get("tokens_per_s"):
            one = results.get(f"{run.kind}-1", {}).get("tokens_per_s")
            of_one = f"{rate / one:.2f}x" if one else "-"
            memory = [f"{row[name]:.1f}" if name in row else "-" for name in (_peak(run), "planned_gib")]
            yield run.name, str(run.gpus), f"{rate:.0f}", f"{row['step_s']:.2f}", of_one, *memory


def _peak(run: Measurement) -> str:
    """Return the name of the peak to compare with the plan, which excludes a sleeping KV cache."""
    return "peak_device_gib" if any("--kv-sleep" in argument for argument in run.argv) else "peak_without_kv_gib"


if __name__ == "__main__":
    main()
