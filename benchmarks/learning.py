r"""Learning on word problems with a pretrained model: Bridge and TRL's colocate mode, by steps and by minutes.

    python -m benchmarks.learning --model smollm2 --seeds 0 1 2
    python -m benchmarks.learning --model smollm2 --seeds 0 1 2 --at-once 3 --share 0.1 --kv-gib 4 --limit-s 560
    python -m benchmarks.learning --model tiny --steps 2 --completions 16 --group 4 --tokens 8   # a try, also on a CPU

Both sides train all weights of the same model, on the same problems in the same order, with the same number of
completions per step, the same constant learning rate, loss and clipping, and float32 moments. Bridge keeps an exact
float32 master of its bf16 weights in 12 bytes per parameter; TRL, with its default model loading, has float32 weights
in 12 bytes, and vLLM's copy in bf16. Accuracy is the share of held-out problems whose greedy answer is right. Minutes
exclude evaluations, and count from the first step (`minutes`) or from the command (`minutes_of_command`): an outside
clock timestamps what either side prints.

A seed determines the order of the problems and the sampling. `--at-once` runs several seeds of one side concurrently on
the GPU, each with `--share` of its memory for vLLM and a KV cache of `--kv-gib`, since a vLLM cannot measure memory
while another one starts; both sides then share the GPU in the same way. Runs with a result in the folder `--out` are
skipped, so a call that ran out of time can be repeated; different settings need a different folder.

Not covered: speed of large models (`grpo.py`), continuous rollouts (`staleness.py`).
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from benchmarks import _curves, _results, _sides, _stamped
from benchmarks._results import say
from benchmarks._sides import Side, Work
from benchmarks._stamped import Run

TASK = "word_problems"
SideName = Literal["bridge", "trl"]
SIDES: tuple[SideName, ...] = get_args(SideName)
SETTINGS = ("steps", "completions", "group", "tokens", "lr", "temperature", "interval", "at_once", "ours", "trl")
"""Options that affect a result, besides model, side and seed."""
LEAST_S = 60.0
"""No run starts if less time than this, or than the longest run so far took, is left."""
GAIN_STEP = 0.05
"""Minutes are compared for gains in accuracy that are multiples of this."""
ROUNDING = 1e-9
Row = dict[str, Any]
Points = Sequence[Mapping[str, float]]


def main() -> None:
    """Run each side with each seed that has no result yet, and write all results after each."""
    options = _flags().parse_args()
    deadline = time.monotonic() + options.limit_s
    settings = {"model": options.model.name, **{name: getattr(options, name) for name in SETTINGS}}
    rows = earlier(settings, options.out)
    if rows:
        write(rows, settings, options)
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        bench = Bench(options, Path(scratch), deadline)
        for side in options.sides:
            measured = {row["seed"] for row in rows if row["side"] == side}
            missing = [seed for seed in options.seeds if seed not in measured]
            for first in range(0, len(missing), options.at_once):
                seeds = missing[first : first + options.at_once]
                if deadline - time.monotonic() < max([LEAST_S, *(row["seconds"] for row in rows)]):
                    say(f"{side}, seeds {seeds}: no time was left")
                    continue
                rows += bench.side_by_side(side, seeds)
                write(rows, settings, options)


def _flags() -> argparse.ArgumentParser:
    flags = _results.parser(__doc__)
    flags.add_argument("--model", type=Path, required=True, help="model folder")
    flags.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--completions", type=int, default=128, help="completions of a step")
    flags.add_argument("--group", type=int, default=8, help="completions of a prompt")
    flags.add_argument("--tokens", type=int, default=48, help="longest completion")
    flags.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    flags.add_argument("--temperature", type=float, default=0.5, help="of sampling while training, and in the loss")
    flags.add_argument("--interval", type=int, default=10, help="steps between evaluations")
    flags.add_argument("--at-once", type=int, default=1, help="seeds that run side by side")
    flags.add_argument("--share", type=float, default=0.3, help="share of the GPU for the vLLM of each run")
    flags.add_argument("--kv-gib", type=float, help="size of the KV cache of each run; default: what its share leaves")
    flags.add_argument(
        "--ours",
        default="adamw --micro-batch-tokens 8192",
        metavar="OPTIMIZER",
        help='"OPTIMIZER [flags of bridge run]"',
    )
    flags.add_argument(
        "--trl", default="64 --float32 --no-checkpointing", metavar="BATCH", help='"BATCH [flags of benchmarks._trl]"'
    )
    flags.add_argument("--limit-s", type=float, default=3600, help="seconds of everything")
    flags.add_argument("--keep-logs", type=Path, help="folder for the logs of every run")
    flags.add_argument("--picture", type=Path, help="draw all results to this SVG file")
    return flags


def earlier(settings: Mapping[str, Any], out: Path) -> list[Row]:
    """Return the rows of the newest file in `out` for this hardware; empty if there is none."""
    hardware = _results.document("learning", {})["hardware"]
    for file in sorted(out.glob("learning-*.json"), reverse=True):
        document = json.loads(file.read_text())
        if document["hardware"] == hardware:
            if document["results"]["settings"] != settings:
                raise SystemExit(f"{file} has results with other settings, expected {settings}: choose another --out")
            return list(document["results"]["rows"])
    return []


@dataclass(frozen=True)
class Bench:
    """Runs that share a deadline."""

    options: argparse.Namespace
    scratch: Path
    deadline: float
    """Deadline on the monotonic clock."""

    def side_by_side(self, side: SideName, seeds: Sequence[int]) -> list[Row]:
        """Train with all `seeds` concurrently, and return a row for each run that did not fail."""
        with ThreadPoolExecutor(len(seeds)) as threads:
            return [row for row in threads.map(lambda seed: self._trained(side, seed), seeds) if row is not None]

    def _trained(self, side: SideName, seed: int) -> Row | None:
        options, folder = self.options, self.scratch / f"{side}-{seed}"
        logs = options.keep_logs or folder
        for path in (folder, logs):
            path.mkdir(parents=True, exist_ok=True)
        work = Work(completions=options.completions, group=options.group, tokens=options.tokens, share=options.share)
        argv = Side(side, self._variant(side, seed)).argv(work, options.model, folder, options.steps)
        num_lines = options.steps + 2 + (options.steps - 1) // options.interval
        limit_s = self.deadline - time.monotonic()
        log = logs / f"{side}-{seed}.log"
        say(f"{side}, seed {seed}: started")
        run = _stamped.run(argv, _sides.environment(work), log, num_lines=num_lines, limit_s=limit_s)
        if run.failure:
            say(f"{side}, seed {seed}: {run.failure}")
            return None
        points = list(curve(run))
        say(f"{side}, seed {seed}: {points[0]['accuracy']:.3f} -> {points[-1]['accuracy']:.3f}, {run.seconds:.0f} s")
        return {"side": side, "seed": seed, "seconds": run.seconds, "points": points, "steps": steps_of(run)}

    def _variant(self, side: str, seed: int) -> str:
        options = self.options
        common = f"--lr {options.lr} --temperature {options.temperature} --seed {seed}"
        common += f" --eval-interval {options.interval}"
        if side == "trl":
            kv_cache = f" --kv-gib {options.kv_gib}" if options.kv_gib else ""
            return f"{options.trl} --task {TASK} {common}{kv_cache}"
        kv_cache = f" -- --kv-cache-memory-bytes {int(options.kv_gib * 2**30)}" if options.kv_gib else ""
        return f"{options.ours} --environment {TASK} --eval-samples 1 --eval-temperature 0 {common}{kv_cache}"


def curve(run: Run) -> Iterator[dict[str, float]]:
    """Yield each evaluation with the minutes spent in the steps before it, without and with the command's startup."""
    start_s, trained_s, previous = 0.0, 0.0, run.begun
    for stamp, line in zip(run.stamps, run.lines, strict=True):
        evaluation = line.get("evaluation")
        if evaluation is None:
            trained_s += stamp - previous
        else:
            if evaluation["step"] == 0:
                start_s = stamp - previous - evaluation["seconds"]
            yield {
                "step": evaluation["step"], "accuracy": evaluation["reward_mean"],
                "minutes": trained_s / 60, "minutes_of_command": (start_s + trained_s) / 60,
            }  # fmt: skip
        previous = stamp


