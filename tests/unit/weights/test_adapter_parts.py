"""A tensor-parallel adapter computes, trains, saves and loads the same as a full one.

Not covered: a run that resumes (`test_parts_resume.py`), and a real server (`tests/cpu/test_tensor_parallel.py`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from bridge.errors import RankError, UsageError
from bridge.passes import layers
from bridge.passes.parallel import divide
from bridge.passes.parallel_proof import check_layers
from bridge.ranks.world import ALONE, Ranks
from bridge.server.manifest import LoraSlot, Shard, SharedMemoryHandle, View
from bridge.types import Group
from bridge.weights import stored_tensors
from bridge.weights.adapter import Adapter
from bridge.weights.attach import OpenedModel
from bridge.weights.rank_parts import Parts
from tests.models import tiny, vllm_cuts
from tests.models.families import FAMILIES
from tests.unit import learners
from tests.unit.checks_sample import shared_memory_handle
from tests.unit.passes.test_parallel import TOLERANCE, computed, difference, whole_model
from tests.unit.run.test_learner import base, config_of, made_by, same
from tests.unit.several_ranks import on_ranks

LIMIT_S = 240.0
CHOICES = {"mode": "lora_only", "lora_r": 8, "lora_alpha": 16.0}


def one_head() -> LlamaConfig:
    config = tiny.llama()
    config.num_key_value_heads = 1
    return config


def put_in(model: PreTrainedModel, ranks: Ranks = ALONE, dropout: float = 0.0) -> Adapter:
    """Insert an adapter into a full model, or into the part of it that this rank holds."""
    cuts: Sequence[Any] = ()
    if ranks.world_size > 1:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        cuts = vllm_cuts.cuts(model.config, shapes, ranks.tp_size)
    for name, parameter in model.named_parameters() if cuts else ():
        parameter.data = cuts[ranks.tp_rank][name].of(parameter.detach()).clone()
    config = config_of(**CHOICES, lora_dropout=dropout)
    return Adapter(
        model.requires_grad_(False),
        config.lora,
        seed=config.seed,
        base_name=config.model_name,
        cuts=cuts,
        tp_group=ranks.tp_group,
    )


def filled(model: PreTrainedModel, ranks: Ranks = ALONE, dropout: float = 0.0) -> Adapter:
    """Like `put_in`, but with nonzero values in all matrices."""
    adapter, chance = put_in(model, ranks, dropout), torch.Generator().manual_seed(0)
    for name in adapter.lr_factors():
        matrix = model.get_parameter(name)
        cut = adapter.cuts[ranks.tp_rank][name] if adapter.cuts else None
        whole = torch.randn(cut.shape if cut else matrix.shape, generator=chance) * 0.1
        matrix.data.copy_(cut.of(whole) if cut else whole)
    return adapter


def in_parts(ranks: Ranks, config: PretrainedConfig) -> dict[str, float]:
    """Return the differences between this rank's part and the full adapter, by what is compared."""
    whole, model = whole_model(config), whole_model(config)
    filled(whole)
    adapter = filled(model, ranks, dropout=0.5)
    divided = divide(model, adapter.cuts, ranks.tp_group.process_group)
    check_layers(model, divided)
    model.eval()
    logprobs_T, entropies, gradients = computed(model, divided)
    expected, expected_entropies, expected_gradients = computed(whole)
    divided.combine(gradients)
    assert gradients.keys() == expected_gradients.keys() == adapter.lr_factors().keys()
    for shared in (piece for piece in divided.shared if piece.name in gradients):
        mine = (
            shared.of(gradients[shared.name], divided.cuts[ranks.tp_rank][shared.name])
            if (ranks.tp_rank in shared.parts)
            else None
        )
        first, *others = [gathered for gathered in ranks.all_gather_object(mine) if gathered is not None]
        assert all(torch.equal(first, other) for other in others), shared
    own = adapter.cuts[ranks.tp_rank]
    return {
        "log-probabilities": difference(logprobs_T, expected),
        "entropies": difference(entropies, expected_entropies),
        **{name: difference(gradients[name], own[name].of(gradient)) for name, gradient in expected_gradients.items()},
    }


@pytest.mark.parametrize(
    ("config", "num_parts"),
    [(tiny.qwen2, 2), (tiny.qwen2, 4), (one_head, 2), (FAMILIES["Phi-3"], 2), (FAMILIES["StarCoder2"], 2)],
    ids=[
        "Qwen2",
        "Qwen2 with shared KV heads",
        "Llama with one KV head",
        "fused layers",
        "biases after row-parallel layers",
    ],
)
def test_tensor_parallel_adapter_equals_the_full_adapter(config: Any, num_parts: int) -> None:
    for differences in on_ranks(num_parts, in_parts, config(), tp_size=num_parts, limit_s=LIMIT_S):
        assert not isinstance(differences, BaseException), differences
        assert max(differences.values()) <= TOLERANCE, max(differences, key=lambda name: differences[name])


def in_other_forms(ranks: Ranks) -> list[float]:
    """Return the differences between the gradients of recomputed or compiled layers and those of eager ones."""
    layers.COMPILER = "aot_eager"
    gradients_by_form = []
    forms: Sequence[Callable[[PreTrainedModel], None]] = (lambda _: None, layers.call_again, layers.compile_layers)
    for form in forms:
        model = whole_model(tiny.qwen2())
        divided = divide(model, filled(model, ranks).cuts, ranks.tp_group.process_group)
        form(model)
        gradients_by_form.append(computed(model, divided)[2])
    plain, *others = gradients_by_form
    return [difference(gradients[name], plain[name]) for gradients in others for name in plain]


