"""Every optimizer in one table: what it supports, and the bytes that it takes per trained weight.

The choices of `--optimizer`, the memory plan, and `bridge/optimizers/factory.py` read it. No torch is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

OptimizerName = Literal["adamw", "adamw-8bit", "adamw-4bit"]
SCALE_BYTES = 4
"""Size of a block's float32 scale."""
BLOCK_OF_8_BIT, BLOCK_OF_4_BIT = 256, 128
"""Number of elements that share a scale."""
REMAINDER_BYTES = 2
"""Size of the part of a float32 master that bf16 does not hold."""
BF16_BYTES, FLOAT32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """One value of `--optimizer`."""

    state_bytes: float
    """Bytes of state per parameter, in addition to the remainder."""
    can_offload: bool = False
    """Whether `--offload-optimizer` can move its state to host memory, away from the weights' device."""
    has_master: bool = True
    """Whether it keeps the remainder of a float32 master for bf16 weights, instead of rounding them stochastically."""


OPTIMIZERS: Mapping[OptimizerName, OptimizerSpec] = {
    "adamw": OptimizerSpec(state_bytes=2 * 4, can_offload=True),
    "adamw-8bit": OptimizerSpec(state_bytes=2 * (1 + SCALE_BYTES / BLOCK_OF_8_BIT)),
    "adamw-4bit": OptimizerSpec(state_bytes=2 * (0.5 + SCALE_BYTES / BLOCK_OF_4_BIT), has_master=False),
}
"""The optimizers by value of `--optimizer`, the most precise first."""


@dataclass(frozen=True, kw_only=True)
class BytesPerParameter:
    """Bytes per trained parameter in addition to its weight.

    They leave out what does not grow with the number of parameters: rounding up to whole blocks, temporaries, the
    offloaded optimizer's buffers, and the single gradient that exists at a time when gradients are released.
    """

    device: float
    """State on the weights' device."""
    host: float
    """State, master and summed gradients in host memory."""
    gradient: float
    """Gradient on the weights' device; 0 if gradients are released."""

    @classmethod
    def of(
        cls, name: OptimizerName, *, offload: bool = False, release: bool = False, weight_bytes: int = BF16_BYTES
    ) -> Self:
        """Compute the bytes for `--optimizer`, `--offload-optimizer`, `--gradient-release` and the size of a weight."""
        spec = OPTIMIZERS[name]
        remainder = REMAINDER_BYTES if spec.has_master and weight_bytes == BF16_BYTES else 0
        summed = FLOAT32_BYTES if release else 0
        return cls(
            device=0 if offload else spec.state_bytes + remainder,
            host=spec.state_bytes + FLOAT32_BYTES + summed if offload else 0,
            gradient=0 if release else weight_bytes,
        )
