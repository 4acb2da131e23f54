"""The adapter itself: its output compared with PEFT's, what it saves and loads, and which parameters are trained."""

import copy
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AfmoeConfig, AutoModelForCausalLM, PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.optimizers.factory import scaled_group
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.offloaded_adamw import OffloadedAdamW
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.passes.preparation import recompute_activations
from bridge.passes.prepared_model import PreparedModel
from bridge.weights.adapter import Adapter
from tests.logged import nothing_logged
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.models.tiny import frozen_llama

SCALINGS = [(16.0, 8), (4.0, 8), (24.0, 8)]
"""alpha and r with a scaling of 2, 1/2 and 3, which is not a power of two."""
IDS = torch.arange(3, 19).view(2, 8)


def put_in(model: PreTrainedModel, **choices: Any) -> Adapter:
    fixed = {"model_name": "tiny", "mode": "lora_only", "lora_r": 8, "lora_alpha": 16.0}
    config = TrainConfig.model_validate(fixed | choices)
    return Adapter(model, config.lora, seed=config.seed, base_name=config.model_name)


def fill(adapter: Adapter, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrices in adapter.modules.values():
            for matrix in (matrices.lora_a, matrices.lora_b):
                matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.1)


def values(adapter: Adapter) -> dict[str, Tensor]:
    return {
        f"{name}.{side}": matrix.detach().clone()
        for name, matrices in adapter.modules.items()
        for side, matrix in (("a", matrices.lora_a), ("b", matrices.lora_b))
    }


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def saved(adapter: Adapter, folder: Path) -> Path:
    folder.mkdir()
    adapter.save(folder)
    return folder


def plain_peft(model: PreTrainedModel, folder: Path) -> Any:
    return PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)


@pytest.mark.parametrize(("alpha", "rank"), SCALINGS)
def test_saved_adapter_computes_the_same_in_peft(tmp_path: Path, alpha: float, rank: int) -> None:
    model, alone = frozen_llama(), frozen_llama()
    adapter = put_in(model, lora_alpha=alpha, lora_r=rank)
    without = alone(IDS).logits
    assert torch.equal(model(IDS).logits, without)  # B is zero
    fill(adapter)
    ours = model(IDS).logits
    theirs = plain_peft(alone, saved(adapter, tmp_path / "adapter"))(IDS).logits
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert (ours - without).abs().max() > 100 * (ours - theirs).abs().max()


