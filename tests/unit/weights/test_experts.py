"""The adapter of routed experts, compared with a simple loop over experts, and how PEFT and vLLM read it once saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bridge.engine.reference import adapter_off
from bridge.errors import UsageError
from bridge.passes.routing import RouterReplay
from tests.models.families import FAMILIES
from tests.unit.weights.test_adapter import equal, fill, plain_peft, put_in, saved, values

IDS = torch.arange(3, 35).view(2, 16)
BOTH = "all-linear,experts"
NUM_LAYERS, NUM_EXPERTS = 2, 4
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def base(family: str = "Qwen3-MoE", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(7)
    config = FAMILIES[family]()
    config.initializer_range = 0.08
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def by_a_loop(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute a layer one expert and one token at a time."""
    rows = []
    for token, hidden_H in enumerate(hidden_TH):
        row = torch.zeros_like(hidden_H)
        for route, expert in enumerate(chosen_TK[token].tolist()):
            gate, up, down = (
                (experts.lora[name].lora_A.default.weight[expert], experts.lora[name].lora_B.default.weight[expert])
                for name in PROJECTIONS
            )
            gate_I, up_I = linear(hidden_H, experts.gate_up_proj[expert]).chunk(2)
            inner_I = experts.act_fn(gate_I + gate[1] @ (gate[0] @ hidden_H)) * (up_I + up[1] @ (up[0] @ hidden_H))
            outer_H = experts.down_proj[expert] @ inner_I + down[1] @ (down[0] @ inner_I)
            row = row + weights_TK[token, route] * outer_H
        rows.append(row)
    return torch.stack(rows)


def layer(num_tokens: int = 12) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    """Return a layer's experts with an adapter, and inputs for which one expert gets no token."""
    model = base()
    fill(put_in(model, lora_target_modules=BOTH))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, model.config.hidden_size, generator=generator)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=generator)[:2] for _ in range(num_tokens)])
    weights = torch.rand(chosen.shape, generator=generator)
    return model.get_submodule("model.layers.0.mlp.experts"), (hidden, chosen, weights)


def test_output_and_gradients_equal_a_loop_over_experts() -> None:
    experts, (hidden, chosen, weights) = layer()
    leaves = [*experts.get_submodule("lora").parameters(), hidden.requires_grad_(), weights.requires_grad_()]
    assert len(leaves) == 2 * len(PROJECTIONS) + 2
    ours, theirs = experts(hidden, chosen, weights), by_a_loop(experts, hidden, chosen, weights)
    assert torch.allclose(ours, theirs, atol=1e-5)
    for own, other in zip(
        torch.autograd.grad(ours.sin().sum(), leaves), torch.autograd.grad(theirs.sin().sum(), leaves), strict=True
    ):
        assert own.abs().max() > 1e-2
        assert (own - other).abs().max() < 1e-5 * other.abs().max()


def test_expert_adapter_keeps_no_weight_sized_tensor() -> None:
    experts, inputs = layer()
    addresses = {parameter.data_ptr() for parameter in experts.parameters()}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in addresses:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(*inputs).sum().backward()
    assert 0 < max(kept) < experts.down_proj.numel()  # type: ignore[operator]


def test_new_adapter_is_neutral_and_can_be_disabled() -> None:
    model, alone = base(), base()
    without = alone(IDS).logits
    adapter = put_in(model, lora_target_modules=BOTH)
    assert torch.allclose(model(IDS).logits, without, atol=1e-6)
    fill(adapter)
    assert (model(IDS).logits - without).abs().max() > 0.1
    with adapter_off(model):
        assert torch.equal(model(IDS).logits, without)
    assert all(model.get_parameter(name).requires_grad for name in adapter.lr_factors())


@pytest.mark.parametrize(
    ("family", "names", "alpha"),
    [
        ("Qwen3-MoE", BOTH, 16.0), ("Qwen3-MoE", "experts", 24.0), ("Qwen3-Next", BOTH, 16.0),
        ("DeepSeek-V2-Lite", BOTH, 16.0), ("DeepSeek-V3", BOTH, 24.0), ("GLM-4.5", BOTH, 16.0),
    ],
)  # fmt: skip
def test_saved_adapter_computes_the_same_in_peft(tmp_path: Path, family: str, names: str, alpha: float) -> None:
    model, alone = base(family), base(family)
    without = alone(IDS).logits
    adapter = put_in(model, lora_target_modules=names, lora_alpha=alpha)
    fill(adapter)
    ours = model(IDS).logits
    theirs = plain_peft(alone, saved(adapter, tmp_path / "adapter"))(IDS).logits
    assert (ours - theirs).abs().max() < 1e-2 * (ours - without).abs().max()


