"""A batch becomes updates: gradients and weights compared with plain autograd, and the state after interruptions."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bridge.config import OptimizerConfig, TrainConfig
from bridge.engine import reference
from bridge.errors import UsageError
from bridge.learn import policy_loss
from bridge.learn.policy_loss import Sums
from bridge.optimizers import factory
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.passes import budget
from bridge.passes.flops import Flops
from bridge.ranks.world import ALONE, Ranks
from bridge.run import learner as module
from bridge.run.learner import Learner
from bridge.types import Completion, Group
from bridge.weights.adapter import Adapter
from bridge.weights.attach import OpenedModel
from tests.logged import logged
from tests.models import tiny
from tests.unit import learners

CPU = torch.device("cpu")
TEMPERATURE = 0.8
NUM_GROUPS, GROUP_SIZE = 4, 4
CLOSE = 1e-4
"""Largest relative distance of gradients or steps that differ only in the order of float32 sums."""
FAR = 0.02
"""A relative distance that only a different formula causes; it exceeds the effect of rounding on Adam's signs."""
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
Weights = dict[str, Tensor]


def base(seed: int = 7, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tiny.llama()
    config.initializer_range = 0.08
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Return completions of several lengths, with log-probabilities from weights other than the trained ones."""
    return made_by(base(seed=8))


def made_by(sampler: PreTrainedModel) -> list[Group]:
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist())

    def completion(prompt: tuple[int, ...], length: int) -> Completion:
        ids = tokens(length)
        logprobs = tuple(naive_logprobs(sampler, prompt, ids).tolist())
        return Completion(token_ids=ids, logprobs=logprobs, text="", finish_reason="stop", versions=(0,) * len(ids))

    made = []
    for number in range(NUM_GROUPS):
        prompt = tokens(2 + number)
        completions = tuple(completion(prompt, 1 + (3 * number + index) % 6) for index in range(GROUP_SIZE))
        rewards = tuple(float((5 * index + number) % 4) for index in range(GROUP_SIZE))
        made.append(Group(problem={"prompt": "?"}, prompt_token_ids=prompt, completions=completions, rewards=rewards))
    return made


def config_of(**choices: Any) -> TrainConfig:
    fixed = {"model_name": "tiny", "batch_size": NUM_GROUPS * GROUP_SIZE, "group_size": GROUP_SIZE}
    return TrainConfig.model_validate(fixed | {"lr": 1e-3, "temperature": TEMPERATURE, "max_grad_norm": 1e6} | choices)


def learner_of(
    model: PreTrainedModel,
    *,
    make_optimizer: Callable[..., InPlaceOptimizer] = factory.make,
    lr_factors: Mapping[str, float] | None = None,
    ranks: Ranks = ALONE,
    **choices: Any,
) -> Learner:
    factors = lr_factors or {name: 1.0 for name, _ in model.named_parameters()}
    opened = OpenedModel(model=model, device=CPU, lr_factors=factors, open_s=0, weight_bytes=0)
    with mock.patch.object(factory, "make", make_optimizer):
        return learners.made(config_of(**choices), opened, ranks=ranks)


def prepared(model: PreTrainedModel, groups: Sequence[Group], **choices: Any) -> Learner:
    learner = learner_of(model, **choices)
    learner.take(groups)
    learner.prepare()
    return learner


def updated(model: PreTrainedModel, groups: Sequence[Group], **choices: Any) -> dict[str, Any]:
    learner = prepared(model, groups, **choices)
    learner.write()
    return learner.learnt()


def gradient(model: PreTrainedModel) -> Weights:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor.clone() for name, tensor in gradients.items() if tensor is not None}


def weights(model: PreTrainedModel) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(actual: Weights, expected: Weights) -> float:
    """Return the norm of the difference relative to the norm of `expected`."""
    assert actual.keys() == expected.keys()
    ours, theirs = (
        torch.cat([tensors[name].double().flatten() for name in expected]) for tensors in (actual, expected)
    )
    return float((ours - theirs).norm() / theirs.norm())


def moved(after: Weights, before: Weights) -> Weights:
    return {name: after[name] - before[name] for name in before}


class Descent(InPlaceOptimizer):
    """Plain gradient descent; unlike Adam's, its steps differ by no more than the gradients do."""

    def __init__(self, _choices: OptimizerConfig, groups: Iterable[dict[str, Any]], **_shared: Any) -> None:
        super().__init__(groups)

    def _step(self, norm: float, max_norm: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * min(1.0, max_norm / norm))


# The simplest reference: one completion at a time, the full vocabulary, torch's own autograd.


def naive_logprobs(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    logits_TV: Tensor = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    return logits_TV.log_softmax(dim=-1)[range(len(ids)), list(ids)]


def naive_loss(
    model: PreTrainedModel,
    groups: Sequence[Group],
    old: PreTrainedModel,
    *,
    weigh: Callable[[Tensor], Tensor] = lambda ratio_T: ratio_T.clamp(max=2.0),
    kl: tuple[float, PreTrainedModel] | None = None,
    in_reward: bool = False,
    entropy: float = 0.0,
    num_clipped: list[int] | None = None,
) -> Tensor:
    """Return DAPO's loss with importance weights and, optionally, a KL divergence or an entropy bonus."""
    total, num_tokens = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor(group.rewards)
        standardised = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        for index, completion in enumerate(group.completions):
            at = group.prompt_token_ids, completion.token_ids
            advantage = standardised[index] if group.advantages is None else torch.tensor(group.advantages[index])
            logprobs_T, old_T = naive_logprobs(model, *at), naive_logprobs(old, *at).detach()
            ratio_T = (logprobs_T - old_T).exp()
            if kl is not None and in_reward:
                log_ratios_T = old_T - naive_logprobs(kl[1], *at).detach()
                advantage = advantage - kl[0] * log_ratios_T.flip(0).cumsum(0).flip(0)
            kept_T = torch.minimum(ratio_T * advantage, ratio_T.clamp(0.8, 1.28) * advantage)
            term_T = -kept_T
            if kl is not None and not in_reward:
                difference_T = naive_logprobs(kl[1], *at).detach() - logprobs_T
                term_T = term_T + kl[0] * (difference_T.exp() - difference_T - 1)
            if entropy:
                inputs_1T = torch.tensor([[*at[0], *at[1]]])
                logits_TV = model(inputs_1T).logits[0, len(at[0]) - 1 : -1] / TEMPERATURE
                term_T = term_T - entropy * torch.distributions.Categorical(logits=logits_TV).entropy()
            total = total + (term_T * weigh((old_T - torch.tensor(completion.logprobs)).exp())).sum()
            num_tokens += len(completion.token_ids)
            if num_clipped is not None:
                num_clipped.append(int((kept_T != ratio_T * advantage).sum()))
    return total / num_tokens


def naive_gradient(model: PreTrainedModel, *arguments: Any, **choices: Any) -> Weights:
    model.zero_grad()
    naive_loss(model, *arguments, **choices).backward()
    return gradient(model)


def naive_descent(model: PreTrainedModel, updates: Iterable[Sequence[Group]], lr: float, **choices: Any) -> Weights:
    """Take one step per entry of `updates`, with ratios relative to the log-probabilities before the first step."""
    old = copy.deepcopy(model)
    for share in updates:
        for name, tensor in naive_gradient(model, share, old, **choices).items():
            model.get_parameter(name).data.sub_(tensor, alpha=lr)
    return weights(model)


def poisoned(monkeypatch: pytest.MonkeyPatch, *odd: Callable[[Tensor], Tensor] | None) -> list[int]:
    """Apply one entry of `odd` to the loss in each call, as long as there are any; return the call counter."""
    original, calls = policy_loss.policy_loss, [0]

    def bent(*arguments: Any) -> tuple[Tensor, Sums]:
        calls[0] += 1
        loss, statistics = original(*arguments)
        change = odd[calls[0] - 1] if calls[0] <= len(odd) else None
        return (loss if change is None else change(loss)), statistics

    monkeypatch.setattr(module, "policy_loss", bent)
    return calls


def no_number(loss: Tensor) -> Tensor:
    return loss * math.nan


def raising(error: BaseException) -> Callable[[Tensor], Tensor]:
    """Raise in the middle of the backward pass, when some gradients exist already."""

    def change(loss: Tensor) -> Tensor:
        def stop(_: Tensor) -> None:
            raise error

        loss.backward(retain_graph=True)
        loss.register_hook(stop)
        return loss

    return change


def test_gradient_matches_plain_autograd(groups: list[Group]) -> None:
    model = base()
    expected = naive_gradient(copy.deepcopy(model), groups, model)
    prepared(model, groups)
    assert distance(gradient(model), expected) < CLOSE


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo"])
def test_gradients_do_not_depend_on_budget_or_order(groups: list[Group], loss: str) -> None:
    one, cut, turned = base(), base(), base()
    learnt = prepared(one, groups, loss=loss).learnt()
    in_parts = prepared(cut, groups, loss=loss, micro_batch_tokens=1).learnt()
    prepared(turned, groups[::-1], loss=loss)
    assert distance(gradient(cut), gradient(one)) < CLOSE
    assert same(gradient(turned), gradient(one))
    assert in_parts["grad_norm"] == pytest.approx(learnt["grad_norm"], rel=1e-4)
    assert in_parts["entropy"] == pytest.approx(learnt["entropy"], rel=1e-4)
    assert in_parts["logprob_diff_mean"] == pytest.approx(learnt["logprob_diff_mean"], rel=1e-4)


@pytest.mark.parametrize("max_norm", [1e6, 1e-2])
def test_update_equals_one_step_of_adamw(groups: list[Group], max_norm: float) -> None:
    model = base()
    plain, before = copy.deepcopy(model), weights(model)
    naive_loss(plain, groups, model).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1).step()
    learnt = updated(model, groups, weight_decay=0.1, max_grad_norm=max_norm)
    assert learnt["updates"] == 1
    assert distance(moved(weights(model), before), moved(weights(plain), before)) < FAR
    assert all(parameter.grad is None for parameter in model.parameters())


def test_prepare_writes_nothing(groups: list[Group]) -> None:
    model = base()
    before = weights(model)
    learner = prepared(model, groups, updates_per_batch=2, passes_per_batch=2)
    assert same(weights(model), before)
    learner.write()
    assert not same(weights(model), before)


LARGE = 0.1
"""Learning rate at which the first step moves log-probabilities past their clips."""


@pytest.mark.parametrize(("updates", "passes"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tokens", [None, 1])
def test_later_updates_use_ratios_to_the_initial_weights(
    groups: list[Group], updates: int, passes: int, tokens: int | None
) -> None:
    model = base()
    plain, before, clipped = copy.deepcopy(model), weights(model), list[int]()
    shares = [groups[:2], groups[2:]] if updates == 2 else [groups]
    expected = naive_descent(plain, shares * passes, LARGE, num_clipped=clipped)
    learnt = updated(
        model, groups, make_optimizer=Descent, lr=LARGE, micro_batch_tokens=tokens,
        updates_per_batch=updates, passes_per_batch=passes,
    )  # fmt: skip
    assert distance(moved(weights(model), before), moved(expected, before)) < CLOSE * 10
    assert learnt["updates"] == updates * passes
    num_tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
    assert learnt["tokens_trained"] == num_tokens
    assert sum(clipped) > 0
    assert learnt["clipped_low_share"] + learnt["clipped_high_share"] == pytest.approx(
        sum(clipped) / (num_tokens * passes)
    )


def test_mismatch_is_measured_before_the_first_update(groups: list[Group]) -> None:
    model = base()
    differences_N = torch.cat(
        [
            naive_logprobs(model, group.prompt_token_ids, completion.token_ids).detach()
            - torch.tensor(completion.logprobs)
            for group in groups
            for completion in group.completions
        ]
    )
    once = updated(base(), groups)
    often = updated(model, groups, lr=LARGE, make_optimizer=Descent, updates_per_batch=2, passes_per_batch=2)
    for learnt in (once, often):
        assert learnt["logprob_diff_mean"] == pytest.approx(float(differences_N.abs().mean()), rel=1e-3)
        assert learnt["logprob_diff_max"] == pytest.approx(float(differences_N.abs().max()), rel=1e-3)
        assert learnt["importance_weight"] == pytest.approx(float(differences_N.exp().clamp(max=2).mean()), rel=1e-3)
        assert learnt["entropy"] == pytest.approx(once["entropy"], rel=1e-5)


def flat(group: Group) -> Group:
    return replace(group, rewards=(1.0,) * GROUP_SIZE)


@pytest.mark.parametrize("teaches", [0, 1])
def test_update_without_a_gradient_does_not_count(groups: list[Group], teaches: int) -> None:
    model = base()
    shares = [groups[:2], groups[2:]]
    shares[1 - teaches] = [flat(group) for group in shares[1 - teaches]]
    plain, before = copy.deepcopy(model), weights(model)
    expected = naive_descent(plain, [shares[teaches]], LARGE)
    learnt = updated(model, [*shares[0], *shares[1]], make_optimizer=Descent, lr=LARGE, updates_per_batch=2)
    assert learnt["updates"] == 1
    assert distance(moved(weights(model), before), moved(expected, before)) < CLOSE


def test_batch_without_signal_changes_nothing(groups: list[Group]) -> None:
    model = base()
    before = weights(model)
    learnt = updated(model, [flat(group) for group in groups], updates_per_batch=2, passes_per_batch=2)
    assert same(weights(model), before)
    assert (learnt["updates"], learnt["tokens_trained"], learnt["loss"], learnt["grad_norm"]) == (0, 0, 0, 0)
    assert math.isnan(learnt["logprob_diff_mean"])


@pytest.mark.parametrize(
    ("choices", "weigh"),
    [
        ({"mismatch": "truncate"}, lambda ratio_T: ratio_T.clamp(max=2.0)),
        ({"mismatch": "truncate", "mismatch_high": 1.25}, lambda ratio_T: ratio_T.clamp(max=1.25)),
        ({"mismatch": "mask"}, lambda ratio_T: torch.where((ratio_T < 0.5) | (ratio_T > 5), 0.0, ratio_T)),
        ({"mismatch": "none"}, torch.ones_like),
        (
            {"mismatch": "truncate", "mismatch_level": "sequence"},
            lambda ratio_T: ratio_T.prod().clamp(max=2.0).expand_as(ratio_T),
        ),
    ],
)
def test_stale_rollouts_get_importance_weights(
    groups: list[Group], choices: dict[str, Any], weigh: Callable[[Tensor], Tensor]
) -> None:
    model = base()
    expected = naive_gradient(copy.deepcopy(model), groups, model, weigh=weigh)
    learnt = prepared(model, groups, **choices).learnt()
    corrected = gradient(model)
    assert distance(corrected, expected) < CLOSE
    assert (learnt["corrected_share"] > 0) == (choices["mismatch"] != "none")
    uncorrected = naive_gradient(copy.deepcopy(model), groups, model, weigh=lambda ratio_T: ratio_T)
    assert distance(corrected, uncorrected) > FAR


@pytest.mark.parametrize("in_reward", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_divergence_uses_the_frozen_reference(
    groups: list[Group], tmp_path: Path, passes: int, in_reward: bool
) -> None:
    folder = tiny.write(tiny.llama(), tmp_path / "model", seed=3)
    frozen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = base()
    plain, before = copy.deepcopy(model), weights(model)
    expected = naive_descent(plain, [groups] * passes, LARGE, kl=(0.5, frozen), in_reward=in_reward)
    learnt = updated(
        model, groups, make_optimizer=Descent, lr=LARGE, passes_per_batch=passes,
        kl_coef=0.5, kl_in_reward=in_reward, reference_model=str(folder),
    )  # fmt: skip
    assert distance(moved(weights(model), before), moved(expected, before)) < CLOSE * 10
    assert learnt["kl"] > 0.01


@pytest.mark.parametrize(("passes", "tokens"), [(1, None), (2, None), (1, 20)])
def test_entropy_bonus_has_its_exact_gradient(groups: list[Group], passes: int, tokens: int | None) -> None:
    model = base()
    plain, before = copy.deepcopy(model), weights(model)
    expected = naive_descent(plain, [groups] * passes, LARGE, entropy=0.5)
    updated(
        model, groups, make_optimizer=Descent, lr=LARGE, passes_per_batch=passes, micro_batch_tokens=tokens,
        entropy_coef=0.5,
    )  # fmt: skip
    assert distance(moved(weights(model), before), moved(expected, before)) < CLOSE * 10


def test_entropy_bonus_alone_makes_the_policy_less_certain(groups: list[Group]) -> None:
    model, equal = base(), [flat(group) for group in groups]
    first = updated(model, equal, make_optimizer=Descent, lr=LARGE, entropy_coef=1.0)
    second = updated(model, equal, make_optimizer=Descent, lr=LARGE, entropy_coef=1.0)
    assert first["tokens_trained"] == 52
    assert second["entropy"] > first["entropy"]


def test_completions_without_advantage_stay_near_the_reference(groups: list[Group]) -> None:
    model = base()
    adapter = with_adapter(model)
    learnt = updated(model, [flat(group) for group in groups], **of_adapter(adapter))
    assert (learnt["updates"], learnt["tokens_trained"]) == (1, 52)
    assert learnt["grad_norm"] > 0


def uncertain(model: PreTrainedModel, groups: Sequence[Group], share: float) -> list[Group]:
    """Give advantages only to this share of all tokens, the ones with the highest entropies."""
    entropies = []
    for group in groups:
        for completion in group.completions:
            tokens_1T = torch.tensor([[*group.prompt_token_ids, *completion.token_ids]])
            logits_TV = model(tokens_1T).logits[0, len(group.prompt_token_ids) - 1 : -1].detach() / TEMPERATURE
            entropies.append(torch.distributions.Categorical(logits=logits_TV).entropy())
    flat_N = torch.cat(entropies).sort(descending=True).values
    least = (flat_N[math.ceil(share * len(flat_N)) - 1] + flat_N[math.ceil(share * len(flat_N))]) / 2
    of_completions = iter(entropies)
    made = []
    for group in groups:
        rewards = torch.tensor(group.rewards)
        standardised = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        kept = [(next(of_completions) > least) * value for value in standardised]
        made.append(replace(group, advantages=tuple(tuple(row.tolist()) for row in kept)))
    return made


def with_equal_rewards(group: Group) -> Group:
    return replace(group, rewards=(1.0,) * len(group.rewards))


@pytest.mark.parametrize("is_silent", [False, True], ids=["different rewards", "equal rewards"])
@pytest.mark.parametrize("tokens", [None, 20, 1])
@pytest.mark.parametrize(("updates", "passes"), [(1, 1), (2, 1), (1, 2)])
def test_top_entropy_trains_only_the_most_uncertain_tokens(
    groups: list[Group], tokens: int | None, updates: int, passes: int, is_silent: bool
) -> None:
    if is_silent:  # tokens without an advantage are ranked with the others
        groups = [groups[0], with_equal_rewards(groups[1]), *groups[2:]]
    model = base()
    plain, before = copy.deepcopy(model), weights(model)
    shares = [uncertain(model, batch, 0.2) for batch in ([groups[:2], groups[2:]] if updates == 2 else [groups])]
    expected = naive_descent(plain, shares * passes, LARGE)
    learnt = updated(
        model, groups, make_optimizer=Descent, lr=LARGE, micro_batch_tokens=tokens,
        updates_per_batch=updates, passes_per_batch=passes, top_entropy=0.2,
    )  # fmt: skip
    assert distance(moved(weights(model), before), moved(expected, before)) < CLOSE * 10
    assert learnt["tokens_trained"] == (36 if is_silent else 52)
    assert learnt["entropy"] == pytest.approx(updated(base(), groups)["entropy"], rel=1e-4)


def with_adapter(model: PreTrainedModel) -> Adapter:
    model.requires_grad_(False)
    adapter = Adapter(model, config_of(mode="lora_only", lora_r=8).lora, seed=0, base_name="base")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrices in adapter.modules.values():
            for matrix in (matrices.lora_a, matrices.lora_b):
                matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.1)
    return adapter


def of_adapter(adapter: Adapter, **choices: Any) -> dict[str, Any]:
    return {"mode": "lora_only", "lora_r": 8, "kl_coef": 0.5, "lr_factors": adapter.lr_factors()} | choices


def test_reference_of_an_adapter_is_computed_once(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    alone, model = base(), base()
    adapter = with_adapter(model)
    plain = copy.deepcopy(model)
    original, calls = reference.adapter_off, 0

    @contextmanager
    def counted(model: PreTrainedModel) -> Iterator[None]:
        nonlocal calls
        calls += 1
        with original(model):
            yield

    monkeypatch.setattr(reference, "adapter_off", counted)
    expected = naive_gradient(plain, groups, copy.deepcopy(plain), kl=(0.5, alone))
    learner = prepared(model, groups, **of_adapter(adapter, passes_per_batch=3))
    assert gradient(model).keys() == adapter.lr_factors().keys()
    assert distance(gradient(model), expected) < CLOSE
    learner.write()
    assert learner.learnt()["updates"] == 3
    assert calls == 1


def test_given_advantages_reach_their_tokens(groups: list[Group]) -> None:
    def outside(number: int, group: Group) -> Group:
        values = tuple(
            tuple(math.sin(number + 3 * index + position) for position in range(len(completion.token_ids)))
            for index, completion in enumerate(group.completions)
        )
        return replace(group, advantages=values)

    given = [outside(number, group) for number, group in enumerate(groups)]
    model = base()
    expected = naive_gradient(copy.deepcopy(model), given, model)
    prepared(model, given, micro_batch_tokens=20)
    assert distance(gradient(model), expected) < CLOSE
    turned = [replace(group, advantages=tuple(row[::-1] for row in group.advantages or ())) for group in given]
    assert distance(naive_gradient(copy.deepcopy(model), turned, model), expected) > FAR


def cut_off(group: Group, *token_ids: int) -> Group:
    """Truncate the last completion to this number of tokens."""
    last = replace(
        group.completions[-1], token_ids=token_ids, logprobs=(-1.5,) * len(token_ids), finish_reason="length"
    )
    return replace(group, completions=(*group.completions[:-1], last))


def test_masked_truncated_completions_have_no_effect(groups: list[Group]) -> None:
    results = []
    for tokens in [(5, 6, 7), (250,) * 40]:
        model = base()
        learner = prepared(model, [cut_off(group, *tokens) for group in groups], mask_truncated=True)
        gradients = gradient(model)
        learner.write()
        results.append((gradients, weights(model), learner.learnt()))
    (one, written, learnt), (other, written_other, learnt_other) = results
    assert same(one, other)
    assert same(written, written_other)
    assert learnt == learnt_other
    assert one["model.norm.weight"].any()
    model = base()
    prepared(model, [cut_off(group, 5, 6, 7) for group in groups])
    assert distance(gradient(model), one) > FAR


def state(learner: Learner, model: PreTrainedModel) -> list[Any]:
    """Return the optimizer's full state."""
    optimizer = learner.optimizer
    parts = [optimizer.parts(parameter) for parameter in model.parameters()]
    kept = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in parts]
    return [kept, [optimizer.num_updates(parameter) for parameter in model.parameters()]]


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"updates_per_batch": 2, "passes_per_batch": 2},
        {"offload_optimizer": True},
        {"offload_optimizer": True, "gradient_release": True},
        {"gradient_release": True},
        {"gradient_release": True, "updates_per_batch": 2},
    ],
)
def test_nonfinite_first_gradient_skips_the_batch(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    model, straight = base(), base()
    learner, other = learner_of(model, **choices), learner_of(straight, **choices)

    def taken(by: Learner) -> dict[str, Any]:
        by.take(groups)
        by.prepare()
        by.write()
        return by.learnt()

    taken(learner)
    taken(other)
    before, kept = weights(model), state(learner, model)
    poisoned(monkeypatch, no_number)
    metrics = taken(learner)
    assert (metrics["updates"], metrics["skipped_updates"]) == (0, 1)
    assert math.isnan(metrics["grad_norm"])
    assert same(weights(model), before)
    after = state(learner, model)
    assert after[1] == kept[1]
    assert all(same(one, another) for one, another in zip(after[0], kept[0], strict=True))
    assert gradient(model) == {}
    assert taken(learner) == taken(other)  # and the next batch is unaffected
    assert same(weights(model), weights(straight))


def test_nonfinite_later_gradient_keeps_earlier_updates(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    model, straight = base(), base()
    calls = poisoned(monkeypatch, None, no_number)
    learnt = updated(model, groups, updates_per_batch=2, passes_per_batch=2)
    assert calls == [2]
    monkeypatch.undo()
    alone = updated(straight, [*groups[:2], *map(flat, groups[2:])], updates_per_batch=2)
    assert same(weights(model), weights(straight))
    assert (learnt["updates"], learnt["skipped_updates"]) == (1, 1)
    assert (learnt["loss"], learnt["grad_norm"]) == pytest.approx((alone["loss"], alone["grad_norm"]))
    assert gradient(model) == {}


@pytest.mark.parametrize(
    "choices", [{}, {"updates_per_batch": 2}, {"offload_optimizer": True, "gradient_release": True}]
)
def test_interrupted_update_leaves_nothing_and_is_retried(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    straight, model = base(), base()
    expected = updated(straight, groups, micro_batch_tokens=20, **choices)
    before = weights(model)
    calls = poisoned(monkeypatch, None, raising(KeyboardInterrupt()))
    learner = learner_of(model, micro_batch_tokens=20, **choices)
    learner.take(groups)
    with pytest.raises(KeyboardInterrupt):
        learner.prepare()
    assert calls == [2]
    assert gradient(model) == {}
    assert same(weights(model), before)
    nothing = learner.learnt()
    assert (nothing["updates"], nothing["loss"], nothing["grad_norm"], nothing["entropy"]) == (0, 0, 0, 0)
    assert math.isnan(nothing["logprob_diff_mean"])
    assert math.isnan(nothing["clipped_low_share"])
    learner.prepare()
    learner.write()
    assert learner.learnt() == expected
    assert same(weights(model), weights(straight))


def test_preparing_twice_computes_once(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    model = base()
    calls = poisoned(monkeypatch)
    learner = prepared(model, groups)
    first = gradient(model)
    learner.prepare()
    assert calls == [1]
    assert same(gradient(model), first)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({}, "activations are recomputed from now on"),
        ({"gradient_checkpointing": False}, "micro-batches have at most 33 tokens from now on"),
        ({"gradient_checkpointing": True, "micro_batch_tokens": 40}, "micro-batches have at most 20 tokens"),
    ],
)
def test_update_out_of_memory_is_retried_with_smaller_passes(
    groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
    choices: dict[str, Any],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    straight, model = base(), base()
    expected = updated(straight, groups, make_optimizer=Descent)
    poisoned(monkeypatch, raising(OUT_OF_MEMORY))
    learnt = updated(model, groups, make_optimizer=Descent, **choices)
    (line,) = caplog.messages
    assert words in line
    assert distance(moved(weights(model), weights(base())), moved(weights(straight), weights(base()))) < CLOSE
    assert learnt["updates"] == 1
    assert learnt["logprob_diff_mean"] == pytest.approx(expected["logprob_diff_mean"], rel=1e-4)
    assert learnt["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_update_that_never_fits_changes_no_weight(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = base()
    before = weights(model)
    calls = poisoned(monkeypatch, *[raising(OUT_OF_MEMORY)] * 99)
    learner = learner_of(model)
    learner.take(groups)
    with pytest.raises(UsageError, match=r"a sequence of 11 tokens does not fit .* Tried to allocate 2.00 GiB"):
        learner.prepare()
    assert calls[0] == len(caplog.messages) + 1
    assert len(caplog.messages) > 2
    assert same(weights(model), before)
    assert gradient(model) == {}


def test_later_update_that_never_fits_is_refused_afterwards(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, straight = base(), base()
    choices = {"updates_per_batch": 2, "micro_batch_tokens": 1, "gradient_checkpointing": True}
    counts = poisoned(monkeypatch)
    prepared(base(), groups, **choices)
    calls = poisoned(monkeypatch, *[None] * counts[0], raising(OUT_OF_MEMORY))
    learner = prepared(model, groups, **choices)
    learner.write()
    assert calls[0] == counts[0] + 1
    monkeypatch.undo()
    updated(straight, [*groups[:2], *map(flat, groups[2:])], **choices)
    assert same(weights(model), weights(straight))
    assert learner.learnt()["updates"] == 1
    assert gradient(model) == {}
    learner.take(groups)
    with pytest.raises(UsageError, match=r"a sequence of \d+ tokens does not fit"):
        learner.prepare()


def test_optimizer_state_that_does_not_fit_is_refused() -> None:
    class Large(Descent):
        def allocate(self) -> None:
            raise OUT_OF_MEMORY

    with pytest.raises(UsageError, match=r"the optimizer's state does not fit beside the server: CUDA out") as caught:
        learner_of(base(), make_optimizer=Large)
    assert "--offload-optimizer" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit", "adamw-4bit"])
def test_gradient_release_gives_the_same_weights(groups: list[Group], kind: str, dtype: torch.dtype) -> None:
    straight, model = base(dtype=dtype), base(dtype=dtype)
    choices: dict[str, Any] = {"optimizer": kind, "updates_per_batch": 2}
    expected = updated(straight, groups, **choices)
    learner = prepared(model, groups, gradient_release=True, **choices)
    assert same(weights(model), weights(base(dtype=dtype)))
    learner.write()
    learnt = learner.learnt()
    assert same(weights(model), weights(straight))
    assert not same(weights(model), weights(base(dtype=dtype)))
    assert learnt["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert {**learnt, "grad_norm": 0.0} == {**expected, "grad_norm": 0.0}
    assert learner.optimizer.changed_weight_share > 0


@pytest.mark.parametrize("tokens", [54, 40])
def test_gradient_release_needs_one_pass_per_update(groups: list[Group], tokens: int) -> None:
    def refusal(number: int) -> UsageError | None:
        learner = learner_of(model, gradient_release=True, micro_batch_tokens=tokens, updates_per_batch=number)
        learner.take(groups)
        try:
            learner.prepare()
        except UsageError as error:
            return error
        learner.write()
        return None

    model, updates = base(), [1]
    before = weights(model)
    while error := refusal(updates[-1]):
        assert same(weights(model), before)
        assert f"of at most {tokens} tokens" in error.message
        flag, number, *_ = error.hint.replace(",", "").split()
        assert flag == "--updates-per-batch"
        updates.append(int(number))
        assert updates[-1] > updates[-2]
    assert not same(weights(model), before)
    assert len(updates) > 1


def test_512_micro_batches_are_as_accurate_as_one(groups: list[Group]) -> None:
    """With bf16 sums the additions alone had an error of 2.5 %; one pass has 0.7 %."""
    whole = [group for group in groups for _ in range(512 // NUM_GROUPS // GROUP_SIZE)]
    exact = base().bfloat16().double()
    expected = naive_gradient(copy.deepcopy(exact), groups, exact)
    errors = []
    for tokens in (None, 1):
        model = base().bfloat16()
        prepared(model, whole, batch_size=512, micro_batch_tokens=tokens)
        errors.append(distance(gradient(model), expected))
    one, many = errors
    assert many < 1.1 * one < 0.02, errors


@pytest.mark.parametrize("choices", [{}, {"optimizer": "adamw-8bit"}, {"updates_per_batch": 2}])
def test_optimizer_accepts_float32_gradients_of_bf16_weights(
    groups: list[Group], choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list[torch.dtype]()
    monkeypatch.setattr(budget, "FEW", 1)
    monkeypatch.setattr(SplitMasterAdamW, "expect", lambda _, dtype: expected.append(dtype))
    straight, model, untrained = (base(dtype=torch.bfloat16) for _ in range(3))
    learner = prepared(model, groups, micro_batch_tokens=20, max_grad_norm=1e-2, **choices)
    assert expected == [torch.float32]  # compiled for float32 before any weight changes
    assert {tensor.dtype for tensor in gradient(model).values()} == {torch.float32}
    learner.write()
    assert gradient(model) == {}
    updated(straight, groups, max_grad_norm=1e-2, **choices)
    ours, theirs = (moved(weights(trained_model), weights(untrained)) for trained_model in (model, straight))
    assert distance(ours, theirs) < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [1e6, 1e-2])
@pytest.mark.parametrize("updates", [1, 2])
def test_host_gradient_sums_span_several_passes(
    groups: list[Group], updates: int, max_norm: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FEW", 1)  # host memory always sums in float32
    straight, model = base(dtype=dtype), base(dtype=dtype)
    choices: dict[str, Any] = {"offload_optimizer": True, "micro_batch_tokens": 20, "updates_per_batch": updates}
    choices["max_grad_norm"] = max_norm
    expected = updated(straight, groups, **choices)
    learner = prepared(model, groups, gradient_release=True, **choices)
    assert same(weights(model), weights(base(dtype=dtype)))
    assert gradient(model) == {}
    learner.write()
    assert same(weights(model), weights(straight))
    assert learner.learnt() == expected


KINDS = [
    *({"optimizer": kind} for kind in ("adamw", "adamw-8bit", "adamw-4bit")),
    {"offload_optimizer": True},
]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("choices", KINDS)
def test_every_optimizer_prefers_good_completions(groups: list[Group], choices: dict[str, Any], released: bool) -> None:
    model = base(dtype=torch.bfloat16)
    before = weights(model)
    learner = learner_of(model, gradient_release=released, max_grad_norm=1.0, **choices)
    losses = [float(learning(model, groups))]
    for _ in range(4):
        learner.take(groups)
        learner.prepare()
        learner.write()
        assert learner.optimizer.changed_weight_share > 0
        losses.append(float(learning(model, groups)))
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < losses[0] - 0.1
    assert not same(weights(model), before)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("choices", KINDS)
def test_every_optimizer_follows_the_schedule(groups: list[Group], choices: dict[str, Any], released: bool) -> None:
    fixed = choices | {"gradient_release": released, "weight_decay": 0.1, "training_steps": 4}
    rising: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    for step, share in ((1, 0.0), (2, 0.5), (3, 1.0)):
        ours, theirs = base(dtype=torch.bfloat16), base(dtype=torch.bfloat16)
        one, other = learner_of(ours, lr=8e-3, **fixed, **rising), learner_of(theirs, lr=8e-3 * (share or 1), **fixed)
        for learner in (one, other):
            learner.take(groups, step=step)
            learner.prepare()
            learner.write()
        assert one.learnt()["lr"] == 8e-3 * share
        expected = weights(theirs if share else base(dtype=torch.bfloat16))
        assert same(weights(ours), expected)


def test_learning_rate_changes_with_every_update(groups: list[Group]) -> None:
    rates = list[float]()

    class Recording(Descent):
        def _step(self, norm: float, max_norm: float) -> None:
            rates.extend(group["lr"] for group in self.param_groups[:1])
            super()._step(norm, max_norm)

    choices: dict[str, Any] = {"updates_per_batch": 2, "passes_per_batch": 2, "training_steps": 3, "lr": 1.2e-3}
    learner = learner_of(base(), make_optimizer=Recording, lr_scheduler_type="linear", **choices)
    for step in (2, 3, 2):  # the rate depends only on the step
        learner.take(groups, step=step)
        learner.prepare()
        learner.write()
    second, third = [8e-4, 7e-4, 6e-4, 5e-4], [4e-4, 3e-4, 2e-4, 1e-4]
    assert rates == pytest.approx([*second, *third, *second])
    assert learner.learnt()["lr"] == pytest.approx(8e-4)


def test_flops_are_counted_for_every_update(groups: list[Group]) -> None:
    model = base()
    learner = prepared(model, groups, updates_per_batch=2, passes_per_batch=3, micro_batch_tokens=20)
    learner.write()
    passes = [model_pass.batch for update in learner._computed.passes for model_pass in update]
    flops = Flops.of(model)
    assert len(passes) > 2
    assert learner.learnt()["train_flops"] == pytest.approx(3 * sum(map(flops.of_batch, passes)))


def learning(model: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    """Return the mean of -advantage * log-probability over all tokens; it falls as the model learns."""
    with torch.no_grad():
        rows = [
            -torch.tensor(group.rewards).sub(sum(group.rewards) / GROUP_SIZE)[index]
            * naive_logprobs(model, group.prompt_token_ids, completion.token_ids)
            for group in groups
            for index, completion in enumerate(group.completions)
        ]
    return torch.cat(rows).mean()


def notes_of(**choices: Any) -> list[str]:
    """Return the notes logged before the first step of a run with only these `choices`."""
    model = base()
    config = TrainConfig.model_validate({"model_name": "tiny"} | choices)
    factors = {name: 4.0 for name, _ in model.named_parameters()}
    opened = OpenedModel(model=model, device=CPU, lr_factors=factors, open_s=0, weight_bytes=0)
    with logged() as notes:
        made = learners.made(config, opened)
    assert {group["lr"] for group in made.optimizer.param_groups} == {config.learning_rate * 4}
    return notes


def test_default_learning_rate_is_logged() -> None:
    assert "learning rate 1e-06, the default for all weights; set it with --lr" in notes_of()
    adapter = notes_of(mode="lora_only")
    assert "learning rate 1e-05, the default for an adapter; set it with --lr" in adapter
    assert not [line for line in notes_of(lr=1e-6) if "learning rate" in line]


@pytest.mark.parametrize(
    ("choices", "cause"),
    [
        ({"max_staleness": 4}, "--max-staleness 4"),
        ({"mode": "none", "vllm_restart_interval": 2}, "--vllm-restart-interval 2"),
        ({}, None),
    ],
)
def test_uncorrected_staleness_is_logged(choices: dict[str, Any], cause: str | None) -> None:
    line = f"with {cause} completions of older weights are trained on, and nothing corrects for the difference"
    expected = [f"--mismatch none: {line}"] if cause else []
    assert [note for note in notes_of(mismatch="none", **choices) if "corrects" in note] == expected
    assert not [note for note in notes_of(**choices) if "corrects" in note]


@pytest.mark.parametrize(
    ("lr", "decay", "effect"), [(1e-6, 0.01, False), (1e-6, 0.1, True), (1e-6, 0.0, True), (1e-5, 0.01, True)]
)
def test_weight_decay_lost_to_rounding_is_logged(lr: float, decay: float, effect: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(256))
    weight.grad = torch.zeros(256)
    SplitMasterAdamW([factory.scaled_group(weight, 4.0, lr=lr, weight_decay=decay)]).step()
    assert bool((weight != 1).any()) == (effect and decay > 0)
    notes = [line for line in notes_of(lr=lr, weight_decay=decay) if "weight decay has no effect" in line]
    assert len(notes) == (0 if effect else 1)
    assert all("at least --weight-decay 0.06" in line for line in notes)
