"""Run a function on several ranks: processes with gloo between them, and NCCL if each has a GPU.

Ranks on a CPU are forks of this process. CUDA cannot be used in a fork of a process that has used it: ranks on GPUs are
forks of a process that imports this module and does nothing else.
"""

import faulthandler
import gc
import io
import multiprocessing
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor

from bridge.ranks.world import ALONE, Ranks

LIMIT_S = 60.0
START = multiprocessing.get_context("fork")
CLEAN = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload([__name__])


def on_ranks(
    world_size: int,
    act: Callable[..., Any],
    *given: Any,
    tp_size: int | Sequence[int] = 1,
    cp_size: int = 1,
    limit_s: float = LIMIT_S,
    on_gpus: bool = False,
) -> list[Any]:
    """Return the result of `act(ranks, *given)` on every rank, or the exception raised by `act` or by joining.

    With `on_gpus` each rank has a GPU; `act` and `given` are pickled, and monkeypatches of this process have no effect.
    """
    tp_sizes = [tp_size] * world_size if isinstance(tp_size, int) else tp_size
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = CLEAN if on_gpus else START
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
        arguments = rank, world_size, tp_sizes[rank], cp_size, device, port, listener, there, act, given, limit_s
        process = context.Process(target=_rank, args=arguments)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    listener.close()
    results: list[Any] = []
    try:
        for pipe in pipes:
            assert pipe.poll(limit_s), "a rank hangs"
            try:
                results.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
            except EOFError as error:
                results.append(error)
        for process in processes:
            process.join(limit_s)
            assert process.exitcode is not None, "a rank does not end"
    finally:
        for process in processes:
            process.kill()  # a remaining process would keep this one from exiting
    return results


def _rank(
    rank: int,
    world_size: int,
    tp_size: int,
    cp_size: int,
    device: torch.device,
    port: int,
    listener: socket.socket,
    pipe: Any,
    act: Callable[..., Any],
    given: tuple[Any, ...],
    limit_s: float,
) -> None:
    faulthandler.dump_traceback_later(limit_s - 5)  # to stderr: where this rank waits
    gc.freeze()  # collecting what the parent has made would copy its memory
    torch.set_num_threads(1)
    inductor.compile_threads = 1  # the parent's compile workers do not exist here, and this process would wait for them
    own = listener if rank == 0 else None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = ALONE
    try:
        ranks = Ranks.join(rank, world_size, tp_size=tp_size, cp_size=cp_size, port=port, device=device, listener=own)
        result: Any = act(ranks, *given)
    except BaseException as error:  # noqa: BLE001  it is the result
        traceback.print_exc()
        result = error
    buffer = io.BytesIO()
    torch.save(result, buffer)
    pipe.send_bytes(buffer.getvalue())
    ranks.close()
    faulthandler.cancel_dump_traceback_later()
