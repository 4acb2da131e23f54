"""Tensor-parallel parts: the groups of ranks, and steps, saving and loading with the same results as one process.

Not covered: what parts compute (`tests/unit/passes/test_parallel.py`), and a real server
(`tests/cpu/test_tensor_parallel.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from bridge.checkpoints.optimizer_state import WholeState
from bridge.errors import RankError, UsageError
from bridge.optimizers import slabs
from bridge.optimizers.gradient_hooks import counted
from bridge.optimizers.offloaded_adamw import OffloadedAdamW
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS
from bridge.ranks.world import ALONE, Ranks
from bridge.types import Group
from bridge.weights import model_folder, stored_tensors
from bridge.weights import rank_parts as parts_
from bridge.weights.attach import OpenedModel
from bridge.weights.model_folder import state, stored_buffers
from bridge.weights.rank_parts import Cut, Parts
from tests.models import tiny, vllm_cuts
from tests.models.families import FAMILIES
from tests.unit import learners
from tests.unit.run.test_learner import base, config_of, made_by, same
from tests.unit.several_ranks import on_ranks

NUM_PARTS, STEPS = 2, 3
OFFLOADED = "offloaded"
LIMIT_S = 240.0


@pytest.fixture(autouse=True)
def _several_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiny models use several slabs and pieces per step, and several chunks per gather."""
    monkeypatch.setitem(slabs.SMALL_ELEMENTS, "cpu", 9000)
    monkeypatch.setitem(slabs.PIECE_ELEMENTS, "cpu", 4000)
    monkeypatch.setattr(parts_, "CHUNK", 3000)


def mesh(ranks: Ranks) -> dict[str, Any]:
    number = torch.tensor([1.0 + ranks.rank])
    return {
        "place": (ranks.dp_rank, ranks.tp_rank, ranks.dp_size, ranks.is_rank_zero, ranks.is_tp_rank_zero),
        "within": ranks.tp_group.all_gather_object(ranks.rank),
        "peers": ranks.dp_group.all_gather_object(ranks.rank),
        "leaders": ranks.one_per_replica(ranks.all_gather_object(ranks.rank)),
        "totals": (
            ranks.all_reduce(number).item(),
            ranks.all_reduce_shares(number).item(),
            ranks.tp_group.all_reduce(number).item(),
        ),
        "gathered": (ranks.tp_group.all_gather(number).tolist(), ranks.dp_group.all_gather(number).tolist()),
        "summed": ranks.dp_group.reduce_scatter(torch.arange(2.0).view(2, 1) + ranks.rank).item(),
    }  # fmt: skip


def test_ranks_of_two_replicas_have_the_right_groups() -> None:
    for rank, report in enumerate(on_ranks(4, mesh, tp_size=2)):
        replica, part = divmod(rank, 2)
        assert report["place"] == (replica, part, 2, rank == 0, part == 0)
        assert report["within"] == [2 * replica, 2 * replica + 1]
        assert report["peers"] == [part, 2 + part]
        assert report["leaders"] == [0, 2]
        assert report["totals"] == (10.0, 4.0, 3.0 + 4 * replica)
        assert report["gathered"] == ([1.0 + 2 * replica, 2.0 + 2 * replica], [1.0 + part, 3.0 + part])
        assert report["summed"] == 2 * part + 2 + 2 * replica


def one_replica(ranks: Ranks) -> tuple[list[int], list[int], bool]:
    return (
        ranks.tp_group.all_gather_object(ranks.rank),
        ranks.dp_group.all_gather_object(ranks.rank),
        ranks.dp_group is ALONE,
    )


def test_ranks_of_one_replica_have_no_dp_peers() -> None:
    assert on_ranks(2, one_replica, tp_size=2) == [([0, 1], [0], True), ([0, 1], [1], True)]


def fails_within(ranks: Ranks) -> None:
    def act() -> None:
        if ranks.rank == 3:
            raise UsageError("the disk is full", hint="make room")

    ranks.run_on_all(lambda: ranks.tp_group.run_on_all(act))


def test_error_in_one_replica_is_raised_on_all_ranks() -> None:
    for error in on_ranks(4, fails_within, tp_size=2):
        assert isinstance(error, UsageError)
        assert error.message == "the disk is full"


