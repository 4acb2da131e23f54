"""GPU kernels of `fp8.quantize`, in a separate file because they import Triton."""

from typing import Any

import triton
import triton.language as tl

RECIPROCAL: Any = tl.constexpr(1 / 448)
"""torch.compile generates vLLM's block kernel, and multiplies by this number instead of dividing by 448."""
LEAST: Any = tl.constexpr(1e-4)
LEAST_SCALE: Any = tl.constexpr(1 / (448 * 512))
CHUNK = 2048
"""Number of columns that are read at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def quantize_blocks(source, values, scales, num_rows, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Quantize one block per program: axis 0 of the grid is the block's column, axis 1 its row."""
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    block = tl.load(source + offsets, mask=is_inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(block)), LEAST)
    scale = largest * RECIPROCAL
    tl.store(scales + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)
    tl.store(values + offsets, (block * (1.0 / scale)).to(values.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_rows(source, values, scales, num_columns, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Quantize one row per program; the second read hits the cache. Division rounds correctly, as in vLLM's kernel."""
    start = tl.program_id(0).to(tl.int64) * num_columns
    columns = tl.arange(0, CHUNK)
    largest = tl.zeros([CHUNK], tl.float32)
    for first in range(0, num_columns, CHUNK):
        is_inside = first + columns < num_columns
        chunk = tl.load(source + start + first + columns, mask=is_inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(chunk))
    limit = tl.full([1], 448.0, tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0) + tl.zeros([1], tl.float32), limit), LEAST_SCALE)
    tl.store(scales + tl.program_id(0) + tl.arange(0, 1), scale)
    for first in range(0, num_columns, CHUNK):
        is_inside = first + columns < num_columns
        chunk = tl.load(source + start + first + columns, mask=is_inside, other=0.0).to(tl.float32)
        scaled = tl.div_rn(chunk, tl.broadcast_to(scale, [CHUNK]))
        tl.store(values + start + first + columns, scaled.to(values.dtype.element_ty), mask=is_inside)
