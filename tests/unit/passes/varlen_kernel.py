"""A stand-in for torch's variable-length attention kernel, to test calls of it without a GPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bridge.passes.attention import Rule, in_rows


@contextmanager
def kernel_on_the_cpu() -> Iterator[None]:
    """Give torch's GPU-only variable-length kernel a CPU implementation with the same signature.

    It uses the given boundaries, windows and scale, so that wrong arguments give wrong numbers.
    """

    def compute(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, scale: float | None, window: list[int]
    ) -> Tensor:
        assert window[1] == 0, "causal"
        rule = Rule(scale=scale, window=None if window[0] < 0 else window[0] + 1)
        boundaries = (starts, starts_k, starts_k)
        parts = zip(*(x.split(of.diff().tolist()) for x, of in zip((q, k, v), boundaries, strict=True)), strict=True)
        rows = ((x.transpose(0, 1).unsqueeze(0) for x in part) for part in parts)
        return torch.cat([in_rows(*row, rule=rule)[0].transpose(0, 1) for row in rows])

    def forward(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, max_q: int, max_k: int, causal: bool = False,
        scale: float | None = None, window: list[int] | None = None, enable_gqa: bool = False, *_others: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert window is not None
        assert (max_q, max_k) == (int(starts.diff().max()), int(starts_k.diff().max()))
        assert enable_gqa or q.shape[1] == k.shape[1]
        lse = torch.zeros(q.shape[1], len(q))
        return compute(q, k, v, starts, starts_k, scale, window), lse, torch.zeros(2, dtype=torch.uint64)

    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, starts_k: Tensor,
        max_q: int, max_k: int, causal: bool, rng: Tensor, scale: float | None = None, window: list[int] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def gradients() -> tuple[Tensor, ...]:
            assert window is not None
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            output = compute(leaves[0], leaves[1], leaves[2], starts, starts_k, scale, window)
            return torch.autograd.grad(output, leaves, gradient)

        with ThreadPoolExecutor(1) as thread:  # inside an operator autograd records nothing, hence a thread
            return thread.submit(gradients).result()

    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward, lib=library)
        torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward, lib=library)
        yield
