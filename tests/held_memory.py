"""What the processes of a run hold, step by step, and by how much it grows.

Not covered: running it (`tests/cpu/test_flat_memory.py`, `tests/gpu/test_flat_memory.py`).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import linear_regression

import psutil

from bridge.run.metrics import StepMetrics

LIMIT_MIB = 16.0
"""Growth that is none: what allocators keep differs from one moment to the next."""
MIB = 2**20


@dataclass
class Memory:
    """What processes hold, step by step."""

    server: psutil.Process
    more: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    """What else is to be sampled -> what returns its bytes."""
    trainer: psutil.Process = field(default_factory=lambda: psutil.Process(os.getpid()))
    steps: list[int] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=dict)
    """Side and kind -> one figure for each of `steps`."""
    num_updates: int = 0
    """Updates of all steps so far."""

    def hear(self, metrics: StepMetrics, *, every: int) -> None:
        """Take a step's metrics, and sample after every so many."""
        self.num_updates += metrics.updates
        if metrics.step % every == 0:
            self.sample(metrics.step)

    def sample(self, step: int) -> None:
        """Note what every process holds now.

        Resident memory, and of it what is a process's own: pages of the weights, that both sides map, are left out.
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
        """Return by how much the straight line through the samples of steps `since` and later rises, in MiB.

        A line and not a difference of two samples: each is off by what an allocator happens to keep at that moment.
        """
        first = next(index for index, step in enumerate(self.steps) if step >= since)
        steps = self.steps[first:]
        return {
            name: linear_regression(steps, figures[first:]).slope * (steps[-1] - steps[0])
            for name, figures in self.mib.items()
        }
