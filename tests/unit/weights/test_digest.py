"""The digest depends on every bit, on order and on position, but not on strides or chunk sizes."""

import random

import pytest
import torch

from bridge.weights import rank_parts as module
from bridge.weights.rank_parts import digest

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
]  # fmt: skip


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_depends_on_every_bit_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = sample(dtype, 4, 3)
    before = digest(tensor)
    assert len(before) == 16
    assert int(before, 16) >= 0
    data = tensor.view(-1).view(torch.uint8)
    digests = {before}
    for byte in range(len(data)):
        for bit in range(1 if dtype == torch.bool else 8):
            data[byte] ^= 1 << bit
            digests.add(digest(tensor))
            data[byte] ^= 1 << bit
    assert len(digests) == 1 + len(data) * (1 if dtype == torch.bool else 8)
    assert digest(tensor) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_two_flipped_signs_do_not_cancel(dtype: torch.dtype) -> None:
    tensor = sample(dtype, 8)
    flipped = tensor.clone()
    flipped[1], flipped[6] = -flipped[1], -flipped[6]
    assert digest(flipped) != digest(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_swapping_a_value_and_its_negation_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.5, 0.0, -1.5, 4.0], dtype=dtype)
    assert digest(tensor[[2, 1, 0, 3]]) != digest(tensor)


def test_swapping_any_two_elements_changes_the_digest() -> None:
    tensor = torch.arange(64, dtype=torch.bfloat16)
    digests = {digest(tensor)}
    for one in range(64):
        for other in range(one):
            swapped = tensor.clone()
            swapped[one], swapped[other] = tensor[other], tensor[one]
            digests.add(digest(swapped))
    assert len(digests) == 1 + 64 * 63 // 2


def test_digest_of_zeros_depends_on_the_length() -> None:
    assert len({digest(torch.zeros(length)) for length in range(20)}) == 20


@pytest.mark.parametrize("words", [1, 3, 8, 24, 25])
def test_digest_depends_on_position_for_any_chunk_size(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    monkeypatch.setattr(module, "CHUNK_WORDS", words)
    tensor = sample(torch.bfloat16, 24)
    digests = {digest(tensor)}
    for one in range(24):
        changed = tensor.clone()
        changed[one] += 1
        digests.add(digest(changed))
        for other in range(one):
            swapped = tensor.clone()
            swapped[one], swapped[other] = tensor[other], tensor[one]
            digests.add(digest(swapped))
    assert len(digests) == 1 + 24 + 24 * 23 // 2


def test_digest_of_a_view_ignores_its_strides() -> None:
    whole = sample(torch.bfloat16, 8, 6)
    for view in (whole[2:5], whole[:, 1:3], whole.t(), whole[::2], whole[3, 4]):
        assert digest(view) == digest(view.clone().contiguous())
    assert digest(whole[2:5]) != digest(whole[3:6])


def test_digest_does_not_build_an_autograd_graph() -> None:
    parameter = torch.nn.Parameter(sample(torch.float32, 5))
    assert digest(parameter) == digest(parameter.detach())


def test_random_tensors_have_distinct_digests() -> None:
    random_ = random.Random(0)
    tensors = {tuple(random_.randint(-2, 2) for _ in range(6)) for _ in range(1000)}
    assert len({digest(torch.tensor(values, dtype=torch.bfloat16)) for values in tensors}) == len(tensors)
