"""If a rank fails, exits or hangs during an NCCL exchange, no rank keeps waiting or uses a half-written tensor.

The ranks have no server. Not covered: whole runs (`test_several_gpus.py`).
"""

import os
import signal
import time
from typing import Any

import pytest
import torch

from bridge.errors import RankError, UsageError
from bridge.passes.cut_layers import reduced
from bridge.ranks import watch
from bridge.ranks.world import Ranks
from tests.unit.several_ranks import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ELEMENTS = 2**28
LIMIT_S = 20.0
"""Longest time that a test waits for the other rank to give up."""


def exchanges(ranks: Ranks, way: str) -> None:
    """Exchange tensors in every way, repeatedly."""
    ones = torch.ones(ELEMENTS, device="cuda")
    while True:
        if way == "layers":
            with ranks.in_pass():
                reduced(ones[: ELEMENTS // 8], "sum", ranks.tp_group.process_group.group_name)
        elif way == "gather":
            whole = ranks.all_gather(ones)
            assert int(whole.sum(dtype=torch.float64)) == ranks.world_size * ELEMENTS, "used before it was whole"
        else:
            rows = ranks.reduce_scatter(ones)
            assert float(rows.min()) == float(rows.max()) == ranks.world_size, "used before it was whole"


def leaves(ranks: Ranks, how: str, way: str) -> Any:
    """Make the last rank leave while tensors are exchanged; return what the first one raised, and after how long."""
    watch.BEAT_S = 0.2  # this process ends with the test
    watch.SILENT_LIMIT_S = 4.0
    pids = ranks.all_gather_object(os.getpid())
    begun = time.monotonic()
    if ranks.rank == 1 and how == "fails":
        time.sleep(2)
        with pytest.raises(UsageError):
            ranks.run_on_all(fail)
        return None
    if ranks.rank == 1:
        sign = {"ends": signal.SIGKILL, "stops": signal.SIGSTOP}[how]
        if os.fork() == 0:  # in a separate process, because this one is inside torch
            time.sleep(3)
            os.kill(pids[1], sign)
            os._exit(0)
    error = (UsageError if how == "fails" else RankError, AssertionError)
    with pytest.raises(error) as caught:
        ranks.run_on_all(lambda: exchanges(ranks, way))
    torch.cuda.synchronize()
    if how == "stops":
        os.kill(pids[1], signal.SIGKILL)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


def fail() -> None:
    raise UsageError("no room", hint="--micro-batch-tokens 512")


@pytest.mark.parametrize("way", ["gather", "scatter", "layers"])
@pytest.mark.parametrize("how", ["fails", "ends", "stops"])
def test_no_rank_waits_for_a_lost_rank(how: str, way: str) -> None:
    tp_size = 2 if way == "layers" else 1
    name, message, seconds = on_ranks(2, leaves, how, way, tp_size=tp_size, on_gpus=True, limit_s=90)[0]
    assert name == ("UsageError" if how == "fails" else "RankError"), message
    expected = {"fails": "no room", "ends": "lost another rank", "stops": "rank 1 has sent no heartbeat for 4 s"}[how]
    assert expected in message
    assert seconds < LIMIT_S


def agree(ranks: Ranks) -> tuple[float, float]:
    """Return an order-dependent sum and a gathered value from many exchanges."""
    generator = torch.Generator("cuda").manual_seed(ranks.rank)
    total = 0.0
    for _ in range(200):
        rows = ranks.reduce_scatter(torch.randn(64, 1000, generator=generator, device="cuda", dtype=torch.bfloat16))
        total += float(ranks.all_gather(rows).double().sum())
    return total, float(ranks.all_reduce(torch.full((1,), float(ranks.rank + 1), device="cuda")))


def test_ranks_compute_equal_results() -> None:
    one, other = on_ranks(2, agree, on_gpus=True, limit_s=90)
    assert one == other
    assert one[1] == 3.0
