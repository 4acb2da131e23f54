"""Serve linear layers and experts in FP8, quantized from the shared weights, which stay as loaded.

Symptom: with `--quantization fp8_per_block` or `fp8_per_channel`, there is no weight that a trainer could update.
Cause: vLLM quantizes each layer right after loading it, and drops the original weight.
What is done: the layers load as without quantization. vLLM then quantizes each layer with its own code, and the
original weight is kept and exported. At each publication, one kernel (`bridge/weights/fp8.py`) quantizes it again into
the tensors that vLLM's kernels and CUDA graphs hold.
Why this is safe: the layers are vLLM's own, as in an unpatched server. A model is refused if a single byte of FP8
differs between vLLM's code and the kernel, as with kernels that need a different layout or different scales.
On a CPU, vLLM's block kernels repack FP8 and need AMX; instead, the layers multiply by the dequantized weights
(`PlainKernel`).
Seen in vLLM 0.26 to 0.33, `vllm/model_executor/layers/quantization/online`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bridge.errors import UnsupportedModelError
from bridge.types import Quantization
from bridge.weights import fp8
from bridge_patches import cpu_backend, wrap

PINS = """
vllm.platforms: current_platform
vllm.platforms.interface
    call Platform.is_cpu()
    Platform: _enum
vllm.model_executor.layers.quantization.online.fp8
    wrap Fp8PerBlockOnlineLinearMethod.create_weights(layer)
    wrap Fp8PerBlockOnlineLinearMethod.process_weights_after_loading(layer)
    wrap Fp8PerBlockOnlineMoEMethod.process_weights_after_loading(layer)
    wrap Fp8PtpcOnlineLinearMethod.create_weights(layer)
    wrap Fp8PtpcOnlineLinearMethod.process_weights_after_loading(layer)
vllm.model_executor.layers.quantization.online.moe_base: wrap OnlineMoEMethodBase.create_weights(layer)
# Creating weights on the meta device, which these do, is undone.
vllm.model_executor.model_loader.reload.layerwise
    call get_layerwise_info(layer)
    call _get_original_loader(tensor)
vllm.model_executor.model_loader.reload.types: call LayerReloadingInfo.reset()
vllm.model_executor.model_loader.reload.meta: call materialize_meta_tensor(meta_tensor)
vllm.model_executor.kernels.linear: _POSSIBLE_FP8_BLOCK_KERNELS  # by platform, best first
vllm.utils.deep_gemm: call per_block_cast_to_fp8(x, block_size, use_ue8m0)  # which `bridge/weights/fp8.py` reimplements
"""
WEIGHTS = ("weight", "w13_weight", "w2_weight")
"""vLLM's names for the weights that it quantizes, in linear layers and experts."""
SCALES: dict[Quantization, str] = {"fp8_per_block": "_scale_inv", "fp8_per_channel": "_scale"}
"""vLLM's suffix for the name of a weight's scales."""
NOT_QUANTIZED: tuple[Quantization, dict[str, Tensor]] = ("fp8_per_block", {})


@dataclass(frozen=True)
class Quantized:
    """One weight that is served in FP8."""

    how: Quantization
    source: Tensor
    """The unquantized weight, which a trainer updates."""
    values: Tensor
    """FP8 values, with the same rows as the source."""
    scales: Tensor

    def refresh(self) -> None:
        """Quantize the source again, into the same FP8 tensors."""
        fp8.quantize(self.source, self.values, self.scales, self.how)

    def is_current(self) -> bool:
        """Return whether the FP8 tensors are bit-identical to the quantized source."""
        for ours, served in zip(fp8.quantized(self.source, self.how), (self.values, self.scales), strict=True):
            if (ours.shape, ours.dtype) != (served.shape, served.dtype) or not served.is_contiguous():
                return False
            if not torch.equal(ours.view(-1).view(torch.int8), served.view(-1).view(torch.int8)):
                return False
        return True


_layers: WeakKeyDictionary[nn.Module, tuple[Quantization, dict[str, Tensor]]] = WeakKeyDictionary()
"""How each vLLM layer is quantized, and the sources of its weights by name."""


