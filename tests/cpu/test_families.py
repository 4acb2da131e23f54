"""Further families on the CPU: each is trained in place and compared with its own checkpoint.

Not covered: Llama (`test_one_copy.py`).
"""

from pathlib import Path

from tests import scenarios
from tests.models import tiny


def test_a_qwen2_with_biases_and_a_head_of_its_own_trains_in_place(tmp_path: Path) -> None:
    model = tiny.write(tiny.qwen2(), tmp_path / "model", std=0.06)
    with scenarios.served(model, tmp_path / "server") as server:
        scenarios.trains_in_place(server, tmp_path)
        scenarios.verifies(server, tmp_path)
