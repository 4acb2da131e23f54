"""A reporter that passes the metrics of each step to a function."""

from collections.abc import Callable, Sequence

from bridge.checkpoints.metrics import StepMetrics
from bridge.run.reporting import Reporter
from bridge.types import Group


class Listener(Reporter):
    """Passes the metrics of each step to a function."""

    def __init__(self, on_step: Callable[[StepMetrics], object] = lambda _: None) -> None:
        self._on_step = on_step

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        self._on_step(metrics)
