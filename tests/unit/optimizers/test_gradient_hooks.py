"""Gradient release: each parameter is stepped during the backward pass, with the same result as an ordinary step."""

import math

import pytest
import torch
from torch import Tensor, nn

from bridge.errors import UsageError
from bridge.optimizers.factory import scaled_group
from bridge.optimizers.gradient_hooks import added_in_float32, each_group
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Tied(nn.Module):
    """A model whose embedding is also its head."""

    numbers: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 40, dtype=torch.bfloat16)
        self.register_buffer("numbers", torch.arange(30))
        self.layers = nn.ModuleList(nn.Linear(40, 40, dtype=torch.bfloat16) for _ in range(3))

    def loss(self, scale: float = 1.0) -> Tensor:
        hidden = self.embedding(self.numbers)
        for layer in self.layers:
            hidden = hidden + torch.utils.checkpoint.checkpoint(
                lambda x, f=layer: torch.tanh(f(x)), hidden, use_reentrant=False
            )
        return nn.functional.cross_entropy((hidden @ self.embedding.weight.T).float(), self.numbers.roll(1)) * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KINDS)
def test_released_update_equals_an_ordinary_one(name: str, device: str) -> None:
    released, ordinary = Tied().to(device), Tied().to(device)
    one, other = (
        SplitMasterAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, kind=KINDS[name])
        for model in (released, ordinary)
    )
    for _ in range(4):
        with one.releasing():
            released.loss().backward()
        ordinary.loss().backward()
        norm = other.global_norm()
        assert one.global_norm() == pytest.approx(norm, rel=1e-5)
        one.step(grad_norm=one.global_norm())
        other.step(grad_norm=norm)
        other.zero_grad()
        assert one.changed_weight_share == other.changed_weight_share > 0
    for mine, theirs in zip(released.parameters(), ordinary.parameters(), strict=True):
        assert mine.grad is None
        assert torch.equal(mine, theirs)
        assert one.num_updates(mine) == other.num_updates(theirs) == 4
        assert all(torch.equal(one.parts(mine)[part], value) for part, value in other.parts(theirs).items())


def test_only_one_released_gradient_exists_at_a_time() -> None:
    model = Tied()
    optimizer = SplitMasterAdamW(model.parameters(), lr=1e-2)
    num_gradients: list[int] = []
    for parameter in model.parameters():  # called before Bridge's hooks
        parameter.register_post_accumulate_grad_hook(
            lambda _: num_gradients.append(sum(parameter.grad is not None for parameter in model.parameters()))
        )
    with optimizer.releasing():
        model.loss().backward()
    assert num_gradients == [1] * len(list(model.parameters()))
    optimizer.step()
    model.loss().backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "outside the block nothing is released"


@pytest.mark.parametrize(
    ("order", "without", "expected"),
    [
        ("cba", "", ["c", "take c", "b", "take b", "a", "take a"]),
        ("abc", "", ["c", "b", "a", "take a", "take b", "take c"]),
        ("cba", "b", ["c", "take c", "a", "take b", "take a"]),
        ("cba", "abc", ["take c", "take b", "take a"]),
    ],
)
def test_parameter_groups_are_processed_in_order(order: str, without: str, expected: list[str]) -> None:
    weights = {name: nn.Parameter(torch.ones(3)) for name in "abc"}
    happened, hidden = list[str](), torch.ones(3, requires_grad=True)
    for name, weight in weights.items():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: happened.append(name))
    with each_group([[weights[name]] for name in order], lambda number: happened.append(f"take {order[number]}")):
        used = hidden
        for name in (name for name in "abc" if name not in without):
            used = used * weights[name]
        used.sum().backward()
    assert happened == expected


def test_each_released_gradient_is_clipped_separately() -> None:
    small, large = (nn.Parameter(torch.zeros(300).bfloat16()) for _ in range(2))
    optimizer = SplitMasterAdamW([small, large], lr=1e-2)
    with optimizer.releasing(max_norm=1.0):
        (small.sum() * 1e-3 + large.sum() * 1e3).backward()
    assert optimizer.parts(small)["exp_avg"][0].item() == pytest.approx(1e-4, rel=1e-2)
    assert (optimizer.parts(large)["exp_avg"] * 10).norm().item() == pytest.approx(1.0, rel=1e-3)


