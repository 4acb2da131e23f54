"""A long run holds no more memory at its end than early on: the trainer's process, and all of the server's.

Not covered: memory of a GPU (`tests/gpu`), files, what one step needs at its peak.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

import psutil
import pytest

from bridge.training.metrics import StepMetrics
from tests.cpu import demo_server

STEPS = 1_000
EVERY = 50
"""Steps between two samples."""
WARM_UP = 200
"""Steps after which nothing new is to come: vLLM's cache blocks, handed out in turn, have all been written once."""
LIMIT_MIB = 16.0
"""Growth from there to the end."""
LEARNING_RATE = 5e-6
"""A fortieth of the demo's, so that after hundreds of steps there still is something to learn."""
MIB = 2**20


@dataclass
class Memory:
    """What processes hold, step by step."""

    server: psutil.Process
    trainer: psutil.Process = field(default_factory=lambda: psutil.Process(os.getpid()))
    steps: list[int] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=dict)
    """Side and kind -> one figure for each of `steps`."""

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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_a_thousand_steps(tmp_path: Path) -> None:
    num_updates = 0

    def report(metrics: StepMetrics) -> None:
        nonlocal num_updates
        num_updates += metrics.updates
        if metrics.step % EVERY == 0:
            memory.sample(metrics.step)

    with demo_server.served(tmp_path) as server:
        memory = Memory(psutil.Process(server.pid))
        server.train(tmp_path, report, training_steps=STEPS, lr=LEARNING_RATE)
    assert num_updates > 0.9 * STEPS  # or little was left to learn, and little was done
    growth = memory.growth(since=WARM_UP)
    assert len(growth) == 4
    assert all(rise <= LIMIT_MIB for rise in growth.values()), (growth, memory)
