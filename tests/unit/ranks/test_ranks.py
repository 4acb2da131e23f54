"""Ranks: a phase ends with the same outcome on all ranks, and several ranks compute the same as one process."""

import errno
import ipaddress
import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress, SavedCheckpoint
from bridge.checkpoints.metrics import Evaluation, Summary
from bridge.checkpoints.run_directory import RunDirectory
from bridge.core import atomic_folder, folder_mark
from bridge.engine.sharing import busiest, distribute
from bridge.errors import BridgeError, RankError, UsageError
from bridge.optimizers import offloaded_adamw, slabs
from bridge.optimizers.offloaded_adamw import OffloadedAdamW
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS
from bridge.passes.packing import Sample
from bridge.ranks import process_groups as groups_of_torch
from bridge.ranks import world
from bridge.ranks.world import ALONE, Ranks
from bridge.run.learner import Learner
from bridge.run.reporting import Phase, Reporter
from bridge.run.saving import Checkpoints
from bridge.run.trainer import Run
from bridge.server.fence import Update, Window
from bridge.types import Group
from tests.logged import logged
from tests.models import tiny
from tests.unit.run.test_learner import (
    FAR,
    Descent,
    base,
    distance,
    gradient,
    learner_of,
    made_by,
    moved,
    same,
    updated,
    weights,
    with_equal_rewards,
)
from tests.unit.several_ranks import LIMIT_S, START, on_ranks
from tests.unit.trainer_runs import Letters, runner

SHAPES = [(37, 64), (5,), (1, 1), (130, 70), (64, 37), (256, 6)]
STEPS = 3
OFFLOADED = "offloaded"
RELEASED: dict[str, Any] = {"gradient_release": True}
IGNORED = 1
"""A parameter without a gradient on any rank in the second step; the fifth has one only on rank 0."""


def gradients_of(rank: int, step: int) -> list[Tensor | None]:
    chance = torch.Generator().manual_seed(10 * step + rank)
    made: list[Tensor | None] = [torch.randn(shape, generator=chance).bfloat16() for shape in SHAPES]
    if step == 1:
        made[IGNORED] = None
    if rank > 0:
        made[4] = None
    return made


@pytest.fixture(autouse=True)
def _several_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make optimizers of tiny models use several slabs, pieces and chunks."""
    monkeypatch.setitem(slabs.SMALL_ELEMENTS, "cpu", 3000)
    monkeypatch.setitem(slabs.PIECE_ELEMENTS, "cpu", 2000)
    monkeypatch.setattr(offloaded_adamw, "CHUNK_ELEMENTS", 1024)


def optimizer_of(weights: list[nn.Parameter], name: str, ranks: Ranks) -> ShardedOptimizer:
    if name == OFFLOADED:
        return OffloadedAdamW(weights, lr=1e-2, weight_decay=0.1, ranks=ranks)
    return SplitMasterAdamW(weights, lr=1e-2, kind=KINDS[name], seed=3, ranks=ranks)


def stepped(ranks: Ranks, name: str, dtype: torch.dtype, size: int) -> dict[str, Any]:
    """Step on one of several ranks, or in one process with the gradients of `size` ranks summed in rank order."""
    chance = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=chance).to(dtype)) for shape in SHAPES]
    addresses = [weight.data_ptr() for weight in weights]
    optimizer = optimizer_of(weights, name, ranks)
    norms, shares = [], []
    for step in range(STEPS):
        by_rank = [gradients_of(rank, step) for rank in ([ranks.rank] if ranks.world_size > 1 else range(size))]
        for index, weight in enumerate(weights):
            gradients = [one.to(dtype) for own in by_rank if (one := own[index]) is not None]
            weight.grad = None
            if gradients and ranks.world_size == 1:
                weight.grad_dtype = None
                weight.grad = sum((one.float() for one in gradients[1:]), gradients[0].float())
            elif gradients:
                weight.grad = gradients[0]
        optimizer.exchange()
        norms.append(optimizer.global_norm())
        optimizer.step(grad_norm=2.0, max_norm=1.5)
        optimizer.zero_grad()
        shares.append(optimizer.changed_weight_share)
    assert [weight.data_ptr() for weight in weights] == addresses
    return {
        "weights": [weight.detach().clone() for weight in weights],
        "state": [{part: tensor.clone() for part, tensor in optimizer.parts(weight).items()} for weight in weights],
        "steps": [optimizer.num_updates(weight) for weight in weights],
        "norms": norms,
        "shares": shares,
        "bytes": sum(tensor.nbytes for tensor in optimizer._state()),
    }


@pytest.mark.parametrize("name", [*KINDS, OFFLOADED])
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.bfloat16), (2, torch.float32)])
def test_sharded_step_equals_one_process_bit_for_bit(name: str, size: int, dtype: torch.dtype) -> None:
    results = on_ranks(size, stepped, name, dtype, size)
    whole = stepped(ALONE, name, dtype, size)
    for mine in results:
        assert all(map(torch.equal, mine["weights"], whole["weights"]))
        for one, other in zip(mine["state"], whole["state"], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[part], other[part]) for part in one)
        assert mine["steps"] == whole["steps"] == [STEPS, STEPS - 1, *[STEPS] * 4]
        assert mine["norms"] == pytest.approx(whole["norms"], rel=1e-6)
        assert mine["shares"] == whole["shares"]
        assert mine["bytes"] < whole["bytes"] / size * 1.2


class Uneven(nn.Module):
    """A module in which some parameters have no gradient on some or all ranks in a step; the first is used twice."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=chance).bfloat16() for shape in SHAPES)

    def loss(self, rank: int, step: int) -> Tensor | None:
        """Return a loss whose gradients add up exactly in bf16; None if this rank has no share."""
        if rank == 1 and step == 2:
            return None
        chance = torch.Generator().manual_seed(10 * step + rank)
        used = [weight for index, weight in enumerate(self.weights) if not (index == IGNORED and step == 1)]
        used = [*used[:-2], *([used[-2]] if rank == 0 else []), used[-1], used[0]]
        return torch.stack(
            [(weight * torch.randint(-8, 9, weight.shape, generator=chance)).sum() for weight in used]
        ).sum()


