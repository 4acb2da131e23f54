"""Layers that vLLM quantizes on loading keep their unquantized sources, and follow them."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from bridge.errors import UnsupportedModelError
from bridge.types import Quantization
from bridge.weights import fp8
from bridge_patches import loading, placement, quantized
from bridge_patches.worker import BridgeWorker
from tests.unit.patches import test_loading
from tests.unit.patches.test_loading import SHAPES, Model, skeleton

Method = Callable[[Any, nn.Module], None]
DOWN, FUSED = "mlp.down_proj.weight", "mlp.gate_up_proj.weight"


def rebound(layer: nn.Module, name: str, values: Tensor) -> None:
    """Assign the values to the same parameter, as vLLM 0.33 does."""
    layer.get_parameter(name).data = values


def registered(layer: nn.Module, name: str, values: Tensor) -> None:
    """Register a new parameter, as vLLM 0.26 does."""
    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))


@pytest.fixture(params=[rebound, registered])
def replace(request: pytest.FixtureRequest) -> Callable[[nn.Module, str, Tensor], None]:
    return cast(Callable[[nn.Module, str, Tensor], None], request.param)


@pytest.fixture(autouse=True)
def _no_layers_of_other_tests() -> Iterator[None]:
    quantized._layers.clear()
    yield
    quantized._layers.clear()


def quantize(model: Any, how: Quantization, replace: Callable[[nn.Module, str, Tensor], None]) -> None:
    """Process the feed-forward layers of `model` with a stand-in for vLLM's method."""

    def process(method: Any, layer: Any) -> None:
        del method
        values, scales = fp8.quantized(layer.weight.data, how)
        replace(layer, "weight", values.t() if how == "fp8_per_channel" else values)
        registered(layer, f"weight{quantized.SCALES[how]}", scales)

    for layer in model.mlp.values():
        partial(quantized._keep_sources, how)(process, None, layer)


@pytest.mark.parametrize("how", ["fp8_per_block", "fp8_per_channel"])
def test_sources_are_kept_and_fp8_follows_them(how: Quantization, replace: Any) -> None:
    model: Any = Model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    quantize(model, how, replace)
    parameters = quantized.parameters(model)
    assert {name: weight.tolist() for name, weight in parameters.items()} == {
        name: weight.tolist() for name, weight in before.items()
    }
    weights = quantized.weights_of(model)
    assert weights.keys() == {DOWN, FUSED}
    quantized.refuse_other_layouts(weights)
    served = model.mlp["down_proj"].weight
    address = served.data_ptr()
    parameters[DOWN].data.mul_(-3)
    assert not weights[DOWN].is_current()
    weights[DOWN].refresh()
    assert weights[DOWN].is_current()
    assert served.data_ptr() == address, "CUDA graphs hold this address"
    values = served.data.t() if how == "fp8_per_channel" else served.data
    scales = model.mlp["down_proj"].get_parameter(f"weight{quantized.SCALES[how]}")
    back = fp8.dequantized(values, scales, how, torch.float32)
    torch.testing.assert_close(back, -3 * before[DOWN].float(), rtol=0.07, atol=1e-2)


def test_layer_processed_twice_keeps_its_source(replace: Any) -> None:
    model: Any = Model()
    quantize(model, "fp8_per_block", replace)
    source = quantized.parameters(model)[DOWN]
    quantize(model, "fp8_per_block", replace)
    assert quantized.parameters(model)[DOWN] is source


@pytest.mark.parametrize("harm", ["values", "scales", "repacked"])
def test_fp8_in_a_different_form_is_refused_by_name(harm: str, replace: Any) -> None:
    model: Any = Model()
    quantize(model, "fp8_per_block", replace)
    weights = quantized.weights_of(model)
    if harm == "values":
        weights[FUSED].values.view(torch.int8)[3, 3] += 1
    elif harm == "scales":
        weights[FUSED].scales.mul_(1 + 1e-6)
    else:
        weights[FUSED] = quantized.Quantized(
            "fp8_per_block", weights[FUSED].source, weights[FUSED].values.view(-1, 4), weights[FUSED].scales
        )
    with pytest.raises(UnsupportedModelError, match=f"1 of 2 weights .* fp8_per_block, the first: {FUSED}"):
        quantized.refuse_other_layouts(weights)


def test_kernel_that_drops_the_scales_is_refused(replace: Any) -> None:
    model: Any = Model()
    quantize(model, "fp8_per_block", replace)
    del model.mlp["down_proj"].weight_scale_inv
    with pytest.raises(UnsupportedModelError, match=f"1 of 2 weights .* fp8_per_block, the first: {DOWN}"):
        quantized.refuse_other_layouts(quantized.weights_of(model))


