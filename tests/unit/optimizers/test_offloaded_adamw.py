"""The optimizer in host memory equals torch's fused AdamW on float32 masters bit for bit, chunked and streamed."""

import math

import pytest
import torch
from torch import Tensor

from bridge.errors import UsageError
from bridge.optimizers import offloaded_adamw
from bridge.optimizers.factory import scaled_group
from bridge.optimizers.offloaded_adamw import OffloadedAdamW

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = [(37, 64), (5,), (130, 70)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_adamw, "CHUNK_ELEMENTS", 1024)


def weights_of(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def gradients() -> list[Tensor]:
    return [torch.randn(shape).bfloat16() for shape in SHAPES]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_offloaded_adamw_equals_fused_adamw_bit_for_bit(dtype: torch.dtype, device: str) -> None:
    ours = weights_of(device, dtype)
    masters = [torch.nn.Parameter(weight.detach().cpu().float().clone()) for weight in ours]
    optimizer = OffloadedAdamW(ours, lr=1e-3, weight_decay=0.1)
    reference = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, fused=True)
    num_weights = sum(weight.numel() for weight in ours)
    for _ in range(10):
        before = [weight.detach().clone() for weight in ours]
        for weight, master, gradient in zip(ours, masters, gradients(), strict=True):
            weight.grad, master.grad = gradient.to(device, dtype), gradient.float()
        optimizer.step()
        reference.step()
        for weight, master in zip(ours, masters, strict=True):
            assert torch.equal(optimizer.parts(weight)["master"], master)
            assert torch.equal(weight.cpu(), master.to(dtype))
        changed = sum(int((old != new).sum()) for old, new in zip(before, ours, strict=True))
        assert optimizer.changed_weight_share == changed / num_weights > 0


def test_master_starts_from_the_weight_at_its_first_update() -> None:
    ours = weights_of()
    optimizer = OffloadedAdamW(ours, lr=0.0)
    optimizer.allocate()
    assert not optimizer.parts(ours[0])["master"].any()
    with torch.no_grad():
        ours[0].fill_(3.0)  # as if a checkpoint was loaded
    ours[0].grad = torch.ones_like(ours[0])
    optimizer.step()
    assert (ours[0] == 3).all()
    assert [optimizer.num_updates(weight) for weight in ours] == [1, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_streamed_gradients_are_summed_in_float32(device: str) -> None:
    ours, summed = weights_of(device), weights_of()
    optimizer, reference = OffloadedAdamW(ours, lr=1e-3, streams=True), OffloadedAdamW(summed, lr=1e-3)
    for _ in range(3):
        micro_batches = [gradients() for _ in range(3)]
        with optimizer.releasing():
            for parts in micro_batches:
                losses = [(w * g.to(device)).float().sum() for w, g in zip(ours, parts, strict=True)]
                torch.stack(losses).sum().backward()
                assert all(weight.grad is None for weight in ours)
        for weight, one, two, three in zip(summed, *micro_batches, strict=True):
            weight.grad_dtype = torch.float32
            weight.grad = one.float() + two.float() + three.float()
        norm = optimizer.global_norm()
        assert norm == pytest.approx(reference.global_norm(), rel=1e-6)
        optimizer.step(grad_norm=norm, max_norm=norm / 2)
        reference.step(grad_norm=norm, max_norm=norm / 2)
    for mine, theirs in zip(ours, summed, strict=True):
        assert torch.equal(optimizer.parts(mine)["master"], reference.parts(theirs)["master"])
        assert torch.equal(mine.cpu(), theirs)


def test_gradient_sum_without_a_step_is_dropped() -> None:
    ours = weights_of()
    optimizer = OffloadedAdamW(ours, lr=1e-3, streams=True)
    with optimizer.releasing():
        (ours[0] * math.nan).sum().backward()
    with pytest.raises(UsageError, match="no weight was changed"):
        optimizer.step(grad_norm=optimizer.global_norm())
    with optimizer.releasing():
        (ours[0] * 2).sum().backward()
    assert optimizer.global_norm() == pytest.approx(2 * math.sqrt(ours[0].numel()))
    optimizer.step()
    assert [optimizer.num_updates(weight) for weight in ours] == [1, 0, 0]


def test_scaled_master_trains_like_an_unscaled_one() -> None:
    torch.manual_seed(0)
    start = torch.randn(6, 7).bfloat16()
    plain, held = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start * 2)
    optimizers = [
        OffloadedAdamW([scaled_group(weight, factor, lr=3e-3, weight_decay=0.1)])
        for weight, factor in ((plain, 1.0), (held, 2.0))
    ]
    for size in (1.0, 1e-7):
        gradient = (torch.randn(6, 7) * size).bfloat16()
        plain.grad, held.grad = gradient, gradient / 2
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(held, plain * 2)


def test_views_of_a_larger_tensor_are_written_in_place() -> None:
    fused = torch.randn(12, 8).bfloat16()
    before = fused.clone()
    weight = torch.nn.Parameter(fused[2:6])
    weight.grad = torch.ones(4, 8).bfloat16()
    OffloadedAdamW([weight], lr=0.5).step()
    assert (fused != before).all(1).nonzero().flatten().tolist() == [2, 3, 4, 5]
    assert not (fused != before)[[0, 1, *range(6, 12)]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_no_state_is_kept_on_the_device(device: str) -> None:
    ours = weights_of(device)
    num_weights = sum(weight.numel() for weight in ours)
    for streams, bytes_per_weight in ((False, 12), (True, 16)):
        optimizer = OffloadedAdamW(ours, streams=streams)
        assert not optimizer._state()
        optimizer.allocate()
        assert sum(tensor.nbytes for tensor in optimizer._state()) == pytest.approx(
            bytes_per_weight * num_weights, rel=0.1
        )
        assert {tensor.device.type for tensor in optimizer._state()} == {"cpu"}


def test_failed_allocation_of_sums_is_retried_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = weights_of("cpu")
    optimizer = OffloadedAdamW(ours, streams=True)
    super(OffloadedAdamW, optimizer).allocate()
    made, empty = list[None](), torch.empty

    def short(*given: object, **named: object) -> Tensor:
        made.append(None)
        if len(made) == 2:
            raise RuntimeError("can't allocate memory")
        return empty(*given, **named)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", short)
    with pytest.raises(RuntimeError, match="allocate"):
        optimizer.allocate()
    with optimizer.releasing():
        sum(weight.sum() for weight in ours).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert [optimizer.num_updates(weight) for weight in ours] == [1] * len(ours)