def steps_of(run: Run) -> list[dict[str, float]]:
    """Return the lines about steps, which both sides print."""
    names = {"tokens": "tokens", "tokens_generated": "tokens", "reward_mean": "reward"}
    return [
        {short: line[name] for name, short in names.items() if name in line}
        for line in run.lines
        if "evaluation" not in line
    ]


def write(rows: Sequence[Row], settings: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write and print all results so far, and draw them."""
    results = {"settings": settings, "rows": rows, **summary(rows)}
    path = _results.write("learning", results, options.out)
    if options.picture:
        options.picture.write_text(_curves.picture({side: points_of(rows, side) for side in SIDES}))
    say(f"{_results.table(table(results))}\nin {path}")


def points_of(rows: Sequence[Row], side: str) -> list[Points]:
    return [row["points"] for row in rows if row["side"] == side]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return each side's medians and ranges over the seeds, and the minutes until accuracy has risen by each gain."""
    sides = [side for side in SIDES if points_of(rows, side)]
    runs = [row["points"] for row in rows]
    start = statistics.median(points[0]["accuracy"] for points in runs)
    least = min((max(point["accuracy"] for point in points) - start for points in runs), default=0.0)
    gains = [GAIN_STEP * count for count in range(1, 1 + int(least / GAIN_STEP + ROUNDING))]
    minutes = {
        side: {
            name: [
                spread([minutes_to(points, start + gain, name) for points in points_of(rows, side)]) for gain in gains
            ]
            for name in ("minutes", "minutes_of_command")
        }
        for side in sides
    }
    curves = {side: list(_curves.medians(points_of(rows, side), "step")) for side in sides}
    return {"curves": curves, "gains": gains, "minutes_to_gain": minutes}


def minutes_to(points: Points, accuracy: float, name: str) -> float:
    """Return when a run first reached `accuracy`, with linear interpolation between evaluations."""
    for before, after in pairwise(points):
        if after["accuracy"] >= accuracy - ROUNDING:
            rise = after["accuracy"] - before["accuracy"]
            share = max(0.0, (accuracy - before["accuracy"]) / rise) if rise > 0 else 0.0
            return before[name] + share * (after[name] - before[name])
    raise ValueError(f"the run never reached {accuracy}")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def table(results: Mapping[str, Any]) -> list[list[str]]:
    """Return a row per side, and one of ratios: accuracy, and the minutes until it had risen by each gain."""
    gains, minutes = results["gains"], results["minutes_to_gain"]
    lines = [["", "seeds", "before", "after", *(f"+{100 * gain:.0f} points" for gain in gains)]]
    for side, points in results["curves"].items():
        seeds = sum(row["side"] == side for row in results["rows"])
        ends = (
            f"{point['median']:.3f} ({point['least']:.3f} to {point['most']:.3f})" for point in (points[0], points[-1])
        )
        lines.append([side, str(seeds), *ends, *(f"{one['median']:.2f} min" for one in minutes[side]["minutes"])])
    if len(minutes) == len(SIDES):
        for name, title in (("minutes", "TRL / Bridge"), ("minutes_of_command", "with the start")):
            pairs = zip(*(minutes[side][name] for side in SIDES), strict=True)
            lines.append([title, "", "", "", *(f"{trl['median'] / ours['median']:.2f}x" for ours, trl in pairs)])
    return lines


if __name__ == "__main__":
    main()
