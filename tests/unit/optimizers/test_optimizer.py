"""The in-place optimizers reconstruct masters exactly, lose nothing at tiny learning rates, and never move memory."""

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bridge.config import TrainConfig
from bridge.config.optimizers import OPTIMIZERS, BytesPerParameter, OptimizerName
from bridge.errors import CheckpointError, UsageError
from bridge.optimizers import split_adamw
from bridge.optimizers.factory import make, scaled_group, schedule
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.offloaded_adamw import OffloadedAdamW
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS, Coefficients, join, split

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def floats(*bits: int) -> Tensor:
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def master(optimizer: SplitMasterAdamW, parameter: Tensor) -> Tensor:
    return join(parameter.detach().view(torch.int16), optimizer.parts(parameter)["remainder"])


def parameter(values: Tensor, gradient: Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values)
    made.grad = gradient.to(values.dtype)
    return made


def test_split_and_join_preserve_all_bits() -> None:
    torch.manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).int().view(torch.float32)
    anything = anything[anything.isfinite()]
    edges = floats(
        0x00000000, 0x80000000,  # zero and negative zero
        0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x80008000,  # subnormals, around the tie
        0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xBF808000,  # ties with an even and an odd upper half
        0x3FFF8000, 0x3FFFFFFF, 0xBFFFFFFF,  # a carry into the exponent
        0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,  # the largest, and infinities
    )  # fmt: skip
    for values in (anything, edges):
        assert torch.equal(bits(join(*split(values))), bits(values))


def test_adding_parameters_later_is_refused() -> None:
    first = torch.nn.Parameter(torch.zeros(4))
    optimizer = SplitMasterAdamW([first], kind=KINDS["adamw"])
    with pytest.raises(UsageError, match="take all parameters when they are created"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]


def test_upper_half_of_the_master_is_the_nearest_bf16() -> None:
    torch.manual_seed(0)
    values = torch.randn(100_000)
    is_tie = (bits(values) & 0xFFFF) == 0x8000
    upper = split(values)[0].view(torch.bfloat16)
    assert torch.equal(upper[~is_tie], values.bfloat16()[~is_tie])
    ties = floats(0x3F808000, 0xBF808000, 0x3F818000)
    assert split(ties)[0].tolist() == [0x3F81, 0xBF81 - 2**16, 0x3F82]
    assert math.copysign(1, split(torch.tensor([-0.0]))[0].view(torch.bfloat16).item()) == -1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight_decay", [0.0, 128.0])  # float32 holds 1 - lr * weight_decay exactly, on every device
def test_500_tiny_steps_match_a_float32_master(weight_decay: float, device: str) -> None:
    torch.manual_seed(0)
    start, lr = (torch.randn(40, 50, device=device) * 0.05).bfloat16(), 2**-20
    split_weight, plain, reference = (torch.nn.Parameter(x) for x in (start.clone(), start.clone(), start.float()))
    ours = SplitMasterAdamW([split_weight], lr=lr, weight_decay=weight_decay)
    others = [torch.optim.AdamW([x], lr=lr, weight_decay=weight_decay, foreach=False) for x in (plain, reference)]
    drift = torch.randn_like(reference)
    for _ in range(500):
        gradient = (drift + torch.randn_like(drift)).bfloat16()
        split_weight.grad, plain.grad, reference.grad = gradient, gradient.clone(), gradient.float()
        for optimizer in (ours, *others):
            optimizer.step()
    learnt = (reference.detach() - start.float()).norm()
    rtol = 1e-5 if weight_decay and device == "cuda" else 3e-7  # a GPU fuses decay and step into one rounding
    torch.testing.assert_close(master(ours, split_weight), reference.detach(), rtol=rtol, atol=1e-9)
    assert (split_weight != split(reference.detach())[0].view(torch.bfloat16)).float().mean() < 1e-3
    assert (plain.detach().float() - start.float()).norm() < 0.2 * learnt
    assert (split_weight.detach().float() - start.float()).norm() > 0.9 * learnt


