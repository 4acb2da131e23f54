"""What is drawn: every chart but the reward's, with the columns that it reads.

Not covered: making charts of it (`charts.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bridge.types import HEALTHY_NATS
from cli.report.drawing import Band, Scale
from cli.report.events import STEP_SECONDS, Column
from cli.report.record import Run

Curves = Callable[[Run], Mapping[str, Column]]
"""What a run has to draw: name of each line -> one number a step."""
BINS = ("< 0.001", "to 0.003", "to 0.01", "to 0.03", "to 0.1", "to 0.3", "to 1 nat", "more")
"""The bins of `logprob_diff_histogram`."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one chart shows, whichever the run."""

    key: str
    """Its name in the page's links."""
    title: str
    """What is shown, with its unit."""
    about: str
    """What that means, in a sentence."""
    curves: Curves
    """The lines of one run."""
    compared: Callable[[Run], Column] | None = None
    """The one line of a run among several; absent: the first of them."""
    compared_title: str = ""
    """What that is, where the title does not fit."""
    scale: Scale = "zero"
    """Of the heights."""
    smooth: bool = False
    """Whether it is so noisy that one sees more in a smoothed line."""
    stacked: bool = False
    """Whether the lines are parts of a whole."""
    first_colour: int = 0
    """Of the lines."""
    ramp: bool = False
    """Whether they go from good to bad."""
    band: Band | None = None
    """Healthy values."""


def one(name: str, factor: float = 1.0) -> Callable[[Run], Column]:
    """Return what reads a column, times a factor."""
    return lambda run: [None if value is None else factor * value for value in run.column(name)]


def rate(amount: str, seconds: str) -> Callable[[Run], Column]:
    """Return what reads one column over another."""

    def read(run: Run) -> Column:
        pairs = zip(run.column(amount), run.column(seconds), strict=True)
        return [None if many is None or not time else many / time for many, time in pairs]

    return read


def total(*names: str, factor: float = 1.0) -> Callable[[Run], Column]:
    """Return what reads the sum of columns, those that are missing left out."""

    def read(run: Run) -> Column:
        rows = zip(*map(run.column, names), strict=True)
        return [
            factor * sum(x for x in row if x is not None) if any(x is not None for x in row) else None for row in rows
        ]

    return read


def several(**parts: Callable[[Run], Column]) -> Curves:
    """Return what reads several columns; underscores in their names are spaces."""
    return lambda run: {name.replace("_", " "): read(run) for name, read in parts.items()}


def _bins(run: Run) -> Mapping[str, Column]:
    return {name: one(f"logprob_diff_histogram/{index}", 100)(run) for index, name in enumerate(BINS)}


FENCE = ("fence_pause_s", "fence_prepare_s", "fence_write_s", "fence_publish_s")
STEP_TIME = total(*STEP_SECONDS)
FENCE_MS = total(*FENCE, factor=1e3)
TOKENS_PER_S = rate("tokens_generated", "rollout_s")

