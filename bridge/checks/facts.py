"""What torch, transformers and the driver say about themselves, gathered in one child process: importing is slow.

Not covered: what those facts mean (`software.py`, `gpu.py`) and how they are found out (`probe.py`).
"""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from bridge.checks.child import Ended, run_module

PROBE_TIMEOUT_S = 120.0


class Fact(BaseModel):
    """A frozen record of the probe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TorchBuild(Fact):
    """The torch that a trainer would import."""

    version: str
    """Version with its build, such as `2.13.0+cpu`."""
    cuda: str | None
    """The CUDA version it was built for; None: a CPU build."""


class Gpu(Fact):
    """One GPU that this process may use."""

    uuid: str
    """As nvidia-smi prints it."""
    name: str
    """The product's name."""
    total_bytes: int
    """All of its memory."""
    free_bytes: int | None
    """What is left of it; None when the driver would not tell."""
    error: str | None = None
    """Why the driver would not tell."""


class CudaState(Fact):
    """What torch says of the driver."""

    driver_cuda: str | None
    """Newest CUDA version that the driver runs; None: no driver."""
    gpus: tuple[Gpu, ...]
    """The visible GPUs in their order."""
    error: str | None
    """Why CUDA could not be started."""


class Facts(Fact):
    """All that the probe could find out before it ended."""

    torch: TorchBuild | None = None
    """None: torch could not be imported."""
    cuda: CudaState | None = None
    """None: the probe did not get that far."""
    imports: dict[str, str | None] = {}
    """Module -> why it cannot be imported; None: it can. A module the probe never reached is missing."""
    trouble: str | None = None
    """How the probe went wrong, and at what; None: it came to its end."""

    def import_error(self, module: str) -> str | None:
        """Return why `module` cannot be imported, or None."""
        return self.imports.get(module, self.trouble or "not tried")

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the visible GPUs."""
        return self.cuda.gpus if self.cuda else ()


def gather() -> Facts:
    """Run the probe; never raises, whatever state torch and the driver are in."""
    return parse(run_module("bridge.checks.probe", timeout_s=PROBE_TIMEOUT_S))


def parse(ended: Ended) -> Facts:
    """Put the probe's lines together: one JSON object each, `doing` naming what it began."""
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