@pytest.mark.parametrize("alpha", [16.0, 4.0])
def test_power_of_two_scaling_is_bit_exact_in_bf16(tmp_path: Path, alpha: float) -> None:
    model = frozen_llama(torch.bfloat16)
    adapter = put_in(model, lora_alpha=alpha)
    fill(adapter)
    theirs = plain_peft(frozen_llama(torch.bfloat16), saved(adapter, tmp_path / "adapter"))
    assert torch.equal(model(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize(
    ("dtype", "alpha", "stored"),
    [
        (torch.bfloat16, 16.0, torch.bfloat16),
        (torch.bfloat16, 24.0, torch.float32),
        (torch.float32, 4.0, torch.float32),
        (torch.float32, 24.0, torch.float64),
    ],
)
def test_b_is_saved_in_a_wider_dtype_if_needed(
    tmp_path: Path, dtype: torch.dtype, alpha: float, stored: torch.dtype
) -> None:
    adapter = put_in(frozen_llama(dtype), lora_alpha=alpha)
    tensors = load_file(saved(adapter, tmp_path / "adapter") / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(adapter.modules) == 28
    assert {tensor.dtype for name, tensor in tensors.items() if "lora_B" in name} == {stored}
    assert {tensor.dtype for name, tensor in tensors.items() if "lora_A" in name} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [16.0, 4.0, 24.0, 7.0, 80.0])
def test_saving_and_loading_keeps_every_bit(tmp_path: Path, dtype: torch.dtype, alpha: float) -> None:
    adapter = put_in(frozen_llama(dtype), lora_alpha=alpha)
    fill(adapter)
    before, addresses = values(adapter), [m.lora_b.data_ptr() for m in adapter.modules.values()]
    folder = saved(adapter, tmp_path / "adapter")
    fill(adapter, seed=1)
    assert not equal(values(adapter), before)
    adapter.check(folder)
    adapter.load(folder)
    assert equal(values(adapter), before)
    assert [m.lora_b.data_ptr() for m in adapter.modules.values()] == addresses


def test_saved_config_names_the_base_and_standard_lora(tmp_path: Path) -> None:
    folder = saved(put_in(frozen_llama()), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, 16.0, "tiny")
    assert not any(config[extra] for extra in ("use_dora", "use_rslora", "modules_to_save"))
    assert config["bias"] == "none"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_rslora", True),
        ("alpha_pattern", {"q_proj": 64}),
        ("rank_pattern", {"q_proj": 8}),
        ("use_dora", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa_niter_4"),
        ("alora_invocation_tokens", [3, 4]),
    ],
)
def test_saved_adapter_beyond_plain_lora_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    adapter = put_in(frozen_llama())
    path = saved(adapter, tmp_path / "adapter") / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    fill(adapter)
    before = values(adapter)
    with pytest.raises(UsageError, match=rf"has {name} .*, expected plain LoRA"):
        adapter.load(path.parent)
    assert equal(values(adapter), before)


def test_adapter_scaled_by_the_roots_inverse_loads_as_plain_lora(tmp_path: Path) -> None:
    model = frozen_llama()
    peft_model = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
        expected = peft_model.eval()(IDS).logits
    peft_model.save_pretrained(str(tmp_path / "theirs"))
    adapter = put_in(frozen_llama(), lora_alpha=16 * math.sqrt(8))
    with pytest.raises(UsageError) as caught:
        adapter.load(tmp_path / "theirs")
    alpha = re.search(r'"lora_alpha": ([\d.]+) ', caught.value.hint)
    assert alpha is not None
    path = tmp_path / "theirs" / "adapter_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "use_rslora": False, "lora_alpha": float(alpha.group(1))})
    )
    adapter = put_in(frozen_llama(), lora_alpha=float(alpha.group(1)))
    adapter.load(tmp_path / "theirs")
    assert torch.allclose(adapter.peft_model(IDS).logits, expected, atol=1e-4)


def test_saving_and_loading_do_not_contact_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_if_called(*_: Any, **__: Any) -> bool:
        raise AssertionError("the hub was contacted")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", fail_if_called)
    adapter = put_in(frozen_llama())
    adapter.load(saved(adapter, tmp_path / "adapter"))