def released(ranks: Ranks, name: str, size: int, max_norm: float) -> dict[str, Any]:
    """Step in the backward pass on one of several ranks, or in one process with the losses of `size` ranks."""
    model = Uneven()
    weights = [*model.weights]
    optimizer = optimizer_of(weights, name, ranks)
    norms, shares = [], []
    for step in range(STEPS):
        losses = [model.loss(rank, step) for rank in ([ranks.rank] if ranks.world_size > 1 else range(size))]
        with optimizer.releasing(max_norm=max_norm):
            if computed := [loss for loss in losses if loss is not None]:
                torch.stack(computed).sum().backward()
        norms.append(optimizer.global_norm())
        optimizer.step(grad_norm=norms[-1])
        shares.append(optimizer.changed_weight_share)
    assert all(weight.grad is None for weight in weights)
    return {
        "weights": [weight.detach().clone() for weight in weights],
        "state": [{part: tensor.clone() for part, tensor in optimizer.parts(weight).items()} for weight in weights],
        "steps": [optimizer.num_updates(weight) for weight in weights],
        "norms": norms,
        "shares": shares,
    }


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_released_gradients_of_ranks_step_as_one_process(name: str, size: int) -> None:
    whole = released(ALONE, name, size, math.inf)
    for mine in on_ranks(size, released, name, size, math.inf):
        assert not isinstance(mine, BaseException), mine
        assert all(map(torch.equal, mine["weights"], whole["weights"]))
        for one, other in zip(mine["state"], whole["state"], strict=True):
            assert all(torch.equal(one[part], other[part]) for part in other)
        assert mine["steps"] == whole["steps"] == [STEPS, STEPS - 1, *[STEPS] * 4]
        assert mine["norms"] == pytest.approx(whole["norms"], rel=1e-6)
        assert mine["shares"] == whole["shares"]


def test_each_released_gradient_is_clipped_separately() -> None:
    whole = released(ALONE, "adamw", 2, 0.5)
    assert not torch.equal(whole["state"][0]["exp_avg"], released(ALONE, "adamw", 2, math.inf)["state"][0]["exp_avg"])
    one, other = on_ranks(2, released, "adamw", 2, 0.5)
    assert all(map(torch.equal, one["weights"], other["weights"]))
    for mine, theirs in zip(one["state"], whole["state"], strict=True):
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=1e-5, atol=1e-9)


def read_once(ranks: Ranks) -> tuple[bool, bool]:
    """Read the state of all updated parameters; return whether it is dropped afterward, and zero once reset."""
    weights = [nn.Parameter(torch.ones(512)) for _ in range(3)]
    optimizer = SplitMasterAdamW(weights, ranks=ranks)
    for weight in weights[:2]:
        weight.grad = torch.ones(512)
    optimizer.exchange()
    optimizer.step(grad_norm=1.0)
    for weight in weights[:2]:
        optimizer.parts(weight)
    is_dropped = optimizer._gathered is None
    optimizer.parts(weights[0])
    optimizer.reset({})
    return is_dropped, not optimizer.parts(weights[0])["exp_avg"].any()


