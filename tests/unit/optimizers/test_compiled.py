"""The compiled update equals the eager one, and is compiled once for pieces of all sizes."""

import shutil

import pytest
import torch
from torch import Tensor

from bridge.optimizers import slabs
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS, join

CPU = pytest.param("cpu", marks=pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for it with g++"))
DEVICES = [CPU, *(["cuda"] if torch.cuda.is_available() else [])]


def master(optimizer: SplitMasterAdamW, parameter: Tensor) -> Tensor:
    return join(parameter.detach().view(torch.int16), optimizer.parts(parameter)["remainder"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in list(KINDS)[1:])])
def test_the_compiled_update_equals_the_eager_one(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (slabs.SLAB_ELEMENTS, slabs.PIECE_ELEMENTS):
        monkeypatch.setitem(most, device, 2**12)  # gives tails, gathered slabs and pieces of many sizes
    torch.manual_seed(0)
    shapes = [(130, 70), (5,), (300, 512), (64, 37), (20, 50)]
    start = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    pairs = [(torch.nn.Parameter(each.clone()), torch.nn.Parameter(each.clone())) for each in start]
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