def breaks_off(ranks: Ranks) -> None:
    with ranks.in_pass():
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        ranks.tp_group.all_gather(torch.zeros(1))


def test_rank_out_of_memory_stops_its_replica() -> None:
    first, second = on_ranks(2, breaks_off, tp_size=2)
    assert isinstance(second, RankError)
    assert "rank 1 of 2 is out of memory" in second.message
    assert "--micro-batch-tokens" in str(second.hint)
    assert isinstance(first, RankError)


def test_elements_counted_elsewhere_are_zeroed_in_a_copy() -> None:
    gradient = torch.ones(3, 4)
    assert counted(gradient, [range(2, 6), range(11, 12)]).view(-1).tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert counted(gradient[1:], [range(2, 6)], 4).view(-1).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert gradient.all()
    assert counted(gradient, []) is gradient


def whole_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def cuts_of(model: PreTrainedModel) -> Sequence[Mapping[str, Cut]]:
    return vllm_cuts.cuts(model.config, {name: tensor.shape for name, tensor in state(model).items()}, NUM_PARTS)


def in_parts(ranks: Ranks, config: PretrainedConfig) -> tuple[PreTrainedModel, Parts]:
    """Create this rank's part, whose weights are at an offset inside a storage, like a server's."""
    model = whole_model(config)
    parts = Parts(cuts=cuts_of(model), tp_group=ranks.tp_group)
    for name, tensor in state(model).items():
        part = parts.own[name].of(tensor.detach())
        tensor.data = torch.cat([part.new_full((5,), 7), part.reshape(-1)])[5:].view(part.shape)
    return model, parts


