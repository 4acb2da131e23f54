"""FP8 weights: the quantized values, and the GPU kernels in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from bridge.types import Quantization
from bridge.weights import fp8

HOWS: tuple[Quantization, ...] = ("fp8_per_block", "fp8_per_channel")
ROUNDING = 2.0**-4
"""Half the distance between adjacent float8_e4m3fn numbers, relative to the smaller one."""
SHAPES = [(256, 384), (200, 300), (3, 5), (129, 128)]


def random(*shape: int) -> Tensor:
    """Return weights whose rows have very different magnitudes, and one row of zeros."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(shape, generator=generator) * torch.logspace(-4, 2, shape[-2])[:, None]
    weights[..., 1, :] = 0
    return weights.bfloat16()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_error_is_within_rounding(how: Quantization, shape: tuple[int, int]) -> None:
    weights = random(*shape)
    values, scales = fp8.quantized(weights, how)
    error = (fp8.dequantized(values, scales, how, torch.float32) - weights.float()).abs()
    size = scales if how == "fp8_per_channel" else scales.repeat_interleave(128, 0)[: shape[0]]
    size = size.repeat_interleave(128, 1)[:, : shape[1]] if how == "fp8_per_block" else size
    assert (error <= ROUNDING * weights.float().abs() * 1.01 + size * 2**-10).all()
    assert values.float().abs().max() == fp8.LARGEST


def test_block_scale_comes_from_its_largest_number() -> None:
    weights = torch.zeros(130, 257)
    weights[5, 7], weights[129, 256], weights[0, 200] = 448.0, -4.48, 1e-9
    values, scales = fp8.quantized(weights, "fp8_per_block")
    tiny = fp8.LEAST / fp8.LARGEST
    torch.testing.assert_close(scales, torch.tensor([[1.0, tiny, tiny], [tiny, tiny, 0.01]]))
    assert (values[5, 7].item(), values[129, 256].item()) == (448.0, -448.0)


def test_row_scale_comes_from_its_largest_number() -> None:
    values, scales = fp8.quantized(torch.tensor([[4.48, -1.0], [0.0, 0.0]]), "fp8_per_channel")
    torch.testing.assert_close(scales, torch.tensor([[0.01], [fp8.LEAST_SCALE]]))
    torch.testing.assert_close(values.float(), torch.tensor([[448.0, -96.0], [0.0, 0.0]]))


def test_experts_are_quantized_separately() -> None:
    experts = random(3, 256, 130)
    values, scales = fp8.quantized(experts, "fp8_per_block")
    for expert, *both in zip(experts, values, scales, strict=True):
        alone = fp8.quantized(expert.contiguous(), "fp8_per_block")
        assert fp8.digest(*both) == fp8.digest(*alone)


def test_fp8_digest_depends_on_values_and_scales() -> None:
    values, scales = fp8.quantized(random(130, 130), "fp8_per_block")
    before = fp8.digest(values, scales)
    scales[1, 1] *= 2
    assert fp8.digest(values, scales) != before
    scales[1, 1] /= 2
    assert fp8.digest(values, scales) == before
    values[129, 129] = 3.0
    assert fp8.digest(values, scales) != before


INTERPRETED = """
import torch
from bridge.weights import fp8, fp8_kernel
from tests.unit.weights.test_fp8 import SHAPES, random

for shape in SHAPES:
    weights = random(*shape)
    wide = torch.zeros(shape)  # the interpreter rounds to FP8 differently
    _, expected = fp8.quantized(weights, "fp8_per_channel")
    scales = torch.zeros_like(expected)
    fp8_kernel.quantize_rows[shape[0],](weights, wide, scales, shape[1], 64)
    assert torch.equal(scales, expected), shape
    assert torch.equal(wide, weights.float() / scales), shape

    scales = torch.zeros(fp8.scales_shape(weights.shape, "fp8_per_block"))
    grid = scales.shape[1], scales.shape[0]
    fp8_kernel.quantize_blocks[grid](weights, wide, scales, *shape, 128)
    padded = torch.zeros(128 * scales.shape[0], 128 * scales.shape[1])
    padded[: shape[0], : shape[1]] = weights.float()
    blocks = padded.view(scales.shape[0], 128, scales.shape[1], 128)
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4)
    assert torch.equal(scales, largest * torch.tensor(1 / 448)), shape  # as torch.compile divides on a GPU
    scaled = (blocks * (1.0 / scales)[:, None, :, None]).view_as(padded)
    assert torch.equal(wide, scaled[: shape[0], : shape[1]]), shape
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton is installed")
def test_triton_kernels_match_the_cpu_quantization() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
