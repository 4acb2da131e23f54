"""A mixture of experts on the real vLLM on the CPU: with replay, only rounding causes its largest mismatch.

Not covered: the experts that a token reports while weights change (`test_torn_tokens.py`), the proof of each family
(`test_families.py`), passes (`tests/unit/passes/test_routing.py`), a GPU (`tests/gpu/test_router_replay.py`).
"""

from pathlib import Path
from statistics import fmean

from bridge.config import SamplingConfig
from bridge.rollouts.sampler import Sampler
from bridge.server.endpoint import Endpoint
from tests import scenarios
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.scenarios import LiveServer

STEPS = 6
FLAGS = ("--lr", "1e-6", "--batch-size", "16", "--group-size", "4", "--max-staleness", "1")


def test_router_replay_reduces_the_mismatch(tmp_path: Path) -> None:
    model = tiny.write(FAMILIES["Qwen3-MoE"](), tmp_path / "model")
    with scenarios.served(model, tmp_path / "server") as server:
        assert server.status().experts == (2, 2)
        a_later_turn_reports_its_new_tokens_alone(server)
        removes_the_mismatch_of_other_experts(server, tmp_path)
        scenarios.verifies(server, tmp_path)


def a_later_turn_reports_its_new_tokens_alone(server: LiveServer) -> None:
    """Sample a turn after 150 tokens, some of which are cached, and a second turn that continues it in two ways."""
    endpoint, prompt = Endpoint(url=server.manifest.url, reports_experts=True), tuple(range(3, 153))
    with Sampler(SamplingConfig(max_new_tokens=8)) as sampler:
        servers = sampler.servers_at([endpoint])
        (turn,) = sampler.loop.run(sampler.one(servers, prompt, num_samples=1, seed=1))
        num_routed, longer = len(prompt) + len(turn.token_ids) - 1, (*prompt, *turn.token_ids, 5, 6, 7)
        (rest,) = sampler.loop.run(sampler.one(servers, longer, num_samples=1, seed=2, experts=num_routed))
        (whole,) = sampler.loop.run(sampler.one(servers, longer, num_samples=1, seed=2))
    assert rest.token_ids == whole.token_ids
    assert len(turn.experts) == 2 * 2 * 2 * num_routed
    assert rest.experts == whole.experts[len(turn.experts) :]
    assert len(rest.experts) == 2 * 2 * 2 * (1 + 3 + len(rest.token_ids) - 1)


def removes_the_mismatch_of_other_experts(server: LiveServer, folder: Path, *, at_least: float = 3) -> None:
    """Train with and without replay; without it, mismatch must be larger by this factor, and the KL divergence larger.

    Rollouts are a stream whose requests run across publications; weights barely move, so only rounding remains.
    """
    steps = {}
    for choice in ("--router-replay", "--no-router-replay"):
        (folder / choice).mkdir()
        scenarios.trained(server, folder / choice, *FLAGS, choice, steps=STEPS)
        steps[choice] = [step for step in scenarios.metrics(folder / choice / "run") if step["tokens_trained"]]
        scenarios.check_replay(folder / choice / "run", is_on=choice == "--router-replay")
    assert any(step["rerouted_share"] > 0 for step in steps["--router-replay"]), steps
    largest = {choice: max(step["logprob_diff_max"] for step in taken) for choice, taken in steps.items()}
    kl = {choice: fmean(step["mismatch_kl"] for step in taken) for choice, taken in steps.items()}
    assert at_least * largest["--router-replay"] < largest["--no-router-replay"], (largest, kl)
    assert kl["--router-replay"] < kl["--no-router-replay"], (largest, kl)
