"""A long run holds no more memory at its end than early on: the trainer's process, and all of the server's.

Not covered: memory of a GPU (`tests/gpu`), files, what one step needs at its peak.
"""

from pathlib import Path

import psutil
import pytest

from tests.cpu import demo_server
from tests.held_memory import LIMIT_MIB, Memory

STEPS = 1_000
EVERY = 50
"""Steps between two samples."""
WARM_UP = 200
"""Steps after which nothing new is to come: vLLM's cache blocks, handed out in turn, have all been written once."""
LEARNING_RATE = 5e-6
"""A fortieth of the demo's, so that after hundreds of steps there still is something to learn."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_a_thousand_steps(tmp_path: Path) -> None:
    with demo_server.served(tmp_path) as server:
        memory = Memory(psutil.Process(server.pid))
        server.train(tmp_path, lambda step: memory.hear(step, every=EVERY), training_steps=STEPS, lr=LEARNING_RATE)
    assert memory.num_updates > 0.9 * STEPS  # or little was left to learn, and little was done
    growth = memory.growth(since=WARM_UP)
    assert len(growth) == 4
    assert all(rise <= LIMIT_MIB for rise in growth.values()), (growth, memory)
