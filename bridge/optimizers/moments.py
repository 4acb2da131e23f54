"""How AdamW's two moments are stored: as float32, or 8-bit or 4-bit codes with a float32 scale per block.

Rounding is stochastic wherever a value would otherwise get stuck. The random bits are a hashed counter, a function of
(seed, step, index): they need no state, are the same after a resume, and compile into the kernel that uses them.

A code c in a block represents scale * (c / largest code) ** power. The power makes the steps between small values
small, without a table of levels. Both moments are rounded stochastically, so that they are unbiased. Rounded to
nearest, a value never changes if it decays by less than half the distance between two codes. At beta2 = 0.999 that
would happen to every second moment; at beta1 = 0.9 to all 4-bit first moments and to small 8-bit ones, and their
weights would keep moving long after their gradients had vanished. Only the first moment has a code for zero.

Compared with float32 moments in a simulation: gradients in a block spanned two or three decades and swapped magnitudes
after half of the 1,000 steps, as pure noise and as noise around a mean of 0.3 standard deviations, at beta2 = 0.999.
With 8 bits the sum of the updates was 1.01 to 1.02 times as long, with a cosine of at least 0.994. With a second moment
rounded to nearest it was 1.2 times as long after the swap; Dettmers' dynamic tree gave single updates of 20 and more,
because it has a code for zero. With 4 bits the sum was 0.8 to 1.3 times as long, with a cosine of 0.63 to 0.93; a
linear second moment errs towards small steps (0.5 to 0.8 times), a cubic one towards large ones.

Shape suffixes: R blocks, B elements of a block.
Source: block-wise 8-bit states, arXiv 2110.02861; 4 bits, and a second moment without zero (linear there), arXiv
2309.01507; the hash is `lowbias32` of https://github.com/skeeto/hash-prospector; stochastic rounding of bf16 weights is
arXiv 2010.06192.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.config.optimizers import BLOCK_OF_4_BIT, BLOCK_OF_8_BIT

State = Mapping[str, Tensor]
FIRST = "exp_avg"
SECOND = "exp_avg_sq"
BOTH = "exp_avg_codes"
FIRST_SCALE = "exp_avg_scale"
SECOND_SCALE = "exp_avg_sq_scale"
_FACTORS = 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit words
_GOLDEN = 0x9E3779B9 - 2**32


@dataclass(frozen=True)
class StateTensor:
    """The dtype and size of one state tensor."""

    dtype: torch.dtype
    elements: int = 1
    """Elements of the parameter per element of this tensor."""


@dataclass(frozen=True)
class PlainMoments:
    """Moments stored in float32."""

    block: int = BLOCK_OF_8_BIT
    by_chance: bool = False

    @property
    def parts(self) -> Mapping[str, StateTensor]:
        return {FIRST: StateTensor(torch.float32), SECOND: StateTensor(torch.float32)}

    def decode(self, state: State) -> tuple[Tensor, Tensor]:
        return state[FIRST], state[SECOND]

    def encode(self, first_RB: Tensor, second_RB: Tensor, bits_RB: Tensor | None) -> State:  # noqa: ARG002
        """Keep both moments unchanged; only `QuantizedMoments` uses the random bits."""
        return {FIRST: first_RB, SECOND: second_RB}


@dataclass(frozen=True, kw_only=True)
class QuantizedMoments:
    """Moments quantized to a few bits, block by block. State that is all zeros represents moments of zero."""

    bits: int
    """Bits per code: 8 or 4. Two 4-bit codes share a byte."""
    block: int
    """Elements that share a scale."""
    first_power: int
    second_power: int
    by_chance: bool = True
    """Whether `encode` needs random bits; updates are then bounded, because quantization loses precision."""

    @property
    def parts(self) -> Mapping[str, StateTensor]:
        codes = {FIRST: torch.int8, SECOND: torch.uint8} if self.bits == 8 else {BOTH: torch.uint8}
        scale = StateTensor(torch.float32, self.block)
        return {**{name: StateTensor(dtype) for name, dtype in codes.items()}, FIRST_SCALE: scale, SECOND_SCALE: scale}

    def decode(self, state: State) -> tuple[Tensor, Tensor]:
        """Return both moments as float32 [R, B]."""
        first_RB, second_RB = (state[FIRST], state[SECOND]) if self.bits == 8 else unpack(state[BOTH])
        return (
            dequantize_signed(first_RB, self.bits, self.first_power) * state[FIRST_SCALE],
            dequantize_unsigned(second_RB, self.bits, self.second_power) * state[SECOND_SCALE],
        )

    def encode(self, first_RB: Tensor, second_RB: Tensor, bits_RB: Tensor | None) -> State:
        """Scale each block by its largest value, and round to codes stochastically, by the random `bits_RB`."""
        assert bits_RB is not None
        chances = uniform(_mixed(bits_RB ^ _GOLDEN)), uniform(bits_RB)  # the bits' lower half rounds the weight
        return self._encoded(first_RB, second_RB, chances)

    def to_nearest(self, first_RB: Tensor, second_RB: Tensor) -> State:
        """Scale each block as `encode` does, and choose the nearest codes; decoded moments get the same codes again."""
        half = torch.full_like(first_RB, 0.5)
        return self._encoded(first_RB, second_RB, (half, half))

    def _encoded(self, first_RB: Tensor, second_RB: Tensor, chances: tuple[Tensor, Tensor]) -> State:
        first_scale = first_RB.abs().amax(1, keepdim=True)
        second_scale = second_RB.amax(1, keepdim=True)
        first_RB = quantize_signed(_divided(first_RB, first_scale), self.bits, self.first_power, chances[0])
        second_RB = quantize_unsigned(_divided(second_RB, second_scale), self.bits, self.second_power, chances[1])
        codes = {FIRST: first_RB, SECOND: second_RB} if self.bits == 8 else {BOTH: pack(first_RB, second_RB)}
        return {**codes, FIRST_SCALE: first_scale, SECOND_SCALE: second_scale}


Moments = PlainMoments | QuantizedMoments
FLOAT32 = PlainMoments()
EIGHT_BIT = QuantizedMoments(bits=8, block=BLOCK_OF_8_BIT, first_power=4, second_power=8)
FOUR_BIT = QuantizedMoments(bits=4, block=BLOCK_OF_4_BIT, first_power=2, second_power=2)


def dequantize_signed(code: Tensor, bits: int, power: int) -> Tensor:
    """Return the value of a signed code, from -1 to 1."""
    share = code.float() / (2 ** (bits - 1) - 1)
    level: Tensor = share.sign() * share.abs().pow(power)
    return level


def quantize_signed(value: Tensor, bits: int, power: int, chance: Tensor) -> Tensor:
    """Round a value from -1 to 1 stochastically to one of the two nearest int8 codes, so that it is unbiased."""
    size = value.abs()
    largest = 2 ** (bits - 1) - 1
    lower = (_root(size, power) * largest).floor().clamp(0, largest - 1)
    low = dequantize_signed(lower, bits, power)
    high = dequantize_signed(lower + 1, bits, power)
    code: Tensor = value.sign() * (lower + ((size - low) / (high - low) > chance))
    return code.to(torch.int8)


def dequantize_unsigned(code: Tensor, bits: int, power: int) -> Tensor:
    """Return the value of an unsigned code, greater than 0 and at most 1."""
    level: Tensor = ((code.float() + 1) / 2**bits).pow(power)
    return level


def quantize_unsigned(value: Tensor, bits: int, power: int, chance: Tensor) -> Tensor:
    """Round a value from 0 to 1 stochastically to one of the two nearest uint8 codes, so that it is unbiased.

    Values below the lowest level get the lowest level.
    """
    lower = (_root(value, power) * 2**bits - 1).floor().clamp(0, 2**bits - 2)
    low = dequantize_unsigned(lower, bits, power)
    high = dequantize_unsigned(lower + 1, bits, power)
    code: Tensor = lower + ((value - low) / (high - low) > chance)
    return code.to(torch.uint8)


def pack(first: Tensor, second: Tensor) -> Tensor:
    """Pack an element's signed and unsigned 4-bit codes into one byte, so that elements do not share bytes."""
    return (first.byte() & 15) | (second << 4)


