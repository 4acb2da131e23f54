"""Memory stays flat over a long run, in the trainer and in all of the server's processes.

Not covered: GPU memory (`tests/gpu/test_flat_memory.py`).
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
"""By then every allocation has happened once: vLLM hands out its cache blocks in turn, and all have been written."""
LEARNING_RATE = 5e-6
"""A fortieth of the demo's, so that there is still something to learn after hundreds of steps."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_a_thousand_steps(tmp_path: Path) -> None:
    with demo_server.served(tmp_path) as server:
        memory = Memory(psutil.Process(server.pid))
        server.train(tmp_path, lambda step: memory.hear(step, every=EVERY), training_steps=STEPS, lr=LEARNING_RATE)
    assert memory.num_updates > 0.9 * STEPS  # otherwise there was little left to learn, and few updates
    growth = memory.growth(since=WARM_UP)
    assert len(growth) == 4
    assert all(rise <= LIMIT_MIB for rise in growth.values()), (growth, memory)
