"""Keep weights and LoRA slots out of vLLM's sleep pool, and wake its KV cache completely or not at all.

Symptom: with `--enable-sleep-mode` no weight can be exported, and since 0.33 no LoRA slot either. A KV cache that could
not wake up for lack of memory never wakes up, even once there is memory.
Cause: vLLM allocates all of these in its cuMem pool, whose memory has no legacy CUDA IPC handle. After a wake-up that
failed halfway, 0.26 maps the same memory again at the next attempt, which CUDA refuses.
Why this is safe: what stays out of the pool is where it would be without sleep mode; with the tag `runtime` vLLM 0.32
marks what a sleep has to preserve. What a failed attempt mapped is unmapped as a sleep would: it was empty.
Seen in vLLM 0.26 to 0.33, `vllm/device_allocator/cumem.py`, `vllm/v1/worker`.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch

PINS = """
vllm.device_allocator.cumem
    replace CuMemAllocator.use_memory_pool(tag)
    CuMemAllocator: get_instance, pointer_to_data
    call unmap_and_release(allocation_handle)
vllm.device_allocator: AllocationData: handle, cpu_backup_tensor, is_asleep
vllm.config.model: ModelConfig: enable_sleep_mode, sleep_mode_backend
# Not AsyncLLM's: its sleep would pause once more, and its wake_up resume too early.
vllm.v1.worker.gpu_worker
    call Worker.sleep(level)
    call Worker.wake_up(tags)
"""
OUTSIDE = ("weights", "runtime")
"""vLLM's tags of what stays in place while the KV cache sleeps; `runtime`, since 0.33, holds LoRA slots."""
LEVEL = 1
"""vLLM's level of a sleep that loses only the KV cache."""


def patch() -> None:
    """Give the tags in `OUTSIDE` no pool."""
    from vllm.device_allocator.cumem import CuMemAllocator

    original = CuMemAllocator.use_memory_pool

    @wraps(original)
    def use_memory_pool(allocator: CuMemAllocator, tag: str | None = None) -> AbstractContextManager[None]:
        return nullcontext() if tag in OUTSIDE else original(allocator, tag)

    CuMemAllocator.use_memory_pool = use_memory_pool


def can_sleep(model_config: Any) -> bool:
    """Return whether this vLLM can free its KV cache; backends other than its own pool would free weights as well."""
    return bool(model_config.enable_sleep_mode) and model_config.sleep_mode_backend == "cumem"


def sleep(worker: Any) -> None:
    if not _asleep():
        worker.sleep(LEVEL)


def wake(worker: Any) -> str | None:
    """Allocate the KV cache of vLLM's `worker` again, empty; if that fails, free all of it and return the reason."""
    from vllm.device_allocator.cumem import unmap_and_release

    asleep = _asleep()
    empty = [data for data in asleep if data.cpu_backup_tensor is None]
    try:
        if asleep:
            worker.wake_up()
    except RuntimeError as error:
        for data in [data for data in empty if not data.is_asleep]:
            unmap_and_release(data.handle)
            data.is_asleep = True
        needed, free = sum(data.handle[1] for data in asleep), torch.cuda.mem_get_info()[0]
        return f"{needed / 2**30:.2f} GiB are needed, and {free / 2**30:.2f} GiB of the GPU are free ({error})"
    return None


def _asleep() -> list[Any]:
    from vllm.device_allocator.cumem import CuMemAllocator

    return [data for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.is_asleep]
