"""`forward_backward`, `optim_step`, `train_step`, `save_state` and `load_state` on a toy server's memory.

Results must be bit-identical to those of `bridge run` on the same samples.
Not covered: sampling (`test_policy_calls.py`), a real server and several ranks (`tests/cpu/test_library.py`).
"""

import math
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import bridge
from bridge.config import TrainConfig
from bridge.engine import policy as module
from bridge.engine.trainable import LossInputs
from bridge.errors import CheckpointError, GradientError, ServerUnreachableError, UsageError
from bridge.learn.policy_loss import LossSpec
from bridge.modes import shared_vllm
from bridge.passes import budget
from bridge.passes.layers import INPUTS
from bridge.passes.packing import MicroBatch
from bridge.server.fence import Update
from bridge.server.manifest import MANIFEST_NAME
from bridge.types import Group
from bridge.weights.attach import attach as attach_weights
from tests.models import tiny
from tests.unit import learners, toy_server
from tests.unit.engine.test_policy import FenceClient, calls
from tests.unit.modes import lora_runs
from tests.unit.run.test_learner import made_by
from tests.unit.trainer_runs import FakeMode

LR = 1e-3
CHOICES: dict[str, Any] = {
    "sampling": bridge.SamplingConfig(group_size=4, temperature=0.8),
    "optimizer": bridge.OptimizerConfig(lr=LR, max_grad_norm=1e6),
}


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    torch.manual_seed(8)
    from transformers import AutoModelForCausalLM

    return made_by(AutoModelForCausalLM.from_config(tiny.llama(), dtype=torch.float32).eval())


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toy_server.ToyServer:
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    return toy_server.serve(tiny.llama(), tmp_path / "model")


@pytest.fixture
def policy(toy: toy_server.ToyServer, tmp_path: Path) -> Iterator[bridge.Policy]:
    with toy_server.attach(toy.manifest, tmp_path, **CHOICES) as made:
        yield made


def gradients(policy: bridge.Policy) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


