"""The table of bytes per parameter, which needs no torch, matches what the optimizers really allocate."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from bridge.config.optimizers import OPTIMIZERS, BytesPerParameter, OptimizerName
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.offload import OffloadedAdamW
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS

SHAPES = [(1000, 300), (64, 128), (16, 520), (300,)]
NUM_PARAMETERS = 300_000 + 64 * 128 + 16 * 520 + 300


def check(optimizer: InPlaceOptimizer, expected: BytesPerParameter) -> None:
    assert not optimizer._state()
    optimizer.allocate()
    allocated = sum(tensor.nbytes for tensor in optimizer._state())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sum(tensor.nbytes for tensor in optimizer._state()) == allocated, "a step takes no more"
    assert allocated == pytest.approx((expected.device + expected.host) * NUM_PARAMETERS, rel=0.02)
    assert not expected.host or not expected.device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_is_what_state_beside_the_weights_takes(name: OptimizerName, dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    check(SplitMasterAdamW(weights, kind=KINDS[name]), BytesPerParameter.of(name, weight_bytes=dtype.itemsize))


@pytest.mark.parametrize("release", [False, True])
def test_the_table_is_what_state_in_host_memory_takes(release: bool) -> None:
    weights = [nn.Parameter(torch.zeros(shape).bfloat16()) for shape in SHAPES]
    expected = BytesPerParameter.of("adamw", offload=True, release=release)
    assert expected.gradient == (0 if release else 2)
    check(OffloadedAdamW(weights, streams=release), expected)


def test_every_kind_is_in_the_table_with_its_block() -> None:
    assert set(OPTIMIZERS) == set(KINDS)
    assert [round(BytesPerParameter.of(name).device, 2) for name in OPTIMIZERS] == [10, 6, 4.03, 1.06]


def test_it_is_read_without_torch() -> None:
    program = "import sys, bridge.config.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
