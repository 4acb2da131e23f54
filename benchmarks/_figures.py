"""Averages over steps, the results table, and whether the target is reached."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import _results
from benchmarks._sides import MEASURED, Side
from benchmarks._stamped import Run

PARTS = ("generation_s", "training_s", "optimizer_s", "sync_s")
"""Non-overlapping parts of a step; the remainder is `other_s`."""
SPEED_AIM = 1.4
"""Minimum of Bridge's tokens per second over TRL's."""
COLUMNS = {
    "gpus": "GPUs", "num_steps": "steps", "tokens": "tokens", "tokens_per_s": "tokens/s",
    "step_s": "step s", "generation_s": "generate", "training_s": "train", "optimizer_s": "optimizer",
    "sync_s": "sync, fence", "other_s": "other", "first_end_s": "to step 1", "warm_end_s": "to warm",
    "speed": "speed", "scaling": "scaling", "peak_device_gib": "peak GiB",
    "kv_cache_gib": "KV cache", "peak_without_kv_gib": "without KV", "planned_gib": "planned",
    "trained_per_gpu": "trained/s/GPU", "mfu": "MFU", "mismatch_kl": "k3 KL", "rerouted": "rerouted",
}  # fmt: skip
DIGITS = {"mfu": 3, "mismatch_kl": 6, "rerouted": 4}
"""Number of decimals for small numbers."""

Row = dict[str, Any]


def steps_of(side: Side, run: Run, warm_up: int) -> list[dict[str, float]]:
    """Return the steps after `warm_up`; a step lasts from the previous line to its own line."""
    first = max(1, warm_up)
    times = [later - earlier for earlier, later in zip(run.stamps[first - 1 :], run.stamps[first:], strict=False)]
    steps = [{"step_s": time, **side.parts(line)} for time, line in zip(times, run.lines[first:], strict=True)]
    return [{**step, "other_s": step["step_s"] - sum(step[part] for part in PARTS)} for step in steps]


def row(side: Side, runs: Sequence[Run], *, warm_up: int, differ: bool = False) -> Row:
    """Return the figures of one side over all its runs; unknown ones are left out.

    They are medians over steps, or means if the work of steps may `differ`. `first_end_s` and `warm_end_s` are the
    seconds from the command to the end of the first and of the last warm-up step: startup, compilation and these steps.
    """
    average = statistics.fmean if differ else statistics.median
    steps_of_runs = [steps_of(side, run, warm_up) for run in runs]
    steps = [step for steps_of_run in steps_of_runs for step in steps_of_run]
    ends_of_runs = [[stamp - run.begun for stamp in run.stamps] for run in runs]
    names = [name for name in (steps[0] if steps else {}) if name.endswith("_s")]
    known: dict[str, Any] = {
        **{name: average([step[name] for step in steps]) for name in names},
        "tokens": average([step["tokens"] for step in steps]) if steps else None,
        "first_end_s": _median([ends[0] for ends in ends_of_runs if ends]),
        "warm_end_s": _median([ends[max(1, warm_up) - 1] for ends in ends_of_runs if len(ends) >= max(1, warm_up)]),
        "peak_allocated_gib": max((step["peak_allocated_gib"] for step in steps), default=None),
        "peak_device_gib": max((run.peak_gib for run in runs if run.peak_gib is not None), default=None),
        "kv_cache_gib": max((run.kv_cache_gib for run in runs if run.kv_cache_gib is not None), default=None),
    }
    has_both = known["peak_device_gib"] is not None and known["kv_cache_gib"] is not None
    if has_both and not side.kv_sleeps:  # otherwise the peak may be from a time without the cache
        known["peak_without_kv_gib"] = known["peak_device_gib"] - known["kv_cache_gib"]
    if known["tokens"] is not None:
        known["tokens_per_s"] = known["tokens"] / average([step["step_s"] for step in steps])
    for name in MEASURED:
        if measured := [step[name] for step in steps if name in step]:
            known[name] = statistics.fmean(measured)
    if rate := known.get("trained_per_s"):
        known["trained_per_gpu"] = rate / side.gpus
    return {
        "side": side.name, "variant": side.variant, "gpus": side.gpus, "num_steps": len(steps),
        **{name: value for name, value in known.items() if value is not None},
        "failures": [run.failure for run in runs if run.failure],
        "run_seconds": [run.seconds for run in runs],
        "ends_s_of_runs": ends_of_runs,
        "step_s_of_runs": [average([step["step_s"] for step in of_run]) for of_run in steps_of_runs if of_run],
        "steps": steps,
    }  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def compare(rows: Sequence[Row], *, weights_gib: float) -> list[Row]:
    """Return the rows with Bridge's gain over the fastest TRL row on the same number of GPUs, if there is one."""
    rivals = [row for row in rows if row["side"] == "trl" and "tokens_per_s" in row]
    best = {row["gpus"]: row for row in sorted(rivals, key=lambda row: row["tokens_per_s"])}
    return [_against(row, best[row["gpus"]], weights_gib) if row["gpus"] in best else row for row in rows]


def scale(rows: Mapping[Side, Row]) -> list[Row]:
    """Return the rows; those on several GPUs get their tokens per second relative to the same variant on one GPU."""

    def scaled(side: Side, row: Row) -> Row:
        one = rows.get(side.on_one, {}) if side.on_one != side else {}
        known = side.gpus > 1 and "tokens_per_s" in row and "tokens_per_s" in one
        return {**row, "scaling": row["tokens_per_s"] / one["tokens_per_s"]} if known else row

    return [scaled(side, row) for side, row in rows.items()]


def _against(row: Row, rival: Row, weights_gib: float) -> Row:
    if "tokens_per_s" not in row:
        return row
    gained: Row = {"speed": row["tokens_per_s"] / rival["tokens_per_s"]}
    if "peak_without_kv_gib" in row and "peak_without_kv_gib" in rival:
        gained["memory_saved_gib"] = rival["peak_without_kv_gib"] - row["peak_without_kv_gib"]
    if row["side"] == "bridge":
        gained["is_fast_enough"] = gained["speed"] >= SPEED_AIM
        if "memory_saved_gib" in gained:
            gained["is_small_enough"] = gained["memory_saved_gib"] >= weights_gib
    return {**row, **gained}


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a table, with failures listed below it."""
    shown = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    cells = [["", *(COLUMNS[name] for name in shown)]]
    cells += [[_name(row), *(_cell(name, row.get(name)) for name in shown)] for row in rows]
    faults = [f"{_name(row)}: {fault}" for row in rows for fault in row["failures"]]
    return "\n".join([_results.table(cells), *faults])


def verdicts(rows: Sequence[Row], *, weights_gib: float) -> list[str]:
    """Return one line per comparable Bridge row."""
    return [
        f"{_name(row)}: {row['speed']:.2f}x TRL's speed, {_word(row['is_fast_enough'])} of {SPEED_AIM}x"
        + _saved(row, weights_gib)
        for row in rows
        if "is_fast_enough" in row
    ]


def _saved(row: Mapping[str, Any], weights_gib: float) -> str:
    if "is_small_enough" not in row:
        return ""
    saved, word = row["memory_saved_gib"], _word(row["is_small_enough"])
    return f"; {saved:.1f} GiB less at the peak, {word} of the weights' {weights_gib:.1f} GiB"


def _word(reached: bool) -> str:
    return "within the aim" if reached else "short of the aim"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['side']} {row['variant']}"


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in ("speed", "scaling"):
        return f"{value:.2f}x"
    digits = 1 if name.endswith("_gib") else 3 if name.endswith("_s") else 0
    return f"{value:.{DIGITS.get(name, digits)}f}"
