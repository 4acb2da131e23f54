"""The share of a GPU that vLLM may use so that training fits beside it, and whether it fits into the host's memory.

Not covered: the arithmetic (`bridge/planning/memory.py`), and other setups (`bridge plan`).
"""

import math
from typing import NamedTuple

from bridge.config import ServeConfig, TrainConfig
from bridge.core.memory import left_bytes
from bridge.errors import UsageError
from bridge.planning import memory
from bridge.planning.memory import GIB, Need
from bridge.planning.model_size import ModelSize

UNKNOWN_SHARE = 0.45
"""Share of the GPU for a model of unknown size."""
FULL = TrainConfig.of(model_name="")
"""The default trainer: it trains the server's own weights."""


class MemoryShare(NamedTuple):
    """vLLM's share of one GPU."""

    share: float
    """Value of `--gpu-memory-utilization`."""
    reason: str
    """What it was derived from."""


def derive(
    model: str,
    *,
    gpu_bytes: int,
    tensor_parallel_size: int,
    trainer: TrainConfig = FULL,
    max_model_len: int | None = None,
) -> MemoryShare:
    """Derive vLLM's share of a GPU of `gpu_bytes` from the size of `model` and the choices of its `trainer`."""
    try:
        size = ModelSize.of(model)
    except UsageError as error:
        return MemoryShare(UNKNOWN_SHARE, f"the size of {model} is not known before it is loaded: {error.message}")
    if trainer.trains_in_server:
        trainer = trainer.changed(gpus=max(1, trainer.gpus // tensor_parallel_size))  # replicas
    need = Need.of(size, trainer, gpu_bytes=gpu_bytes, num_ranks=tensor_parallel_size)
    if need.apart:
        return MemoryShare(memory.LARGEST_SHARE, "the trainer is on another device")
    # vLLM does not start if its KV cache is too small for the longest sequence
    least_kv = need.kv_per_token * memory.least_kv_tokens(trainer, max_model_len or size.max_tokens)
    found = memory.fit(need, least_kv=least_kv, kv_sleep=trainer.publishing.kv_sleep)
    exactly = min(memory.share(need, found, least_kv=least_kv), memory.LARGEST_SHARE)
    fixed = need.own + need.state + need.gradients + need.temporaries
    reason = (
        f"{size.num_params / 1e9:.2f}B parameters: of {need.gpu / GIB:.0f} GiB training needs {fixed / GIB:.0f}, "
        f"and at least {need.least_activations / GIB:.0f} for activations"
        + (", while the KV cache sleeps" if found.asleep else "")
        + (f"; {found.lacking / GIB:.0f} GiB more than there is: see bridge plan" if found.lacking else "")
    )
    return MemoryShare(math.floor(100 * exactly) / 100, reason)


def expected(config: ServeConfig) -> TrainConfig:
    """Return the trainer for which a server started alone leaves room: of an adapter, or of all weights."""
    if config.max_lora_rank is None:
        return FULL
    return TrainConfig.of(model_name="", mode="lora_only", lora_r=config.max_lora_rank)


def check_host(trainer: TrainConfig) -> None:
    """Check that the state of an offloaded optimizer fits into what is left of this host's memory.

    Raises:
        UsageError: it does not, and the kernel would kill the run in its first step.
    """
    if not trainer.optimizer.offload:
        return
    try:
        size = ModelSize.of(trainer.model_name)
    except UsageError:
        return  # nothing is known before it is loaded
    needed, left = Need.of(size, trainer, gpu_bytes=math.inf).offloaded, left_bytes()
    if needed > left:
        raise UsageError(
            f"--offload-optimizer takes {needed / GIB:.1f} GiB of this host's memory, {left / GIB:.1f} GiB are left",
            remedy="--optimizer adamw-8bit or adamw-4bit without it, whose state on the GPU is small; see bridge plan",
        )
