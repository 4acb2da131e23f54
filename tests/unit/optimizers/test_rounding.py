"""Stochastic rounding: right on average, the same for the same seed and position, and different everywhere else."""

import torch
from torch import Tensor

from bridge.optimizers.moments import key, random_bits, round_by_chance, uniform


def place(number: int, row: int = 0) -> Tensor:
    return torch.tensor([number, row], dtype=torch.int32)


def bits_of(number: int, row: int = 0, shape: tuple[int, int] = (1000, 256)) -> Tensor:
    return random_bits(place(number, row), torch.empty(shape))


def test_the_bits_are_of_the_key_and_the_place_alone() -> None:
    whole = bits_of(key(1, 2, 3))
    assert torch.equal(whole, bits_of(key(1, 2, 3)))
    assert torch.equal(whole[400:410], bits_of(key(1, 2, 3), 400, (10, 256)))
    for other in (key(0, 2, 3), key(1, 2, 4), key(1, 3, 3), key(12, 3)):
        assert (bits_of(other) == whole).float().mean() < 1e-4
        same_bits = (~(bits_of(other) ^ whole)).unsqueeze(-1) >> torch.arange(32) & 1
        assert abs(same_bits.float().mean().item() - 0.5) < 1e-3


def test_random_bits_are_fair_and_independent() -> None:
    bits = bits_of(key(5)) >> torch.arange(32).view(-1, 1, 1) & 1
    assert ((bits.float().mean((1, 2)) - 0.5).abs() < 5e-3).all()
    numbers = uniform(bits_of(key(5)))
    assert 0 <= numbers.min() <= numbers.max() < 1
    for one, other in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 1e-2


def test_stochastic_rounding_is_right_on_average() -> None:
    for value in (1.0 + 2**-9, -3.3, 1e-5, -(2.0 - 2**-12), 0.0):
        rounded = round_by_chance(torch.full((4000, 256), value), bits_of(key(7), shape=(4000, 256))).view(
            torch.bfloat16
        )
        found = rounded.float()
        spacing = max(abs(value), 1e-30) * 2**-7
        assert (found - value).abs().max() <= spacing
        assert found.unique().numel() == (2 if value else 1)
        assert abs(found.double().mean().item() - value) < spacing * 4 / 1000  # the deviation is 0.5 / sqrt(1,024,000)


def test_what_bf16_holds_is_not_changed() -> None:
    values = torch.randn(10, 256).bfloat16()
    assert torch.equal(round_by_chance(values.float(), bits_of(key(1), shape=(10, 256))).view(torch.bfloat16), values)
