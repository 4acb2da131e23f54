"""Keep adapters away from the base model's requests on the CPU.

Symptom: a request for the base model that shares a step with one for an adapter is answered by the adapter.
Cause: vLLM's plain-torch LoRA kernels take the index -1, which means "no adapter", for the last slot.
Why this is safe: rows of index -1 get a product of zero, which is added to what the base layer gave. The GPU's kernels
skip such rows, and vLLM 0.33 masks them here too.
Seen in vLLM 0.26 to 0.32, `vllm/lora/ops/torch_ops/lora_ops.py`.

Not covered: GPUs, whose kernels are right.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

KERNELS = ("bgmv_expand", "bgmv_expand_slice")
"""The last step of every LoRA product, whole or by slices; `sgmv_*` call them."""


def patch() -> None:
    """Wrap the kernels where they are defined and where the CPU's wrapper holds on to them; once per process."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in KERNELS:
        kernel = without_base_rows(getattr(lora_ops, name))
        setattr(lora_ops, name, kernel)
        setattr(punica_cpu, name, kernel)


def without_base_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Return `original` with the inputs of index -1 set to zero; as it is if that was done before."""
    if hasattr(original, "bridge"):
        return original

    @wraps(original)
    def kernel(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        masked = inputs.masked_fill((lora_indices_tensor == -1).unsqueeze(-1), 0)
        original(masked, lora_b_weights, output_tensor, lora_indices_tensor, *args, **kwargs)

    kernel.bridge = True  # type: ignore[attr-defined]
    return kernel
