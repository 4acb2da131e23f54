"""`bridge run` on a GPU survives the death of its server, and frees all GPU memory.

Not covered: other ways to die, which are the same on the CPU (`tests/cpu/test_supervision.py`).
"""

import time
from pathlib import Path

import torch

from tests.cpu.test_supervision import INTO_THE_NEXT_BATCH_S, running
from tests.models import tiny

SLACK_BYTES = 2**30
"""Memory that other processes may use meanwhile, or that the driver may keep."""


def test_killed_server_loses_no_step_and_no_memory(tmp_path: Path) -> None:
    config = tiny.llama()
    config.head_dim = 64
    model = tiny.write(config, tmp_path / "model")
    before = torch.cuda.mem_get_info()[0]
    with running(model, tmp_path, *("--gpu-memory-utilization", "0.2")) as run:
        run.wait_for(2)
        server = run.server()
        time.sleep(INTO_THE_NEXT_BATCH_S)
        server.kill()
        run.finishes()
    assert "restarting vLLM" in run.stderr_text()
    assert before - torch.cuda.mem_get_info()[0] < SLACK_BYTES
