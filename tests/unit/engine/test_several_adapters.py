"""Adapters that take turns on one base: each trains as if it were alone, and is saved with its own rank.

Not covered: what vLLM computes with them (`tests/cpu/test_tinker.py`).
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import bridge
from bridge.engine.held_adapter import HeldAdapter
from bridge.errors import UsageError
from bridge.passes.packing import Sample
from tests.scenarios import LiveServer
from tests.unit import patched_server

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("several adapters")]
SAMPLES = [
    Sample(
        prompt_token_ids=(5, 6), token_ids=(7, 8, 9), sampled_logprobs=(-1.0,) * 3, advantages=(value,) * 3, weight=1.0
    )
    for value in (1.0, -0.5)
]
NUM_SLOTS = 2
PROMPTS = [f"{number}+1=" for number in range(400)]
LORA = bridge.LoraConfig(r=8, alpha=16)


def attached(path: Path, **choices: Any) -> bridge.Policy:
    optimizer = bridge.OptimizerConfig(lr=1e-2, weight_decay=0.1)
    return bridge.attach(path, lora=LORA, optimizer=optimizer, **{"several_adapters": True, **choices})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with patched_server.tiny_llama(tmp_path_factory.mktemp("server"), num_slots=NUM_SLOTS) as served:
        yield served


@pytest.fixture
def policy(server: LiveServer) -> Iterator[bridge.Policy]:
    with attached(server.path) as made:
        yield made


def loss(logprobs: Tensor, batch: Any) -> Tensor:
    total: Tensor = -(logprobs * batch.advantages_N).sum()
    return total


def step(policy: bridge.Policy) -> float:
    passes = policy.forward_backward(SAMPLES, loss)
    policy.optim_step()
    return passes.metrics["loss"]


def logprobs(policy: bridge.Policy) -> Tensor:
    return torch.cat([*policy.forward(SAMPLES, loss).logprobs])


def served(server: LiveServer) -> list[str]:
    answer = httpx.get(f"{server.manifest.url}/v1/models", trust_env=False).json()
    return [model["id"] for model in answer["data"][1:]]


def test_adapters_in_turn_train_as_if_alone(policy: bridge.Policy) -> None:
    choices: list[dict[str, Any]] = [{"r": 8, "seed": 1}, {"r": 2, "alpha": 32, "seed": 2}, {"r": 4, "seed": 3}]
    alone = []
    for choice in choices:
        policy.new_adapter(**choice)
        alone.append(([step(policy) for _ in range(3)], logprobs(policy)))
    held = [policy.new_adapter(**choice) for choice in choices]
    losses: dict[HeldAdapter, list[float]] = {one: [] for one in held}
    for _ in range(3):
        for one in held:
            policy.use(one)
            losses[one].append(step(policy))
    for one, (expected, after) in zip(held, alone, strict=True):
        policy.use(one)
        assert losses[one] == expected
        assert torch.equal(logprobs(policy), after)
        assert expected[-1] < expected[0]


def test_gradients_wait_for_their_adapters_step(policy: bridge.Policy) -> None:
    first = policy.new_adapter(seed=1)
    step(policy)
    step(policy)
    expected = logprobs(policy)
    first = policy.new_adapter(seed=1)
    step(policy)
    policy.forward_backward(SAMPLES, loss)
    policy.new_adapter(seed=2)
    with pytest.raises(UsageError, match="there are no gradients"):
        policy.optim_step()
    policy.use(first)
    policy.optim_step()
    assert torch.equal(logprobs(policy), expected)


def test_a_smaller_adapter_is_saved_as_peft_reads_it(policy: bridge.Policy, tmp_path: Path) -> None:
    attention = [name for name in tiny_modules(policy) if "self_attn" in name]
    policy.new_adapter(r=3, alpha=6, modules=attention)
    for _ in range(3):
        step(policy)
    expected = logprobs(policy)
    folder = policy.save(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], {*config["target_modules"]}) == (3, 6, {*attention})
    shapes = {tensor.shape for tensor in load_file(folder / "adapter_model.safetensors").values()}
    assert {min(shape) for shape in shapes} == {3}
    base = AutoModelForCausalLM.from_pretrained(policy.model_name, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, folder)
    ids = torch.tensor([[*SAMPLES[0].prompt_token_ids, *SAMPLES[0].token_ids]])
    with torch.no_grad():
        found = theirs(ids).logits[0].log_softmax(-1)[1:-1].gather(1, ids[0, 2:, None])[:, 0]
    assert torch.allclose(found, expected[:3], atol=0.02)


def test_a_saved_adapter_continues_exactly(policy: bridge.Policy, tmp_path: Path) -> None:
    policy.new_adapter(r=3, alpha=5, seed=1)
    step(policy)
    policy.save_state(tmp_path / "state", step=1)
    policy.save(tmp_path / "weights")
    step(policy)
    expected = logprobs(policy)
    policy.new_adapter(r=3, alpha=5, seed=7)
    policy.load_state(tmp_path / "state")
    step(policy)
    assert torch.equal(logprobs(policy), expected)
    policy.load(tmp_path / "weights")
    step(policy)
    assert not torch.equal(logprobs(policy), expected)  # AdamW's moments begin anew
    policy.new_adapter(r=4, alpha=5)
    with pytest.raises(UsageError, match="contains a different adapter: rank 3"):
        policy.load(tmp_path / "weights")


def test_adapters_beyond_the_slots_are_each_sampled(policy: bridge.Policy, server: LiveServer) -> None:
    held = [policy.new_adapter(r=2, seed=seed) for seed in range(NUM_SLOTS + 1)]
    seen = list[dict[str, Any]]()
    for _ in range(2):
        for one in held:
            policy.use(one)
            policy.sample(["1+1="], n=1, max_tokens=2)
            seen.append(httpx.get(f"{server.manifest.url}/sampled", trust_env=False).json()[-1])
            assert len(served(server)) <= NUM_SLOTS
    digests = [one["held"] for one in seen]
    assert digests[: len(held)] == digests[len(held) :]
    assert len({*digests}) == len(held)
    assert len({one["model"] for one in seen}) == len(seen), "cached keys and values are looked up by the name"


def test_requests_in_flight_keep_their_adapter(policy: bridge.Policy, server: LiveServer) -> None:
    """More adapters than slots are sampled at once, by calls that send their requests one after the other."""
    held = [policy.new_adapter(r=2, seed=seed) for seed in range(NUM_SLOTS + 1)]
    before = len(httpx.get(f"{server.manifest.url}/sampled", trust_env=False).json())

    async def scenario() -> None:
        calls = list[asyncio.Task[Any]]()
        for one in held * 2:
            await asyncio.to_thread(policy.use, one)
            calls.append(asyncio.ensure_future(policy.sample_async(PROMPTS, n=1, max_tokens=2)))
            await asyncio.sleep(0.2)
        groups = await asyncio.gather(*calls)
        assert all(len(one) == len(PROMPTS) for one in groups)

    asyncio.run(scenario())
    seen = httpx.get(f"{server.manifest.url}/sampled", trust_env=False).json()[before:]
    assert all(one["is_same"] for one in seen)
    assert len({(one["model"], one["held"]) for one in seen}) == len({one["model"] for one in seen})
    assert len({one["held"] for one in seen}) == len(held)


@pytest.mark.parametrize("has_slots", [True, False])
def test_only_what_is_sampled_is_served(request: pytest.FixtureRequest, tmp_path: Path, has_slots: bool) -> None:
    if has_slots:
        only_what_is_sampled_is_served(request.getfixturevalue("policy"), request.getfixturevalue("server"))
        return
    with patched_server.tiny_llama(tmp_path) as server, attached(server.path) as policy:
        only_what_is_sampled_is_served(policy, server)


def only_what_is_sampled_is_served(policy: bridge.Policy, server: LiveServer) -> None:
    first = policy.adapter
    assert not served(server)
    second = policy.new_adapter(r=2)
    step(policy)
    assert not served(server)
    policy.sample(["1+1="], n=1, max_tokens=2)
    (name,) = served(server)
    policy.sample(["1+1="], n=1, max_tokens=2)
    assert served(server) == [name]
    policy.use(first)
    policy.sample(["1+1="], n=1, max_tokens=2)
    assert served(server)[0] == name
    assert len(served(server)) == 2
    policy.use(second)
    policy.sample(["1+1="], n=1, max_tokens=2)
    assert len(served(server)) == 2
    step(policy)
    policy.sample(["1+1="], n=1, max_tokens=2)
    assert len(served(server)) == 2
    assert name not in served(server)


def test_the_base_is_verified_beneath_an_adapter(policy: bridge.Policy) -> None:
    policy.new_adapter(r=2)
    step(policy)
    failed = [check.name for check in policy.verify() if check.status == "FAIL"]
    assert failed == ["log-probabilities"], "this server makes up what it samples"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda policy: policy.new_adapter(r=9), "r is 9, expected 1 to 8"),
        (lambda policy: policy.new_adapter(r=0), "r is 0, expected 1 to 8"),
        (lambda policy: policy.new_adapter(alpha=0), "alpha is 0.0"),
        (lambda policy: policy.new_adapter(modules=["x"]), "the module x has no adapter"),
        (lambda policy: policy.new_adapter(modules=[]), "modules is empty"),
        (lambda policy: policy.use(HeldAdapter(policy.adapter.shape)), "belongs to a different policy"),
    ],
)
def test_an_impossible_adapter_is_refused(
    policy: bridge.Policy, call: Callable[[bridge.Policy], object], words: str
) -> None:
    before = policy.adapter
    with pytest.raises(UsageError, match=words):
        call(policy)
    assert policy.adapter is before


def test_several_adapters_need_settings(server: LiveServer) -> None:
    with pytest.raises(UsageError, match="several_adapters needs lora"):
        bridge.attach(server.path, several_adapters=True)
    with (
        bridge.attach(server.path) as all_weights,
        pytest.raises(UsageError, match="does not train several adapters"),
    ):
        all_weights.new_adapter()


def tiny_modules(policy: bridge.Policy) -> list[str]:
    assert policy.opened.adapter is not None
    return [*policy.opened.adapter.modules]


def test_adapters_on_trained_weights_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with patched_server.tiny_llama(tmp_path) as server:
        with bridge.attach(server.path) as all_weights:
            all_weights.publish(lambda: None)
        with attached(server.path):
            pass
    assert "adapters are trained on its weights, version 1, not on those of" in caplog.text