def test_views_of_rows_are_written_in_place() -> None:
    fused = torch.randn(12, 8).bfloat16()
    before, pointer = fused.clone(), fused.data_ptr()
    query, value = parameter(fused[:6], torch.ones(6, 8)), parameter(fused[8:10], torch.ones(2, 8))
    SplitMasterAdamW([query, value], lr=0.5).step()
    assert query.data_ptr() == pointer
    assert value.data_ptr() == pointer + 8 * 8 * 2
    assert not (fused[:6] == before[:6]).any()
    assert not (fused[8:10] == before[8:10]).any()
    assert torch.equal(fused[6:8], before[6:8])
    assert torch.equal(fused[10:], before[10:])


def test_float32_parameters_are_stepped_as_torch_does() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(5, 6), torch.randn(20, 5, 6)
    mine, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours = SplitMasterAdamW([mine], lr=1e-3, weight_decay=0.01)
    torchs = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.01, foreach=False)
    for gradient in gradients:
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)
    assert "remainder" not in ours.parts(mine)


def test_float32_gradient_of_a_bf16_weight_is_not_rounded() -> None:
    weight = torch.nn.Parameter(torch.zeros(1).bfloat16())
    weight.grad_dtype = torch.float32
    weight.grad = torch.tensor([1 + 2**-12])
    optimizer = SplitMasterAdamW([weight])
    optimizer.step()
    assert optimizer.parts(weight)["exp_avg"].item() == pytest.approx(0.1 * (1 + 2**-12), rel=1e-7)


def test_share_of_changed_weights_is_exact() -> None:
    # a step of 1e-3 moves 0.01 (spacing 2^-14) and 1e-9, but not 64 (spacing 0.5); no gradient, no change
    moved = parameter(torch.tensor([0.01, 64.0, 1e-9]).bfloat16(), torch.ones(3))
    still = torch.nn.Parameter(torch.ones(5))
    float32 = parameter(torch.tensor([1.0, 2.0**20]), torch.ones(2))
    optimizer = SplitMasterAdamW([moved, still, float32], lr=1e-3)
    assert optimizer.changed_weight_share == 0.0
    optimizer.step()
    assert optimizer.changed_weight_share == pytest.approx((2 + 0 + 1) / 10)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_that_is_not_finite_changes_no_weight(value: float) -> None:
    good, bad = (parameter(torch.ones(4).bfloat16(), torch.ones(4)) for _ in range(2))
    assert bad.grad is not None
    bad.grad[2] = value
    optimizer = SplitMasterAdamW([good, bad], lr=0.1)
    norm = optimizer.global_norm()
    assert not math.isfinite(norm)
    for known in (None, norm):
        with pytest.raises(UsageError, match="expected a finite number: no weight was changed"):
            optimizer.step(grad_norm=known, max_norm=1.0)
    assert torch.equal(good.detach(), torch.ones(4).bfloat16())
    assert optimizer.num_updates(good) == 0
    assert not optimizer._state()
    assert optimizer.changed_weight_share == 0.0


def test_norm_of_bf16_gradients_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    weights = [parameter(torch.zeros(n).bfloat16(), torch.randn(n)) for n in (3, 1000, 40_000)]
    exact = math.sqrt(sum(float(w.grad.double().square().sum()) for w in weights if w.grad is not None))
    optimizer = SplitMasterAdamW(weights)
    assert optimizer.global_norm() == pytest.approx(exact, rel=1e-5)
    weights[0].grad_dtype = None  # allow a gradient whose dtype differs from the weight's
    weights[0].grad = torch.zeros(3)
    weights[0].grad[0] = 1e4
    assert optimizer.global_norm() == pytest.approx(math.hypot(exact, 1e4), rel=1e-4)
    assert SplitMasterAdamW([torch.nn.Parameter(torch.ones(2))]).global_norm() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_scaled_master_trains_like_an_unscaled_one(factor: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start, choices = torch.randn(6, 7).to(dtype), {"lr": 3e-3, "weight_decay": 0.1}
    plain, held = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start * factor)
    optimizers = [
        SplitMasterAdamW([scaled_group(plain, 1.0, **choices)], lr=1.0),
        SplitMasterAdamW([scaled_group(held, factor, **choices)], lr=1.0),
    ]
    for size in (1.0, 1e-3, 1e-7, 1e-9):  # the last two are close to eps, so eps must be scaled, too
        gradient = (torch.randn(6, 7) * size).to(dtype)
        plain.grad, held.grad = gradient, gradient / factor
        before = plain.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(before, plain)
        assert torch.equal(held, plain * factor)
    if dtype == torch.bfloat16:
        assert torch.equal(master(optimizers[1], held), master(optimizers[0], plain) * factor)


