"""The program of the CUDA IPC trial: `export` shares a tensor with a second process, which runs `write`.

The exporter prints what it reads afterwards; only that the value is the writer's proves that the memory is one.

Not covered: judging the outcome (`cuda_ipc.py`), opening handles (`bridge/weights/cuda_ipc.py`).
"""

import sys
from typing import Any

import torch

from bridge.checks.child import ERROR, run_module
from bridge.checks.cuda_ipc import MARK, READ
from bridge.errors import AttachError
from bridge.server.manifest import CudaHandle
from bridge.weights import cuda_ipc

MODULE = "bridge.checks.cuda_ipc_trial"
DTYPE = torch.float32
"""One that a manifest may name, and that holds the mark."""
NUM_ELEMENTS = 1024
PLACE = 321
WRITER_TIMEOUT_S = 60.0


def export(uuid: str) -> int:
    """Share zeros, let another process write the mark, and print what is there then."""
    tensor = torch.zeros(NUM_ELEMENTS, dtype=DTYPE, device=cuda_ipc.device_of(uuid))
    torch.cuda.synchronize(tensor.device)
    handle = cuda_ipc.export(tensor)
    described = handle.model_dump_json()
    writer = run_module(MODULE, "write", uuid, timeout_s=WRITER_TIMEOUT_S, stdin=described, own_group=False)
    if trouble := writer.trouble():
        return refuse(f"the second process: {trouble}")
    torch.cuda.synchronize(tensor.device)
    sys.stdout.write(f"{READ}{int(tensor[PLACE].item())}\n")
    return 0


def write(uuid: str, handle: CudaHandle) -> int:
    """Open the exporter's memory and write the mark into it."""
    device = cuda_ipc.device_of(uuid)
    starter: Any = torch.cuda
    starter.init()  # the opener expects a started CUDA
    storage = cuda_ipc.open_storage(handle, device)
    tensor = torch.empty(0, dtype=getattr(torch, handle.dtype), device=device)
    tensor.set_(storage, handle.tensor_offset, handle.shape, handle.stride)
    tensor[PLACE] = MARK
    torch.cuda.synchronize(device)
    return 0


def refuse(message: str) -> int:
    """Name the trouble on stderr."""
    sys.stderr.write(f"{ERROR}{message}\n")
    return 1


def main(arguments: list[str]) -> int:
    """Run the role that the first argument names, on the GPU whose UUID is the second."""
    role, uuid = arguments
    try:
        if role == "export":
            return export(uuid)
        return write(uuid, CudaHandle.model_validate_json(sys.stdin.read()))
    except (AttachError, RuntimeError) as error:
        return refuse(str(getattr(error, "message", error)).strip().partition("\n")[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