class PlainKernel:
    """A vLLM kernel for FP8 linear layers on a CPU, which does not quantize the inputs."""

    def __init__(self, config: Any) -> None:  # noqa: ARG002  vLLM's signature
        self._multiply = cpu_backend.linear()  # choose now, because a graph cannot check the CPU's instruction set

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:  # noqa: ARG003
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:  # noqa: ARG003
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights unchanged."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = fp8.dequantized(layer.weight, layer.weight_scale_inv, "fp8_per_block", x.dtype)
        return self._multiply(x, weight, bias)


def patch() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.online.fp8 import (
        Fp8PerBlockOnlineLinearMethod,
        Fp8PerBlockOnlineMoEMethod,
        Fp8PtpcOnlineLinearMethod,
    )
    from vllm.platforms import current_platform

    methods: dict[Any, Quantization] = {
        Fp8PerBlockOnlineLinearMethod: "fp8_per_block",
        Fp8PerBlockOnlineMoEMethod: "fp8_per_block",
        Fp8PtpcOnlineLinearMethod: "fp8_per_channel",
    }
    for method, how in methods.items():
        wrap(method, "create_weights")(_create_at_once)
        wrap(method, "process_weights_after_loading")(partial(_keep_sources, how))
    if current_platform.is_cpu():
        linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum] = [PlainKernel]


def weights_of(model: nn.Module) -> dict[str, Quantized]:
    """Return the weights that are currently served in FP8, by the names of vLLM's parameters."""
    return {
        f"{prefix}.{leaf}": _served(layer, leaf, how, source)
        for prefix, layer in model.named_modules()
        for how, sources in [_layers.get(layer, NOT_QUANTIZED)]
        for leaf, source in sources.items()
    }


def _served(layer: nn.Module, leaf: str, how: Quantization, source: Tensor) -> Quantized:
    """Return a weight as `layer` currently holds it; a kernel may have dropped its scales."""
    values, scales = (layer._parameters.get(name) for name in (leaf, f"{leaf}{SCALES[how]}"))
    if values is None or scales is None:
        return Quantized(how, source, source.new_empty(0), source.new_empty(0))
    in_rows = values.data.t() if how == "fp8_per_channel" else values.data  # vLLM stores these as columns
    return Quantized(how, source, in_rows, scales.data)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a trainer updates, by vLLM's parameter names; for quantized weights, the sources."""
    quantized = weights_of(model)
    scales = names_of_scales(quantized)
    return {
        name: quantized[name].source if name in quantized else parameter
        for name, parameter in model.named_parameters()
        if name not in scales
    }


def names_of_scales(quantized: Mapping[str, Quantized]) -> set[str]:
    """Return vLLM's names for the scales of these weights."""
    return {f"{name}{SCALES[weight.how]}" for name, weight in quantized.items()}


def refuse_other_layouts(quantized: Mapping[str, Quantized]) -> None:
    """Raise UnsupportedModelError if vLLM quantized a weight differently from Bridge's kernel."""
    others = [name for name, weight in quantized.items() if not weight.is_current()]
    if others:
        raise UnsupportedModelError(
            f"vLLM serves {len(others)} of {len(quantized)} weights in a different form than --quantization"
            f" {quantized[others[0]].how}, the first: {others[0]}; it chose a kernel that repacks or rescales them",
            hint="put VLLM_USE_DEEP_GEMM=0 in front of the command, or leave out --quantization",
        )


def _create_at_once(original: Callable[..., None], method: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Allocate the weights of `layer` now, so that they load like any others and are kept."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    original(method, layer, *args, **kwargs)
    for leaf, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.is_meta:
            real = materialize_meta_tensor(parameter)
            real.weight_loader = _get_original_loader(parameter)
            layer.register_parameter(leaf, real)
    get_layerwise_info(layer).reset()


def _keep_sources(
    how: Quantization, original: Callable[..., None], method: Any, layer: nn.Module, *args: Any, **kwargs: Any
) -> None:
    if layer in _layers:
        return
    # `.data`: vLLM may assign the quantized values to the same parameter
    sources = {leaf: parameter.data for leaf, parameter in layer.named_parameters(recurse=False) if leaf in WEIGHTS}
    original(method, layer, *args, **kwargs)
    _layers[layer] = how, sources
