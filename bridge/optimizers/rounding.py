"""Stochastic rounding, with random bits that are a function of (seed, step, place).

A hashed counter needs no state, is the same after a resume, and compiles into the kernel that uses it.

Shape suffixes: R blocks, B elements of a block.
Source: the hash is `lowbias32` of https://github.com/skeeto/hash-prospector; stochastic rounding of bf16 weights is
arXiv 2010.06192.
"""

import hashlib

import torch
from torch import Tensor

_FACTORS = 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit words
_GOLDEN = 0x9E3779B9 - 2**32


def key(*numbers: int) -> int:
    """Hash numbers such as seed, slab and step into a signed 32-bit word."""
    digest = hashlib.blake2s(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(place: Tensor, like_RB: Tensor) -> Tensor:
    """Return 32 random bits for each element of `like_RB`, as int32.

    Shapes: `place` int32 [2], a key and the number of the first block.
    """
    (num_rows, width), device = like_RB.shape, like_RB.device
    rows_R = torch.arange(num_rows, device=device, dtype=torch.int32) + place[1]
    index_RB = rows_R[:, None] * width + torch.arange(width, device=device, dtype=torch.int32)
    bits_RB = _mixed(index_RB * _GOLDEN) ^ place[0]
    return _mixed(bits_RB)


def round_by_chance(master: Tensor, bits: Tensor) -> Tensor:
    """Round each finite float32 to one of the two bf16 around it, right on average, by the lower half of `bits`.

    Returns the int16 bits of the bf16.
    """
    return ((master.view(torch.int32) + (bits & 0xFFFF)) >> 16).short()


def remixed(bits: Tensor) -> Tensor:
    """Derive as many new random bits from `bits`."""
    return _mixed(bits ^ _GOLDEN)


def uniform(bits: Tensor) -> Tensor:
    """Return float32 numbers in [0, 1) from the upper half of `bits`."""
    return ((bits >> 16) & 0xFFFF).float() * 2.0**-16


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _FACTORS[0]
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _FACTORS[1]
    return bits ^ ((bits >> 16) & 0xFFFF)
