"""Given completions in a loop that uses the library: supervised and preference losses on a toy server's memory."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bridge
from bridge.errors import UsageError
from bridge.modes import shared_vllm
from bridge.types import Group
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.engine.test_policy import FenceClient
from tests.unit.run.test_learner import base, made_by

SFT, DPO = bridge.LossConfig(name="sft"), bridge.LossConfig(name="dpo", dpo_beta=0.5)
OPTIMIZER = bridge.OptimizerConfig(lr=1e-3)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return made_by(base(seed=8))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toy_server.ToyServer:
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    return toy_server.serve(tiny.llama(), tmp_path / "model")


@pytest.fixture
def policy(toy: toy_server.ToyServer, tmp_path: Path) -> Iterator[bridge.Policy]:
    with toy_server.attach(toy.manifest, tmp_path, optimizer=OPTIMIZER) as made:
        yield made


def pairs_of(groups: list[Group]) -> list[Group]:
    """Keep the completions with the largest and the smallest reward of each group, in any order."""
    result = []
    for number, group in enumerate(groups):
        ordered = sorted(range(len(group.rewards)), key=lambda index: group.rewards[index])
        kept = [ordered[0], ordered[-1]] if number % 2 else [ordered[-1], ordered[0]]
        completions = tuple(group.completions[index] for index in kept)
        result.append(replace(group, completions=completions, rewards=tuple(group.rewards[index] for index in kept)))
    return result


def test_supervised_loss_is_the_mean_negative_log_likelihood(policy: bridge.Policy, groups: list[Group]) -> None:
    before = policy.forward(bridge.samples(groups, SFT), SFT)
    assert before.metrics["loss"] == pytest.approx(-torch.cat([*before.logprobs]).double().mean().item(), rel=1e-5)
    policy.train_step(bridge.samples(groups, SFT), SFT)
    assert policy.forward(bridge.samples(groups, SFT), SFT).metrics["loss"] < before.metrics["loss"]


def test_encoded_texts_are_trained_with_their_weights(policy: bridge.Policy) -> None:
    samples = [policy.encode("2+3=", text, weight=weight) for text, weight in (("5", 0.25), ("five", 0.5))]
    passes = policy.forward_backward(samples, SFT)
    terms = [-sample.weight * float(own.sum()) for sample, own in zip(samples, passes.logprobs, strict=True)]
    assert passes.metrics["loss"] == pytest.approx(math.fsum(terms), rel=1e-5)
    assert math.isnan(passes.metrics["logprob_diff_mean"])


def test_preferences_are_learned_against_the_reference(
    toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group]
) -> None:
    loss = bridge.LossConfig(name="dpo", reference_model=toy.manifest.model)
    with toy_server.attach(toy.manifest, tmp_path, optimizer=OPTIMIZER, loss=loss) as policy:
        samples = bridge.samples(pairs_of(groups), loss)
        first = policy.forward_backward(samples).metrics
        policy.optim_step()
        for _ in range(5):
            policy.train_step(samples)
        last = policy.forward(samples).metrics
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert last["loss"] < first["loss"]
    assert last["margin"] > first["margin"]
    assert last["preference_accuracy"] == 1


def test_group_without_a_preference_counts_in_the_mean(groups: list[Group]) -> None:
    pairs = pairs_of(groups)
    equal = [replace(pairs[0], rewards=(1.0, 1.0)), *pairs[1:]]
    samples = bridge.samples(equal, DPO)
    assert len(samples) == 2 * (len(pairs) - 1)
    assert {sample.weight for sample in samples} == {1 / len(pairs)}


def test_preferences_without_a_reference_are_refused(
    policy: bridge.Policy, toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group]
) -> None:
    with pytest.raises(UsageError, match="the loss is dpo, but no reference model is loaded"):
        policy.forward_backward(bridge.samples(pairs_of(groups), DPO), DPO)
    (batch, *_) = policy.pack(bridge.samples(pairs_of(groups), DPO))
    with pytest.raises(UsageError, match="loss dpo compares log-probabilities with a reference's"):
        bridge.policy_loss(policy.logprobs(batch)[0], batch, DPO)
    policy.close()
    with pytest.raises(UsageError, match="--loss dpo needs a frozen reference"):
        toy_server.attach(toy.manifest, tmp_path, loss=DPO)


def test_samples_that_are_no_pairs_are_refused(toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group]) -> None:
    with pytest.raises(
        UsageError, match=r"group 1 .* has 4 completions of 4 token sequences, but loss dpo compares two"
    ):
        bridge.samples(groups, DPO)
    loss = bridge.LossConfig(name="dpo", reference_model=toy.manifest.model)
    with toy_server.attach(toy.manifest, tmp_path, loss=loss) as policy:
        samples = bridge.samples(pairs_of(groups), loss)
        with pytest.raises(UsageError, match=r"pair 0 has 1 samples, of which . are preferred"):
            policy.forward_backward(samples[1:])
        both = [replace(sample, advantages=(1.0,) * len(sample.advantages)) for sample in samples]
        with pytest.raises(UsageError, match="pair 0 has 2 samples, of which 2 are preferred"):
            policy.forward_backward(both)
        with pytest.raises(UsageError, match="sample 0 belongs to no pair, but loss dpo compares two completions"):
            policy.forward_backward(bridge.samples(groups))