SECTIONS: Mapping[str, Sequence[Figure]] = {
    "Learning": (
        Figure(key="parts", title="Parts of the reward", about="Mean of each part, before its weight.", scale="share",
               curves=lambda run: run.items("reward_parts"), smooth=True),
        Figure(key="length", title="Completion length, tokens", about="Mean over the step's completions.",
               curves=several(tokens=one("completion_tokens_mean")), smooth=True),
        Figure(key="truncated", title="Completions cut off, %", about="By --max-new-tokens, before they ended.",
               curves=several(cut_off=one("truncated_share", 100)), smooth=True),
        Figure(key="entropy", title="Entropy, nats", about="Mean where a token was sampled, before the update.",
               curves=several(entropy=one("entropy")), smooth=True),
        Figure(key="kl", title="KL from the reference, nats", about="Mean over the tokens.",
               curves=several(KL=one("kl")), smooth=True),
        Figure(key="clipped", title="Tokens clipped, %", about="Without a gradient, as the policy has gone far enough.",
               curves=several(bad_tokens=one("clipped_low_share", 100), good_tokens=one("clipped_high_share", 100)),
               compared=total("clipped_low_share", "clipped_high_share", factor=100),
               smooth=True),
        Figure(key="gradient", title="Gradient norm", about="Before it is scaled down; mean over the step's updates.",
               curves=several(norm=one("grad_norm")), scale="auto", smooth=True),
        Figure(key="loss", title="Policy loss", about="Says little by itself: it is not what is to fall.",
               curves=several(loss=one("loss")), scale="linear", smooth=True),
        Figure(key="changed", title="Weights changed, %", about="Share of the weights whose bytes the step changed.",
               curves=several(changed=one("changed_weight_share", 100)), smooth=True),
        Figure(key="updates", title="Updates", about="Optimizer steps of each batch.",
               curves=several(updates=one("updates"))),
        Figure(key="faults", title="Unscored and retried", about="Completions whose score failed, requests sent again.",
               curves=several(unscored=one("unscored"), retries=one("retries")), compared=total("unscored", "retries"),
               compared_title="Unscored and retried, together"),
    ),
    "Two engines, one policy": (
        Figure(key="difference", title="|Δ log-probability|, nats", scale="log",
               about="Of vLLM and of the trainer, over the tokens trained on, before the update.",
               curves=several(mean=one("logprob_diff_mean"), max=one("logprob_diff_max")),
               band=Band(low=HEALTHY_NATS[0], high=HEALTHY_NATS[1], name="rounding alone, in bf16")),
        Figure(key="histogram", title="Tokens by |Δ log-probability|, %", about="Share of the tokens in each range.",
               curves=_bins,
               compared=total(*(f"logprob_diff_histogram/{index}" for index in (5, 6, 7)), factor=100),
               compared_title="Tokens apart by 0.1 nats and more, %", stacked=True, ramp=True),
        Figure(key="weights", title="Importance weights", scale="linear",
               about="Mean weight, and effective share of the tokens: both 1 where the engines agree.",
               curves=several(mean_weight=one("importance_weight"), effective_share=one("effective_share")),
               smooth=True),
        Figure(key="corrected", title="Tokens corrected, %", about="Their weight was truncated, or they were left out.",
               curves=several(corrected=one("corrected_share", 100)), smooth=True),
        Figure(key="stale", title="Staleness, versions", about="How old the oldest completion's weights were.",
               curves=several(staleness=one("staleness"))),
    ),
    "Time and memory": (
        Figure(key="time", title="Where a step's time goes, s", about="Rollouts, passes and the fence.",
               curves=several(rollouts=one("rollout_s"), training=one("train_s"), pause=one("fence_pause_s"),
                              write=one("fence_write_s"), publish=one("fence_publish_s")),
               compared=STEP_TIME, compared_title="Time of a step, s", stacked=True),
        Figure(key="fence", title="The fence, ms", about="While no token is generated.", compared=FENCE_MS,
               curves=several(pause=one("fence_pause_s", 1e3), write=one("fence_write_s", 1e3),
                              publish=one("fence_publish_s", 1e3), passes=one("fence_prepare_s", 1e3)),
               stacked=True, first_colour=2),
        Figure(key="speed", title="Tokens per second", about="Generated while rolling out; trained on in the passes.",
               curves=several(generated=TOKENS_PER_S, trained=rate("tokens_trained", "train_s")), smooth=True),
        Figure(key="tokens", title="Tokens of a step", about="The others had no advantage, or were masked.",
               curves=several(generated=one("tokens_generated"), trained=one("tokens_trained")), smooth=True),
        Figure(key="memory", title="Trainer's peak memory, GiB", about="Of the GPU, or of the process on a CPU.",
               curves=several(peak=one("peak_memory_gib"))),
    ),
}  # fmt: skip