def test_scaled_parameter_is_clipped_like_an_unscaled_one() -> None:
    plain, held = (nn.Parameter(torch.full((300,), value).bfloat16()) for value in (1.0, 4.0))
    one, other = (
        SplitMasterAdamW([scaled_group(weight, factor, lr=1e-2, weight_decay=0.0)])
        for weight, factor in ((plain, 1.0), (held, 4.0))
    )
    for size in (1.0, 1e-2, 5.0):
        for optimizer, weight, factor in ((one, plain, 1.0), (other, held, 4.0)):
            with optimizer.releasing(max_norm=1.0):
                (weight * (size / factor)).sum().backward()
            assert optimizer.global_norm() == pytest.approx(size * math.sqrt(300), rel=1e-2)
            optimizer.step()
        torch.testing.assert_close(held / 4, plain, rtol=1e-2, atol=0)
        torch.testing.assert_close(other.parts(held)["exp_avg"] * 4, one.parts(plain)["exp_avg"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", KINDS)
def test_released_gradient_that_is_not_finite_raises(name: str, value: float) -> None:
    torch.manual_seed(0)
    good, bad = (nn.Parameter(torch.randn(4, 200).bfloat16()) for _ in range(2))
    optimizer = SplitMasterAdamW([good, bad], lr=0.1, kind=KINDS[name])
    with optimizer.releasing():
        (good * good + bad * bad).sum().backward()
    optimizer.step()
    before = {part: tensor.clone() for part, tensor in optimizer.parts(bad).items()} | {"weight": bad.detach().clone()}
    weight = good.detach().clone()
    with (
        pytest.raises(UsageError, match="1 of 2 gradients were not finite; only the other parameters were updated"),
        optimizer.releasing(),
    ):
        (good.sum() + (bad * value).sum()).backward()
    after = {**optimizer.parts(bad), "weight": bad}
    assert all(torch.equal(after[part], tensor) for part, tensor in before.items())
    assert not torch.equal(good, weight)


def test_gradients_of_several_passes_are_summed_in_float32() -> None:
    model = Tied()
    model.loss().backward()
    alone = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    unused = nn.Parameter(torch.ones(3).bfloat16())
    wide = list[int]()

    def count(_: Tensor) -> None:
        wide.append(
            sum(
                parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
                for parameter in model.parameters()
            )
        )

    with added_in_float32([*model.parameters(), unused]):
        for parameter in model.parameters():  # called after Bridge's hooks
            parameter.register_post_accumulate_grad_hook(count)
        for _ in range(64):
            model.loss().backward()
    assert set(wide) == {0}, "a bf16 gradient must not stay beside float32 ones"
    assert unused.grad is None
    for parameter, one in zip(model.parameters(), alone, strict=True):
        assert parameter.grad is not None
        assert one is not None
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, 64 * one.float(), rtol=1e-5, atol=0)
    model.zero_grad(set_to_none=True)
    model.loss().backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.bfloat16}


def test_second_backward_pass_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = SplitMasterAdamW([weight], lr=0.1)
    with optimizer.releasing():
        weight.sum().backward()
        with pytest.raises(AssertionError, match="one backward pass is one update"):
            weight.sum().backward()
    assert optimizer.num_updates(weight) == 1


def test_parameters_without_a_gradient_are_skipped() -> None:
    used, unused = (nn.Parameter(torch.ones(3).bfloat16()) for _ in range(2))
    optimizer = SplitMasterAdamW([used, unused], lr=0.1)
    with optimizer.releasing():
        used.sum().backward()
    optimizer.step()
    assert (optimizer.num_updates(used), optimizer.num_updates(unused)) == (1, 0)
    assert torch.equal(unused, torch.ones(3).bfloat16())
