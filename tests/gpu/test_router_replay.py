"""Router replay on a GPU: the server reports its experts from inside CUDA graphs, and the trainer computes with them.

Not covered: tokens that change version (`tests/cpu/test_torn_tokens.py`), real sizes.
"""

from math import sqrt
from pathlib import Path

from tests import family_proof, scenarios
from tests.cpu.test_router_replay import removes_the_mismatch_of_other_experts
from tests.gpu.test_families import KV_CACHE, LEAST_PARAMETERS, LR
from tests.models import tiny
from tests.models.families import FAMILIES, large

EXPERTS = {"num_experts": 32, "moe_intermediate_size": 128}


def test_replay_removes_the_mismatch_of_other_experts(tmp_path: Path) -> None:
    config = large(FAMILIES["Qwen3-MoE"]())
    config.update(EXPERTS)
    model = tiny.write(config, tmp_path / "model", std=family_proof.GAIN / sqrt(config.hidden_size))
    with scenarios.served(model, tmp_path / "server", *KV_CACHE) as server:
        assert server.status().experts == (config.num_hidden_layers, config.num_experts_per_tok)
        assert "CUDA graph" in server.child.log.read_text()
        removes_the_mismatch_of_other_experts(server, tmp_path, at_least=2)
        scenarios.verifies(server, tmp_path)


def test_a_large_family_trains_with_replay_and_equals_its_checkpoint(tmp_path: Path) -> None:
    """As Mixtral does in `test_families.py`."""
    config = large(FAMILIES["Qwen3-MoE"]())
    config.update(EXPERTS)
    result = family_proof.prove(config, tmp_path, engine=KV_CACHE, lr=LR)
    assert result.num_parameters > LEAST_PARAMETERS
    scenarios.check_replay(tmp_path / "run", is_on=True)
