"""What torch, transformers and the driver report, collected in a child process.

The child prints each fact at once: imports are slow, and a crash there must not crash `bridge doctor`.
"""

import ctypes
import importlib
import importlib.util
import json
import sys
from typing import Any

from pydantic import BaseModel, ConfigDict

from bridge.checks.child import Ended, run_module

PROBE_TIMEOUT_S = 120.0
COMPANIONS = ("torchvision",)
"""transformers imports them if they are installed: a broken one breaks text models too."""
MODEL_CLASSES = ("AutoModelForCausalLM", "AutoTokenizer")
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, NameError, TypeError, ValueError)


class Gpu(BaseModel):
    """One GPU that this process can use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uuid: str
    """As nvidia-smi prints it."""
    name: str
    """Product name."""
    total_bytes: int
    """Total memory."""
    free_bytes: int | None
    """Free memory; None: the driver does not report it."""
    error: str | None = None
    """Why the driver does not report it."""


class Facts(BaseModel):
    """Everything that the child reported before it ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    torch: str | None = None
    """Version of torch with its build, such as `2.13.0+cpu`; None: torch cannot be imported."""
    torch_cuda: str | None = None
    """CUDA version that torch was built for; None: a CPU build."""
    driver_cuda: str | None = None
    """Newest CUDA version that the driver runs; None: no driver, or the child did not get that far."""
    gpus: tuple[Gpu, ...] = ()
    """The visible GPUs, in torch's order."""
    cuda_error: str | None = None
    """Why torch could not initialize CUDA."""
    imports: dict[str, str | None] = {}
    """Module -> import error; None: it can be imported. Modules that were not reached are missing."""
    trouble: str | None = None
    """How the child failed, and at what; None: it did not."""

    def import_error(self, module: str) -> str | None:
        """Return why `module` cannot be imported; None: it can."""
        return self.imports.get(module, self.trouble or "not tried")


def gather() -> Facts:
    """Run the child. Never raises, whatever state torch and the driver are in."""
    return parse(run_module("bridge.checks.facts", timeout_s=PROBE_TIMEOUT_S))


def parse(ended: Ended) -> Facts:
    """Merge the child's lines, one JSON object each; `doing` names what it began last."""
    known: dict[str, Any] = {"imports": {}, "doing": "start"}
    for line in ended.stdout.splitlines():
        if line.startswith('{"probe": '):  # else a library printed it
            found = json.loads(line)["probe"]
            known |= {**found, "imports": known["imports"] | found.get("imports", {})}
    doing, trouble = known.pop("doing"), ended.trouble()
    return Facts.model_validate(known | {"trouble": f"{trouble} ({doing})" if trouble else None})


def probe() -> None:
    """Collect the facts, in the child; what is most likely to hang or crash comes last."""
    _say(doing="import torch")
    if not try_import("torch"):
        return
    import torch

    _say(torch=str(torch.__version__), torch_cuda=torch.version.cuda)
    for companion in filter(importlib.util.find_spec, COMPANIONS):
        _say(doing=f"import {companion}")
        try_import(companion)
    _say(doing="import transformers")
    try_import("transformers", MODEL_CLASSES)
    _say(doing="start CUDA")
    if torch.version.cuda is None:
        _say(cuda_error="torch is a CPU build")
        return
    _say(driver_cuda=_driver_cuda())
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        _say(cuda_error=_first_line(error))
        return
    _say(gpus=[_describe_gpu(index) for index in range(torch.cuda.device_count())])


def try_import(name: str, members: tuple[str, ...] = ()) -> bool:
    """Import `name` and its lazily loaded `members`, report whether that worked, and return it."""
    try:
        module = importlib.import_module(name)
        for member in members:
            getattr(module, member)
    except IMPORT_ERRORS as error:
        _say(imports={name: f"{type(error).__name__}: {_first_line(error)}"})
        return False
    _say(imports={name: None})
    return True


def _say(**found: Any) -> None:
    sys.stdout.write(json.dumps({"probe": found}) + "\n")
    sys.stdout.flush()


def _driver_cuda() -> str | None:
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _describe_gpu(index: int) -> dict[str, Any]:
    import torch

    from bridge.weights.cuda_ipc import gpu_uuid

    properties = torch.cuda.get_device_properties(index)
    uuid = gpu_uuid(torch.device("cuda", index))
    gpu = {"uuid": uuid, "name": properties.name, "total_bytes": properties.total_memory}
    try:
        return gpu | {"free_bytes": torch.cuda.mem_get_info(index)[0]}
    except RuntimeError as error:
        return gpu | {"free_bytes": None, "error": _first_line(error)}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    probe()