def unpack(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two codes that `pack` put into a byte."""
    return ((both & 15) ^ 8).to(torch.int8) - 8, both >> 4


def _root(value: Tensor, power: int) -> Tensor:
    """Return value ** (1 / power), with square roots if possible, since they are cheaper on a GPU."""
    while power % 2 == 0:
        value = value.sqrt()
        power = power // 2
    return value if power == 1 else value.pow(1 / power)


def _divided(value_RB: Tensor, scale: Tensor) -> Tensor:
    return value_RB / torch.where(scale > 0, scale, 1.0)


def key(*numbers: int) -> int:
    """Hash numbers, such as seed, slab and step, into a signed 32-bit word."""
    digest = hashlib.blake2s(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(counter: Tensor, like_RB: Tensor) -> Tensor:
    """Return 32 random bits for each element of `like_RB`, as int32.

    Shapes: `counter` int32 [2], a key and the index of the first block.
    """
    (num_rows, width), device = like_RB.shape, like_RB.device
    rows_R = torch.arange(num_rows, device=device, dtype=torch.int32) + counter[1]
    index_RB = rows_R[:, None] * width + torch.arange(width, device=device, dtype=torch.int32)
    return _mixed(_mixed(index_RB * _GOLDEN) ^ counter[0])


def stochastic_round(master: Tensor, bits: Tensor) -> Tensor:
    """Round each finite float32 stochastically to one of the two nearest bf16, by the lower half of `bits`.

    Return the bits of the bf16 as int16.
    """
    return ((master.view(torch.int32) + (bits & 0xFFFF)) >> 16).short()


def uniform(bits: Tensor) -> Tensor:
    """Return uniform float32 numbers in [0, 1), from the upper half of `bits`."""
    return ((bits >> 16) & 0xFFFF).float() * 2.0**-16


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _FACTORS[0]
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _FACTORS[1]
    return bits ^ ((bits >> 16) & 0xFFFF)
