"""Supervised and preference losses: value and gradient against float64 autograd, however the batch is cut."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from bridge.config import OptimizerConfig
from bridge.engine import reference
from bridge.engine.reference import Reference
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.training_rows import Tokens, TrainingRow
from bridge.run.learner import Learner
from bridge.types import Group
from bridge.weights import loaded
from tests.models import tiny
from tests.unit.run.test_learner import (
    CLOSE,
    Descent,
    Weights,
    base,
    distance,
    gradient,
    learner_of,
    made_by,
    moved,
    same,
    weights,
    with_adapter,
)
from tests.unit.several_ranks import on_ranks

BETA = 0.5
NUM_ROWS = 6


def conversation(length: int, *, seed: int, turns: int) -> Tokens:
    """Return a made-up conversation, of whose turns every second one is trained on; the first three are its prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist()
    return Tokens(ids, [index >= 3 and (index // turns) % 2 == 1 for index in range(length)])


def sft_rows() -> list[Group]:
    return [
        TrainingRow.of(conversation(8 + 5 * number, seed=number, turns=3 + number % 2)).group()
        for number in range(NUM_ROWS)
    ]


def dpo_rows() -> list[Group]:
    """Return pairs with a prompt of four tokens, answered in one turn or in two, by more or fewer tokens."""
    pairs = []
    for number in range(NUM_ROWS):
        prompt = conversation(4, seed=number, turns=99).ids
        both = []
        for index in (0, 1):
            answer = conversation(5 + 3 * number + 2 * index, seed=100 + 2 * number + index, turns=99).ids
            flags = [number % 2 == 0 or place not in (2, 3) for place in range(len(answer))]
            both.append(Tokens([*prompt, *answer], [False] * len(prompt) + flags))
        pairs.append(TrainingRow.of(*both).group())
    return pairs


def log_likelihoods(model: PreTrainedModel, group: Group) -> list[Tensor]:
    """Return the log-probabilities of each completion's tokens that are trained on."""
    result = []
    for completion in group.completions:
        logits_TV = model(torch.tensor([[*group.prompt_token_ids, *completion.token_ids]])).logits[0]
        at = range(len(group.prompt_token_ids) - 1, len(logits_TV) - 1)
        logprobs_T = logits_TV[[*at]].log_softmax(-1)[range(len(at)), [*completion.token_ids]]
        flags = [True] * len(at) if completion.sampled is None else [*completion.sampled]
        result.append(logprobs_T[torch.tensor(flags)])
    return result


def exact_sft(model: PreTrainedModel, _: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    return -torch.cat([part for group in groups for part in log_likelihoods(model, group)]).mean()


def exact_mean_of_rows(model: PreTrainedModel, _: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    return -torch.stack([part.mean() for group in groups for part in log_likelihoods(model, group)]).mean()


def exact_margins(model: PreTrainedModel, frozen: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    margins = []
    for group in groups:
        ours, theirs = log_likelihoods(model, group), log_likelihoods(frozen, group)
        chosen, rejected = (BETA * (own.sum() - other.sum().detach()) for own, other in zip(ours, theirs, strict=True))
        margins.append(chosen - rejected)
    return torch.stack(margins)


def exact_dpo(model: PreTrainedModel, frozen: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    return -functional.logsigmoid(exact_margins(model, frozen, groups)).mean()


Exact = Callable[[PreTrainedModel, PreTrainedModel, Sequence[Group]], Tensor]
CASES: dict[str, tuple[Exact, Callable[[], list[Group]], dict[str, Any]]] = {
    "sft": (exact_sft, sft_rows, {"loss": "sft"}),
    "sft over rows": (exact_mean_of_rows, sft_rows, {"loss": "sft", "aggregation": "sequence_mean"}),
    "dpo": (exact_dpo, dpo_rows, {"loss": "dpo", "dpo_beta": BETA, "reference_model": "frozen"}),
}
PLAIN = {"group_size": 8, "batch_size": 8, "temperature": 1.0, "lr": 1e-2}


class SummedDescent(Descent):
    """Plain gradient descent with the gradients of all ranks."""

    def __init__(self, choices: OptimizerConfig, groups: Iterable[dict[str, Any]], *, ranks: Ranks, **_: Any) -> None:
        super().__init__(choices, groups)
        self._all = ranks

    def exchange(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = self._all.all_reduce(parameter.grad.clone())


def opened(ranks: Ranks = ALONE, **choices: Any) -> Learner:
    """Return a learner of the model with seed 7, whose reference is the one with seed 8."""
    frozen = Reference(prepared=PreparedModel(base(seed=8)), takes_experts=False)
    with mock.patch.object(loaded, "load") as load:
        load.return_value.model = frozen.prepared.model
        return learner_of(base(), ranks=ranks, make_optimizer=SummedDescent, **PLAIN | choices)


def stepped(ranks: Ranks, groups: Sequence[Group], choices: dict[str, Any]) -> tuple[dict[str, Any], Weights]:
    learner = opened(ranks, **choices)
    model = learner.trainable.prepared.model
    before = weights(model)
    learner.take(groups)
    learner.prepare()
    learner.write()
    return learner.learnt(), moved(weights(model), before)


def expected(exact: Exact, groups: Sequence[Group]) -> tuple[float, Weights]:
    model, frozen = base().double(), base(seed=8).double()
    loss = exact(model, frozen, groups)
    loss.backward()
    return loss.item(), gradient(model)


@pytest.mark.parametrize("cut", [{}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_match_float64_autograd(case: str, cut: dict[str, Any]) -> None:
    exact, rows, choices = CASES[case]
    groups = rows()
    learner = opened(**choices, **cut)
    learner.take(groups)
    learner.prepare()
    value, exact_gradient = expected(exact, groups)
    assert distance(gradient(learner.trainable.prepared.model), exact_gradient) < CLOSE
    num_passes = len(learner._computed.passes[0])
    assert num_passes == {0: 1, 1: NUM_ROWS}.get(cut.get("micro_batch_tokens", 0), num_passes)
    learner.write()
    assert learner.learnt()["loss"] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("cp_size", [1, 2], ids=["replicas", "slices"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_take_the_exact_step(case: str, cp_size: int) -> None:
    exact, rows, choices = CASES[case]
    groups = rows()
    sizes = {"gpus": 2, "context_parallel_size": cp_size}
    of_ranks = on_ranks(2, stepped, groups, choices | sizes, cp_size=cp_size)
    value, exact_gradient = expected(exact, groups)
    step = {name: -PLAIN["lr"] * tensor for name, tensor in exact_gradient.items()}
    for learnt, change in of_ranks:
        assert learnt["loss"] == pytest.approx(value, rel=1e-5)
        assert distance(change, step) < CLOSE
    assert same(of_ranks[0][1], of_ranks[1][1])


def test_pairs_have_exact_margins() -> None:
    _, rows, choices = CASES["dpo"]
    groups = rows()
    learnt, _ = stepped(ALONE, groups, choices | {"micro_batch_tokens": 40})
    margins = exact_margins(base().double(), base(seed=8).double(), groups)
    assert learnt["margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert learnt["preference_accuracy"] == (margins > 0).double().mean().item()
    assert 0 < learnt["preference_accuracy"] < 1


@pytest.mark.parametrize("case", CASES)
def test_every_update_of_a_batch_trains_its_own_rows(case: str) -> None:
    exact, rows, choices = CASES[case]
    groups = rows()
    _, change = stepped(ALONE, groups, choices | {"updates_per_batch": 2})
    model, frozen = base().double(), base(seed=8).double()
    before = weights(copy.deepcopy(model))
    for part in (groups[:3], groups[3:]):
        model.zero_grad()
        exact(model, frozen, part).backward()
        for name, tensor in gradient(model).items():
            model.get_parameter(name).data.sub_(tensor, alpha=PLAIN["lr"])
    assert distance(change, moved(weights(model), before)) < CLOSE


def test_supervised_loss_ignores_rewards_and_server_logprobs() -> None:
    groups = made_by(base(seed=8))
    _, change = stepped(ALONE, groups, {"loss": "sft", "batch_size": 16, "group_size": 8})
    _, exact_gradient = expected(exact_sft, groups)
    assert distance(change, {name: -PLAIN["lr"] * tensor for name, tensor in exact_gradient.items()}) < CLOSE


def test_adapter_is_compared_with_its_own_base() -> None:
    _, rows, choices = CASES["dpo"]
    groups = rows()
    model = base()
    adapter = with_adapter(model)
    of_adapter = {"mode": "lora_only", "lora_r": 8, "reference_model": None, "lr_factors": adapter.lr_factors()}
    learner = learner_of(model, **PLAIN | choices | of_adapter)
    learner.take(groups)
    learner.prepare()
    with reference.adapter_off(model):
        frozen = [[part.detach() for part in log_likelihoods(model, group)] for group in groups]
    margins = []
    for group, (chosen, rejected) in zip(groups, frozen, strict=True):
        ours = log_likelihoods(model, group)
        margins.append(BETA * ((ours[0].sum() - chosen.sum()) - (ours[1].sum() - rejected.sum())))
    ours_before = gradient(model)
    model.zero_grad()
    loss = -functional.logsigmoid(torch.stack(margins)).mean()
    loss.backward()
    assert distance(ours_before, gradient(model)) < 1e-3
    learner.write()
    assert learner.learnt()["loss"] == pytest.approx(loss.item(), rel=1e-4)
