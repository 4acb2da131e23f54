"""`bridge.Policy` over a toy server's memory: misuse raises one clear error, before the fence.

Not covered: a real server (`tests/cpu/test_library.py`).
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

import bridge
from bridge.engine import policy as module
from bridge.errors import RewardError, UsageError
from bridge.modes import shared_vllm
from bridge.rollouts.vocabulary import Vocabulary
from bridge.server.client import BridgeClient
from bridge.server.manifest import Manifest
from bridge.server.protocol import Status
from tests.models import chat, tiny
from tests.unit import toy_server
from tests.unit.passes.test_preparation import mixture


class FenceClient(BridgeClient):
    """A client that grants every request, and records the calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[str] = []
        self._version = 0

    def status(self) -> Status:
        return Status.model_construct(version=self._version, state="serving")

    def take_lease(self, run: str) -> Status:
        return self._called("lease")

    def pause(self, *_: Any, **__: Any) -> Status:
        return self._called("pause")

    def resume(self) -> Status:
        return self._called("resume")

    def publish(self, version: int | None = None) -> Status:
        self._version += 1
        return self._called("publish")

    def _called(self, name: str) -> Status:
        self.calls.append(name)
        return self.status()


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bridge.Policy]:
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    toy = toy_server.serve(tiny.llama(), tmp_path / "model")
    with toy_server.attach(toy.manifest, tmp_path) as made:
        yield made


def calls(policy: bridge.Policy) -> list[str]:
    client = client_of(policy)
    assert isinstance(client, FenceClient)
    return client.calls


def client_of(policy: bridge.Policy) -> BridgeClient:
    assert isinstance(policy.mode, shared_vllm.PatchedServer)
    return policy.mode.client


def manifest_of(policy: bridge.Policy) -> Manifest:
    assert isinstance(policy.mode, shared_vllm.PatchedServer)
    return policy.mode.manifest


def with_gradients(policy: bridge.Policy) -> bridge.Policy:
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return policy


