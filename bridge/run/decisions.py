"""What a run decides from its choices and from what it measures: when the server pauses, and what is an alarm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from bridge.config import PublishingConfig
from bridge.errors import UsageError
from bridge.learn import mismatch
from bridge.learn.mismatch import Mismatch
from bridge.run import measuring
from bridge.run.metrics import StepMetrics

SKIPS_IN_A_ROW = 3
"""Steps in a row whose first gradient is not finite, after which the run ends: the next would be no better."""


@dataclass(frozen=True, kw_only=True)
class PausePolicy:
    """What the server does while this process computes a step's passes."""

    kv_sleeps: bool | None
    """Whether its KV cache gives up its memory; None: the first batch that is trained on decides."""
    stops_sampling: bool

    @classmethod
    def of(cls, publishing: PublishingConfig, *, max_staleness: int, can_sleep: bool, shares_gpu: bool) -> Self:
        """Derive the policy of a run.

        `can_sleep`: the server can free its KV cache. `shares_gpu`: it samples on the GPU that this process computes
        on, so that sampling meanwhile would only slow both down.
        """
        if publishing.kv_sleep == "always" and not can_sleep:
            raise UsageError(
                "--kv-sleep always, but the server's KV cache cannot sleep",
                remedy="bridge serve-vllm on a GPU switches vLLM's --enable-sleep-mode on; or leave --kv-sleep out",
            )
        is_open = publishing.kv_sleep == "auto" and can_sleep
        chosen = publishing.pause_while_training
        return cls(
            kv_sleeps=None if is_open else publishing.kv_sleep == "always",
            stops_sampling=max_staleness > 0 and shares_gpu if chosen is None else chosen,
        )

    @property
    def computes_inside(self) -> bool:
        """Whether the passes before the first write are computed inside the fence, and not before it."""
        return bool(self.kv_sleeps) or self.stops_sampling


class Alarms:
    """Logs what is wrong with a step, in the first of consecutive steps with the same alarm."""

    def __init__(self, note: Callable[[str], None], *, mismatch_limit: float) -> None:
        self._note = note
        self._mismatch_limit = mismatch_limit
        self._active: dict[str, str | None] = {}
        """Alarms of the last step, by their kind."""
        self._is_ahead = False
        """Whether the server has older weights than the next batch is trained on, as in mode `none` between reloads."""
        self._skipped = 0
        """Steps in a row without an update because the first gradient was not finite."""

    def check(self, metrics: StepMetrics, measured: Mismatch, *, is_published: bool) -> None:
        """Log a mismatch between vLLM and the trainer, unless it is expected, and a step that taught nothing."""
        self._sound("mismatch", None if self._is_ahead else mismatch.alarm(measured, self._mismatch_limit))
        self._is_ahead = not is_published
        self._sound("signal", measuring.nothing_learnt(metrics))

    def count_skipped(self, metrics: StepMetrics) -> None:
        """Log a skipped update; the step was published with the weights of the update before.

        Raises:
            UsageError: too many in a row.
        """
        if metrics.updates:
            self._skipped = 0
        if not metrics.skipped_updates:
            return
        if metrics.updates:
            left = f"{metrics.updates} updates of the batch were taken before it, and none after it"
        else:
            self._skipped += 1
            left = f"no weight was changed ({self._skipped} in a row; the run ends after {SKIPS_IN_A_ROW})"
        self._note(f"step {metrics.step}: a gradient was not finite, and its update was skipped: {left}")
        if self._skipped == SKIPS_IN_A_ROW:
            raise UsageError(
                f"the gradients of {SKIPS_IN_A_ROW} steps in a row were not finite; no weight was changed in them",
                remedy="lower --lr or --max-grad-norm and continue with --resume; if no step before them had an update,"
                " check the model with bridge verify",
            )

    def _sound(self, kind: str, alarm: str | None) -> None:
        if alarm and not self._active.get(kind):
            self._note(alarm)
        self._active[kind] = alarm