@pytest.mark.parametrize("late", [None, 0, 1])
def test_ranks_with_different_tp_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, late: int | None) -> None:
    get = torch.distributed.TCPStore.get  # type: ignore[attr-defined]

    def slow_get(store: Any, key: str) -> bytes:
        if key.startswith("--tensor-parallel-size") and torch.distributed.get_rank() == late:
            time.sleep(1)  # keep this rank, and with it the store, alive for the others
        return bytes(get(store, key))

    monkeypatch.setattr(torch.distributed.TCPStore, "get", slow_get)  # type: ignore[attr-defined]
    refused = on_ranks(2, lambda _: None, tp_size=(1, 2))
    assert [type(error) for error in refused] == [UsageError, UsageError]
    assert refused[0].message == "the hosts differ in --tensor-parallel-size: 1 and 2"


def test_optimizer_without_gradient_sums_is_refused() -> None:
    def step(ranks: Ranks) -> None:
        updated(base(), made_by(base(seed=8)), make_optimizer=Descent, ranks=ranks)

    refused = on_ranks(2, step)
    assert all("Descent does not sum gradients over ranks" in error.message for error in refused), refused


def test_gathered_optimizer_state_is_dropped_after_reading() -> None:
    assert on_ranks(2, read_once) == [(True, True)] * 2


def graphs_of_a_step(ranks: Ranks) -> tuple[int, int]:
    """Return the number of graphs that torch has compiled after allocating the state, and after an update."""
    weight = nn.Parameter(torch.zeros(5 * 256))
    optimizer = SplitMasterAdamW([weight], ranks=ranks, compiles=True)
    optimizer.allocate()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    weight.sum().backward()
    optimizer.exchange()
    optimizer.step(grad_norm=1.0)
    return before, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_single_block_of_a_rank_is_compiled_before_the_fence() -> None:
    """With five blocks on two ranks, the second rank has one."""
    for before, after in on_ranks(2, graphs_of_a_step):
        assert before == after > 0


def restored(ranks: Ranks, name: str, saved: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    weights = [nn.Parameter(torch.zeros(shape).bfloat16()) for shape in SHAPES]
    optimizer = optimizer_of(weights, name, ranks)
    optimizer.allocate()
    for weight, parts in zip(weights, saved, strict=True):
        optimizer.put(weight, parts)
    return [{part: tensor.clone() for part, tensor in optimizer.parts(weight).items()} for weight in weights]


@pytest.mark.parametrize("name", ["adamw-8bit", OFFLOADED])
def test_state_loads_on_any_number_of_ranks(name: str) -> None:
    saved = on_ranks(3, stepped, name, torch.bfloat16, 3)[0]["state"]
    for states in [restored(ALONE, name, saved), *on_ranks(2, restored, name, saved)]:
        for one, other in zip(states, saved, strict=True):
            assert all(torch.equal(one[part], other[part]) for part in other)


def fails(ranks: Ranks, who: int, error: BaseException) -> list[str]:
    """Run a phase, and return the events on this rank in order."""
    happened = []

    def act() -> int:
        happened.append("act")
        if ranks.rank == who:
            raise error
        return ranks.rank

    try:
        assert ranks.run_and_gather(act, undo=lambda: happened.append("undo")) == [0, 1]
    except BaseException as met:  # noqa: BLE001  the error is the result
        happened.append(f"{type(met).__name__}: {met.args[0] if met.args else ''}")
    assert ranks.all_gather_object(ranks.rank) == [0, 1], "they are not together any more"
    return happened


@pytest.mark.parametrize("who", [0, 1])
def test_error_on_one_rank_is_raised_on_all_and_undone(who: int) -> None:
    outcomes = on_ranks(2, fails, who, UsageError("no", hint="yes"))
    assert outcomes[who] == ["act", "UsageError: no"]
    assert outcomes[1 - who] == ["act", "undo", "UsageError: no"]


def test_interrupt_or_bug_ends_all_ranks() -> None:
    assert [one[-1] for one in on_ranks(2, fails, 1, KeyboardInterrupt())] == ["KeyboardInterrupt: "] * 2
    first, second = on_ranks(2, fails, 1, ZeroDivisionError("1 / 0"))
    assert second == ["act", "ZeroDivisionError: 1 / 0"]
    assert first == ["act", "undo", "RankError: rank 1 of 2 failed: ZeroDivisionError: 1 / 0"]


def ends(ranks: Ranks, who: int) -> str:
    if ranks.rank == who:
        os._exit(9)
    with pytest.raises(RankError) as met:
        ranks.run_and_gather(lambda: None)
    assert ranks.is_broken
    return met.value.message


def test_lost_rank_stops_the_others_immediately() -> None:
    first, second = on_ranks(2, ends, 1)
    assert "lost another rank" in first
    assert isinstance(second, EOFError)


def starts_long(ranks: Ranks, is_gone: bool) -> str:
    """Make one rank exit during a long operation on the other."""

    def act() -> None:
        if ranks.rank == 1 and is_gone:
            os._exit(1)
        if ranks.rank == 1:
            raise UsageError("no", hint="yes")
        while True:
            time.sleep(0.1)
            ranks.check_abort()

    ranks.check_abort()  # no rank has failed
    ranks.all_gather_object(None)  # wait until both ranks have checked
    with pytest.raises(BridgeError) as met:
        ranks.run_on_all(act)
    return met.value.message


def test_failed_rank_ends_another_ranks_wait_with_its_reason() -> None:
    assert on_ranks(2, starts_long, False) == ["no", "no"]


def test_exited_rank_ends_a_long_wait() -> None:
    first, _ = on_ranks(2, starts_long, True)
    assert "lost another rank" in first


def waits_in_vain(ranks: Ranks, is_over: Event) -> bool:
    """Suspend one rank in the middle of a fence until the other one has given up."""
    if ranks.rank == 1:
        return is_over.wait(LIMIT_S / 2)
    with pytest.raises(RankError, match="lost another rank"), ranks.in_fence():
        ranks.run_on_all(lambda: None)
    is_over.set()
    return True


def test_wait_for_a_hanging_rank_in_the_fence_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "FENCE_LIMIT", timedelta(seconds=2))
    assert on_ranks(2, waits_in_vain, START.Event()) == [True, True]