def weights(policy: bridge.Policy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def of_a_run(
    toy: toy_server.ToyServer, groups: list[Group], **choices: Any
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Return the gradients, weights and metrics of one step of `bridge run`, on a copy of the server's weights."""
    opened = attach_weights(toy.manifest).opened()
    for parameter in opened.model.parameters():
        parameter.data = parameter.data.clone()
    fixed = {"model_name": toy.manifest.model, "batch_size": 16, "group_size": 4, "temperature": 0.8}
    config = TrainConfig.model_validate(fixed | {"lr": LR, "max_grad_norm": 1e6} | choices)
    learner = learners.made(config, opened)
    trained = [parameter for parameter in opened.model.parameters() if parameter.requires_grad]
    learner.take(groups)
    learner.prepare()
    of_step = [parameter.grad.clone() for parameter in trained if parameter.grad is not None]
    learner.write()
    return of_step, [parameter.detach() for parameter in trained], learner.learnt()


@pytest.fixture(params=[None, 24], ids=["one pass", "many passes"])
def tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Return the size of a pass; with many passes, gradients are summed in float32."""
    monkeypatch.setattr(budget, "FEW", 2)
    of_a_pass: int | None = request.param
    return of_a_pass


def test_step_matches_bridge_run(
    toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group], tokens: int | None
) -> None:
    _, expected, figures = of_a_run(toy, groups, micro_batch_tokens=tokens)
    compute = bridge.ComputeConfig(micro_batch_tokens=tokens)
    with toy_server.attach(toy.manifest, tmp_path, compute=compute, **CHOICES) as policy:
        passes, stepped = policy.train_step(bridge.samples(groups))
        assert equal(weights(policy), expected)
        assert stepped.version == policy.version == 1
        assert stepped.grad_norm == figures["grad_norm"]
        assert stepped.changed_weight_share > 0.5
        for name in ("loss", "entropy", "logprob_diff_mean", "mismatch_kl", "kl", "tokens_trained"):
            assert passes.metrics[name] == figures[name], name


def test_gradients_match_bridge_run(
    toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group], tokens: int | None
) -> None:
    expected, *_ = of_a_run(toy, groups, micro_batch_tokens=tokens)
    compute = bridge.ComputeConfig(micro_batch_tokens=tokens)
    with toy_server.attach(toy.manifest, tmp_path, compute=compute, **CHOICES) as policy:
        policy.forward_backward(bridge.samples(groups))
        found = gradients(policy)
        assert equal(found, expected)
        assert len(found) == len([*policy.parameters()])
        assert {gradient.dtype for gradient in found} == {torch.float32 if tokens else torch.bfloat16}
        assert all(gradient.count_nonzero() for gradient in found)


def test_log_probs_are_returned_in_the_callers_order(policy: bridge.Policy, groups: list[Group]) -> None:
    samples = bridge.samples(groups)
    in_order = policy.forward_backward(samples)
    reversed_order = policy.forward_backward(samples[::-1])
    assert [len(of_sample) for of_sample in in_order.logprobs] == [sample.num_trained for sample in samples]
    assert equal(in_order.logprobs, reversed_order.logprobs[::-1])
    assert equal(in_order.entropies, reversed_order.entropies[::-1])
    (alone,) = policy.pack([samples[2]])
    assert torch.allclose(policy.logprobs(alone)[0], in_order.logprobs[2], atol=0.02)


def test_gradients_of_several_calls_are_summed(policy: bridge.Policy, groups: list[Group]) -> None:
    """Sums are float32 from the second call on; converting the first bf16 gradient loses nothing."""
    samples = bridge.samples(groups)
    policy.forward_backward(samples[:8])
    first = gradients(policy)
    policy.trainable.drop_gradients()
    policy._num_passes = 0
    policy.forward_backward(samples[8:])
    second = gradients(policy)
    policy.trainable.drop_gradients()
    policy._num_passes = 0
    policy.forward_backward(samples[:8])
    policy.forward_backward(samples[8:])
    both = gradients(policy)
    assert {gradient.dtype for gradient in both} == {torch.float32}
    expected = [one.float() + other.float() for one, other in zip(first, second, strict=True)]
    assert all(torch.allclose(ours, theirs, rtol=1e-2, atol=1e-6) for ours, theirs in zip(both, expected, strict=True))
    policy.optim_step()
    assert gradients(policy) == []


def test_loss_may_be_a_function(policy: bridge.Policy, groups: list[Group]) -> None:
    samples, seen = bridge.samples(groups), list[int]()

    def loss(logprobs: Tensor, batch: MicroBatch) -> Tensor:
        seen.extend(batch.indices)
        return bridge.policy_loss(logprobs, batch)

    passes = policy.forward_backward(samples, loss)
    ours = gradients(policy)
    assert sorted(seen) == [*range(len(samples))]
    assert "kl" not in passes.metrics
    policy.optim_step(lr=1e-12)
    policy.forward_backward(samples)
    assert equal(gradients(policy), ours)


def test_ratios_use_the_given_old_log_probs(policy: bridge.Policy, groups: list[Group]) -> None:
    samples = bridge.samples(groups)
    before = policy.forward_backward(samples)
    policy.optim_step(lr=1e-2)
    clipped = policy.forward_backward(samples, old_logprobs=before.logprobs)
    assert clipped.metrics["clipped_high_share"] + clipped.metrics["clipped_low_share"] > 0
    with pytest.raises(UsageError, match=f"old_logprobs has 1 samples, expected {len(samples)}"):
        policy.forward_backward(samples, old_logprobs=before.logprobs[:1])


def test_gradient_release_works_in_one_call(toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group]) -> None:
    samples = bridge.samples(groups)
    released = bridge.OptimizerConfig(lr=LR, max_grad_norm=1e6, gradient_release=True)
    _, expected, _ = of_a_run(toy, groups, gradient_release=True)
    with toy_server.attach(toy.manifest, tmp_path, **{**CHOICES, "optimizer": released}) as policy:
        with pytest.raises(UsageError, match="stepped in the backward pass"):
            policy.forward_backward(samples)
        passes, stepped = policy.train_step(samples)
        assert equal(weights(policy), expected)
        assert math.isfinite(stepped.grad_norm)
        assert len(passes.logprobs) == len(samples)
        assert gradients(policy) == []


def test_state_is_saved_and_loaded_exactly(policy: bridge.Policy, groups: list[Group], tmp_path: Path) -> None:
    samples = bridge.samples(groups)
    policy.train_step(samples)
    assert policy.save_state(tmp_path / "state", step=1) == tmp_path / "state"
    policy.train_step(samples)
    expected = weights(policy)
    assert policy.load_state(tmp_path / "state").progress.step == 1
    assert not equal(weights(policy), expected)
    policy.train_step(samples)
    assert equal(weights(policy), expected)


def test_weights_without_optimizer_are_saved_and_loaded(
    policy: bridge.Policy, groups: list[Group], tmp_path: Path
) -> None:
    policy.save_state(tmp_path / "weights", has_optimizer=False)
    before = weights(policy)
    policy.train_step(bridge.samples(groups))
    policy.load_state(tmp_path / "weights", has_optimizer=False)
    assert equal(weights(policy), before)
    with pytest.raises(CheckpointError, match="optimizer"):
        policy.load_state(tmp_path / "weights")
    (tmp_path / "weights" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        policy.load_state(tmp_path / "weights", has_optimizer=False)


def test_step_without_gradients_is_refused(policy: bridge.Policy, groups: list[Group]) -> None:
    with pytest.raises(UsageError, match="there are no gradients"):
        policy.optim_step()
    policy.forward_backward(bridge.samples(groups))
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="lr is"):
            policy.optim_step(lr=wrong)
    with pytest.raises(UsageError, match="max_norm is"):
        policy.optim_step(max_norm=0)
    assert "pause" not in calls(policy)
    policy.optim_step()


def test_infinite_gradients_change_nothing(policy: bridge.Policy, groups: list[Group]) -> None:
    samples, before = bridge.samples(groups), weights(policy)
    policy.forward_backward([replace(sample, weight=math.inf) for sample in samples])
    with pytest.raises(GradientError, match="expected a finite number"):
        policy.optim_step()
    assert equal(weights(policy), before)
    assert "pause" not in calls(policy)
    policy.train_step(samples)
    assert policy.version == 1


def test_failed_loss_leaves_no_gradients(policy: bridge.Policy, groups: list[Group]) -> None:
    def loss(_: Tensor, __: MicroBatch) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        policy.forward_backward(bridge.samples(groups), loss)
    assert gradients(policy) == []
    with pytest.raises(UsageError, match="no gradients"):
        policy.optim_step()


def test_entropy_bonus_is_part_of_forward_backward(policy: bridge.Policy, groups: list[Group]) -> None:
    samples = bridge.samples(groups)

    def found(coef: float) -> tuple[float, list[Tensor]]:
        policy.drop_gradients()
        passes = policy.forward_backward(samples, bridge.LossConfig(entropy_coef=coef))
        return passes.metrics["loss"], [
            parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None
        ]

    (plain, without), (once, one), (twice, two) = map(found, (0.0, 0.1, 0.2))
    assert once < plain
    assert twice - once == pytest.approx(once - plain, rel=1e-3)
    for a, b, c in zip(without, one, two, strict=True):
        torch.testing.assert_close((c - b).float(), (b - a).float(), rtol=0.1, atol=2e-2 * float(a.float().abs().max()))
    assert any(not torch.equal(a, b) for a, b in zip(without, one, strict=True))
    policy.drop_gradients()


def test_losses_forward_backward_cannot_use_are_refused(policy: bridge.Policy, groups: list[Group]) -> None:
    samples = bridge.samples(groups)
    with pytest.raises(UsageError, match="top_entropy"):
        policy.forward_backward(samples, bridge.LossConfig(top_entropy=0.5))
    with pytest.raises(UsageError, match="no reference model is loaded"):
        policy.forward_backward(samples, bridge.LossConfig(kl_coef=0.1))


def test_running_out_of_memory_makes_passes_smaller(
    policy: bridge.Policy, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, failures = bridge.samples(groups), [torch.OutOfMemoryError("CUDA out of memory")]
    trainable, loss_inputs = policy.trainable, policy.trainable.loss_inputs

    def failing(batch: MicroBatch, spec: LossSpec) -> LossInputs:
        if failures:
            raise failures.pop()
        return loss_inputs(batch, spec)

    monkeypatch.setattr(trainable, "loss_inputs", failing)
    policy.forward_backward(samples)
    assert trainable.prepared.kept == INPUTS, "activations must be recomputed from now on"
    failures.append(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UsageError, match="out of memory in call 2 of forward_backward"):
        policy.forward_backward(samples)
    assert gradients(policy) == []


def test_read_only_policy_computes_but_never_writes(
    toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group]
) -> None:
    samples = bridge.samples(groups)
    with toy_server.attach(toy.manifest, tmp_path, reads_only=True, **CHOICES) as reader:
        (batch, *_) = reader.pack(samples)
        assert reader.logprobs(batch)[0].isfinite().all()
        for call in (lambda: reader.forward_backward(samples), reader.optim_step, lambda: reader.trainable):
            with pytest.raises(UsageError, match="is read-only"):
                call()


def test_kl_coef_without_a_reference_is_refused(toy: toy_server.ToyServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reference"):
        toy_server.attach(toy.manifest, tmp_path, loss=bridge.LossConfig(kl_coef=0.1))


def test_optim_step_inside_policy_fence_is_refused(policy: bridge.Policy) -> None:
    with policy.fence(Update()), pytest.raises(UsageError, match=r"policy\.optim_step was called inside policy\.fence"):
        policy.optim_step()
    assert policy.version == 1


@pytest.fixture
def sleeping(
    toy: toy_server.ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[bridge.Policy, FakeMode]]:
    """Return a policy whose server's KV cache sleeps while passes are computed."""
    mode = FakeMode(toy, "http://localhost:1", can_sleep=True)
    monkeypatch.setattr(module, "WAYS", defaultdict(lambda: lambda *_: mode))
    publishing = bridge.PublishingConfig(kv_sleep="always")
    with toy_server.attach(toy.manifest, tmp_path, publishing=publishing, **CHOICES) as policy:
        yield policy, mode
    assert mode.calls[-1] == "close"


def test_passes_use_kv_cache_memory_until_the_step(
    sleeping: tuple[bridge.Policy, FakeMode], groups: list[Group]
) -> None:
    policy, mode = sleeping
    samples = bridge.samples(groups)
    policy.forward_backward(samples[:8])
    with pytest.raises(UsageError, match="KV cache sleeps until"):
        policy.sample(["a"])
    policy.forward_backward(samples[8:])
    assert mode.calls == ["open", "sleep", "prepare"]
    stepped = policy.optim_step()
    assert mode.calls[-1] == "publish"
    assert stepped.version == policy.version == 4
    policy.forward_backward(samples)
    assert mode.calls[-2:] == ["sleep", "prepare"]


def test_server_wakes_if_no_step_follows(sleeping: tuple[bridge.Policy, FakeMode], groups: list[Group]) -> None:
    """Cases: leaving the block, a failed loss, and a gradient that is not finite."""
    policy, mode = sleeping
    samples = bridge.samples(groups)

    def failing(_: Tensor, __: MicroBatch) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        policy.forward_backward(samples, failing)
    assert policy._sleep is None
    policy.forward_backward([replace(sample, weight=math.inf) for sample in samples])
    with pytest.raises(GradientError):
        policy.optim_step()
    assert policy._sleep is None
    policy.forward_backward(samples)
    policy.close()
    assert mode.calls == ["open", *["sleep", "prepare"] * 3, "close"]
    assert "publish" not in mode.calls


RELEASE = bridge.OptimizerConfig(lr=LR, max_grad_norm=1e6, gradient_release=True)


def failing_loss(_: Tensor, __: MicroBatch) -> Tensor:
    raise ZeroDivisionError


def test_failed_loss_with_gradient_release_keeps_weights(
    toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group]
) -> None:
    """The loss runs inside the fence, before anything is written, so the server serves the same weights again."""
    with toy_server.attach(toy.manifest, tmp_path, **{**CHOICES, "optimizer": RELEASE}) as policy:
        before = weights(policy)
        with pytest.raises(ZeroDivisionError):
            policy.train_step(bridge.samples(groups), failing_loss)
        assert calls(policy) == ["lease", "pause", "resume"]
        assert equal(weights(policy), before)
        policy.train_step(bridge.samples(groups))


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_gradient_release_refuses_existing_gradients(
    toy: toy_server.ToyServer, tmp_path: Path, groups: list[Group], is_offloaded: bool
) -> None:
    """Otherwise they would be dropped silently, or fail an assertion."""
    choices = {**CHOICES, "optimizer": RELEASE.model_copy(update={"offload": is_offloaded})}
    with toy_server.attach(toy.manifest, tmp_path, **choices) as policy:
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(UsageError, match="gradients of another backward pass"):
            policy.train_step(bridge.samples(groups))
        assert "pause" not in calls(policy)


@pytest.mark.parametrize("call", ["train_step", "optim_step"])
def test_gradients_of_a_failed_step_are_dropped(
    policy: bridge.Policy, groups: list[Group], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Otherwise repeating the call would add the same gradients again."""
    samples = bridge.samples(groups)

    def step() -> object:
        policy.forward_backward(samples)
        return policy.optim_step()

    act = step if call == "optim_step" else lambda: policy.train_step(samples)
    with monkeypatch.context() as gone:
        gone.setattr(FenceClient, "pause", Mock(side_effect=ServerUnreachableError("gone", hint="none")))
        with pytest.raises(ServerUnreachableError):
            act()
    assert gradients(policy) == []
    with pytest.raises(UsageError, match="there are no gradients"):
        policy.optim_step()


def test_loading_a_state_drops_old_gradients(policy: bridge.Policy, groups: list[Group], tmp_path: Path) -> None:
    samples = bridge.samples(groups)
    policy.save_state(tmp_path / "state")
    policy.forward_backward(samples)
    policy.load_state(tmp_path / "state")
    assert gradients(policy) == []
    with pytest.raises(UsageError, match="there are no gradients"):
        policy.optim_step()


@pytest.mark.parametrize("repair", ["load_state", "publish"])
def test_repair_drops_gradients_of_the_failed_update(
    policy: bridge.Policy, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repair: str
) -> None:
    samples = bridge.samples(groups)
    policy.save_state(tmp_path / "state")
    policy.forward_backward(samples)

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        policy.update(Failing(policy.parameters(), lr=1.0))
    policy.load_state(tmp_path / "state") if repair == "load_state" else policy.publish(lambda: None)
    assert gradients(policy) == []
    policy.train_step(samples)


def test_loading_a_state_closes_the_open_fence(
    sleeping: tuple[bridge.Policy, FakeMode], groups: list[Group], tmp_path: Path
) -> None:
    policy, mode = sleeping
    policy.save_state(tmp_path / "state", has_optimizer=False)
    policy.forward_backward(bridge.samples(groups))
    policy.load_state(tmp_path / "state", has_optimizer=False)
    assert policy._sleep is None
    assert "publish" not in mode.calls


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD"])
def test_torch_optimizers_can_step_float32_sums(policy: bridge.Policy, groups: list[Group], name: str) -> None:
    """Some accept only gradients of the parameter's dtype, and would fail inside the fence."""
    samples = bridge.samples(groups)
    policy.forward_backward(samples[:8])
    policy.forward_backward(samples[8:])
    policy.update(getattr(torch.optim, name)(policy.parameters(), lr=LR))
    assert policy.version == 1


@pytest.mark.parametrize("wrong", ["1e-6", True, [1e-6], torch.ones(2)])
def test_learning_rate_that_is_not_a_number_is_refused(policy: bridge.Policy, groups: list[Group], wrong: Any) -> None:
    policy.forward_backward(bridge.samples(groups))
    with pytest.raises(UsageError, match="lr is"):
        policy.optim_step(lr=wrong)
    with pytest.raises(UsageError, match="max_norm is"):
        policy.optim_step(max_norm=wrong)
    assert "pause" not in calls(policy)
    policy.optim_step(lr=torch.tensor(1e-3))  # type: ignore[arg-type]  # as a scheduler may hold it


@pytest.mark.parametrize(("name", "wrong"), [("weight_decay", "a"), ("eps", None), ("betas", (0.9, "b"))])
def test_hyperparameters_are_checked_before_the_fence(
    policy: bridge.Policy, groups: list[Group], name: str, wrong: Any
) -> None:
    with pytest.raises(UsageError):
        policy.optimizer("adamw", **{"lr": 1e-3, name: wrong})
    optimizer = policy.optimizer("adamw", lr=1e-3)
    optimizer.param_groups[0][name] = wrong
    policy.forward_backward(bridge.samples(groups))
    with pytest.raises(UsageError, match="expected a finite number"):
        policy.update(optimizer)
    assert "pause" not in calls(policy)


def test_publish_refuses_a_non_function_before_the_fence(policy: bridge.Policy) -> None:
    with pytest.raises(UsageError, match="write is None, expected a function"):
        policy.publish(None)  # type: ignore[arg-type]
    assert "pause" not in calls(policy)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "advantages": ({"advantages": (1.0,)}, "3 sampled tokens and 1 advantages"),
    "log-probs": ({"sampled_logprobs": (0.0,) * 4}, "3 sampled tokens and 4 sampled_logprobs"),
    "flags": ({"sampled": (True,)}, "3 tokens but 1 flags"),
    "unsampled": ({"sampled": (False,) * 3}, "no sampled token"),
    "kept": ({"kept": ((0.0, 1),)}, "3 sampled tokens and 1 kept"),
    "number of prompt rows": ({"num_prompt_rows": 0.0}, "0.0 as num_prompt_rows, expected an integer"),
    "too many prompt rows": ({"num_prompt_rows": 99}, "99 prompt rows and a prompt of"),
    "infinite": ({"advantages": (1.0, math.inf, 1.0)}, "an advantage of inf"),
    "none": ({"advantages": (1.0, None, 1.0)}, "cannot be used"),
    "weight": ({"weight": None}, "None as weight"),
    "prompt": ({"prompt_token_ids": ()}, "no prompt"),
    "empty": ({"token_ids": (), "sampled_logprobs": (), "advantages": ()}, "no tokens"),
    "list": ({"token_ids": [1, 2, 3]}, "expected a tuple"),
    "beyond": ({"token_ids": (1, 2, 10**6)}, "token id 1000000, but the model has"),
    "negative": ({"prompt_token_ids": (-1,)}, "token id -1, but the model has"),
    "experts": ({"experts": b"abc"}, "3 bytes of experts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_sample_is_refused_by_name(policy: bridge.Policy, fault: str) -> None:
    """Two wrong lengths could match and train the wrong tokens; a wrong token id kills a process on a GPU."""
    fields, words = FAULTS[fault]
    whole = bridge.Sample(
        prompt_token_ids=(1,), token_ids=(2, 3, 4), sampled_logprobs=(-1.0,) * 3, advantages=(1.0,) * 3, weight=0.1
    )
    for call in (policy.forward_backward, policy.train_step, policy.pack):
        with pytest.raises(UsageError, match=f"sample 1 .*{words}"):
            call([whole, replace(whole, **fields)])
    policy.forward_backward([whole])


def test_first_invalid_sample_is_named(policy: bridge.Policy, groups: list[Group]) -> None:
    samples: Any
    for samples, words in ((groups, "sample 0 is Group"), (None, "samples is None"), (["a"], "sample 0 is 'a'")):
        with pytest.raises(UsageError, match=words):
            policy.forward_backward(samples)
    whole = bridge.samples(groups)
    assert len(policy.forward_backward(iter(whole)).logprobs) == len(whole)  # type: ignore[arg-type]


LOSSES: dict[str, Any] = {
    "vector": lambda logprobs, _: logprobs,
    "nothing": lambda *_: None,
    "float": lambda *_: 1.0,
    "detached": lambda logprobs, _: logprobs.sum().detach(),
    "elsewhere": lambda *_: torch.zeros((), requires_grad=True) * 2,
    "pair": lambda logprobs, _: (logprobs.sum(), {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_invalid_loss_is_refused_by_name(policy: bridge.Policy, groups: list[Group], name: str) -> None:
    with pytest.raises(UsageError, match=r"the loss .*, expected one number that depends on the log-prob"):
        policy.forward_backward(bridge.samples(groups), LOSSES[name])
    assert gradients(policy) == []
    with pytest.raises(UsageError, match="loss is 'grpo'"):
        policy.forward_backward(bridge.samples(groups), "grpo")  # type: ignore[arg-type]


def test_old_log_probs_of_different_samples_are_refused(policy: bridge.Policy, groups: list[Group]) -> None:
    """Lengths that match by chance would give ratios to the wrong tokens; a loss function would never see them."""
    samples = bridge.samples(groups)
    old = [*policy.forward_backward(samples).logprobs]
    shifted = [old[0][:-1], torch.cat([old[0][-1:], old[1]]), *old[2:]]
    wrong: Any
    for wrong in (shifted, [None, *old[1:]], [of.tolist() for of in old], [of.long() for of in old]):
        with pytest.raises(UsageError, match="old_logprobs of sample 0"):
            policy.forward_backward(samples, old_logprobs=wrong)
    with pytest.raises(UsageError, match="old_logprobs has NaN"):
        policy.forward_backward(samples, old_logprobs=[of * math.nan for of in old])
    with pytest.raises(UsageError, match="loss is a function"):
        policy.forward_backward(samples, bridge.policy_loss, old_logprobs=old)


def test_calls_without_samples_add_nothing(policy: bridge.Policy, groups: list[Group]) -> None:
    samples = bridge.samples(groups)
    policy.forward_backward(samples)
    expected = gradients(policy)
    policy.optim_step(lr=1e-12)
    for batch in ([], [], samples):
        policy.forward_backward(batch)
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(expected, gradients(policy), strict=True))
    policy.forward_backward([])
    policy.optim_step()


@pytest.mark.parametrize(
    "given", [{"sampling": {"group_size": 4}}, {"optimizer": "adamw"}, {"loss": CHOICES["sampling"]}]
)
def test_wrong_configuration_section_is_refused_by_name(
    toy: toy_server.ToyServer, tmp_path: Path, given: dict[str, Any]
) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=rf"{name} is .*, expected a bridge\."):
        toy_server.attach(toy.manifest, tmp_path, **given)


def test_read_only_policy_joins_no_process_group(
    toy: toy_server.ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its configuration would be for several ranks, although it is a single process."""
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with toy_server.attach(toy.manifest, tmp_path, reads_only=True) as reader:
        assert reader.ranks.world_size == reader.config.gpus == 1


def test_verify_does_not_close_the_open_fence(sleeping: tuple[bridge.Policy, FakeMode], groups: list[Group]) -> None:
    """Otherwise it would resume the server while the KV cache still sleeps."""
    policy, _ = sleeping
    policy.forward_backward(bridge.samples(groups))
    with pytest.raises(UsageError, match="the fence stays open for passes"):
        policy.verify()
    policy.optim_step()


@pytest.mark.parametrize("end", ["a step", "a failed step", "leaving"])
def test_ctrl_c_works_between_passes_and_step_and_afterwards(
    sleeping: tuple[bridge.Policy, FakeMode], groups: list[Group], end: str
) -> None:
    """Ctrl-C is deferred only inside the fence; afterwards the previous handler is active again."""
    policy, _ = sleeping
    before, samples = signal.getsignal(signal.SIGINT), bridge.samples(groups)
    weight = math.inf if end == "a failed step" else 1.0
    policy.forward_backward([replace(sample, weight=weight) for sample in samples])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    if end == "leaving":
        policy.close()
    elif end == "a step":
        policy.optim_step()
    else:
        with pytest.raises(GradientError):
            policy.optim_step()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_gradient_release_sleeps_inside_a_single_fence(
    toy: toy_server.ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[Group]
) -> None:
    mode = FakeMode(toy, "http://localhost:1", can_sleep=True)
    monkeypatch.setattr(module, "WAYS", defaultdict(lambda: lambda *_: mode))
    choices = {
        **CHOICES,
        "publishing": bridge.PublishingConfig(kv_sleep="always"),
        "optimizer": bridge.OptimizerConfig(lr=LR, gradient_release=True),
    }
    with toy_server.attach(toy.manifest, tmp_path, **choices) as policy:
        policy.train_step(bridge.samples(groups))
    assert mode.calls == ["open", "sleep", "prepare", "publish", "close"]


def test_in_flight_is_refused_once_the_server_is_paused(
    sleeping: tuple[bridge.Policy, FakeMode], groups: list[Group]
) -> None:
    policy, _ = sleeping
    policy.forward_backward(bridge.samples(groups))
    with pytest.raises(UsageError, match="in_flight='abort' has no effect"):
        policy.optim_step(in_flight="abort")
    assert policy.optim_step().version == 4


def test_adapter_and_full_checkpoints_are_not_interchangeable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = bridge.LoraConfig(r=lora_runs.RANK)
    with lora_runs.world_in(tmp_path, monkeypatch) as world:
        world.export()
        for other in (lora, None):
            with bridge.attach(tmp_path / MANIFEST_NAME, lora=other) as policy:
                saved = policy.save_state(tmp_path / "saved", has_optimizer=False)
            with bridge.attach(tmp_path / MANIFEST_NAME, lora=None if other else lora) as policy:
                before, version = weights(policy), policy.version
                kinds = "an adapter, but .* trains all weights" if other else "all weights, but .* trains an adapter"
                with pytest.raises(UsageError, match=f"saved is a checkpoint of {kinds}"):
                    policy.load_state(saved, has_optimizer=False)
                assert equal(weights(policy), before)
                assert policy.version == version


def given_targets() -> list[bridge.Sample]:
    """Return samples with targets other than the next token: three per token, one per token, and one of weight 0."""
    fixed: dict[str, Any] = {
        "prompt_token_ids": (5, 6, 7),
        "token_ids": (8, 9),
        "sampled_logprobs": (math.nan, math.nan),
    }
    fixed |= {"advantages": (0.0, 0.0), "weight": 1.0}
    several: dict[str, Any] = {
        "targets": ((20, 21, 22), (23, 24, 25)),
        "target_weights": ((0.5, 0.25, 0.25), (0.0, 0.0, 0.0)),
    }
    return [
        bridge.Sample(**fixed | several),
        bridge.Sample(**fixed | {"token_ids": (8, 9, 10), "targets": (30, 31, 0)} | of_length(3)),
        bridge.Sample(**fixed | {"prompt_token_ids": (5,), "targets": (40, 41), "weight": 0.0}),
    ]


def of_length(length: int) -> dict[str, Any]:
    return {"sampled_logprobs": (math.nan,) * length, "advantages": (0.0,) * length}


def cross_entropy(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    assert batch.several is not None
    return -(logprobs * batch.several.weights_NK * batch.weights_N.unsqueeze(1)).sum()


@pytest.mark.parametrize("tokens", [None, 6], ids=["one pass", "many passes"])
def test_targets_are_scored_in_the_callers_order(toy: toy_server.ToyServer, tmp_path: Path, tokens: int | None) -> None:
    """bf16 against float64: values within 0.03 nats, gradients in the same direction."""
    samples = given_targets()
    exact = toy.reference.double()
    compute = bridge.ComputeConfig(micro_batch_tokens=tokens)
    choices = {**CHOICES, "sampling": bridge.SamplingConfig(temperature=1.0)}
    with toy_server.attach(toy.manifest, tmp_path, compute=compute, **choices) as policy:
        passes = policy.forward_backward(samples, cross_entropy)
        ours = {name: p.grad.double() for name, p in policy.model.named_parameters() if p.grad is not None}
    assert [tuple(of_sample.shape) for of_sample in passes.logprobs] == [(2, 3), (3,), (2,)]
    for one, found in zip(samples, passes.logprobs, strict=True):
        ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
        rows = exact(input_ids=ids).logits[0, len(one.prompt_token_ids) - 1 : -1]
        targets = torch.tensor(one.targets).view(len(rows), -1)
        expected = rows.log_softmax(-1).gather(1, targets)
        torch.testing.assert_close(found.view_as(expected).double(), expected.detach(), atol=0.03, rtol=0)
        (-(expected * torch.tensor(one.target_weights or [[1.0]]) * one.weight).sum()).backward()
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        assert torch.cosine_similarity(ours[name].flatten(), parameter.grad.flatten(), dim=0) > 0.999, name
    assert "mismatch_kl" not in passes.metrics or math.isnan(passes.metrics["mismatch_kl"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": (1,)}, "2 sampled tokens and 1 targets"),
        ({"targets": (1, 300_000)}, "token id 300000"),
        ({"targets": ((1, 2), (3, 400_000))}, "token id 400000"),
        ({"targets": ((1, 2), (3,))}, "between 1 and 2 targets"),
        ({"targets": ((), ())}, "between 0 and 0 targets"),
        ({"targets": [1, 2]}, "as targets, expected a tuple"),
        ({"targets": (), "target_weights": ((1.0,), (1.0,))}, "no targets"),
        ({"targets": (1, 2), "target_weights": ((1.0,), (1.0,))}, "one target per token"),
        ({"targets": ((1, 2), (3, 4)), "target_weights": ((1.0, 1.0),)}, "shape differs from its 2 x 2"),
        ({"targets": ((1, 2), (3, 4)), "target_weights": ((1.0, 1.0), (math.nan, 1.0))}, "weight of nan"),
    ],
)
def test_invalid_targets_are_refused(policy: bridge.Policy, changes: dict[str, Any], words: str) -> None:
    one = replace(given_targets()[2], **changes)
    with pytest.raises(UsageError, match=words):
        policy.forward_backward([one], cross_entropy)


def test_probability_ratios_of_several_targets_are_refused(policy: bridge.Policy) -> None:
    with pytest.raises(UsageError, match="sample 0 has several targets per token, but loss is a LossConfig"):
        policy.forward_backward(given_targets())


def test_forward_matches_training_and_keeps_gradients(policy: bridge.Policy, groups: list[Group]) -> None:
    samples = bridge.samples(groups)
    passes = policy.forward_backward(samples)
    before = gradients(policy)
    alone = policy.forward(samples)
    assert equal(gradients(policy), before)
    assert equal(alone.logprobs, passes.logprobs)
    assert alone.metrics == passes.metrics
    policy.optim_step()
    assert policy.version == 1
    constant = policy.forward(samples[:1], lambda logprobs, _: logprobs.new_tensor(3.0))
    assert constant.metrics["loss"] == 3.0
    with pytest.raises(UsageError, match="there are no gradients"):
        policy.optim_step()


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_each_step_has_its_own_hyperparameters(policy: bridge.Policy, groups: list[Group], factor: float) -> None:
    """The reference is torch's AdamW on float32 copies, with hyperparameters that change every step."""
    parameters = [*policy.parameters()]
    exact = [parameter.detach().float().requires_grad_() for parameter in parameters]
    torchs = torch.optim.AdamW(exact, lr=1.0)
    steps: list[dict[str, Any]] = [
        {"lr": 1e-2 * factor, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0},
        {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.5},
        {"lr": 0.0, "betas": (0.5, 0.9), "eps": 1e-8, "weight_decay": 0.1},
    ]
    for chosen in steps:
        policy.forward_backward(bridge.samples(groups))
        for parameter, copy in zip(parameters, exact, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        torchs.param_groups[0].update(chosen)
        torchs.step()
        policy.optim_step(max_norm=math.inf, **chosen)
        for parameter, copy in zip(parameters, exact, strict=True):
            torch.testing.assert_close(parameter.float(), copy, rtol=2**-8, atol=1e-6)
    policy.forward_backward(bridge.samples(groups))
    policy.optim_step()
    group = policy.trainable.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (LR, (0.9, 0.999), 1e-8, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"betas": 0.9}, "betas is"),
        ({"eps": -1.0}, "eps is -1.0, expected a number from 0"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
        ({"weight_decay": "much"}, "weight_decay is 'much'"),
    ],
)
def test_hyperparameters_out_of_range_change_nothing(
    policy: bridge.Policy, groups: list[Group], changes: dict[str, Any], words: str
) -> None:
    policy.forward_backward(bridge.samples(groups))
    with pytest.raises(UsageError, match=words):
        policy.optim_step(**changes)
    assert "pause" not in calls(policy)
    policy.optim_step()


def test_loading_weights_resets_the_optimizer(
    policy: bridge.Policy, toy: toy_server.ToyServer, groups: list[Group], tmp_path: Path
) -> None:
    samples = bridge.samples(groups)
    before = weights(policy)
    policy.train_step(samples)
    expected = weights(policy)
    saved = policy.save(tmp_path / "saved")
    policy.train_step(samples)
    policy.load(toy.manifest.model)
    assert equal(weights(policy), before)
    assert policy.version == 3
    policy.train_step(samples)
    assert equal(weights(policy), expected)
    policy.load(saved)
    assert equal(weights(policy), expected)
    (saved / "config.json").unlink()
    (saved / "model.safetensors").unlink()
    with pytest.raises(UsageError):
        policy.load(saved)
    assert equal(weights(policy), expected)


def test_policy_reports_its_model_and_longest_sequence(policy: bridge.Policy, toy: toy_server.ToyServer) -> None:
    assert policy.model_name == toy.manifest.model
    assert policy.max_model_len == toy.manifest.max_model_len


def test_dropped_gradients_do_not_affect_a_step(policy: bridge.Policy, groups: list[Group]) -> None:
    policy.forward_backward(bridge.samples(groups)[:8])
    policy.drop_gradients()
    assert gradients(policy) == []
    with pytest.raises(UsageError, match="there are no gradients"):
        policy.optim_step()
