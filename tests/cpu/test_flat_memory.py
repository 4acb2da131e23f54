"""Memory does not grow over a long run, neither in the trainer nor in any of the server's processes.

Not covered: GPU memory (`tests/gpu/test_flat_memory.py`).
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.cpu import demo_server
from tests.cpu.demo_server import DemoServer
from tests.held_memory import Memory

STEPS = 300
EVERY = 10
"""Number of steps between two readings."""
WARM_UP = 120
LIMIT_MIB = 6.0
"""Limit in MiB, which a leak of 33 KiB per step reaches; allocators vary by some MiB."""
LEARNING_RATE = 5e-6
"""A fortieth of the demo's, so that there is still something to learn after hundreds of steps."""
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""oneDNN keeps the kernels of the last 1,024 shapes, half a GiB that takes 500 steps to fill, and on CPUs that compute
in bf16 itself even more, whatever that capacity; it reads both once."""
FEW_BLOCKS = ("--kv-cache-memory-bytes", str(64 * 2**20))
"""vLLM uses its cache blocks in rotation, so with few blocks all of them are soon written once."""


@pytest.mark.slow
def test_memory_does_not_grow_over_hundreds_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FEW_KERNELS.items():
        monkeypatch.setenv(name, value)
    fresh = multiprocessing.get_context("spawn")
    with demo_server.served(tmp_path, *FEW_BLOCKS) as server, ProcessPoolExecutor(1, mp_context=fresh) as process:
        num_updates, growth, mib = process.submit(train, server, tmp_path).result()
    assert num_updates > 0.9 * STEPS  # otherwise there was little left to learn, and few updates
    print(growth, mib)  # noqa: T201  shown if it fails
    resident = [growth[f"{side} rss"] for side in ("trainer", "server")]  # a forked engine's own part grows by itself
    assert all(rise <= LIMIT_MIB for rise in resident)


def train(server: DemoServer, folder: Path) -> tuple[int, dict[str, float], dict[str, list[float]]]:
    """Return the number of updates, the growth of each figure in MiB, and the figures."""
    memory = Memory(psutil.Process(server.pid))
    server.train(folder, lambda step: memory.hear(step, every=EVERY), training_steps=STEPS, lr=LEARNING_RATE)
    return memory.num_updates, memory.growth(since=WARM_UP), memory.mib
