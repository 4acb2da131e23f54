"""The program of the probe: import torch and its companions, start CUDA, print each fact as one line of JSON at once.

Not covered: reading those lines (`facts.py`). It runs as a child: what crashes here must not crash `bridge doctor`.
"""

import ctypes
import importlib
import importlib.util
import json
import sys
from typing import Any

COMPANIONS = ("torchvision",)
"""Imported by transformers when installed, so that a broken one breaks text models too."""
MODEL_CLASSES = ("AutoModelForCausalLM", "AutoTokenizer")
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, NameError, TypeError, ValueError)


def main() -> None:
    """Find out everything, the most likely to hang or crash last."""
    say(doing="import torch")
    if not try_import("torch"):
        return
    import torch

    say(torch={"version": torch.__version__, "cuda": torch.version.cuda})
    for companion in COMPANIONS:
        if importlib.util.find_spec(companion):
            say(doing=f"import {companion}")
            try_import(companion)
    say(doing="import transformers")
    try_import("transformers", MODEL_CLASSES)
    say(doing="start CUDA")
    say(cuda=cuda_state())


def say(**found: Any) -> None:
    """Print one line of facts."""
    sys.stdout.write(json.dumps({"probe": found}) + "\n")
    sys.stdout.flush()


def try_import(name: str, members: tuple[str, ...] = ()) -> bool:
    """Import `name` and look its lazily loaded `members` up; print whether that worked."""
    try:
        module = importlib.import_module(name)
        for member in members:
            getattr(module, member)
    except IMPORT_ERRORS as error:
        say(imports={name: f"{type(error).__name__}: {first_line(error)}"})
        return False
    say(imports={name: None})
    return True


def cuda_state() -> dict[str, Any]:
    """Start CUDA and describe every visible GPU."""
    import torch

    if torch.version.cuda is None:
        return {"driver_cuda": None, "gpus": [], "error": "torch is a CPU build"}
    starter: Any = torch.cuda
    try:
        starter.init()
    except (RuntimeError, AssertionError) as error:
        return {"driver_cuda": driver_cuda(), "gpus": [], "error": first_line(error)}
    gpus = [describe_gpu(index) for index in range(torch.cuda.device_count())]
    return {"driver_cuda": driver_cuda(), "gpus": gpus, "error": None}


def driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver runs, by `cuDriverGetVersion` of the driver's own library."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def describe_gpu(index: int) -> dict[str, Any]:
    """Return what facts.Gpu holds."""
    import torch

    from bridge.weights.cuda_ipc import gpu_uuid

    properties = torch.cuda.get_device_properties(index)
    gpu = {
        "uuid": gpu_uuid(torch.device("cuda", index)),
        "name": properties.name,
        "total_bytes": properties.total_memory,
    }
    try:
        return gpu | {"free_bytes": torch.cuda.mem_get_info(index)[0]}
    except RuntimeError as error:
        return gpu | {"free_bytes": None, "error": first_line(error)}


def first_line(error: BaseException) -> str:
    """Return the first line of the message, which names the cause."""
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    main()
