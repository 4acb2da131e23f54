"""What a run came to: the figures on top of its page, and of the table that compares several.

Not covered: the numbers of single steps (`charts.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cli.report import catalogue, curves
from cli.report.events import Column
from cli.report.lines import number
from cli.report.record import Run
from cli.report.wording import shown


@dataclass(frozen=True, kw_only=True)
class Result:
    """One figure."""

    name: str
    """What it is."""
    value: float | None
    """How much; None where the run does not tell."""
    unit: str = ""
    """Of the value."""
    detail: str = ""
    """What else is worth knowing of it."""

    @property
    def text(self) -> str:
        """Return the value and its unit."""
        return self._with_unit(4)

    @property
    def brief(self) -> str:
        """Return the same, with three digits that count."""
        return self._with_unit(3)

    def _with_unit(self, digits: int) -> str:
        return shown(self.value, digits) + (f" {self.unit}" if self.unit and self.value is not None else "")


def of(run: Run) -> dict[str, Result]:
    """Return every figure by its key."""
    return {**_learnt(run), **_measured(run)}


def as_json(results: Mapping[str, Result]) -> dict[str, float | None]:
    """Return the values alone."""
    return {key: result.value for key, result in results.items()}


def status(run: Run) -> tuple[str, str]:
    """Return how the run stands, in a word, and in a sentence."""
    done, wanted = run.steps[-1], number(run.config.get("training_steps"))
    of_all = f"step {done:,}" + (f" of {wanted:,.0f}" if wanted else "")
    if run.summary:
        return "finished", of_all
    if run.holder:
        return "under way", f"process {run.holder} is at work in it; so far {of_all}"
    return (
        "unfinished",
        f"it stopped after {of_all}, and left no summary of that: interrupted, killed, or at work elsewhere",
    )


def held_out(run: Run) -> tuple[float | None, float | None]:
    """Return the held-out reward before training and at last; the summary's where nothing else tells."""
    if run.evaluations:
        first, *_, last = (*run.evaluations[:1], *run.evaluations)
        before = number(first["reward_mean"]) if first["step"] < run.steps[0] else None
        return before, number(last["reward_mean"]) if last["step"] >= run.steps[0] else None
    return number(run.summary.get("reward_before")), number(run.summary.get("reward_after"))


def _learnt(run: Run) -> dict[str, Result]:
    rewards = run.column("reward_mean")
    few = max(1, min(20, len(rewards) // 10))
    over = f"mean of {few} steps" if few > 1 else ""
    before, after = held_out(run)
    return {
        "reward_first": Result(name="reward, first steps", value=_mean(rewards[:few]), detail=over),
        "reward_last": Result(name="reward, last steps", value=_mean(rewards[-few:]), detail=over),
        "held_out_before": Result(name="held-out reward before", value=before),
        "held_out_after": Result(name="held-out reward at last", value=after),
        "steps": Result(name="steps", value=float(len(run.steps))),
        "tokens_generated": Result(name="tokens generated", value=_sum(run.column("tokens_generated"))),
        "unscored": Result(name="completions unscored", value=_sum(run.column("unscored"))),
        "retries": Result(name="requests sent again", value=_sum(run.column("retries"))),
    }


def _measured(run: Run) -> dict[str, Result]:
    fence = _of_published(catalogue.FENCE_MS(run), run)
    copied = run.summary.get("weight_bytes", run.summary.get("weight_bytes_copied"))
    seconds, speed = catalogue.STEP_TIME(run), catalogue.TOKENS_PER_S(run)
    difference, largest = run.column("logprob_diff_mean"), run.column("logprob_diff_max")
    return {
        "training_s": Result(name="time in steps", value=_sum(seconds), unit="s"),
        "step_s": _median("time of a step, median", seconds, "s"),
        "fence_ms": _median("fence, median", fence, "ms"),
        "fence_p90_ms": Result(name="fence, 90 % below", value=curves.quantile(fence, 0.9), unit="ms"),
        "tokens_per_s": _median("tokens generated per second, median", speed, ""),
        "logprob_diff_mean": _median("|Δ log-probability|, median of the steps' means", difference, "nats"),
        "logprob_diff_max": Result(name="|Δ log-probability|, largest", value=_largest(largest), unit="nats"),
        "peak_memory_gib": Result(name="peak memory", value=_largest(run.column("peak_memory_gib")), unit="GiB"),
        "weight_bytes": Result(name="weights beside the server's", value=number(copied), unit="bytes"),
    }


def _median(name: str, column: Column, unit: str) -> Result:
    return Result(name=name, value=curves.quantile(column, 0.5), unit=unit)


def _of_published(fence: Column, run: Run) -> Column:
    """Return the fence of the steps whose weights the server got, as `StepMetrics.is_published` has it."""
    published = run.column("fence_publish_s")
    return [each for each, publish_s in zip(fence, published, strict=True) if publish_s is None or publish_s > 0]


def _known(column: Column) -> list[float]:
    return [value for value in column if value is not None]


def _sum(column: Column) -> float | None:
    known = _known(column)
    return sum(known) if known else None


def _mean(column: Column) -> float | None:
    known = _known(column)
    return sum(known) / len(known) if known else None


def _largest(column: Column) -> float | None:
    return max(_known(column), default=None)
