"""FP8 weights are bit-identical to what vLLM's own functions compute from the same weights."""

import json
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bridge.processes.server_command import UNQUANTIZED
from bridge.processes.vllm_flags import UNPACKED
from bridge.types import Quantization
from bridge.weights import fp8
from tests.unit.weights.test_fp8 import HOWS, SHAPES, random

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM is installed")


@pytest.mark.parametrize("shape", SHAPES)
def test_block_quantization_matches_vllm(shape: tuple[int, int]) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weights = random(*shape)
    theirs = per_block_cast_to_fp8(weights, block_size=[128, 128], use_ue8m0=False)
    assert fp8.digest(*fp8.quantized(weights, "fp8_per_block")) == fp8.digest(*theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_row_quantization_matches_vllm(shape: tuple[int, int]) -> None:
    from vllm.model_executor.layers.quantization.online import fp8 as online

    if not hasattr(online, "_fp8_quant_per_channel"):
        pytest.skip("this vLLM quantizes rows by a kernel of the GPU")
    weights = random(*shape)
    scales = online._fp8_channel_scale(weights.abs().amax(dim=-1, keepdim=True))
    theirs = online._fp8_quant_per_channel(weights, scales)
    assert fp8.digest(*fp8.quantized(weights, "fp8_per_channel")) == fp8.digest(theirs, scales)


def test_disabled_kernel_names_exist_in_vllm() -> None:
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    name, disabled = UNPACKED
    assert name in envs.environment_variables
    kernels = {kernel.__name__ for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]}
    assert {*disabled.split(",")} <= kernels


@pytest.mark.parametrize("how", HOWS)
def test_routers_are_not_quantized_and_other_layers_are(how: Quantization) -> None:
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    flag, value = UNQUANTIZED
    assert flag == "--quantization-config"
    args = resolve_quantization_config(how, json.loads(value))
    plain = resolve_quantization_config(how, None)
    assert args is not None
    assert plain is not None
    assert (args.linear, args.moe) == (plain.linear, plain.moe)
    fused = {
        "gate_up_proj": ["gate_proj", "up_proj"], "in_proj_ba": ["in_proj_b", "in_proj_a"],
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    }  # fmt: skip
    left_out = {
        name
        for name in ("mlp.gate", "linear_attn.in_proj_ba", "mlp.gate_up_proj", "linear_attn.in_proj_qkvz",
                     "mlp.experts", "mlp.shared_expert_gate", "mlp.down_proj")
        if should_ignore_layer(f"model.layers.0.{name}", ignore=args.ignore, fused_mapping=fused)
    }  # fmt: skip
    assert left_out == {"mlp.gate", "linear_attn.in_proj_ba"}


@pytest.mark.parametrize(
    ("how", "name"),
    [("fp8_per_block", "Fp8PerBlockOnlineLinearMethod"), ("fp8_per_channel", "Fp8PtpcOnlineLinearMethod")],
)
def test_layers_are_requantized_in_place(monkeypatch: pytest.MonkeyPatch, how: Quantization, name: str) -> None:
    """The calls of a weight transfer: `start_weight_update`, tensors in any order, `finish_weight_update`."""
    online: Any = import_module("vllm.model_executor.layers.quantization.online.fp8")
    if how == "fp8_per_channel" and not hasattr(online, "_fp8_quant_per_channel"):
        pytest.skip("this vLLM quantizes rows by a kernel of the GPU")
    reload: Any = import_module("vllm.model_executor.model_loader.reload.layerwise")
    model = nn.Sequential(online_layer(monkeypatch, online, name))
    reload.record_metadata_for_reloading(model)
    layer: Any = model[0]
    suffix = "_scale_inv" if how == "fp8_per_block" else "_scale"
    first, second = random(256, 384), random(256, 384) * 3

    def served() -> str:
        values = layer.weight.t() if how == "fp8_per_channel" else layer.weight
        return fp8.digest(values, layer.get_parameter(f"weight{suffix}"))

    def load(weights: Tensor, half: int) -> None:
        layer.weight.weight_loader(layer.weight, weights.chunk(2)[half], half)

    load(first, 0)
    load(first, 1)
    assert served() == fp8.digest(*fp8.quantized(first, how))
    held = dict(layer.named_parameters())
    addresses = {leaf: parameter.data_ptr() for leaf, parameter in held.items()}
    reload.initialize_layerwise_reload(model)
    load(second, 1)
    assert fp8.digest(*fp8.quantized(first, how)) == fp8.digest(
        held["weight"].t() if how == "fp8_per_channel" else held["weight"], held[f"weight{suffix}"]
    ), "half a layer has changed"
    load(second, 0)
    reload.finalize_layerwise_reload(model, None)
    assert served() == fp8.digest(*fp8.quantized(second, how))
    assert addresses == {leaf: parameter.data_ptr() for leaf, parameter in layer.named_parameters()}


def online_layer(monkeypatch: pytest.MonkeyPatch, online: Any, method: str) -> nn.Module:
    """Return a layer with two fused weights that vLLM's `method` quantizes, without the matrix-product kernel."""
    parameter: Any = import_module("vllm.model_executor.parameter")
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    kernel = SimpleNamespace(process_weights_after_loading=lambda _: None)
    monkeypatch.setattr(online, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(online, "init_fp8_linear_kernel", lambda **_: kernel)
    monkeypatch.setattr(online, "expose_input_quant_key", lambda *_: None, raising=False)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)

    def load(param: Tensor, loaded: Tensor, half: int) -> None:
        param.data.chunk(2)[half].copy_(loaded)

    layer: Any = nn.Module()
    layer.tp_size = 1
    layer.quant_config = SimpleNamespace(online_quantization_config=None)
    layer.quant_method = getattr(online, method)()
    layer.quant_method.create_weights(layer, 384, [128, 128], 384, 256, torch.bfloat16, weight_loader=load)
    return layer  # type: ignore[no-any-return]