def gradients_of(model: PreTrainedModel, replica: int, step: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(10 * step + replica)
    return {n: torch.randn(p.shape, generator=chance).bfloat16() for n, p in model.named_parameters()}


def stepped(ranks: Ranks, kind: str, num_replicas: int) -> dict[str, Any]:
    """Step one rank's part, or the full model with the summed gradients of all replicas."""
    config = tiny.llama()
    whole, (model, parts) = (
        whole_model(config),
        in_parts(ranks, config) if ranks.world_size > 1 else (whole_model(config), None),
    )
    trained = dict(model.named_parameters())
    replicated: dict[Tensor, list[range]] = {}
    if parts is not None:
        same = [name for name in trained if all(cuts[name].axis is None for cuts in parts.cuts)]
        replicated = {trained[n]: [] if ranks.tp_rank == 0 else [range(trained[n].numel())] for n in same}
    optimizer: ShardedOptimizer
    if kind == OFFLOADED:
        optimizer = OffloadedAdamW(trained.values(), lr=1e-2, ranks=ranks, replicated=replicated)
    else:
        optimizer = SplitMasterAdamW(
            trained.values(), lr=1e-2, kind=KINDS[kind], seed=3, ranks=ranks, replicated=replicated
        )
    norms, shares = [], []
    for step in range(STEPS):
        by_replica = [
            gradients_of(whole, r, step) for r in ([ranks.dp_rank] if parts is not None else range(num_replicas))
        ]
        for name, parameter in trained.items():
            parameter.grad_dtype = None
            total = sum((one[name].float() for one in by_replica[1:]), by_replica[0][name].float())
            total = total if parts is None else parts.own[name].of(total)
            parameter.grad = total if ranks.dp_group.world_size == 1 else total.bfloat16()
        optimizer.exchange()
        norms.append(optimizer.global_norm())
        optimizer.step(grad_norm=1.0)
        optimizer.zero_grad()
        shares.append(optimizer.changed_weight_share)
    if parts is None:
        state = {name: {k: t.clone() for k, t in optimizer.parts(p).items()} for name, p in trained.items()}
    else:
        state = {name: WholeState(optimizer, trained, parts).parts(p) for name, p in trained.items()}
    weights = {name: p.detach() if parts is None else parts.whole(name, p.detach()) for name, p in trained.items()}
    return {
        "weights": weights,
        "state": state,
        "norms": norms,
        "shares": shares,
        "replicated": [p.detach() for p in replicated],
    }


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", ["adamw", OFFLOADED])
def test_steps_on_parts_equal_full_steps_bitwise(kind: str, num_replicas: int) -> None:
    whole = stepped(ALONE, kind, num_replicas)
    for mine in on_ranks(NUM_PARTS * num_replicas, stepped, kind, num_replicas, tp_size=NUM_PARTS):
        assert not isinstance(mine, BaseException), mine
        for name, weight in whole["weights"].items():
            assert torch.equal(mine["weights"][name], weight), name
            assert mine["state"][name].keys() == whole["state"][name].keys()
            assert all(torch.equal(mine["state"][name][k], t) for k, t in whole["state"][name].items()), name
        assert mine["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert mine["shares"] == pytest.approx(whole["shares"], rel=0.01)


@pytest.mark.parametrize("kind", ["adamw-8bit", "adamw-4bit"])
def test_shared_elements_stay_equal_under_random_rounding(kind: str) -> None:
    first, *others = on_ranks(4, stepped, kind, 2, tp_size=NUM_PARTS)
    for other in others:
        assert all(map(torch.equal, first["replicated"], other["replicated"]))
        assert first["shares"] == other["shares"]
        assert all(torch.equal(other["weights"][name], weight) for name, weight in first["weights"].items())


def learnt(
    ranks: Ranks, groups: Sequence[Group], choices: Mapping[str, Any], model: PreTrainedModel | None = None
) -> dict[str, Any]:
    """Train two steps in float32, in one process or with tensor parallelism."""
    model = model or base()
    parts = None if ranks.world_size == 1 else Parts(cuts=cuts_of(model), tp_group=ranks.tp_group)
    for name, tensor in state(model).items() if parts is not None else ():
        tensor.data = parts.own[name].of(tensor.detach()).clone()  # type: ignore[union-attr]
    opened = OpenedModel(
        model=model, device=torch.device("cpu"), lr_factors={name: 1.0 for name, _ in model.named_parameters()},
        cuts=() if parts is None else parts.cuts, open_s=0, weight_bytes=0,
    )  # fmt: skip
    learner = learners.made(config_of(**choices), opened, ranks=ranks)
    figures = []
    for step in (1, 2):
        learner.take(groups, step=step)
        learner.prepare()
        learner.write()
        figures.append(learner.learnt())
    held = state(model)
    whole = {name: t.detach().clone() if parts is None else parts.whole(name, t.detach()) for name, t in held.items()}
    return {"weights": whole, "figures": figures}


@pytest.mark.parametrize("choices", [{}, {"top_entropy": 0.3}], ids=["all tokens", "top entropy"])
def test_two_replicas_of_two_ranks_train_as_one_process(choices: dict[str, Any]) -> None:
    groups = made_by(base(seed=8))
    alone, before = learnt(ALONE, groups, choices), dict(base().named_parameters())
    results = on_ranks(4, learnt, groups, choices, tp_size=NUM_PARTS, limit_s=LIMIT_S)
    for mine in results:
        assert not isinstance(mine, BaseException), mine
        assert same(mine["weights"], results[0]["weights"]), "replicas differ"
        for name, weight in alone["weights"].items():
            moved = weight - before[name].detach()
            assert (mine["weights"][name] - weight).norm() < 0.01 * moved.norm(), name
        for one, other in zip(mine["figures"], alone["figures"], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
            assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-4)
            assert one["logprob_diff_mean"] == pytest.approx(other["logprob_diff_mean"], rel=1e-3)
            assert (one["tokens_trained"], one["updates"]) == (other["tokens_trained"], other["updates"])


def learnt_with_a_bias(ranks: Ranks, groups: Sequence[Group]) -> dict[str, Any]:
    """Train a model whose router has a bias, which is a buffer in its files."""
    model = whole_model(FAMILIES["GLM-4.5"]()).float()
    for bias in stored_buffers(model).values():
        bias.copy_(torch.linspace(0.5, -0.5, bias.numel()))
    return learnt(ranks, groups, {}, model)


def test_stored_buffer_is_not_trained_in_parts() -> None:
    groups = made_by(base(seed=8))
    alone = learnt_with_a_bias(ALONE, groups)
    names = stored_buffers(whole_model(FAMILIES["GLM-4.5"]()))
    assert names
    for mine in on_ranks(2, learnt_with_a_bias, groups, tp_size=NUM_PARTS, limit_s=LIMIT_S):
        assert not isinstance(mine, BaseException), mine
        assert mine["figures"][1]["loss"] == pytest.approx(alone["figures"][1]["loss"], abs=1e-5)
        assert mine["figures"][1]["grad_norm"] == pytest.approx(alone["figures"][1]["grad_norm"], rel=1e-3)
        for name in names:
            assert torch.equal(mine["weights"][name], torch.linspace(0.5, -0.5, 4))


def loaded(ranks: Ranks, kind: str, full: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Load a full optimizer state into parts, one tensor at a time, and gather it again."""
    model, parts = in_parts(ranks, tiny.llama())
    trained = dict(model.named_parameters())
    optimizer = SplitMasterAdamW(trained.values(), lr=1e-2, kind=KINDS[kind], ranks=ranks)
    optimizer.allocate()
    whole = WholeState(optimizer, trained, parts)
    for name, tensors in full.items():
        for key, tensor in tensors.items():
            whole.put(trained[name], {key: tensor})
    return {name: whole.parts(parameter) for name, parameter in trained.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_survives_splitting_into_parts(kind: str) -> None:
    full = stepped(ALONE, kind, 1)["state"]
    for loaded_state in on_ranks(2, loaded, kind, full, tp_size=NUM_PARTS):
        assert not isinstance(loaded_state, BaseException), loaded_state
        for name, tensors in full.items():
            assert loaded_state[name].keys() == tensors.keys()
            if "exp_avg_scale" in tensors and name.endswith(("o_proj.weight", "down_proj.weight")):
                continue  # a part has different blocks than the full tensor
            assert all(torch.equal(loaded_state[name][key], tensor) for key, tensor in tensors.items()), name


def saved(ranks: Ranks, family: str, folder: Path, source: Path) -> bool:
    """Save the model, load it into zeros, and return whether every part has its weights again."""
    model, parts = in_parts(ranks, FAMILIES[family]())
    before = {name: tensor.detach().clone() for name, tensor in state(model).items()}
    if ranks.is_rank_zero:
        model_folder.save(model, source, folder, parts)
    else:
        model_folder.send_parts(model, parts)
    for tensor in state(model).values():
        tensor.data.zero_()
    ranks.all_gather_object(None)
    model_folder.check(model, folder, parts)
    model_folder.load_into(model, folder, parts)
    return all(torch.equal(before[name], tensor) for name, tensor in state(model).items())


def files_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("max_bytes", [5 * 10**9, 200_000])
def test_ranks_save_and_load_the_same_folder_as_one_process(
    max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "MAX_SHARD_BYTES", max_bytes)
    for number, family in enumerate(("Llama 3, 3.1", "Qwen3-MoE", "GLM-4.5")):
        whole, made = tmp_path / f"whole{number}", tmp_path / f"made{number}"
        whole.mkdir()
        made.mkdir()
        tiny.write_tokenizer(tmp_path, tiny.VOCABULARY)
        model_folder.save(whole_model(FAMILIES[family]()), tmp_path, whole)
        assert on_ranks(2, saved, family, made, tmp_path, tp_size=NUM_PARTS) == [True, True]
        expected, actual = files_of(whole), files_of(made)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
        assert (made / "config.json").read_text() == (whole / "config.json").read_text()
        assert {p.name for p in made.iterdir()} >= {"config.json", "tokenizer.json"}
        assert (len([*made.glob("*.safetensors")]) > 1) == (max_bytes < 10**6)
        AutoModelForCausalLM.from_pretrained(made)


def differing(ranks: Ranks) -> None:
    model, parts = in_parts(ranks, tiny.llama())
    if ranks.tp_rank == 1:
        model.get_parameter("model.norm.weight").data[3] = 2
    parts.check_equal(dict(model.named_parameters()))


def test_ranks_with_unequal_shared_values_do_not_save() -> None:
    for error in on_ranks(2, differing, tp_size=NUM_PARTS):
        assert isinstance(error, RankError)
        assert "differ in model.norm.weight" in error.message


def test_cut_returns_the_rows_and_columns_of_its_runs() -> None:
    cut, whole = Cut((6, 2), (((0, 2), (4, 1)), ((0, 2),))), torch.arange(12).view(6, 2)
    assert cut.of(whole).tolist() == [[0, 1], [2, 3], [8, 9]]
    assert (cut.axis, cut.part_shape, cut.num_elements) == (0, (3, 2), 6)
    assert nn.Parameter(cut.of(whole).float()).shape == (3, 2)
