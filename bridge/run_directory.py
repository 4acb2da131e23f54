"""The run directory: everything that one training run leaves behind, and the names of its files.

Not covered: checkpoints, whose folder the user chooses (`--save-path`).
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bridge.errors import UsageError
from bridge.training.metrics import StepMetrics
from bridge.weights.manifest import MANIFEST_NAME

RUNS = Path("runs")


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder."""

    path: Path
    """The folder."""
    made: tuple[Path, ...] = ()
    """The folders that were made for it, the innermost first."""

    @classmethod
    def create(cls, given: Path | None, *, environment: str) -> "RunDirectory":
        """Make the folder `given`, or a new one under `runs/` named by the time and `environment`.

        Raises:
            UsageError: `given` holds another run, is a file, or cannot be made.
        """
        path = _unused(environment) if given is None else given
        missing = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the run directory {path} cannot be made: {error.strerror}", remedy="name another with --run-dir"
            ) from error
        run = cls(path, missing)
        if run.metrics.exists():
            raise UsageError(f"{path} holds another run: {run.metrics.name}", remedy="name another with --run-dir")
        return run

    @property
    def config(self) -> Path:
        """Return the file of the resolved choices."""
        return self.path / "config.json"

    @property
    def server_config(self) -> Path:
        """Return the file of the server's resolved choices, where the run started the server."""
        return self.path / "serve.json"

    @property
    def metrics(self) -> Path:
        """Return the file of the steps, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def server_log(self) -> Path:
        """Return the file of the server's output, where the run started the server."""
        return self.path / "serve.log"

    @property
    def manifest(self) -> Path:
        """Return where the server's manifest goes, where the run started the server and no place was given."""
        return self.path / MANIFEST_NAME

    def remove_if_unused(self) -> None:
        """Remove the folders that were made for this run, where nothing was put into them."""
        with contextlib.suppress(OSError):  # the first that is not empty keeps those around it
            for folder in self.made:
                folder.rmdir()

    def write_config(self, config: BaseModel) -> None:
        """Write the run's resolved choices."""
        write_json(self.config, config.model_dump(mode="json"))

    def append(self, metrics: StepMetrics) -> None:
        """Append one step and hand it to the operating system at once; a number that is not finite becomes null."""
        with self.metrics.open("a") as file:
            file.write(to_json(metrics) + "\n")


def to_json(metrics: StepMetrics) -> str:
    """Return one step as a JSON object on one line; a number that is not finite becomes null."""
    values = {name: _finite(value) for name, value in dataclasses.asdict(metrics).items()}
    return json.dumps(values, allow_nan=False)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` to `path` atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _unused(environment: str) -> Path:
    task = Path(environment.rpartition(":")[2]).stem
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}"
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    return next(RUNS / name for name in names if not (RUNS / name).exists())
