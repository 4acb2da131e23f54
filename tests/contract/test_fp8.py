"""FP8 is, to the bit, what vLLM's own functions make of the same weights."""

from importlib.util import find_spec

import pytest

from bridge.processes.vllm_flags import UNPACKED
from bridge.weights import fp8
from tests.unit.weights.test_fp8 import SHAPES, random

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM is installed")


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_vllms(shape: tuple[int, int]) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weights = random(*shape)
    theirs = per_block_cast_to_fp8(weights, block_size=[128, 128], use_ue8m0=False)
    assert fp8.digest(*fp8.quantized(weights, "fp8_per_block")) == fp8.digest(*theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_vllms(shape: tuple[int, int]) -> None:
    from vllm.model_executor.layers.quantization.online import fp8 as online

    if not hasattr(online, "_fp8_quant_per_channel"):
        pytest.skip("this vLLM quantizes rows by a kernel of the GPU")
    weights = random(*shape)
    scales = online._fp8_channel_scale(weights.abs().amax(dim=-1, keepdim=True))
    theirs = online._fp8_quant_per_channel(weights, scales)
    assert fp8.digest(*fp8.quantized(weights, "fp8_per_channel")) == fp8.digest(theirs, scales)


def test_kernels_that_repack_fp8_have_the_names_that_are_disabled() -> None:
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    name, disabled = UNPACKED
    assert name in envs.environment_variables
    kernels = {kernel.__name__ for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]}
    assert {*disabled.split(",")} <= kernels