def test_each_expert_is_saved_separately_as_vllm_expects(tmp_path: Path) -> None:
    adapter = put_in(base(), lora_target_modules="q_proj,experts")
    fill(adapter)
    tensors = load_file(saved(adapter, tmp_path / "adapter") / "adapter_model.safetensors")
    names = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{side}.weight"
        for layer in range(NUM_LAYERS)
        for expert in range(NUM_EXPERTS)
        for name in PROJECTIONS
        for side in "AB"
    }
    assert {name for name in tensors if ".experts." in name} == names
    assert len(tensors) == len(names) + NUM_LAYERS * 2
    stacked = adapter.modules["model.layers.1.mlp.experts.lora.up_proj"]
    third = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
    assert torch.equal(tensors[f"{third}.lora_A.weight"], stacked.lora_a[2])
    assert torch.equal(tensors[f"{third}.lora_B.weight"] * 2, stacked.lora_b[2])


def test_saved_adapter_loads_bit_identically(tmp_path: Path) -> None:
    adapter, other = (put_in(base(), lora_target_modules=BOTH) for _ in range(2))
    fill(adapter)
    folder = saved(adapter, tmp_path / "adapter")
    other.load(folder)
    assert equal(values(other), values(adapter))
    with pytest.raises(UsageError, match="contains a different adapter"):
        put_in(base(), lora_target_modules="all-linear").check(folder)


def test_router_replay_works_with_an_adapter() -> None:
    model = base()
    adapter = put_in(model, lora_target_modules=BOTH)
    fill(adapter)
    own = model(IDS[:1]).logits
    replay = RouterReplay.of(model, (NUM_LAYERS, 2))
    assert replay is not None
    replay.choose(None, IDS.shape[1])
    assert torch.allclose(model(IDS[:1]).logits, own, atol=1e-5)
    chosen = torch.zeros(IDS.shape[1], NUM_LAYERS, 2, dtype=torch.int16)
    chosen[..., 1] = 3
    replay.choose(chosen, IDS.shape[1])
    assert (model(IDS[:1]).logits - own).abs().max() > 1e-2
    replay.expert_tokens()
    model(IDS[:1]).logits.sum().backward()
    gradients = [matrices.lora_b.grad for name, matrices in adapter.modules.items() if ".experts." in name]
    assert len(gradients) == NUM_LAYERS * len(PROJECTIONS)
    for gradient in gradients:
        assert gradient is not None
        assert gradient.flatten(1).any(1).tolist() == [True, False, False, True]
    replay.choose(None, IDS.shape[1])


@pytest.mark.parametrize(("family", "kind"), [("Qwen3", "qwen3"), ("Mixtral", "mixtral")])
def test_models_without_supported_experts_are_refused(family: str, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"checkpoints of a {kind} model have no experts\.N\.gate_proj"):
        put_in(base(family), lora_target_modules=BOTH)


def test_models_with_weightless_experts_are_refused() -> None:
    config = AutoConfig.for_model(
        "longcat_flash", vocab_size=64, hidden_size=32, num_layers=1, num_hidden_layers=2, num_attention_heads=4,
        ffn_hidden_size=32, expert_ffn_hidden_size=16, n_routed_experts=4, zero_expert_num=2, moe_topk=2,
        kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"a longcat_flash model have no experts\.N\.gate_proj"):
        put_in(AutoModelForCausalLM.from_config(config), lora_target_modules=BOTH)


@pytest.mark.parametrize(
    ("choices", "reason"), [({"lora_dropout": 0.1}, "supports dropout"), ({"lora_r": 4}, "must be a multiple of 8")]
)
def test_lora_options_unsupported_for_experts_are_refused(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        put_in(base(), lora_target_modules=BOTH, **choices)