def weights(policy: bridge.Policy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def test_only_a_filtered_policy_normalizes_over_kept_words(
    policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher without filters scores a filtered student's tokens over the full vocabulary."""
    sample = policy.encode("a", "b c")
    filtered = replace(sample, kept=((1e9, 1),) * len(sample.token_ids))
    ours, plain = (policy.logprobs(batch)[0] for group in (filtered, sample) for batch in policy.pack([group]))
    assert torch.equal(ours, plain)
    monkeypatch.setattr(policy, "config", policy.config.changed(top_k=1))
    (batch,) = policy.pack([filtered])
    assert not torch.equal(policy.logprobs(batch)[0], plain)


def test_encoded_text_ends_like_a_sampled_completion(policy: bridge.Policy, tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path / "gemma", "gemma3")
    tokenizer.eos_token = "<|endoftext|>"  # as in Gemma, whose turns end with <end_of_turn>
    policy.tokenizer = tokenizer
    policy._vocabulary = Vocabulary.of(tokenizer, str(tmp_path / "gemma"))
    messages = [{"role": "user", "content": "2+3?"}]
    assert tokenizer.decode(policy.encode(messages, "5").token_ids) == "5<end_of_turn>"
    assert tokenizer.decode(policy.encode("2+3=", "5").token_ids) == "5<|endoftext|>"
    tokenizer.chat_template = None
    policy._vocabulary = Vocabulary.of(tokenizer, str(tmp_path / "gemma"))
    assert tokenizer.decode(policy.encode("2+3=", "5").token_ids) == "5<|endoftext|>"


def test_mixture_of_experts_with_large_weights_is_packed(policy: bridge.Policy) -> None:
    policy.model = mixture()
    first, second = (batch for text in ("b c", "d") for batch in policy.pack([policy.encode("a", text)]))
    policy.model.gradient_checkpointing_enable()
    policy.model.train()
    (policy.logprobs(first)[0].sum() + policy.logprobs(second)[0].sum()).backward()


def test_optimizer_that_needs_a_closure_is_refused(policy: bridge.Policy) -> None:
    optimizer = torch.optim.LBFGS(policy.parameters())
    with pytest.raises(UsageError, match="LBFGS needs a closure"):
        with_gradients(policy).update(optimizer)
    assert "pause" not in calls(policy)


@pytest.mark.parametrize("max_norm", [None, 0, -1.0, float("nan")])
@pytest.mark.parametrize("bridges_own", [True, False])
def test_non_positive_max_norm_is_refused(policy: bridge.Policy, max_norm: Any, bridges_own: bool) -> None:
    """A negative value would reverse the gradients, and None would raise inside the fence."""
    before, own = weights(policy), policy.optimizer(lr=1e-3)
    optimizer = own if bridges_own else torch.optim.SGD(policy.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="max_norm is"):
        with_gradients(policy).update(optimizer, max_norm=max_norm)
    assert "pause" not in calls(policy)
    assert all(map(torch.equal, before, weights(policy)))


def test_setting_the_group_learning_rate_sets_all_parameters(policy: bridge.Policy) -> None:
    """One group per parameter would let a loop set only the first group's rate, and the step fail inside the fence."""
    optimizer, before = policy.optimizer(lr=1e-3), weights(policy)
    optimizer.param_groups[0]["lr"] = 0.5
    with_gradients(policy).update(optimizer)
    moved = [float((old - new).abs().max()) for old, new in zip(before, weights(policy), strict=True)]
    assert min(moved) > 0.4, moved


def test_optimizer_state_is_allocated_before_the_first_fence(
    policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that TRL never uses costs nothing, and without memory for its state the weights stay consistent."""
    optimizer = policy.optimizer(lr=1e-3)
    assert not [*optimizer._state()]
    with monkeypatch.context() as full:
        full.setattr(torch, "empty", Mock(side_effect=[torch.empty(1), torch.OutOfMemoryError("no room")]))
        with pytest.raises(torch.OutOfMemoryError):
            with_gradients(policy).update(optimizer)
    assert "pause" not in calls(policy)
    policy.update(optimizer)
    assert [*optimizer._state()]


def test_ctrl_c_during_an_update_drops_the_gradients(policy: bridge.Policy) -> None:
    """Otherwise a loop that continues, as in a notebook, would add the next batch's gradients to applied ones."""

    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        with_gradients(policy).update(Interrupted(policy.parameters(), lr=1.0))
    assert policy.version == 1
    assert all(parameter.grad is None for parameter in policy.parameters())


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "save_state, folder": (lambda policy: policy.save_state(3), r"save_state: folder is 3, expected a path"),
    "load_state, folder": (lambda policy: policy.load_state(None), "load_state: folder is None, expected a path"),
    "save, folder": (lambda policy: policy.save(b"x"), "save: folder is b'x', expected a path"),
    "save_state, text as step": (
        lambda policy: policy.save_state("new", step="x"),
        "save_state: step is 'x', expected",
    ),
    "save, negative step": (lambda policy: policy.save(step=-1), "save: step is -1, expected an integer from 0"),
    "save, flag as step": (lambda policy: policy.save(step=True), "save: step is True, expected an integer from 0"),
    "save, optimizer": (lambda policy: policy.save(step=1, optimizer="adamw"), "save: optimizer is 'adamw', expected"),
    "resume, optimizer": (lambda policy: policy.resume("adamw"), "resume: optimizer is 'adamw', expected"),
    "update, optimizer": (lambda policy: policy.update(None), "update: optimizer is None, expected"),
    "log, groups": (lambda policy: policy.log(1, "abc"), "groups is 'abc', expected a list of bridge.Group"),
    "log, entry of groups": (lambda policy: policy.log(1, [1]), r"groups is \[1\], expected a list of bridge.Group"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_invalid_argument_is_named_in_one_line(policy: bridge.Policy, name: str) -> None:
    call, words = WRONG_ARGUMENTS[name]
    with pytest.raises(UsageError, match=words) as refused:
        call(policy)
    assert "\n" not in refused.value.message
    assert "pause" not in calls(policy)


@pytest.mark.parametrize("call", ["publish", "update", "train_step", "optim_step"])
def test_unknown_in_flight_value_is_refused_before_the_fence(policy: bridge.Policy, call: str) -> None:
    before, samples, unknown = weights(policy), [policy.encode("a", "b")], {"in_flight": cast("Any", "zz")}
    choices: dict[str, Callable[[], object]] = {
        "publish": lambda: policy.publish(lambda: None, **unknown),
        "update": lambda: with_gradients(policy).update(policy.optimizer(lr=1e-3), **unknown),
        "train_step": lambda: policy.train_step(samples, **unknown),
        "optim_step": lambda: (policy.forward_backward(samples), policy.optim_step(**unknown)),
    }
    with pytest.raises(UsageError, match=f"{call}: in_flight is 'zz', expected one of keep, wait, abort"):
        choices[call]()
    assert "pause" not in calls(policy)
    assert all(map(torch.equal, before, weights(policy)))


@pytest.mark.parametrize("one", ["say 1:", {"prompt": "say 1:", "answer": "1"}, [{"role": "user", "content": "1"}]])
def test_single_prompt_instead_of_a_list_is_refused(policy: bridge.Policy, one: Any) -> None:
    """Otherwise its characters or fields would be treated as prompts."""
    with pytest.raises(UsageError, match="one prompt"):
        policy.sample(one)


def test_problem_without_a_prompt_is_refused_with_its_keys(policy: bridge.Policy) -> None:
    with pytest.raises(UsageError, match="no key 'prompt', only 'question'"):
        policy.sample([{"question": "1 + 1"}])  # type: ignore[list-item]
    assert policy.sample([]) == []


@pytest.mark.parametrize("reward", [None, [1.0], "good", "1.0", float("nan"), torch.zeros(2)])
def test_reward_that_is_not_a_number_is_refused(reward: Any) -> None:
    with pytest.raises(RewardError, match="the reward of 'text' is"):
        module._reward(lambda *_: reward, {"prompt": ""}, "text")


@pytest.mark.parametrize("reward", [True, 1, torch.tensor(1.0), np.float32(1)])
def test_any_kind_of_number_is_accepted_as_reward(reward: Any) -> None:
    assert module._reward(lambda *_: reward, {"prompt": ""}, "text") == 1.0


@pytest.mark.parametrize("by_name", [True, False])
def test_padding_is_refused_however_the_mask_is_passed(policy: bridge.Policy, by_name: bool) -> None:
    policy.pack([policy.encode("a", "b")])
    ids, mask = torch.tensor([[0, 0, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1]])
    with pytest.raises(UsageError, match="padding"):
        policy.model(input_ids=ids, attention_mask=mask) if by_name else policy.model(ids, mask)


def test_close_inside_the_block_is_not_an_error(policy: bridge.Policy) -> None:
    policy.close()
    policy.close()


def test_default_completion_length_fits_the_servers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default of 256 tokens, a server with `max_model_len` 256 would reject every prompt."""
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    whole = toy_server.serve(tiny.llama(), tmp_path / "model").manifest
    short = whole.model_copy(update={"max_model_len": 256})
    sampling = bridge.SamplingConfig(group_size=4)
    with toy_server.attach(short, tmp_path, sampling=sampling) as made:
        assert made.sampling == bridge.SamplingConfig(group_size=4, max_new_tokens=128)


def test_sampling_attribute_cannot_be_replaced(policy: bridge.Policy) -> None:
    """`logprobs` would use the new temperature, and `sample` the old one."""
    with pytest.raises(AttributeError, match="sampling"):
        policy.sampling = bridge.SamplingConfig(temperature=0.5)  # type: ignore[misc]


def test_optimizer_of_another_model_is_refused(policy: bridge.Policy) -> None:
    """For example after `get_peft_model(policy.model)`: the server's weights would silently never change."""
    other, head = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    other.grad = head.grad = torch.ones(2)
    with pytest.raises(UsageError, match="none of the 1 parameters that SGD would change is the server's"):
        policy.update(torch.optim.SGD([other], lr=1.0))
    assert "pause" not in calls(policy)
    with_gradients(policy).update(torch.optim.SGD([*policy.parameters(), head], lr=1.0))  # a critic, for example
    assert policy.version == 1


def test_hint_for_an_existing_folder_names_the_librarys_call(policy: bridge.Policy, tmp_path: Path) -> None:
    (tmp_path / "model" / "there").touch()
    with pytest.raises(UsageError, match=r"choose another with policy\.save\(FOLDER\)"):
        policy.save(tmp_path / "model")


@pytest.mark.parametrize(
    ("choices", "words"),
    [({"name": "sgd", "lr": 1e-6}, "name is 'sgd'"), ({"lr": 0.0}, "lr is 0.0: .* greater than 0")],
)
def test_invalid_optimizer_choice_is_one_clear_line(policy: bridge.Policy, choices: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        policy.optimizer(**choices)
