"""Low-bit moments: levels and codes, and how closely training with them follows float32 moments."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bridge.optimizers.moments import (
    EIGHT_BIT,
    FOUR_BIT,
    dequantize_signed,
    dequantize_unsigned,
    key,
    pack,
    quantize_signed,
    quantize_unsigned,
    random_bits,
    stochastic_round,
    uniform,
    unpack,
)
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS

CODED = [EIGHT_BIT, FOUR_BIT]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: with such tiny tensors, synchronization would dominate on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "power"), [(8, 4), (4, 2)])
def test_signed_code_round_trips_through_its_level(bits: int, power: int) -> None:
    largest = 2 ** (bits - 1) - 1
    codes = torch.arange(-largest, largest + 1).to(torch.int8)
    levels = dequantize_signed(codes, bits, power)
    assert [levels[0].item(), levels[largest].item(), levels[-1].item()] == [-1, 0, 1]
    assert (levels.diff() > 0).all()
    assert torch.equal(quantize_signed(levels, bits, power, torch.full_like(levels, 0.5)), codes)


@pytest.mark.parametrize(("bits", "power"), [(8, 4), (4, 2)])
def test_signed_codes_are_unbiased_and_zero_stays_zero(bits: int, power: int) -> None:
    torch.manual_seed(0)
    values = torch.linspace(-1, 1, 51)[:, None].repeat(1, 4000)
    values[25] = 0
    levels = dequantize_signed(quantize_signed(values, bits, power, torch.rand(51, 4000)), bits, power)
    torch.testing.assert_close(levels.mean(1), values[:, 0], rtol=0.02, atol=1e-2)
    assert not levels[25].any()
    ends = quantize_signed(torch.tensor([-1.0, 1.0]), bits, power, torch.tensor([0.0, 1 - 2**-16]))
    assert ends.tolist() == [-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1]


@pytest.mark.parametrize(("bits", "power"), [(8, 8), (4, 2)])
def test_unsigned_codes_are_unbiased_and_have_no_zero(bits: int, power: int) -> None:
    codes = torch.arange(2**bits).to(torch.uint8)
    levels = dequantize_unsigned(codes, bits, power)
    assert levels[0] > 0
    assert levels[-1] == 1
    inner = levels[1:-1]
    assert (
        (quantize_unsigned(inner, bits, power, torch.full_like(inner, 0.5)).int() - codes[1:-1].int()).abs() == 0
    ).all()
    values = torch.linspace(float(levels[0]), 1, 50)[:, None].expand(50, 4000)
    positive_levels = dequantize_unsigned(quantize_unsigned(values, bits, power, torch.rand(50, 4000)), bits, power)
    torch.testing.assert_close(positive_levels.mean(1), values[:, 0], rtol=0.02, atol=1e-3)
    assert quantize_unsigned(torch.zeros(1), bits, power, torch.zeros(1)).item() == 0


def test_both_codes_of_an_element_share_one_byte() -> None:
    first, second = (
        torch.arange(-7, 8).to(torch.int8)[:, None].expand(15, 16),
        torch.arange(16).to(torch.uint8).expand(15, 16),
    )
    packed = pack(first, second)
    assert packed.dtype == torch.uint8
    assert packed.unique().numel() == 15 * 16
    assert all(map(torch.equal, unpack(packed), (first, second)))


@pytest.mark.parametrize("moments", CODED)
def test_blocks_are_independent_and_zeros_stay_zeros(moments: object) -> None:
    assert isinstance(moments, type(EIGHT_BIT))
    first, second = torch.randn(3, moments.block), torch.rand(3, moments.block)
    first[1] = second[1] = 0
    first[2], second[2] = first[0] * 1e-6, second[0] * 1e-12
    bits = random_bits(torch.tensor([1, 0], dtype=torch.int32), first)
    bits[2] = bits[0]
    decoded = moments.decode(moments.encode(first, second, bits))
    for values in decoded:
        assert not values[1].any()
    torch.testing.assert_close(decoded[0][2], decoded[0][0] * 1e-6, rtol=1e-5, atol=0)
    torch.testing.assert_close(decoded[1][2], decoded[1][0] * 1e-12, rtol=0.5 if moments.bits == 4 else 0.1, atol=0)
    zeros = {
        name: torch.zeros(2, moments.block // part.elements, dtype=part.dtype) for name, part in moments.parts.items()
    }
    assert not any(values.any() for values in moments.decode(zeros))


def path(name: str, lr: float, steps: int) -> tuple[Tensor, float]:
    """Return how far the weights move while minimizing a noisy quadratic, and the final loss."""
    torch.manual_seed(0)
    target, scale = torch.randn(16, 256), 10 ** (-2 * torch.rand(16, 256))  # gradients span two decades within a block
    weight = torch.nn.Parameter((torch.randn(16, 256) * 0.02).bfloat16())
    start = weight.detach().float()
    optimizer = SplitMasterAdamW([weight], lr=lr, kind=KINDS[name])
    for _ in range(steps):
        noise = torch.randn(16, 256)
        weight.grad = (scale * (weight.detach().float() - target + noise)).bfloat16()
        optimizer.step(max_norm=1.0)
    end = weight.detach().float()
    return end - start, float((scale * (end - target) ** 2).mean())


@pytest.mark.parametrize(
    ("name", "least_cosine", "shortest", "longest"),
    [("adamw-8bit", 0.995, 0.98, 1.03), ("adamw-4bit", 0.85, 0.8, 1.05)],
)
def test_600_steps_follow_float32_moments(name: str, least_cosine: float, shortest: float, longest: float) -> None:
    (moved, loss), (reference, best) = path(name, 1e-3, 600), path("adamw", 1e-3, 600)
    assert torch.cosine_similarity(moved.flatten(), reference.flatten(), dim=0) > least_cosine
    assert shortest < moved.norm() / reference.norm() < longest
    assert loss < best * 1.1


def test_second_moment_forgets_old_gradients() -> None:
    scale, kept = 10 ** (-2 * torch.rand(8, 256)), []
    for name in ("adamw", "adamw-8bit"):
        weight = torch.nn.Parameter(torch.zeros(8, 256).bfloat16())
        optimizer = SplitMasterAdamW([weight], lr=1e-6, betas=(0.9, 0.98), kind=KINDS[name])
        torch.manual_seed(1)
        for step in range(400):
            weight.grad = ((scale if step < 200 else scale.flip(1)) * torch.randn(8, 256)).bfloat16()
            optimizer.step()
        slab = optimizer._slabs[0]
        kept.append(slab.kind.moments.decode(slab.state)[1].flatten().log())
    assert abs((kept[1] - kept[0]).mean()) < 0.05
    assert (kept[1] - kept[0]).abs().median() < 0.15


def drift(name: str, size: float) -> float:
    """Return how far weights drift, in learning rates, in the 600 steps after their gradients became zero.

    Their neighbors in each block keep getting gradients, which are 1 / `size` times as large.
    """
    torch.manual_seed(0)
    weight, ended = torch.nn.Parameter(torch.zeros(8, 256)), torch.rand(8, 256) < 0.5
    optimizer = SplitMasterAdamW([weight], lr=1.0, kind=KINDS[name])
    for step in range(700):
        if step == 100:
            before = weight.detach().clone()
        weight.grad = torch.randn(8, 256) * torch.where(ended, size if step < 100 else 0.0, 1.0)
        optimizer.step()
    return float((weight.detach() - before)[ended].abs().mean())


@pytest.mark.parametrize(("name", "size"), [("adamw-8bit", 1.0), ("adamw-8bit", 3e-4), ("adamw-4bit", 1.0)])
def test_momentum_fades_once_gradients_are_zero(name: str, size: float) -> None:
    expected = drift("adamw", size)
    assert 1 < expected < 3
    assert 0.7 * expected < drift(name, size) < 1.4 * expected


@pytest.mark.parametrize("name", ["adamw-8bit", "adamw-4bit"])
def test_rounding_depends_on_the_seed_and_the_step(name: str) -> None:
    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        weight, weights = torch.nn.Parameter(torch.randn(20, 130).bfloat16()), []
        optimizer = SplitMasterAdamW([weight], lr=1e-3, kind=KINDS[name], seed=seed)
        for _ in range(5):
            weight.grad = torch.randn(20, 130).bfloat16()
            optimizer.step()
            weights.append(weight.detach().clone())
        return weights

    first, repeated, other = run(3), run(3), run(4)
    assert all(map(torch.equal, first, repeated))
    assert not torch.equal(first[-1], other[-1])
    assert key(3, 0, 1) != key(4, 0, 1)


def key_and_row(number: int, row: int = 0) -> Tensor:
    return torch.tensor([number, row], dtype=torch.int32)


def bits_of(number: int, row: int = 0, shape: tuple[int, int] = (1000, 256)) -> Tensor:
    return random_bits(key_and_row(number, row), torch.empty(shape))


def test_random_bits_depend_only_on_key_and_index() -> None:
    whole = bits_of(key(1, 2, 3))
    assert torch.equal(whole, bits_of(key(1, 2, 3)))
    assert torch.equal(whole[400:410], bits_of(key(1, 2, 3), 400, (10, 256)))
    for other in (key(0, 2, 3), key(1, 2, 4), key(1, 3, 3), key(12, 3)):
        assert (bits_of(other) == whole).float().mean() < 1e-4
        same_bits = (~(bits_of(other) ^ whole)).unsqueeze(-1) >> torch.arange(32) & 1
        assert abs(same_bits.float().mean().item() - 0.5) < 1e-3


def test_random_bits_are_uniform_and_independent() -> None:
    bits = bits_of(key(5)) >> torch.arange(32).view(-1, 1, 1) & 1
    assert ((bits.float().mean((1, 2)) - 0.5).abs() < 5e-3).all()
    numbers = uniform(bits_of(key(5)))
    assert 0 <= numbers.min() <= numbers.max() < 1
    for one, other in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 1e-2


def test_stochastic_rounding_is_unbiased() -> None:
    for value in (1.0 + 2**-9, -3.3, 1e-5, -(2.0 - 2**-12), 0.0):
        rounded = stochastic_round(torch.full((4000, 256), value), bits_of(key(7), shape=(4000, 256))).view(
            torch.bfloat16
        )
        floats = rounded.float()
        spacing = max(abs(value), 1e-30) * 2**-7
        assert (floats - value).abs().max() <= spacing
        assert floats.unique().numel() == (2 if value else 1)
        assert abs(floats.double().mean().item() - value) < spacing * 4 / 1000  # the deviation is 0.5 / sqrt(1,024,000)


def test_stochastic_rounding_keeps_bf16_values() -> None:
    values = torch.randn(10, 256).bfloat16()
    assert torch.equal(stochastic_round(values.float(), bits_of(key(1), shape=(10, 256))).view(torch.bfloat16), values)