def test_factor_of_one_gives_an_ordinary_group() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    (group,) = SplitMasterAdamW([scaled_group(weight, 1.0, lr=2e-4, weight_decay=0.1)]).param_groups
    (plain,) = SplitMasterAdamW([weight], lr=2e-4, weight_decay=0.1).param_groups
    assert {key: group[key] for key in plain} == plain


def _stepped(kind: str, num_updates: int) -> tuple[torch.nn.Parameter, SplitMasterAdamW]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300).bfloat16())
    optimizer = SplitMasterAdamW([weight], kind=KINDS[kind], lr=1e-3)
    for number in range(num_updates):
        weight.grad = torch.sin(torch.arange(300.0) + number).bfloat16()
        optimizer.step()
    return weight, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_state_saved_by_torch_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole, _ = _stepped(kind, 5)
    weight, optimizer = _stepped(kind, 3)
    torch.save({"state": optimizer.state_dict(), "weight": weight.detach()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = torch.nn.Parameter(saved["weight"])
    other = SplitMasterAdamW([resumed], kind=KINDS[kind], lr=7.0)
    other.load_state_dict(saved["state"])
    assert other.param_groups[0]["lr"] == 1e-3
    for number in (3, 4):
        resumed.grad = torch.sin(torch.arange(300.0) + number).bfloat16()
        other.step()
    assert torch.equal(resumed, whole)


def test_optimizer_can_load_its_own_state() -> None:
    weight, optimizer = _stepped("adamw", 2)
    before = {name: part.clone() for name, part in optimizer.parts(weight).items()}
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.num_updates(weight) == 2
    assert all(torch.equal(part, before[name]) for name, part in optimizer.parts(weight).items())


def test_state_of_a_different_optimizer_is_refused() -> None:
    _, optimizer = _stepped("adamw", 1)
    weight, other = _stepped("adamw-8bit", 1)
    with pytest.raises(CheckpointError, match="saved with --optimizer adamw"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="another optimizer"):
        other.load_state_dict(torch.optim.AdamW([weight]).state_dict())
    with pytest.raises(CheckpointError, match="different parameters"):
        SplitMasterAdamW([torch.nn.Parameter(torch.ones(3))]).load_state_dict(optimizer.state_dict())


def test_float16_strided_and_overlapping_parameters_are_refused() -> None:
    whole = torch.zeros(4, 4).bfloat16()
    with pytest.raises(UsageError, match=r"torch.float16, expected bfloat16 or float32"):
        SplitMasterAdamW([torch.nn.Parameter(whole.half())])
    with pytest.raises(AssertionError, match=r"\(4, 1\)"):
        SplitMasterAdamW([torch.nn.Parameter(whole[:, :2])])
    with pytest.raises(AssertionError, match="overlaps"):
        SplitMasterAdamW([torch.nn.Parameter(whole[:3]), torch.nn.Parameter(whole[2:])])


def as_before(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], moments: dict[int, list[Tensor]], **choices: float
) -> None:
    """Step float32 masters with the operations of torch.optim.AdamW's for-loop implementation, in the same order."""
    step, lr, decay = int(choices["step"]), choices["lr"], choices["weight_decay"]
    for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        first, second = moments.setdefault(index, [torch.zeros_like(weight), torch.zeros_like(weight)])
        weight.mul_(1 - lr * decay)
        first.lerp_(gradient, 1 - 0.9)
        second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        denominator = second.sqrt().div_(math.sqrt(1 - 0.999**step)).add_(1e-8)
        weight.addcdiv_(first, denominator, value=-lr / (1 - 0.9**step))


SHAPES = [(37, 64), (5,), (1, 1), (130, 70), (64, 37)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_default_optimizer_equals_a_float32_loop_bitwise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    masters, moments = [weight.detach().float() for weight in ours], dict[int, list[Tensor]]()
    optimizer = SplitMasterAdamW(ours, lr=1e-3, weight_decay=0.1)
    for step in range(1, 8):
        gradients = [torch.randn(shape).to(dtype) for shape in SHAPES]
        for weight, gradient in zip(ours, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
        as_before(masters, [gradient.float() for gradient in gradients], moments, step=step, lr=1e-3, weight_decay=0.1)
    for index, weight in enumerate(ours):
        held = weight.detach() if dtype == torch.float32 else master(optimizer, weight)
        assert torch.equal(bits(held), bits(masters[index]))
        assert torch.equal(optimizer.parts(weight)["exp_avg"], moments[index][0])
        assert torch.equal(optimizer.parts(weight)["exp_avg_sq"], moments[index][1])


def test_gradients_are_clipped_in_float32_inside_the_step() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(40, 50), torch.randn(40, 50).bfloat16()
    clipped, scaled = parameter(start.bfloat16(), gradient), torch.nn.Parameter(start.bfloat16())
    one, other = SplitMasterAdamW([clipped], lr=1e-3), SplitMasterAdamW([scaled], lr=1e-3)
    norm = one.global_norm()
    scaled.grad_dtype = torch.float32
    scaled.grad = gradient.float() * (torch.tensor(0.5) / torch.tensor(norm))
    one.step(grad_norm=norm, max_norm=0.5)
    other.step()
    assert torch.equal(one.parts(clipped)["exp_avg"], other.parts(scaled)["exp_avg"])
    assert torch.equal(clipped, scaled)
    assert clipped.grad is not None
    assert torch.equal(clipped.grad, gradient), "the gradient itself must not change"


def test_exact_moments_never_exceed_the_update_bound() -> None:
    torch.manual_seed(0)
    group = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}
    first, second = torch.zeros(4), torch.zeros(4)
    for step in range(1, 200):
        gradient = torch.tensor([1.0, 1.1**step, (-1.2) ** step, 0.95**step])
        first, second = first.lerp(gradient, 0.1), second * 0.999 + 0.001 * gradient**2
        by = Coefficients.of(group, step)
        assert (first / (second.sqrt() / by.root_bias2)).abs().max() <= by.largest * (1 + 1e-5)
    assert Coefficients.of(group, 1).largest == pytest.approx(0.1, rel=1e-6)  # for a moment without bias correction
    assert Coefficients.of({**group, "betas": (0.9, 0.8)}, 3).largest == math.inf


def make_from(**choices: Any) -> InPlaceOptimizer:
    config = TrainConfig.of(model_name="m", **choices)
    weight = torch.nn.Parameter(torch.ones(4).bfloat16())
    return make(
        config.optimizer,
        [scaled_group(weight, 1.0, lr=config.learning_rate, weight_decay=config.optimizer.weight_decay)],
    )


def test_factory_makes_the_configured_optimizer() -> None:
    for name in KINDS:
        made = make_from(optimizer=name, beta1=0.8)
        assert made.flags == f"--optimizer {name} --no-offload-optimizer"
        assert made.param_groups[0]["betas"] == (0.8, 0.999)
    assert make_from(beta2=0.0).param_groups[0]["betas"] == (0.9, 0.0)
    offloaded = make_from(offload_optimizer=True, lr=3e-4)
    assert isinstance(offloaded, OffloadedAdamW)
    assert offloaded.param_groups[0]["lr"] == 3e-4


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", {0: 1, 7: 1, 100: 1}),
        ("constant_with_warmup", {0: 0, 1: 0.25, 4: 1, 100: 1}),
        ("linear", {0: 0, 2: 0.5, 4: 1, 6: 0.75, 12: 0}),
        ("cosine", {0: 0, 2: 0.5, 4: 1, 6: (1 + math.sqrt(0.5)) / 2, 8: 0.5, 12: 0}),
        ("inverse_sqrt", {0: 0, 2: 0.5, 4: 1, 16: 0.5}),
    ],
)
def test_schedule_counts_planned_updates(kind: str, expected: dict[int, float]) -> None:
    """There are 6 steps with 2 updates each, and 2 of these steps are warm-up."""
    choices = {"training_steps": 6, "passes_per_batch": 2, "warmup_steps": 2 * (kind != "constant")}
    config = TrainConfig.of(model_name="m", lr_scheduler_type=kind, **choices)
    factor = schedule(config.optimizer, config.training_steps)
    assert {number: factor(number) for number in expected} == pytest.approx(expected, abs=1e-12)


