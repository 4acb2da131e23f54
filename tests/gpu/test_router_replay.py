"""Router replay on a GPU: the server reports its experts from inside CUDA graphs, and the trainer computes with them.

Not covered: tokens that change version (`tests/cpu/test_torn_tokens.py`), real sizes.
"""

from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import pytest

from tests import family_proof, scenarios
from tests.cpu.test_router_replay import removes_the_mismatch_of_other_experts
from tests.gpu.test_families import ENGINE, LEAST_PARAMETERS, LR
from tests.models import tiny
from tests.models.families import FAMILIES, large
from tests.scenarios import LiveServer

CONFIG = large(FAMILIES["Qwen3-MoE"]())
CONFIG.update({"num_experts": 32, "moe_intermediate_size": 128})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start one server for both tests, since starting it takes half of their time."""
    folder = tmp_path_factory.mktemp("mixture")
    model = tiny.write(CONFIG, folder / "model", std=family_proof.GAIN / sqrt(CONFIG.hidden_size))
    with scenarios.served(model, folder / "server", *ENGINE) as server:
        assert server.status().experts == (CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)
        assert "CUDA graph" in server.child.log.read_text()
        yield server


def test_large_family_with_replay_equals_its_checkpoint(mixture: LiveServer, tmp_path: Path) -> None:
    """Like Mixtral's test in `test_families.py`, but with replay."""
    scenarios.bridge("restore", mixture.manifest.model, "--vllm-config-path", mixture.path, folder=tmp_path)
    result = family_proof.trains(mixture, Path(mixture.manifest.model), tmp_path, lr=LR)
    scenarios.check_metrics(tmp_path / "run", parity_limit=scenarios.FAMILY_PARITY_LIMIT)
    scenarios.check_replay(tmp_path / "run", is_on=True)
    assert result.num_parameters > LEAST_PARAMETERS


def test_replay_removes_the_routing_mismatch(mixture: LiveServer, tmp_path: Path) -> None:
    """This uses the model's initial weights: after three steps at `LR`, it only repeats one token, without mismatch."""
    scenarios.bridge("restore", mixture.manifest.model, "--vllm-config-path", mixture.path, folder=tmp_path)
    removes_the_mismatch_of_other_experts(mixture, tmp_path, at_least=2)
    scenarios.verifies(mixture, tmp_path)
