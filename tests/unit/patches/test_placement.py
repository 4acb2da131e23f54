"""LoRA slots in toy layers: matched to modules, moved into shared memory, watched and exported."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bridge.server.manifest import Shard, View
from bridge.weights import shared_memory
from bridge_patches import placement
from tests.unit.patches.test_loading import HIDDEN, SHAPES, vllm, with_lora, worker  # noqa: F401

# The fixture and the fakes of vLLM's layers; pytest finds a fixture by its imported name.
from tests.unit.weights.test_layout import rows

SLOTS, RANK = 2, 3
HEAD_ROWS, VOCABULARY = 4, 11


def views() -> dict[str, View]:
    """Views of the parameters, by vLLM's names without LoRA."""
    shapes: dict[str, tuple[str, int]] = {
        "attn.q_proj.weight": ("attn.qkv_proj.weight", 0),
        "attn.k_proj.weight": ("attn.qkv_proj.weight", 16),
        "attn.v_proj.weight": ("attn.qkv_proj.weight", 20),
        "attn.q_proj.bias": ("attn.qkv_proj.bias", 0),
        "mlp.up_proj.weight": ("mlp.gate_up_proj.weight", 12),
        "mlp.gate_proj.weight": ("mlp.gate_up_proj.weight", 0),
        "mlp.down_proj.weight": ("mlp.down_proj.weight", 0),
        "embed.weight": ("embed.weight", 0),
        "norm.weight": ("norm.weight", 0),
    }
    return {
        name: rows(parameter, (99, *SHAPES[name][1:]), start, SHAPES[name][0])
        for name, (parameter, start) in shapes.items()
    }


def slots(outputs: int, inputs: int, *, rank: int = RANK) -> tuple[Tensor, Tensor]:
    return torch.randn(SLOTS, 1, rank, inputs).bfloat16(), torch.randn(SLOTS, 1, outputs, rank).bfloat16()


def stack(layer: Any, *pairs: tuple[Tensor, Tensor]) -> Any:
    layer.lora_a_stacked, layer.lora_b_stacked = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    return layer


def test_experts_get_slots_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class MoERunner(nn.Module):
        """Stands in for vLLM's experts layer."""

    fused_moe = SimpleNamespace(MoERunner=MoERunner)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.runner.moe_runner", fused_moe)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(1, 1), "experts": MoERunner()})})
    assert placement._without_experts(lambda _: ["experts", "gate"], model) == ["gate"]
    for value, supported in (("0", ["gate"]), ("1", ["experts", "gate"])):
        monkeypatch.setenv(placement.EXPERT_SLOTS, value)
        assert placement._without_experts(lambda _: ["experts", "gate"], model) == supported


def test_experts_whose_gate_and_up_share_a_slot_are_left_out() -> None:
    """For example, vLLM's layer for checkpoints with stacked experts."""
    model: Any = nn.Module()
    layer, sides = SimpleNamespace(), {side: (torch.zeros(SLOTS, 4, RANK, HIDDEN),) for side in ("w13", "w2")}
    for side, stacks in sides.items():
        setattr(layer, f"{side}_lora_a_stacked", stacks)
        setattr(layer, f"{side}_lora_b_stacked", stacks)
    model.lora_manager = SimpleNamespace(modules={"mlp.experts": layer})
    assert (
        placement.lora_slots(model, {"mlp.experts.down_proj": rows("mlp.experts.w2_weight", (4, HIDDEN), 0, 4)}) == {}
    )
    assert len(placement.slot_tensors(model)) == 4


