"""vLLM's sleep pool: the KV cache lies in it, and nothing else that a trainer shares; freeing it and taking it back.

Symptom: with `--enable-sleep-mode` no weight can be exported, since 0.33 no LoRA slot either; a KV cache that cannot be
taken back for want of memory can never be, even once there is memory.
Cause: vLLM allocates them in its cuMem pool, whose memory has no legacy CUDA IPC handle. Where the pool wakes up in
part, 0.26 maps that part a second time at the next attempt, which CUDA refuses.
Why this is safe: what stays out of the pool lies where it lies without sleep mode; with the tag `runtime` vLLM 0.32
marks what a sleep has to preserve. What an attempt mapped in vain is unmapped as a sleep would: it was empty.
Seen in vLLM 0.26 to 0.33, `vllm/device_allocator/cumem.py`, `vllm/v1/worker`.

Not covered: when the cache sleeps, and that no request needs it then (`server_fence.py`).
"""

from contextlib import AbstractContextManager
from contextlib import nullcontext as no_pool
from functools import wraps
from typing import Any

import torch

OUTSIDE = ("weights", "runtime")
"""vLLM's tags of what stays where it is while the KV cache sleeps; `runtime` holds LoRA slots, since 0.33."""
LEVEL = 1
"""vLLM's level of a sleep that loses the KV cache alone."""


def patch() -> None:
    """Give the tags in `OUTSIDE` no pool; once per process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    original = CuMemAllocator.use_memory_pool
    if hasattr(original, "bridge"):
        return

    @wraps(original)
    def use_memory_pool(allocator: CuMemAllocator, tag: str | None = None) -> AbstractContextManager[None]:
        return no_pool() if tag in OUTSIDE else original(allocator, tag)

    use_memory_pool.bridge = True  # type: ignore[attr-defined]
    CuMemAllocator.use_memory_pool = use_memory_pool


def can_sleep(model_config: Any) -> bool:
    """Tell whether this vLLM can free its KV cache; a mechanism other than its own pool would free weights as well."""
    return bool(model_config.enable_sleep_mode) and model_config.sleep_mode_backend == "cumem"


def sleep(worker: Any) -> None:
    """Free the KV cache of vLLM's `worker`, unless that is done already."""
    if not _asleep():
        worker.sleep(LEVEL)


def wake(worker: Any) -> str | None:
    """Take the KV cache of vLLM's `worker` back, empty; where that fails, say why, and all of it sleeps on."""
    asleep = _asleep()
    empty = [data for data in asleep if data.cpu_backup_tensor is None]
    try:
        if asleep:
            worker.wake_up()
    except RuntimeError as error:
        _unmap([data for data in empty if not data.is_asleep])
        needed, free = sum(data.handle[1] for data in asleep), torch.cuda.mem_get_info()[0]
        return f"{needed / 2**30:.2f} GiB are needed, and {free / 2**30:.2f} GiB of the GPU are free ({error})"
    return None


def _asleep() -> list[Any]:
    """Return the allocations that have no memory now."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return [data for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.is_asleep]


def _unmap(allocations: list[Any]) -> None:
    from vllm.device_allocator.cumem import unmap_and_release

    for data in allocations:
        unmap_and_release(data.handle)
        data.is_asleep = True
