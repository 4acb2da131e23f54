"""Slabs: stepping small parameters together and large ones in pieces equals stepping each one separately."""

import shutil

import pytest
import torch
from torch import Tensor

from bridge.optimizers import slabs
from bridge.optimizers.factory import scaled_group
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS, join

SHAPES = [(37, 64), (5,), (1, 1), (130, 70), (64, 37)]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16)


def parameter(values: Tensor, gradient: Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values)
    made.grad = gradient.to(values.dtype)
    return made


def test_pieces_equal_one_full_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(70, 110).bfloat16(), torch.randn(3, 70, 110)
    results = []
    for most in (2**24, 1000):
        monkeypatch.setitem(slabs.PIECE_ELEMENTS, "cpu", most)
        monkeypatch.setitem(slabs.SLAB_ELEMENTS, "cpu", most)
        weight = parameter(start.clone(), gradients[0])
        optimizer = SplitMasterAdamW([weight], lr=1e-3, kind=KINDS["adamw-8bit"])
        for gradient in gradients:
            weight.grad = gradient.bfloat16()
            optimizer.step()
        results.append((weight.detach(), optimizer.parts(weight), optimizer.changed_weight_share))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], part) for name, part in results[1][1].items())
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("name", KINDS)
def test_gathered_parameters_match_separate_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for small in (2**22, 0):
        monkeypatch.setitem(slabs.SMALL_ELEMENTS, "cpu", small)
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
        optimizer = SplitMasterAdamW(weights, lr=1e-3, kind=KINDS[name])
        monkeypatch.setattr("bridge.optimizers.split_adamw.key", lambda *numbers: numbers[-1])  # the same in all slabs
        for step in range(4):
            for index, weight in enumerate(weights):
                weight.grad = None if (step, index) == (2, 1) else torch.randn(weight.shape).bfloat16()
            optimizer.step(max_norm=3.0)
        assert [optimizer.num_updates(weight) for weight in weights] == [4, 3, 4, 4, 4]
        results.append((weights, optimizer))
    (gathered, one), (alone, other) = results
    by_chance = KINDS[name].moments.by_chance
    assert one.changed_weight_share == other.changed_weight_share or by_chance
    compared = [(gathered[0], alone[0])] if by_chance else zip(gathered, alone, strict=True)
    for weight, same in compared:  # random numbers depend on the position in a slab
        assert torch.equal(bits(weight.detach()), bits(same.detach()))
        assert all(torch.equal(one.parts(weight)[part], value) for part, value in other.parts(same).items())


@pytest.mark.parametrize("name", KINDS)
def test_neighbors_and_padding_stay_unchanged(name: str) -> None:
    torch.manual_seed(0)
    fused = torch.randn(40, 33).bfloat16()
    before = fused.clone()
    rows = slice(0, 10), slice(12, 13), slice(20, 35)
    weights = [parameter(fused[row], torch.randn(fused[row].shape)) for row in rows]
    optimizer = SplitMasterAdamW(weights, lr=0.5, weight_decay=0.1, kind=KINDS[name])
    for _ in range(3):
        optimizer.step()
    touched = (fused != before).any(1)
    assert touched.nonzero().flatten().tolist() == [*range(10), 12, *range(20, 35)]


def test_many_small_parameters_need_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [parameter(torch.randn(16, 24).bfloat16(), torch.randn(16, 24)) for _ in range(100)]
    groups = [scaled_group(w, 1.0 + index % 2, lr=1e-3, weight_decay=0.0) for index, w in enumerate(weights)]
    optimizer, calls = SplitMasterAdamW(groups), 0
    original = optimizer._update

    def counted(*dtypes: torch.dtype) -> object:
        nonlocal calls
        calls += 1
        return original(*dtypes)

    optimizer.allocate()
    monkeypatch.setattr(optimizer, "_update", counted)
    optimizer._step(1.0, 1.0)
    assert calls - 2 == 2  # `allocate` calls it for each slab, too


CPU = pytest.param("cpu", marks=pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for it with g++"))
DEVICES = [CPU, *(["cuda"] if torch.cuda.is_available() else [])]


def master(optimizer: SplitMasterAdamW, parameter: Tensor) -> Tensor:
    return join(parameter.detach().view(torch.int16), optimizer.parts(parameter)["remainder"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in list(KINDS)[1:])])
def test_compiled_update_equals_the_eager_one(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (slabs.SLAB_ELEMENTS, slabs.PIECE_ELEMENTS):
        monkeypatch.setitem(most, device, 2**12)  # so that there are tails, gathered slabs and pieces of many sizes
    torch.manual_seed(0)
    shapes = [(130, 70), (5,), (300, 512), (64, 37), (20, 50)]
    start = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    pairs = [(torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())) for weight in start]
    eager, compiled = (
        SplitMasterAdamW(list(weights), lr=1e-3, weight_decay=0.1, kind=KINDS[name], compiles=compiles)
        for weights, compiles in zip(zip(*pairs, strict=True), (False, True), strict=True)
    )
    compiled.allocate()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(5):
            for pair in pairs:
                pair[0].grad = torch.randn_like(pair[0])
                pair[1].grad = pair[0].grad.clone()
            if step == 2:
                pairs[1][0].grad = pairs[1][1].grad = None
            eager.step(max_norm=10.0)
            compiled.step(max_norm=10.0)
    for one, other in pairs:
        if name == "adamw":  # a quantized moment may round to a neighbor
            masters = master(eager, one), master(compiled, other)
            torch.testing.assert_close(*masters, rtol=5 * 2**-23, atol=5 * 1e-3 * 2**-22)
        assert (one != other).float().mean() <= 1e-3