def test_fp8_is_read_from_the_layers_current_parameters(replace: Any) -> None:
    model: Any = Model()
    quantize(model, "fp8_per_block", replace)
    served = model.mlp["down_proj"].weight
    registered(model.mlp["down_proj"], "weight", torch.zeros_like(served))
    assert not quantized.weights_of(model)[DOWN].is_current(), "the old tensor is checked, which no kernel reads"
    quantized.weights_of(model)[DOWN].refresh()
    assert torch.equal(model.mlp["down_proj"].weight.view(torch.int8), served.view(torch.int8))


def test_strides_of_single_columns_do_not_matter() -> None:
    source = torch.randn(256, 128).bfloat16()
    values, scales = fp8.quantized(source, "fp8_per_block")
    odd = scales.as_strided(scales.shape, (1, 7))
    assert quantized.Quantized("fp8_per_block", source, values, odd).is_current()


class Loader(test_loading.Loader):
    """Loads a model, and quantizes it when its weights are processed."""

    def __init__(self, *, is_exact: bool) -> None:
        def process(model: Any) -> None:
            quantize(model, "fp8_per_block", rebound)
            if not is_exact:
                model.mlp["down_proj"].weight.data.view(torch.int8)[0, 0] += 1

        super().__init__(process)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("is_exact", [True, False])
def test_quantized_model_is_shared_only_if_its_fp8_is_exact(monkeypatch: pytest.MonkeyPatch, *, is_exact: bool) -> None:
    monkeypatch.setattr("bridge.weights.skeleton.build", lambda *_, **__: skeleton(SHAPES))
    loader = Loader(is_exact=is_exact)
    model = loading.watched(lambda: loader.load_model(test_loading.CONFIG), loader, test_loading.CONFIG)
    record = loading.RECORDS[model]
    assert record.views["mlp.down_proj.weight"].parameter == DOWN
    assert (record.refusal is None) == is_exact


vllm = test_loading.vllm


@pytest.mark.usefixtures("vllm")
def test_worker_exports_sources_and_requantizes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.weights.skeleton.build", lambda *_, **__: skeleton(SHAPES))
    loader = Loader(is_exact=True)
    model = loading.watched(lambda: loader.load_model(test_loading.CONFIG), loader, test_loading.CONFIG)
    worker = BridgeWorker()
    runner = SimpleNamespace(get_model=lambda: model, load=lambda: None)
    placement._load_model(lambda *_: None, runner)
    worker.model_runner, worker.rank = runner, 0
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    shard = worker._bridge_shard()
    assert shard.quantized == {FUSED: "fp8_per_block", DOWN: "fp8_per_block"}
    assert {handle.dtype for handle in shard.ipc_handles.values()} == {"bfloat16"}
    assert not any("scale" in name for name in shard.ipc_handles)
    before, shadows = worker.bridge_digests(), worker.bridge_quantized_digests()
    worker.bridge_write([{"parameter": DOWN, "index": 5, "part": 0}], [64.0])
    after = worker.bridge_digests()
    assert {name for name in before if before[name] != after[name]} == {DOWN}
    assert worker.bridge_quantized_digests() == shadows
    worker.bridge_requantize()
    assert {name for name, text in worker.bridge_quantized_digests().items() if text != shadows[name]} == {DOWN}
    assert worker.bridge_synchronize() == [], "nothing has moved"


def test_quantized_layers_allocate_weights_at_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[str] = []
    layerwise: Any = ModuleType("vllm.model_executor.model_loader.reload.layerwise")
    layerwise._get_original_loader = lambda parameter: parameter.weight_loader.__wrapped__
    layerwise.get_layerwise_info = lambda layer: SimpleNamespace(reset=lambda: resets.append(type(layer).__name__))
    meta: Any = ModuleType("vllm.model_executor.model_loader.reload.meta")
    meta.materialize_meta_tensor = lambda parameter: nn.Parameter(torch.empty_like(parameter, device="cpu"))
    for module in (layerwise, meta):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def load() -> None: ...

    def create(method: Any, layer: nn.Module, rows: int, *, columns: int) -> None:
        del method
        weight: Any = nn.Parameter(torch.empty(rows, columns, device="meta"))
        weight.weight_loader = SimpleNamespace(__wrapped__=load)
        layer.register_parameter("weight", weight)

    layer: Any = nn.Module()
    quantized._create_at_once(create, None, layer, 4, columns=3)
    assert (layer.weight.device.type, tuple(layer.weight.shape)) == ("cpu", (4, 3))
    assert layer.weight.weight_loader is load
    assert resets == ["Module"]


def test_cpu_multiplies_by_the_dequantized_weights() -> None:
    layer: Any = nn.Module()
    weight = torch.randn(130, 128).bfloat16()
    layer.weight, layer.weight_scale_inv = fp8.quantized(weight, "fp8_per_block")
    rows, bias = torch.randn(3, 128).bfloat16(), torch.randn(130).bfloat16()
    product = quantized.PlainKernel(None).apply_weights(layer, rows, bias)
    expected = rows.float() @ weight.float().T + bias.float()
    assert (product.float() - expected).abs().mean() < 0.05 * expected.abs().mean()