def test_update_is_compiled_for_the_expected_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for = list[tuple[torch.dtype, torch.dtype]]()
    monkeypatch.setattr(
        split_adamw, "compiled", lambda _, weight, gradient, __, single: compiled_for.append((weight, gradient))
    )
    weights = [torch.nn.Parameter(torch.ones(3).bfloat16())]
    optimizer = split_adamw.SplitMasterAdamW(weights, compiles=True)
    optimizer.allocate()
    optimizer.expect(torch.float32)
    assert compiled_for == [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    split_adamw.SplitMasterAdamW(weights, compiles=False).expect(torch.float32)
    assert len(compiled_for) == 2


def test_state_with_more_parameters_is_refused() -> None:
    many = [parameter(torch.ones(4, 4).bfloat16(), torch.ones(4, 4)) for _ in range(3)]
    optimizer = SplitMasterAdamW(many)
    optimizer.step()
    with pytest.raises(CheckpointError, match="different parameters"):
        SplitMasterAdamW(many[:1]).load_state_dict(optimizer.state_dict())


MODEL_SHAPES = [(1000, 300), (64, 128), (16, 520), (300,)]
NUM_PARAMETERS = 300_000 + 64 * 128 + 16 * 520 + 300


def check(optimizer: InPlaceOptimizer, expected: BytesPerParameter) -> None:
    assert not optimizer._state()
    optimizer.allocate()
    allocated = sum(tensor.nbytes for tensor in optimizer._state())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sum(tensor.nbytes for tensor in optimizer._state()) == allocated, "a step must not allocate more"
    assert allocated == pytest.approx((expected.device + expected.host) * NUM_PARAMETERS, rel=0.02)
    assert not expected.host or not expected.device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_bytes_on_the_device_match_the_table(name: OptimizerName, dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in MODEL_SHAPES]
    check(SplitMasterAdamW(weights, kind=KINDS[name]), BytesPerParameter.of(name, weight_bytes=dtype.itemsize))


@pytest.mark.parametrize("release", [False, True])
def test_optimizer_bytes_in_host_memory_match_the_table(release: bool) -> None:
    weights = [nn.Parameter(torch.zeros(shape).bfloat16()) for shape in MODEL_SHAPES]
    expected = BytesPerParameter.of("adamw", offload=True, release=release)
    assert expected.gradient == (0 if release else 2)
    check(OffloadedAdamW(weights, streams=release), expected)


def test_optimizer_table_lists_every_kind_and_block_size() -> None:
    assert set(OPTIMIZERS) == set(KINDS)
    assert [round(BytesPerParameter.of(name).device, 2) for name in OPTIMIZERS] == [10, 4.03, 1.06]


def test_optimizer_table_is_read_without_torch() -> None:
    program = "import sys, bridge.config.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
