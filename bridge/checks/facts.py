"""What torch, transformers and the driver say about themselves, found out by a child process.

The child prints each fact at once: importing is slow, and what crashes there must not crash `bridge doctor`.
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
"""Imported by transformers when installed: a broken one breaks text models too."""
MODEL_CLASSES = ("AutoModelForCausalLM", "AutoTokenizer")
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, NameError, TypeError, ValueError)


class Fact(BaseModel):
    """A frozen record of the child."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Gpu(Fact):
    """One GPU that this process may use."""

    uuid: str
    """As nvidia-smi prints it."""
    name: str
    """The product's name."""
    total_bytes: int
    """All of its memory."""
    free_bytes: int | None
    """What is left of it; None: the driver does not report it."""
    error: str | None = None
    """Why the driver does not report it."""


class Facts(Fact):
    """Everything that the child found out before it ended."""

    torch: str | None = None
    """Version of torch with its build, such as `2.13.0+cpu`; None: torch cannot be imported."""
    torch_cuda: str | None = None
    """CUDA version that torch was built for; None: a CPU build."""
    driver_cuda: str | None = None
    """Newest CUDA version that the driver runs; None: no driver, or the child did not get that far."""
    gpus: tuple[Gpu, ...] = ()
    """The visible GPUs in their order."""
    cuda_error: str | None = None
    """Why torch could not start CUDA."""
    imports: dict[str, str | None] = {}
    """Module -> why it cannot be imported; None: it can. Modules that were not reached are missing."""
    trouble: str | None = None
    """How the child failed, and at what; None: it did not."""

    def import_error(self, module: str) -> str | None:
        """Return why `module` cannot be imported, or None."""
        return self.imports.get(module, self.trouble or "not tried")


def gather() -> Facts:
    """Run the child; never raises, whatever state torch and the driver are in."""
    return parse(run_module("bridge.checks.facts", timeout_s=PROBE_TIMEOUT_S))


def parse(ended: Ended) -> Facts:
    """Put the child's lines together: one JSON object each; `doing` is what it began."""
    known: dict[str, Any] = {"imports": {}}
    doing = "start"
    for line in ended.stdout.splitlines():
        if not line.startswith('{"probe": '):
            continue  # a library printed something
        found = json.loads(line)["probe"]
        doing = found.pop("doing", doing)
        known["imports"] |= found.pop("imports", {})
        known |= found
    trouble = ended.trouble()
    return Facts.model_validate(known | {"trouble": f"{trouble} ({doing})" if trouble else None})


def probe() -> None:
    """Find out everything as the child, what is most likely to hang or crash last."""
    _say(doing="import torch")
    if not try_import("torch"):
        return
    import torch

    _say(torch=str(torch.__version__), torch_cuda=torch.version.cuda)
    for companion in COMPANIONS:
        if importlib.util.find_spec(companion):
            _say(doing=f"import {companion}")
            try_import(companion)
    _say(doing="import transformers")
    try_import("transformers", MODEL_CLASSES)
    _say(doing="start CUDA")
    _say(**_cuda_state())


def try_import(name: str, members: tuple[str, ...] = ()) -> bool:
    """Import `name`, look up its lazily loaded `members`, and print whether that worked."""
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


def _cuda_state() -> dict[str, Any]:
    import torch

    if torch.version.cuda is None:
        return {"cuda_error": "torch is a CPU build"}
    starter: Any = torch.cuda
    try:
        starter.init()
    except (RuntimeError, AssertionError) as error:
        return {"driver_cuda": _driver_cuda(), "cuda_error": _first_line(error)}
    return {"driver_cuda": _driver_cuda(), "gpus": [_describe_gpu(i) for i in range(torch.cuda.device_count())]}


def _driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver runs, by `cuDriverGetVersion` of the driver's own library."""
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