def test_only_the_adapter_requires_gradients() -> None:
    model = frozen_llama()
    adapter = put_in(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == adapter.lr_factors().keys()
    assert {adapter.lr_factors()[name] for name in trained if "lora_A" in name} == {1.0}
    assert {adapter.lr_factors()[name] for name in trained if "lora_B" in name} == {2.0}
    ours = {id(matrix) for m in adapter.modules.values() for matrix in (m.lora_a, m.lora_b)}
    assert {id(model.get_parameter(name)) for name in trained} == ours
    assert adapter.num_bytes() == sum(model.get_parameter(name).nbytes for name in trained)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_a_and_b_of_every_module(checkpointing: bool) -> None:
    model = frozen_llama()
    adapter = put_in(model)
    fill(adapter)
    if checkpointing:
        with nothing_logged():
            recompute_activations(PreparedModel(model))
    model(IDS).logits.float().square().mean().backward()
    assert all(m.lora_a.grad is not None and m.lora_a.grad.any() for m in adapter.modules.values())
    assert all(m.lora_b.grad is not None and m.lora_b.grad.any() for m in adapter.modules.values())


def test_initial_adapter_depends_only_on_the_seed() -> None:
    torch.manual_seed(1)
    first = values(put_in(frozen_llama(), seed=3))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    model = frozen_llama()
    torch.set_rng_state(state)
    repeated = values(put_in(model, seed=3))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is untouched
    assert equal(first, repeated)
    assert not equal(first, values(put_in(frozen_llama(), seed=4)))


def test_dropout_applies_only_to_the_adapters_input() -> None:
    model = frozen_llama()
    adapter = put_in(model, lora_dropout=0.5)
    without = model(IDS).logits
    assert torch.equal(
        model(IDS).logits, without
    )  # B is zero: the adapter's dropout has no effect, and the base has none
    fill(adapter)
    assert not torch.equal(model(IDS).logits, model(IDS).logits)
    assert {name for name, module in model.named_modules() if module.training and "lora_dropout" not in name} == set()


def test_model_without_dropout_is_deterministic() -> None:
    model = frozen_llama()
    fill(put_in(model))
    assert torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("make", [SplitMasterAdamW, OffloadedAdamW])
@pytest.mark.parametrize(("alpha", "rank"), SCALINGS)
def test_training_matches_adamw_on_the_saved_adapter(
    tmp_path: Path, alpha: float, rank: int, make: Callable[..., InPlaceOptimizer]
) -> None:
    model, lr, decay, max_norm = frozen_llama(), 1e-2, 0.1, 0.02
    adapter = put_in(model, lora_alpha=alpha, lora_r=rank)
    fill(adapter)
    plain = PeftModel.from_pretrained(
        frozen_llama(), str(saved(adapter, tmp_path / "before")), is_trainable=True
    ).eval()
    theirs = {name.removeprefix("base_model.model."): parameter for name, parameter in plain.named_parameters()}
    ours = {name: (model.get_parameter(name), factor) for name, factor in adapter.lr_factors().items()}
    optimizers = (
        make(scaled_group(held, factor, lr=lr, weight_decay=decay) for held, factor in ours.values()),
        torch.optim.AdamW([theirs[name] for name in ours], lr=lr, weight_decay=decay),
    )
    clipped = []
    for step, size in enumerate((1.0, 1e-3, 30.0)):  # one common factor on all gradients would not change AdamW's steps
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            (size * one(IDS).logits.square().mean()).backward()
        for name, (held, factor) in ours.items():
            expected = theirs[name].grad
            assert expected is not None
            assert held.grad is not None
            assert torch.allclose(held.grad * factor, expected, atol=1e-3 * expected.abs().max().item()), (step, name)
            held.grad.copy_(expected / factor)  # otherwise Adam amplifies the sign of a rounding error
        norm = float(nn.utils.clip_grad_norm_([theirs[name] for name in ours], max_norm))
        assert optimizers[0].global_norm() == pytest.approx(norm, rel=1e-5)
        optimizers[0].step(grad_norm=optimizers[0].global_norm(), max_norm=max_norm)
        optimizers[1].step()
        clipped.append(norm > max_norm)
    assert clipped == [True, False, True]
    after = load_file(saved(adapter, tmp_path / "after") / "adapter_model.safetensors")
    before = load_file(tmp_path / "before" / "adapter_model.safetensors")
    for name, tensor in after.items():
        expected = theirs[name.removeprefix("base_model.model.").replace(".weight", ".default.weight")]
        assert torch.allclose(tensor.float(), expected, atol=1e-6), name
        assert (tensor - before[name]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ("query", "query"),
        ("q_proj,query", "query"),
        ("embed_tokens", "embed_tokens"),
        ("self_attn", "self_attn"),
        ("", ""),
        ("proj", "proj"),
    ],
)
def test_unknown_target_module_is_refused(wanted: str, named: str) -> None:
    with pytest.raises(UsageError, match=f"--lora-target-modules {named}: ") as caught:
        put_in(frozen_llama(), lora_target_modules=wanted)
    assert "choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in caught.value.hint


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wanted", ["lm_head", "q_proj,lm_head"])
def test_adapter_for_the_head_is_refused(wanted: str, tied: bool) -> None:
    config = tiny.llama()
    config.tie_word_embeddings = tied
    with pytest.raises(UsageError, match="--lora-target-modules lm_head: the head gets no adapter") as caught:
        put_in(AutoModelForCausalLM.from_config(config), lora_target_modules=wanted)
    assert "lm_head" not in caught.value.hint


