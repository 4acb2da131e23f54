"""Memory held by the processes of a run, step by step, and its growth."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import linear_regression

import psutil

from bridge.checkpoints.metrics import StepMetrics

LIMIT_MIB = 16.0
"""Growth below this is noise, since allocators vary in how much memory they keep."""
MIB = 2**20


@dataclass
class Memory:
    """Memory held by processes, step by step."""

    server: psutil.Process
    more: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    """Functions that return the bytes of additional figures, by name."""
    trainer: psutil.Process = field(default_factory=lambda: psutil.Process(os.getpid()))
    steps: list[int] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=dict)
    """One figure per entry of `steps`, by side and kind."""
    num_updates: int = 0
    """Number of updates in all steps so far."""

    def hear(self, metrics: StepMetrics, *, every: int) -> None:
        """Add a step's metrics, and sample every `every` steps."""
        self.num_updates += metrics.updates
        if metrics.step % every == 0:
            self.sample(metrics.step)

    def sample(self, step: int) -> None:
        """Record how much memory every process holds now.

        Record resident memory, and its unique part, which excludes pages of the weights that both sides map.
        """
        self.steps.append(step)
        served = [self.server, *self.server.children(recursive=True)]
        for side, processes in {"trainer": [self.trainer], "server": served}.items():
            infos = [process.memory_full_info() for process in processes]
            for kind in ("rss", "uss"):
                self.mib.setdefault(f"{side} {kind}", []).append(sum(getattr(info, kind) for info in infos) / MIB)
        for name, read_bytes in self.more.items():
            self.mib.setdefault(name, []).append(read_bytes() / MIB)

    def growth(self, since: int) -> dict[str, float]:
        """Return the rise of the regression line through the samples from step `since` on, in MiB.

        A regression line, because single samples vary with the memory that allocators happen to keep.
        """
        first = next(index for index, step in enumerate(self.steps) if step >= since)
        steps = self.steps[first:]
        return {
            name: linear_regression(steps, figures[first:]).slope * (steps[-1] - steps[0])
            for name, figures in self.mib.items()
        }
