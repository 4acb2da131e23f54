"""GPU and process memory stays flat over two hundred steps on a GPU.

Not covered: a thousand steps (`tests/cpu/test_flat_memory.py`).
"""

from pathlib import Path

import psutil
import torch

from benchmarks import _gpu_memory
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.run.trainer import Run
from bridge_environments import registry
from tests import scenarios
from tests.held_memory import LIMIT_MIB, Memory
from tests.listener import Listener
from tests.models import tiny

STEPS = 200
EVERY = 5
WARM_UP = 50
LEARNING_RATE = 2e-5
"""Learning rate that is low enough to leave something to learn after hundreds of steps."""


def test_memory_is_flat_over_two_hundred_steps(tmp_path: Path) -> None:
    config = tiny.llama()
    config.head_dim = 64
    model = tiny.write(config, tmp_path / "model")
    device_bytes = _gpu_memory.reader()
    assert device_bytes is not None
    with scenarios.served(model, tmp_path / "server") as server:
        on_gpu = {"gpu": device_bytes, "trainer reserved": torch.cuda.memory_reserved}
        memory = Memory(psutil.Process(server.child.process.pid), on_gpu)
        choices = TrainConfig.of(
            model_name=str(model), vllm_config_path=server.path, training_steps=STEPS, lr=LEARNING_RATE,
            environment=f"{scenarios.ENVIRONMENT}:Vowels", max_new_tokens=16, save_path=tmp_path / "saved",
        )  # fmt: skip
        run = RunDirectory.create(tmp_path / "run", environment=choices.task.environment)
        listener = Listener(lambda step: memory.hear(step, every=EVERY))
        Run(choices, registry.load(choices.task), run, listener).train()
    growth = memory.growth(since=WARM_UP)
    print("growth in MiB", growth, "updates", memory.num_updates)  # noqa: T201  pytest -s shows what was found
    assert memory.num_updates > 0.9 * STEPS  # otherwise there was little left to learn, so few updates
    assert len(growth) == 6
    assert all(rise <= LIMIT_MIB for rise in growth.values()), (growth, memory)
