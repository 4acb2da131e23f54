"""Bytes of optimizer state per trained parameter, for planning memory before torch is imported.

Left out is what does not grow with the number of parameters: rounding up to whole blocks, temporaries, the offloaded
optimizer's buffers, and the one gradient that exists at a time when gradients are released.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SCALE_BYTES = 4
"""Size of a block's float32 scale."""
BLOCK_OF_8_BIT, BLOCK_OF_4_BIT = 256, 128
"""Elements that share a scale."""
REMAINDER_BYTES = 2
"""Size of the part of a float32 master that bf16 does not hold."""
MOMENT_BYTES: Mapping[str, float] = {
    "adamw": 2 * 4,
    "adamw-bf16": 2 * 2,
    "adamw-8bit": 2 * (1 + SCALE_BYTES / BLOCK_OF_8_BIT),
    "adamw-4bit": 2 * (0.5 + SCALE_BYTES / BLOCK_OF_4_BIT),
}
"""Size of both moments, by `--optimizer`."""
WITHOUT_MASTER = "adamw-4bit"
"""Keeps no remainder: it rounds the bf16 weight stochastically."""
BF16_BYTES, FLOAT32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True)
class BytesPerParameter:
    """Bytes of one trained parameter beside its weight."""

    device: float
    """State on the weights' device."""
    host: float
    """State, master and summed gradients in host memory."""
    gradient: float
    """Gradient on the weights' device; 0 if gradients are released."""

    @classmethod
    def of(
        cls, optimizer: str, *, offload: bool = False, release: bool = False, weight_bytes: int = BF16_BYTES
    ) -> "BytesPerParameter":
        """Compute them from `--optimizer`, `--offload-optimizer`, `--gradient-release`, and the size of a weight."""
        has_remainder = weight_bytes == BF16_BYTES and optimizer != WITHOUT_MASTER
        state = MOMENT_BYTES[optimizer] + (REMAINDER_BYTES if has_remainder else 0)
        summed = FLOAT32_BYTES if release else 0
        return cls(
            device=0 if offload else state,
            host=FLOAT32_BYTES + MOMENT_BYTES["adamw"] + summed if offload else 0,
            gradient=0 if release else weight_bytes,
        )