def model_with_slots() -> Any:
    """Return a model as vLLM leaves it: wrapped layers, their slots, and the manager that lists them by name."""
    model = with_lora()
    qkv, gate_up = model.attn["qkv_proj"], model.mlp["gate_up_proj"]
    embed = model.embed
    embed.lora_a_stacked = torch.zeros(SLOTS, VOCABULARY, RANK)
    embed.lora_a_stacked_2d = embed.lora_a_stacked.view(SLOTS * VOCABULARY, RANK)
    embed.lora_b_stacked = torch.zeros(SLOTS, 1, HIDDEN, RANK)
    model.lora_manager = SimpleNamespace(
        modules={
            "attn.qkv_proj": stack(qkv, slots(16, HIDDEN), slots(4, HIDDEN), slots(4, HIDDEN)),
            "mlp.gate_up_proj": stack(gate_up, slots(12, HIDDEN), slots(12, HIDDEN)),
            "mlp.down_proj": stack(model.mlp["down_proj"], slots(HIDDEN, 12)),
            "embed": embed,
        }
    )
    return model


def test_each_slice_of_a_fused_layer_serves_its_own_module() -> None:
    model = model_with_slots()
    slots = placement.lora_slots(model, views())
    qkv, gate_up = model.attn["qkv_proj"], model.mlp["gate_up_proj"]
    assert {name: (id(a), id(b)) for name, (a, b) in slots.items()} == {
        f"{block}.{name}": (id(layer.lora_a_stacked[index]), id(layer.lora_b_stacked[index]))
        for block, name, layer, index in (
            ("attn", "q_proj", qkv, 0),
            ("attn", "k_proj", qkv, 1),
            ("attn", "v_proj", qkv, 2),
            ("mlp", "gate_proj", gate_up, 0),
            ("mlp", "up_proj", gate_up, 1),
            ("mlp", "down_proj", model.mlp["down_proj"], 0),
        )
    }


def test_head_uses_the_slots_of_its_logits_processor() -> None:
    model: Any = nn.Module()
    processor = SimpleNamespace()
    processor.lora_a_stacked, processor.lora_b_stacked = slots(VOCABULARY, HIDDEN)
    model.lora_manager = SimpleNamespace(modules={"lm_head": processor})
    lora_slots = placement.lora_slots(model, {"lm_head.weight": rows("lm_head.weight", (16, HIDDEN), 0, VOCABULARY)})
    assert lora_slots["lm_head"][0] is processor.lora_a_stacked
    assert lora_slots["lm_head"][1] is processor.lora_b_stacked