def test_modules_that_peft_cannot_adapt_are_refused() -> None:
    """For example, the shared expert's layers in Qwen3-Next: PEFT treats their names as those of stacked experts."""
    model = AutoModelForCausalLM.from_config(FAMILIES["Qwen3-Next"]())
    with pytest.raises(UsageError, match="--lora-target-modules q_proj,gate_proj: "):
        put_in(model, lora_target_modules="q_proj,gate_proj")


@pytest.mark.parametrize("wanted", ["gate_proj,up_proj,down_proj", "layers.0.mlp.down_proj"])
def test_dense_layer_is_not_mistaken_for_stacked_experts(wanted: str) -> None:
    """DeepSeek's first layer is a dense one, but PEFT treats its name as that of every layer's stacked experts."""
    model = AutoModelForCausalLM.from_config(FAMILIES["DeepSeek-V3"]())
    with pytest.raises(UsageError, match=f"--lora-target-modules {wanted}: .*experts"):
        put_in(model, lora_target_modules=wanted)


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen3-Next"])
def test_all_linear_excludes_expert_layers(family: str) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = put_in(model, lora_target_modules="all-linear").modules.keys()
    others = ("lm_head", "gate_proj", "up_proj", "down_proj", "shared_expert_gate")
    assert adapted == {name for name in names if not name.endswith(others)}


def test_linear_router_gets_no_adapter() -> None:
    """PEFT treats the name of AFMoE's router as that of a stacked router, and refuses it."""
    config = AfmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        num_dense_layers=1, num_shared_experts=1,
    )  # fmt: skip
    adapted = put_in(AutoModelForCausalLM.from_config(config), lora_target_modules="all-linear").modules.keys()
    layers = [f"model.layers.{number}.self_attn" for number in range(2)]
    assert adapted == {f"{layer}.{name}_proj" for layer in layers for name in "qkvo"}


def test_only_chosen_modules_get_an_adapter() -> None:
    adapter = put_in(frozen_llama(), lora_target_modules="q_proj, layers.1.mlp.down_proj")
    assert adapter.modules.keys() == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    }


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"lora_r": 4, "lora_alpha": 8.0}, "rank 4, alpha 8"),
        ({"lora_alpha": 32.0}, "alpha 32"),
        ({"lora_target_modules": "q_proj"}, "matrices differ"),
    ],
)
def test_mismatched_adapter_is_refused_without_copying(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    adapter = put_in(frozen_llama())
    folder = saved(put_in(frozen_llama(), **other), tmp_path / "other")
    before = values(adapter)
    for take in (adapter.check, adapter.load):
        with pytest.raises(UsageError, match=words) as caught:
            take(folder)
        assert f"--lora-r {other.get('lora_r', 8)} " in caught.value.hint
    assert equal(values(adapter), before)


def cut_short(folder: Path) -> None:
    os.truncate(folder / "adapter_model.safetensors", 1000)


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def bent_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


@pytest.mark.parametrize("damage", [cut_short, without_weights, without_config, bent_config])
def test_damaged_adapter_is_refused_without_copying(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    adapter = put_in(frozen_llama())
    folder = saved(adapter, tmp_path / "adapter")
    before = copy.deepcopy(values(adapter))
    damage(folder)
    with pytest.raises(UsageError, match=r"adapter"):
        adapter.load(folder)
    assert equal(values(adapter), before)


def test_saving_neither_overflows_nor_underflows(tmp_path: Path) -> None:
    adapter = put_in(frozen_llama(torch.bfloat16), lora_alpha=24.0)
    with torch.no_grad():
        for matrices in adapter.modules.values():
            matrices.lora_b.fill_(math.ldexp(1.0, -100))
    before = values(adapter)
    adapter.load(saved(adapter, tmp_path / "adapter"))
    assert equal(values(adapter), before)


def test_gradient_checkpointing_keeps_the_adapters_dropout() -> None:
    model = frozen_llama()
    put_in(model, lora_dropout=0.25)
    with nothing_logged():
        recompute_activations(PreparedModel(model))
    rates = {
        module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout) and "lora" in name
    }
    assert rates == {0.25}
    assert all(module.p == 0.0 for n, module in model.named_modules() if n.endswith("dropout") and hasattr(module, "p"))
