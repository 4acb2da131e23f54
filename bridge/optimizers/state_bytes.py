"""Bytes that each optimizer holds per trained parameter, for whoever plans memory before torch is there.

Not covered: what does not grow with the number of parameters: rounding up to whole blocks, temporaries of one chunk,
the offloaded optimizer's staging buffers, the one gradient that exists at a time where gradients are released.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SCALE_BYTES = 4
"""Of the float32 scale of one block of quantised moments."""
BLOCK_OF_8_BIT, BLOCK_OF_4_BIT = 256, 128
"""Elements of a block that share a scale."""
REMAINDER_BYTES = 2
"""Of what bf16 does not hold of a float32 master."""
MOMENT_BYTES: Mapping[str, float] = {
    "adamw": 2 * 4,
    "adamw-bf16": 2 * 2,
    "adamw-8bit": 2 * (1 + SCALE_BYTES / BLOCK_OF_8_BIT),
    "adamw-4bit": 2 * (0.5 + SCALE_BYTES / BLOCK_OF_4_BIT),
}
"""Of both moments, by `--optimizer`."""
WITHOUT_MASTER = "adamw-4bit"
"""Keeps no remainder: it rounds the bf16 weight by chance."""
BF16_BYTES, FLOAT32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True)
class BytesPerParameter:
    """What one trained parameter takes beside its weight."""

    device: float
    """Optimizer state where the weight lies."""
    host: float
    """Optimizer state, master and summed gradients in host memory."""
    gradient: float
    """Gradient where the weight lies; 0 where it is released as soon as it is there."""

    @classmethod
    def of(
        cls, optimizer: str, *, offload: bool = False, release: bool = False, weight_bytes: int = BF16_BYTES
    ) -> "BytesPerParameter":
        """Return those of `--optimizer`, `--offload-optimizer` and `--gradient-release` for bf16 or float32 weights."""
        has_remainder = weight_bytes == BF16_BYTES and optimizer != WITHOUT_MASTER
        state = MOMENT_BYTES[optimizer] + (REMAINDER_BYTES if has_remainder else 0)
        summed = FLOAT32_BYTES if release else 0
        return cls(
            device=0 if offload else state,
            host=FLOAT32_BYTES + MOMENT_BYTES["adamw"] + summed if offload else 0,
            gradient=0 if release else weight_bytes,
        )
