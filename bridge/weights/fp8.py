"""Quantize weights to FP8, bit-identical to what vLLM does when it loads them.

A weight becomes float8_e4m3fn values and float32 scales; value x scale is the weight. There is one scale per block of
128 x 128 elements, or one per row (output channel).

Source: `per_block_cast_to_fp8` in `vllm/utils/deep_gemm.py`, which vLLM compiles; `Fp8PtpcOnlineLinearMethod` in
`vllm/model_executor/layers/quantization/online/fp8.py`, and the kernel `dynamic_per_token_scaled_fp8_quant`; vLLM 0.26
to 0.33.
"""

import torch
from torch import Tensor
from torch.nn import functional

from bridge.types import Quantization
from bridge.weights import rank_parts

BLOCK = 128
"""Rows and columns of a block."""
LARGEST = 448.0
"""The largest number in float8_e4m3fn."""
LEAST = 1e-4
"""Lower bound on the largest magnitude of a block: a block of smaller numbers is scaled as if it contained this one."""
LEAST_SCALE = 1 / (LARGEST * 512)
"""Smallest scale that a row can have."""
DIGESTED = {"": False, " in FP8": True}
"""Suffix of a parameter's name in messages -> whether the digest is that of its FP8 copy."""


def scales_shape(shape: torch.Size, how: Quantization) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of `shape`."""
    *experts, rows, columns = shape
    return (*experts, rows, 1) if how == "fp8_per_channel" else (*experts, -(-rows // BLOCK), -(-columns // BLOCK))


def quantized(source: Tensor, how: Quantization) -> tuple[Tensor, Tensor]:
    """Return the quantized values and the scales of `source` in new memory; see `quantize`."""
    values = torch.empty_like(source, dtype=torch.float8_e4m3fn)
    scales = source.new_empty(scales_shape(source.shape, how), dtype=torch.float32)
    quantize(source, values, scales, how)
    return values, scales


def digest(values: Tensor, scales: Tensor) -> str:
    """Return a digest of the values and scales; see `rank_parts.digest`."""
    return rank_parts.digest(values) + rank_parts.digest(scales)


def quantize(source: Tensor, values: Tensor, scales: Tensor, how: Quantization) -> None:
    """Quantize `source` into `values` and `scales`; on a GPU, `source` is read from memory only once.

    All three must be contiguous. With one scale per block, the number of rows of stacked experts must be a multiple of
    the block size.

    Shapes: `source` [N, K] or [E, N, K]; `values` the same; `scales` as `scales_shape` returns.
    """
    assert all(tensor.is_contiguous() for tensor in (source, values, scales)), "the kernel requires contiguous rows"
    assert values.shape == source.shape, (values.shape, source.shape)
    assert scales.shape == scales_shape(source.shape, how), (scales.shape, source.shape)
    assert source.dim() == 2 or how == "fp8_per_channel" or source.shape[1] % BLOCK == 0, source.shape
    flat, of_flat, scales = (tensor.view(-1, tensor.shape[-1]) for tensor in (source, values, scales))
    if source.is_cuda:
        _launch(flat, of_flat, scales, how)
    elif how == "fp8_per_channel":
        _quantize_rows(flat, of_flat, scales)
    else:
        _quantize_blocks(flat, of_flat, scales)


def _launch(source: Tensor, values: Tensor, scales: Tensor, how: Quantization) -> None:
    """Run the kernel. It is imported here because not every torch build includes Triton."""
    from bridge.weights import fp8_kernel

    num_rows, num_columns = source.shape
    with torch.cuda.device(source.device):
        if how == "fp8_per_channel":
            fp8_kernel.quantize_rows[num_rows,](source, values, scales, num_columns, fp8_kernel.CHUNK)
        else:
            grid = scales.shape[1], scales.shape[0]
            fp8_kernel.quantize_blocks[grid](source, values, scales, num_rows, num_columns, BLOCK, num_warps=8)


def _quantize_rows(source: Tensor, values: Tensor, scales: Tensor) -> None:
    wide = source.float()
    scales.copy_((wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE))
    values.copy_((wide / scales).clamp(-LARGEST, LARGEST))


def _quantize_blocks(source: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantize one row of blocks at a time."""
    num_columns = source.shape[1]
    padding = scales.shape[1] * BLOCK - num_columns
    for number, rows in enumerate(source.split(BLOCK)):
        blocks = functional.pad(rows, (0, padding)).float().view(len(rows), -1, BLOCK)
        scales[number] = blocks.abs().amax(dim=(0, 2)).clamp(min=LEAST) / LARGEST
        scaled = blocks * (1.0 / scales[number])[:, None]
        values[number * BLOCK :][: len(rows)] = scaled.view(len(rows), -1)[:, :num_columns].to(values.dtype)


def dequantized(values: Tensor, scales: Tensor, how: Quantization, dtype: torch.dtype) -> Tensor:
    """Return the weight that `values` and `scales` represent, rounded to `dtype`.

    Shapes: [N, K] and its `scales_shape` -> [N, K].
    """
    num_rows, num_columns = values.shape
    if how == "fp8_per_block":
        scales = scales.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]
    return (values.float() * scales).to(dtype)
