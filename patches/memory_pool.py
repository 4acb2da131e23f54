"""Keep weights out of vLLM's sleep pool.

Symptom: with `--enable-sleep-mode` no weight can be exported.
Cause: vLLM allocates them in its cuMem pool, whose memory has no legacy CUDA IPC handle.
Why this is safe: a sleeping engine then frees its KV cache alone, and the weights are in use by the trainer anyway.
Seen in vLLM 0.26 to 0.33, `vllm/v1/worker/gpu_worker.py`.

Not covered: the pool of the KV cache, which stays vLLM's.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import wraps


def patch() -> None:
    """Give the tag `weights` a null context; once per process."""
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker._maybe_get_memory_pool_context
    if hasattr(original, "bridge"):
        return

    @wraps(original)
    def pool_context(worker: Worker, tag: str) -> AbstractContextManager[None]:
        return nullcontext() if tag == "weights" else original(worker, tag)

    pool_context.bridge = True  # type: ignore[attr-defined]
    Worker._maybe_get_memory_pool_context = pool_context