@pytest.mark.slow
def test_layers_with_an_adapter_recompute_and_compile() -> None:
    for away in on_ranks(2, in_other_forms, tp_size=2, limit_s=LIMIT_S):
        assert len(away) == 2 * 28
        assert max(away) <= TOLERANCE


def learnt(ranks: Ranks, groups: Sequence[Group]) -> dict[str, Any]:
    """Train two steps in float32, in one process or with tensor parallelism."""
    model = base()
    adapter = filled(model, ranks)
    opened = OpenedModel(
        model=model, device=torch.device("cpu"), lr_factors=adapter.lr_factors(), cuts=adapter.cuts, open_s=0,
        weight_bytes=0,
    )  # fmt: skip
    learner = learners.made(config_of(**CHOICES, kl_coef=0.1), opened, ranks=ranks)
    figures = []
    for step in (1, 2):
        learner.take(groups, step=step)
        learner.prepare()
        learner.write()
        figures.append(learner.learnt())
    trained = {name: model.get_parameter(name).detach() for name in adapter.lr_factors()}
    if adapter.cuts:
        parts = Parts(cuts=adapter.cuts, tp_group=ranks.tp_group)
        parts.check_equal(trained)
        trained = {name: parts.whole(name, tensor) for name, tensor in trained.items()}
    return {"weights": {name: tensor.clone() for name, tensor in trained.items()}, "figures": figures}


def test_two_replicas_of_two_ranks_train_as_one_process() -> None:
    groups, model = made_by(base(seed=8)), base()
    alone, before = learnt(ALONE, groups), {n: model.get_parameter(n).detach() for n in filled(model).lr_factors()}
    results = on_ranks(4, learnt, groups, tp_size=2, limit_s=LIMIT_S)
    for mine in results:
        assert not isinstance(mine, BaseException), mine
        assert same(mine["weights"], results[0]["weights"]), "replicas differ"
        for name, weight in alone["weights"].items():
            moved = weight - before[name]
            assert (mine["weights"][name] - weight).norm() < 0.01 * moved.norm(), name
        for one, other in zip(mine["figures"], alone["figures"], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
            assert (one["tokens_trained"], one["updates"]) == (other["tokens_trained"], other["updates"])


def stored(folder: Path) -> tuple[dict[str, Tensor], Any]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def equal(one: Path, other: Path) -> bool:
    (ours, config), (theirs, expected) = stored(one), stored(other)
    return same(ours, theirs) and config == expected


def saved(ranks: Ranks, folder: Path) -> bool:
    """Save a new adapter and one with different values; return whether ranks load what a full adapter saved."""
    model = base()
    adapter = put_in(model, ranks)
    for name in ("new", "filled"):
        if ranks.is_rank_zero:
            (folder / f"{name} in parts").mkdir()
            adapter.save(folder / f"{name} in parts")
        else:
            adapter.send_parts()
        if name == "new":
            adapter.load(folder / "filled")
    expected, own = base(), adapter.cuts[ranks.tp_rank]
    filled(expected)
    pairs = [(model.get_parameter(n), own[n].of(expected.get_parameter(n))) for n in adapter.lr_factors()]
    return all(torch.equal(here, there) and here.is_contiguous() for here, there in pairs)


def test_ranks_start_save_and_load_as_one_process(tmp_path: Path) -> None:
    for name, adapter in (("new", put_in(base())), ("filled", filled(base()))):
        (tmp_path / name).mkdir()
        adapter.save(tmp_path / name)
    for outcome in on_ranks(2, saved, tmp_path, tp_size=2):
        assert outcome is True, outcome
    assert equal(tmp_path / "new", tmp_path / "new in parts")
    assert equal(tmp_path / "filled", tmp_path / "filled in parts")


def spoiled(ranks: Ranks, name: str, folder: Path) -> None:
    model = base()
    adapter = filled(model, ranks)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += ranks.rank
    adapter.save(folder) if ranks.is_rank_zero else adapter.send_parts()


@pytest.mark.parametrize("name", ["self_attn.q_proj.lora_A", "mlp.down_proj.lora_B"])
def test_ranks_with_unequal_shared_values_do_not_save(tmp_path: Path, name: str) -> None:
    for outcome in on_ranks(2, spoiled, f"model.layers.1.{name}.default.weight", tmp_path, tp_size=2):
        assert isinstance(outcome, RankError), outcome
        assert f"differ in model.layers.1.{name}" in outcome.message
    assert not [*tmp_path.iterdir()]


def shard(part: int) -> Shard:
    """Return the shard of one of a server's two ranks, with handles that are never opened."""
    model = base()
    cuts = vllm_cuts.cuts(model.config, {name: parameter.shape for name, parameter in model.named_parameters()}, 2)[
        part
    ]

    def handle(*shape: int) -> SharedMemoryHandle:
        return shared_memory_handle().model_copy(update={"shape": (1, 1, *shape)})

    views = {
        name: View(parameter=name, offset=0, shape=cut.part_shape, stride=(), whole=cut.shape, runs=cut.runs)
        for name, cut in cuts.items()
    }
    held = {name: cuts[f"{name}.weight"].part_shape for name in put_in(model).modules}
    slots = {
        name: LoraSlot(lora_a=handle(8, inputs), lora_b=handle(outputs, 8)) for name, (outputs, inputs) in held.items()
    }
    return Shard(rank=part, gpu_uuid=None, ipc_handles={}, param_mappings=views, padding={}, lora_slots=slots)


def test_saved_adapter_is_checked_against_full_shapes(tmp_path: Path) -> None:
    put_in(base()).save(tmp_path)
    for part in range(2):
        stored_tensors.check_adapter(tmp_path, shard(part))
    matrices = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    save_file({name: matrices[name][:, :128].contiguous()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"has shape \(8, 128\), its slot \(8, 256\)"):
        stored_tensors.check_adapter(tmp_path, shard(1))