def stays_out(ranks: Ranks, who: int) -> str:
    """Make one rank fail before it enters a fence in which the others wait for it."""

    def act() -> None:
        if ranks.rank == who:
            raise UsageError("no", hint="yes")
        with ranks.in_fence():
            ranks.run_on_all(lambda: None)

    with pytest.raises(UsageError) as met:
        ranks.run_on_all(act)
    assert ranks.all_gather_object(ranks.rank) == [0, 1], "they are not together any more"
    return met.value.message


@pytest.mark.parametrize("who", [0, 1])
def test_failure_outside_the_fence_reaches_ranks_inside(who: int) -> None:
    assert on_ranks(2, stays_out, who, limit_s=20) == ["no", "no"]


def trained(
    ranks: Ranks, groups: Sequence[Group], choices: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Train two steps on one of several ranks."""
    model = base(dtype=dtype)
    learner, learnt, before = learner_of(model, ranks=ranks, **choices), [], []
    for step in (1, 2):
        before.append(weights(model))
        learner.take(groups, step=step)
        learner.prepare()
        learner.prepare()  # a retried publication: nothing is exchanged twice
        learner.write()
        learnt.append(learner.learnt())
    return {"weights": weights(model), "before": before, "learnt": learnt}


def summed_alone(groups: Sequence[Group], size: int, **choices: Any) -> dict[str, Tensor]:
    """Train two steps in one process, on the shares of `size` ranks in sequence."""
    model = base(dtype=torch.bfloat16)
    learner = learner_of(model, **choices)
    for _ in range(2):
        learner.take(groups)
        (whole,), (silent,) = learner._batch.mini_batches, learner._batch.only_ranked or [[]]
        sums: dict[str, Tensor] = {}
        shares = distribute(whole, size)
        if "top_entropy" in choices:
            only_ranked = distribute(silent, size)
            ranked = [entropies_of(learner, *pair) for pair in zip(shares, only_ranked, strict=True)]
            least = least_of(ranked, choices["top_entropy"])
            learner._least_entropies = lambda threshold=least: [threshold]  # type: ignore[method-assign,misc]
        for share in shares:
            learner._start(replace(learner._batch, mini_batches=[share]))
            learner.prepare()
            for name, tensor in gradient(model).items():
                sums[name] = sums[name] + tensor.float() if name in sums else tensor.float()
        for name, parameter in model.named_parameters():
            parameter.grad, parameter.grad_dtype = None, None
            parameter.grad = sums[name]
        learner.optimizer.step(grad_norm=1.0)
        model.zero_grad()
    return weights(model)


def entropies_of(learner: Learner, share: list[Sample], only_ranked: list[Sample]) -> list[float]:
    """Return the entropies of all tokens that a rank trains on, and of those that it only ranks."""
    learner._start(replace(learner._batch, mini_batches=[share], only_ranked=[only_ranked]))
    learner._look_ahead()
    (others,) = learner._other_entropies()
    both = [*(one.entropies for one in learner._computed.passes[0]), *others]
    return [entropy for entropies_N in both for entropy in entropies_N.tolist()]


def least_of(shares: Sequence[list[float]], top: float) -> Tensor:
    """Return the smallest entropy in the top fraction `top` of all ranks' entropies."""
    ordered = sorted((entropy for share in shares for entropy in share), reverse=True)
    return torch.tensor(ordered[math.ceil(top * len(ordered)) - 1])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with a model for each of two ranks."""
    for rank in range(2):
        tiny.write(tiny.llama(), tmp_path / str(rank) / "model")
    return tmp_path


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return made_by(base(seed=8))


@pytest.mark.parametrize(
    ("size", "choices"),
    [
        (2, {}), (3, {}), (2, {"offload_optimizer": True}), (2, RELEASED), (3, RELEASED),
        (2, {"optimizer": "adamw-4bit", **RELEASED}), (2, {"top_entropy": 0.3, **RELEASED}),
    ],
)  # fmt: skip
def test_ranks_match_summed_gradients_bit_for_bit(groups: list[Group], size: int, choices: dict[str, Any]) -> None:
    results = on_ranks(size, trained, groups, choices)
    expected = summed_alone(groups, size, **{**choices, "gradient_release": False})
    assert not same(expected, weights(base(dtype=torch.bfloat16)))
    assert all(same(result["weights"], expected) for result in results)
    assert all(result["learnt"] == results[0]["learnt"] for result in results)


def learnt_from(before: dict[str, Tensor], groups: Sequence[Group], choices: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of one process that trains on the full batch with these weights."""
    model = base()
    model.load_state_dict(before, strict=False)  # the head is tied to the embeddings
    return updated(model, groups, **choices)


@pytest.mark.parametrize(
    ("size", "choices"), [(2, {}), (3, RELEASED), (2, {"optimizer": "adamw-4bit", "top_entropy": 0.3, **RELEASED})]
)
def test_metrics_of_ranks_equal_one_process(groups: list[Group], size: int, choices: dict[str, Any]) -> None:
    """Each step is compared from equal weights: only the order of float32 additions differs.

    A sum of n terms has a relative error below n * 2^-24. A loss or a mean has one term for each of about 50 tokens
    (3e-6), an element of a gradient one for each token and word (a few hundred: 2e-5). Later steps have no such bound:
    stochastic rounding turns a difference in the last bit into different random bits.
    """
    results = on_ranks(size, trained, groups, choices, torch.float32)
    for before, ours in zip(results[0]["before"], results[0]["learnt"], strict=True):
        theirs = learnt_from(before, groups, choices)
        assert ours["tokens_trained"] == theirs["tokens_trained"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=3e-6)
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-5)
        assert ours["logprob_diff_mean"] == pytest.approx(theirs["logprob_diff_mean"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)


@pytest.mark.parametrize("kind", ["all", "twice", "silent"])
def test_top_entropy_ranks_the_tokens_of_all_ranks(groups: list[Group], kind: str) -> None:
    given = {
        "all": groups,
        "twice": [*groups[:2], *groups[:2]],  # both ranks have the same entropies
        "silent": [*groups[:2], *map(with_equal_rewards, groups[2:])],  # ranked, but not trained on
    }[kind]
    choices = {"top_entropy": 0.3}
    expected = summed_alone(given, 2, **choices)
    assert not same(expected, summed_alone(given, 2))
    for mine in on_ranks(2, trained, given, choices):
        assert same(mine["weights"], expected)


def test_rank_without_tokens_joins_the_entropy_ranking(groups: list[Group]) -> None:
    few = [replace(groups[0], completions=groups[0].completions[:2], rewards=(0.0, 1.0))]
    one, other, third = on_ranks(3, trained, few, {"top_entropy": 0.5})
    assert same(one["weights"], other["weights"])
    assert same(one["weights"], third["weights"])
    assert one["learnt"] == third["learnt"]


def runs_short(ranks: Ranks, groups: Sequence[Group], who: int, where: str) -> tuple[dict[str, Tensor], list[str]]:
    """Make one rank run out of memory once, in its first pass or later, so that it trains in smaller passes."""
    failing = [True] * (ranks.rank == who)
    model = base()
    learner = learner_of(model, ranks=ranks, top_entropy=0.3, updates_per_batch=2)
    act = getattr(learner, where)

    def once(*given: Any) -> None:
        act(*given)
        if failing and failing.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    setattr(learner, where, once)
    with logged() as notes:
        learner.take(groups)
        learner.prepare()
        learner.write()
    return weights(model), [note for note in notes if note.startswith("out of memory")]


@pytest.mark.parametrize("where", ["_look_ahead", "_differentiate"])
def test_smaller_passes_on_one_rank_choose_the_same_tokens(groups: list[Group], where: str) -> None:
    (straight, _), _ = on_ranks(2, runs_short, groups, 2, where)
    for (after, notes), who in zip(on_ranks(2, runs_short, groups, 1, where), range(2), strict=True):
        assert len(notes) == who, "another rank repeats its share"
        assert distance(moved(after, weights(base())), moved(straight, weights(base()))) < FAR


@pytest.mark.parametrize("choices", [{}, RELEASED], ids=["exchanged", "released"])
def test_several_updates_per_batch_match_one_process(groups: list[Group], choices: dict[str, Any]) -> None:
    choices = {"updates_per_batch": 2, "passes_per_batch": 2, "optimizer": "adamw-8bit", **choices}
    one, other = on_ranks(2, trained, groups, choices)
    assert same(one["weights"], other["weights"])
    assert [learnt["updates"] for learnt in one["learnt"]] == [4, 4]
    assert one["learnt"] == other["learnt"]


def test_rank_without_a_share_takes_part_in_the_step(groups: list[Group]) -> None:
    one, other, third = on_ranks(
        3, trained, [replace(groups[0], completions=groups[0].completions[:2], rewards=(0.0, 1.0))], {}
    )
    assert same(one["weights"], other["weights"])
    assert same(one["weights"], third["weights"])


def test_rank_without_a_share_contributes_zero_gradients(groups: list[Group]) -> None:
    few = [replace(groups[0], completions=groups[0].completions[:2], rewards=(0.0, 1.0))]
    released, straight = (on_ranks(3, trained, few, choices) for choices in (RELEASED, {}))
    for mine in released:
        assert same(mine["weights"], straight[0]["weights"])


def loses(ranks: Ranks, groups: Sequence[Group], who: int, how: str) -> tuple[BaseException | dict[str, Any], bool]:
    """Make one rank's loss NaN, or its backward pass run out of memory; return whether its weights changed."""
    model = base(dtype=torch.bfloat16)
    learner = learner_of(model, ranks=ranks, **RELEASED)
    loss_of = learner._loss

    def stop(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def spoilt(model_pass: Any) -> Tensor:
        loss = loss_of(model_pass)
        if how == "in the pass":
            loss.register_hook(stop)
        return loss * math.nan if how == "no number" else loss

    if ranks.rank == who:
        learner._loss = spoilt  # type: ignore[method-assign]
    learner.take(groups)
    learner.prepare()
    try:
        ranks.run_on_all(learner.write)
        outcome: BaseException | dict[str, Any] = learner.learnt()
    except UsageError as error:
        outcome = error
    return outcome, not same(weights(model), weights(base(dtype=torch.bfloat16)))


@pytest.mark.parametrize("who", [0, 1])
def test_nan_loss_on_one_rank_updates_no_rank(groups: list[Group], who: int) -> None:
    for learnt, has_moved in on_ranks(2, loses, groups, who, "no number"):
        assert (learnt["updates"], learnt["skipped_updates"], has_moved) == (0, 1, False)


@pytest.mark.parametrize("who", [0, 1])
def test_out_of_memory_in_a_released_update_stops_all(groups: list[Group], who: int) -> None:
    for error, _ in on_ranks(2, loses, groups, who, "in the pass"):
        assert isinstance(error, UsageError), error
        assert "out of memory in the middle of an update" in error.message


def runs_out(ranks: Ranks, groups: Sequence[Group], who: int) -> list[str]:
    """Make one rank run out of memory for its share."""
    learner = learner_of(base(dtype=torch.bfloat16), ranks=ranks, gradient_checkpointing=False)
    if ranks.rank == who:
        learner._differentiate = out_of_memory  # type: ignore[method-assign,assignment]
    learner.take(groups)
    with pytest.raises(UsageError, match="does not fit into the free memory"):
        learner.prepare()
    return [
        name for name, parameter in learner.trainable.prepared.model.named_parameters() if parameter.grad is not None
    ]


def out_of_memory(_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("who", [0, 1])
def test_out_of_memory_on_one_rank_stops_the_step_on_all(groups: list[Group], who: int) -> None:
    assert on_ranks(2, runs_out, groups, who) == [[], []]


def test_tokens_are_balanced_and_prompts_stay_together() -> None:
    chance = random.Random(0)

    def sample(prompt: int, length: int) -> Sample:
        zeros = (0.0,) * length
        return Sample(
            prompt_token_ids=(prompt,) * 20,
            token_ids=(1,) * length,
            sampled_logprobs=zeros,
            advantages=zeros,
            weight=1.0,
        )

    many = [sample(prompt, chance.randint(20, 200)) for prompt in range(64) for _ in range(8)]
    parts = distribute(many, 4)
    assert sorted(id(one) for part in parts for one in part) == sorted(map(id, many))
    loads = [sum(one.num_tokens for one in part) for part in parts]
    assert max(loads) < 1.02 * min(loads)
    prompts = [{one.prompt_token_ids for one in part} for part in parts]
    assert sum(map(len, prompts)) == 64
    few = [sample(0, length) for length in (100, 90, 10)]
    assert distribute(few, 2) == [few[:1], few[1:]]
    assert distribute(few, 1) == [few]
    assert busiest([distribute(few, 2)]) == pytest.approx(2 * max(120, 140) / 260)
    assert busiest([distribute(few, 2), distribute(few, 2)]) == busiest([distribute(few, 2)])
    assert 1 <= busiest([distribute(many, 4)]) < 1.02
    assert math.isnan(busiest([distribute(many, 1)]))
    assert math.isnan(busiest([]))


def interrupted(ranks: Ranks, groups: Sequence[Group], has_been: Event) -> None:
    """Interrupt the first rank while it waits for the other rank's gradients."""
    learner = learner_of(base(dtype=torch.bfloat16), ranks=ranks)
    prepare, exchange = learner._prepare, learner._exchange

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        has_been.set()

    def prepare_and_be_interrupted() -> None:
        prepare()
        threading.Timer(0.5, interrupt).start()

    def exchange_late() -> None:
        assert has_been.wait(LIMIT_S / 2)
        exchange()

    if ranks.rank == 0:
        learner._prepare = prepare_and_be_interrupted  # type: ignore[method-assign]
    else:
        learner._exchange = exchange_late  # type: ignore[method-assign]
    learner.take(groups)
    with pytest.raises(KeyboardInterrupt):
        ranks.run_on_all(lambda: [act() for act in (learner.prepare, lambda: ranks.all_gather_object(None))])
    assert ranks.all_gather_object(ranks.rank) == [0, 1], "they are not together any more"


def test_interrupt_between_two_sums_leaves_no_rank_waiting(groups: list[Group]) -> None:
    assert on_ranks(2, interrupted, groups, START.Event()) == [None, None]


def fail_differently(ranks: Ranks) -> str:
    """Raise a different error on each rank in the same phase."""

    def act() -> None:
        raise UsageError(f"of rank {ranks.rank}", hint="")

    with pytest.raises(UsageError) as met:
        ranks.run_and_gather(act)
    return met.value.message


def test_ranks_that_fail_together_raise_the_same_error() -> None:
    assert on_ranks(2, fail_differently) == ["of rank 0"] * 2


def listening(ranks: Ranks) -> set[str]:
    """Return the addresses on which this process listens."""
    return {
        connection.laddr.ip for connection in psutil.Process().net_connections("tcp") if connection.status == "LISTEN"
    }


def test_ranks_listen_only_on_loopback() -> None:
    for addresses in on_ranks(2, listening):
        assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


def test_missing_rank_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_of_torch, "RENDEZVOUS_LIMIT_S", 0.2)
    listener, cpu = socket.create_server(("127.0.0.1", 0)), torch.device("cpu")
    with pytest.raises(RankError, match="exited before it was ready"):
        Ranks.join(0, 2, port=listener.getsockname()[1], device=cpu, listener=listener)


class Interrupting(Reporter):
    """Interrupts the run after the first evaluation of a trained model."""

    def evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.step:
            raise KeyboardInterrupt


def ran(
    ranks: Ranks, folder: Path, reporter: Reporter, choices: dict[str, Any], resume: SavedCheckpoint | None = None
) -> Summary:
    """Train with this rank's own fake server, which takes as many seconds to pause as the rank's number."""
    with pytest.MonkeyPatch.context() as patched, ExitStack() as serving:
        patched.setattr(tiny, "write", lambda *_: None)  # transformers would write on the first rank only
        fake = serving.enter_context(runner(folder / str(ranks.rank), patched)())
        publish = fake.mode.publish

        @contextmanager
        def slower(update: Update) -> Iterator[Window]:
            with publish(update) as window:
                yield window
            window.times = replace(window.times, pause_s=float(ranks.rank))

        fake.mode.publish = slower  # type: ignore[method-assign]
        run_folder, config = folder / "run", fake.config(save_path=folder / "saved", **choices)
        made = RunDirectory.create(run_folder, environment="letters") if ranks.is_rank_zero else None
        ranks.all_gather_object(None)
        heard = reporter if ranks.is_rank_zero else Reporter()
        run = made or RunDirectory.join(run_folder)
        return Run(config, Letters(), run, heard, resume=resume, ranks=ranks).train()


def test_ranks_stop_after_the_same_step(models: Path) -> None:
    for summary in on_ranks(2, ran, models, Reporter(), {"stop_at": "fence_pause_s<=0.5"}):
        assert summary.steps == 1


def test_interrupt_between_steps_saves_the_last_step(models: Path) -> None:
    choices = {"eval_interval": 1, "eval_samples": 1, "training_steps": 9}
    for error in on_ranks(2, ran, models, Interrupting(), choices):
        assert isinstance(error, KeyboardInterrupt)
    assert checkpoint.read(models / "saved" / "step_1").progress.step == 1


def baseline(ranks: Ranks, folder: Path) -> float | None:
    """Resume on hosts without a shared disk: only the first one has the file of evaluations."""
    with pytest.MonkeyPatch.context() as patched:
        own = RunDirectory.first_evaluation
        patched.setattr(RunDirectory, "first_evaluation", lambda run: own(run) if ranks.is_rank_zero else None)
        patched.setattr(Run, "_load", lambda run: setattr(run, "_begun_at", 1))
        saved = SavedCheckpoint(folder, Progress(step=1, weight_version=3, problems_drawn=2, run_dir=folder))
        return ran(ranks, folder, Reporter(), {"eval_samples": 1}, saved).reward_before


def test_all_ranks_get_the_baseline_reward_of_rank_zero(models: Path) -> None:
    (models / "run").mkdir()
    folder_mark.put(models / "run", "run")
    (models / "run" / "evaluations.jsonl").write_text('{"step": 0, "reward_mean": 0.375}\n')
    assert on_ranks(2, baseline, models) == [0.375, 0.375]


class InterruptingSave(Reporter):
    """Interrupts the run while the optimizer's state is gathered for the first time."""

    has_begun = False

    def phase(self, name: Phase) -> None:
        if name == "save" and not self.has_begun:
            self.has_begun = True
            read = SplitMasterAdamW.parts

            def parts(optimizer: SplitMasterAdamW, parameter: Tensor) -> dict[str, Tensor]:
                SplitMasterAdamW.parts = read  # type: ignore[method-assign]
                os.kill(os.getpid(), signal.SIGINT)
                return read(optimizer, parameter)

            SplitMasterAdamW.parts = parts  # type: ignore[method-assign,assignment]


def test_interrupt_during_a_save_leaves_no_rank_waiting(models: Path) -> None:
    for error in on_ranks(2, ran, models, InterruptingSave(), {"save_interval": 1, "training_steps": 9}):
        assert isinstance(error, KeyboardInterrupt)
    assert checkpoint.read(models / "saved" / "step_1").progress.step == 1


def interrupted_before_a_save(ranks: Ranks, folder: Path, who: int) -> Any:
    """Train, and send a signal to only one rank after an update is published and before it is saved."""
    save = Checkpoints.save

    def interrupted(checkpoints: Checkpoints) -> Path:
        Checkpoints.save = save  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGINT)
        return save(checkpoints)

    if ranks.rank == who:
        Checkpoints.save = interrupted  # type: ignore[method-assign, assignment]
    return ran(ranks, folder, Reporter(), {"save_interval": 1, "training_steps": 9})


@pytest.mark.parametrize("who", [0, 1])
def test_interrupt_of_one_rank_before_a_save_loses_no_state(models: Path, who: int) -> None:
    for error in on_ranks(2, interrupted_before_a_save, models, who):
        assert isinstance(error, KeyboardInterrupt)
    assert checkpoint.read(models / "saved" / "step_1").progress.step == 1


def without_room(ranks: Ranks, folder: Path) -> Any:
    """Make writing the optimizer's state fail."""
    fsync = atomic_folder._fsync

    def full(path: Path) -> None:
        if path.name == "optimizer":
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(path)

    atomic_folder._fsync = full
    return ran(ranks, folder, Reporter(), {"training_steps": 2})


def test_weights_are_kept_if_a_checkpoint_does_not_fit(models: Path) -> None:
    for error in on_ranks(2, without_room, models):
        assert isinstance(error, UsageError)
        assert error.message.startswith(f"cannot write {models / 'saved' / 'step_2'}: [Errno 28]")
    assert [path.name for path in (models / "saved").iterdir()] == ["weights_step_2"]
    assert (models / "saved" / "weights_step_2" / "model.safetensors").is_file()


def dies(ranks: Ranks, folder: Path, where: str) -> Any:
    """Kill one rank while the weights are being rescued."""
    if ranks.rank == 1:
        name = {"before it tells": "is_torn", "as it saves": "save"}[where]
        setattr(Checkpoints, name, lambda *_: os._exit(1))
    return ran(ranks, folder, Interrupting(), {"eval_interval": 1, "eval_samples": 1, "training_steps": 9})


@pytest.mark.parametrize("where", ["before it tells", "as it saves"])
def test_weights_survive_a_rank_lost_during_their_rescue(models: Path, where: str) -> None:
    first, second = on_ranks(2, dies, models, where)
    assert isinstance(first, KeyboardInterrupt), first
    assert isinstance(second, EOFError)
    assert (models / "saved" / "weights_step_1" / "model.safetensors").is_file()
    assert not checkpoint.is_checkpoint(models / "saved" / "step_1")