@pytest.mark.parametrize(
    "pairs",
    [
        [
            (slots(16, HIDDEN)[0], slots(16, HIDDEN, rank=2 * RANK)[1])
        ],  # fully sharded: A has only part of the LoRA rank
        [slots(8, HIDDEN)],  # B is split, but the weight is not
        [slots(16, HIDDEN // 2)],  # A is split, but the weight is not
        [slots(16, HIDDEN), slots(16, HIDDEN)],  # two slices for a single weight
        [(torch.zeros(SLOTS, 8, RANK, HIDDEN), torch.zeros(SLOTS, 8, 16, RANK))],  # experts
        [(torch.zeros(SLOTS, 1, HIDDEN, RANK).transpose(2, 3), slots(16, HIDDEN)[1])],
        [],
    ],
)
def test_slots_with_unsupported_layouts_are_left_out(pairs: list[tuple[Tensor, Tensor]]) -> None:
    model: Any = nn.Module()
    model.lora_manager = SimpleNamespace(modules={"proj": stack(SimpleNamespace(), *pairs)})
    assert placement.lora_slots(model, {"proj.weight": rows("proj.weight", (16, HIDDEN), 0, 16)}) == {}


def test_partial_fused_adapter_is_left_out() -> None:
    model = model_with_slots()
    alone = {"q.weight": rows("attn.qkv_proj.weight", (24, HIDDEN), 0, 16)}
    assert placement.lora_slots(model, alone) == {}


def test_model_without_lora_has_no_slots() -> None:
    assert placement.slot_tensors(nn.Linear(2, 2)) == {}
    assert placement.lora_slots(nn.Linear(2, 2), views()) == {}


def test_slots_move_with_the_weights_as_the_same_objects() -> None:
    model = model_with_slots()
    before = {name: (tensor, tensor.clone()) for name, tensor in placement.slot_tensors(model).items()}
    table, tuples = model.embed.lora_a_stacked, model.attn["qkv_proj"].lora_b_stacked
    placement._move_to_shared_memory(model)
    block = placement.shared_block(model)
    assert block is not None
    start, end = block.storage.data_ptr(), block.storage.data_ptr() + block.storage.nbytes()
    after = placement.slot_tensors(model)
    assert len(after) == 2 * 6 + 1
    for name, (tensor, values) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, values)
        assert start <= tensor.data_ptr() < end
        assert (tensor.data_ptr() - start) % shared_memory.ALIGNMENT_BYTES == 0
    assert model.attn["qkv_proj"].lora_b_stacked is tuples
    assert table.data_ptr() == model.embed.lora_a_stacked_2d.data_ptr()  # vLLM's second view still sees it


def test_moved_or_deleted_slot_is_detected() -> None:
    model = model_with_slots()
    addresses = placement.Addresses(model)
    model.mlp["down_proj"].lora_a_stacked[0][1] = 5
    assert addresses.moved() == []
    model.mlp["down_proj"].lora_a_stacked = (model.mlp["down_proj"].lora_a_stacked[0].clone(),)
    assert addresses.moved() == ["mlp.down_proj.lora_a_stacked.0"]
    del model.lora_manager.modules["mlp.gate_up_proj"]
    assert len(addresses.moved()) == 1 + 4


@pytest.mark.usefixtures("vllm")
def test_worker_exports_slots_that_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_slots()
    placement._move_to_shared_memory(model)
    shard = Shard.model_validate_json(worker(model, monkeypatch).bridge_export())
    assert shard.lora_slots.keys() == {name.removesuffix(".weight") for name in SHAPES if "_proj.weight" in name}
    handle: Any = shard.lora_slots["attn.v_proj"].lora_b
    storage = shared_memory.open_storage(handle.path, handle.storage_size)
    theirs = torch.empty(0, dtype=torch.bfloat16).set_(storage, handle.tensor_offset, handle.shape, handle.stride)
    assert torch.equal(theirs, model.attn["qkv_proj"].lora_b_stacked[2])
    theirs[1, 0, 2] = 7
    assert (model.attn["qkv_proj"].lora_b_stacked[2][1, 0, 2] == 7).all()


def test_slots_of_a_rank_match_its_weight_shard() -> None:
    """The second of two ranks has half the outputs of column-parallel and half the inputs of row-parallel layers."""
    model: Any = nn.Module()
    column, row = slots(8, HIDDEN), slots(HIDDEN, 6)
    sharded = row[0], row[1][:, :, : HIDDEN // 2].contiguous()
    parts = {
        "up": View(
            parameter="up.weight",
            offset=0,
            shape=(8, HIDDEN),
            stride=(HIDDEN, 1),
            whole=(16, HIDDEN),
            runs=(((8, 8),), ((0, HIDDEN),)),
        ),
        "down": View(
            parameter="down.weight",
            offset=0,
            shape=(HIDDEN, 6),
            stride=(6, 1),
            whole=(HIDDEN, 12),
            runs=(((0, HIDDEN),), ((6, 6),)),
        ),
    }
    for down in (row, sharded):
        layers = {"up": stack(SimpleNamespace(), column), "down": stack(SimpleNamespace(), down)}
        model.lora_manager = SimpleNamespace(modules=layers)
        lora_slots = placement.lora_slots(model, {f"{name}.weight": view for name, view in parts.items()})
        assert lora_slots.keys() == ({"up", "down"} if down is row else {"up"})
        assert lora_slots["up"] == column


def test_worker_reports_the_slot_of_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(model_with_slots(), monkeypatch)
    manager = SimpleNamespace(lora_index_to_id=[None, 7])
    made.model_runner.lora_manager = SimpleNamespace(_adapter_manager=manager)
    assert made.bridge_adapter_slot(7) == 1
    assert made.bridge_adapter_slot(8) is None
