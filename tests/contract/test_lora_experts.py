"""An adapter of routed experts that Bridge saves and vLLM's own code loads fills vLLM's slots with the trained values.

Not covered: vLLM's kernels, which need a GPU (`tests/gpu/test_lora_only.py`).
"""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bridge.weights.adapter import Adapter
from bridge_patches import placement
from tests.unit.weights.test_adapter import fill, put_in, saved
from tests.unit.weights.test_experts import NUM_EXPERTS, NUM_LAYERS, base
from tests.unit.weights.test_layout import rows

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM is installed")

RANK, SLOT = 8, 1
PATHS = [f"model.layers.{layer}.mlp.experts" for layer in range(NUM_LAYERS)]


def slots_of(hidden: int, width: int) -> Any:
    """Return vLLM's layer with slots but no kernel, with the attributes set that its constructor reads."""
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA

    layer: Any = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(
        hidden_dim=hidden, num_local_experts=NUM_EXPERTS, num_experts=NUM_EXPERTS,
        intermediate_size_per_partition=width, intermediate_size_per_partition_unpadded=width,
        moe_parallel_config=SimpleNamespace(use_ep=False, ep_rank=0),
    )  # fmt: skip
    layer.tp_size, layer.tp_rank, layer.device, layer._w13_slices = 1, 0, torch.device("cpu"), 2
    settings = SimpleNamespace(
        max_loras=2, max_lora_rank=RANK, lora_dtype=torch.float32, fully_sharded_loras=False,
        enable_moe_shared_loras=False,
    )  # fmt: skip
    layer.create_lora_weights(2, settings)
    return layer


def manager_of(modules: dict[str, Any], supported: list[str]) -> Any:
    """Return vLLM's adapter manager, for experts layers only."""
    from vllm.lora.model_manager import LoRAModelManager

    manager: Any = LoRAModelManager.__new__(LoRAModelManager)
    names = [f"experts.{e}.{name}" for e in range(NUM_EXPERTS) for name in ("gate_proj", "down_proj", "up_proj")]
    manager.modules, manager.supported_lora_modules = modules, supported
    manager.packed_modules_mapping = {"experts": names}
    manager.packed_modules = {}
    for path in modules:
        manager._register_packed_modules(path)
    manager.is_pooling_model = manager._enable_moe_shared_loras = manager._is_non_gated_moe = False
    manager._enable_mixed_moe_lora_format = manager._use_ep = False
    return manager


def loaded(manager: Any, folder: Path) -> Any:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    expected, settings = (
        {*manager.packed_modules_mapping["experts"], "experts"},
        PEFTHelper.from_local_dir(str(folder), 64),
    )
    adapter = LoRAModel.from_local_checkpoint(
        str(folder), expected, settings, lora_model_id=1, device="cpu", dtype=torch.float32,
    )  # fmt: skip
    manager._create_merged_loras_inplace(adapter)
    return adapter


def served(folder: Path) -> tuple[Adapter, Any]:
    """Return an adapter of experts, and a vLLM model into whose slot vLLM has loaded it."""
    model = base()
    adapter = put_in(model, lora_target_modules="experts", lora_r=RANK, lora_alpha=24.0)
    fill(adapter)
    modules = {path: slots_of(model.config.hidden_size, model.config.moe_intermediate_size) for path in PATHS}
    manager = manager_of(modules, ["experts"])
    weights = loaded(manager, saved(adapter, folder))
    for path, layer in modules.items():
        packed = weights.get_lora(path)
        layer.set_lora(SLOT, packed.lora_a, packed.lora_b)
    return adapter, SimpleNamespace(lora_manager=manager)


@pytest.mark.parametrize("inside", ["", "routed_experts."])
def test_vllm_fills_its_slots_with_the_trained_adapter(tmp_path: Path, inside: str) -> None:
    adapter, model = served(tmp_path / "adapter")
    views = {
        f"{path}.{name}": rows(f"{path}.{inside}{theirs}", (1, 1), 0, 1)
        for path in PATHS
        for name, theirs in (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight"))
    }
    slots = placement.lora_slots(model, views)
    assert slots.keys() == adapter.modules.keys()
    assert len(slots) == NUM_LAYERS * 3
    for name, (a, b) in slots.items():
        own = adapter.modules[name]
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert a[SLOT].shape == own.lora_a.shape
        assert torch.allclose(a[SLOT], own.lora_a)
        assert torch.allclose(b[SLOT], own.lora_b, rtol=1e-6)  # divided by 3 and multiplied again
        assert not a[0].any()
    assert len(placement.slot_tensors(model)) == NUM_LAYERS * 6


def test_vllms_kernels_read_the_exported_tensors(tmp_path: Path) -> None:
    _, model = served(tmp_path / "adapter")
    layer = model.lora_manager.modules[PATHS[0]]
    layer.moe_config.experts_per_token = 2
    layer.punica_wrapper = layer._lora_stream = None
    layer._enable_aux_cuda_stream = False
    context, exported = layer._build_lora_context(), placement.slot_tensors(model)
    assert context.adapter_enabled[SLOT]
    for side in ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked"):
        for index, tensor in enumerate(getattr(context, side)):
            assert exported[f"{PATHS[0]}.{side}.{index}"] is tensor


def test_saved_settings_use_pefts_names(tmp_path: Path) -> None:
    adapter = put_in(base(), lora_target_modules="experts")
    settings = json.loads((saved(adapter, tmp_path / "adapter") / "adapter_config.json").read_text())
    assert set(settings["target_modules"]) == {"gate_proj", "up_proj", "down_proj"}
    assert not settings["target_parameters"]
