"""Where the checkpoints of clients are: `tinker://RUN/weights/NAME` and `.../sampler_weights/NAME`, as folders."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bridge.errors import UsageError

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Middle part of a path -> the SDK's name for that type of checkpoint."""
RUN = re.compile(r"[0-9a-f-]{36}:train:[0-9]{1,9}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
SCHEME = "tinker://"
ABOUT = "tinker.json"
"""File in a run's folder that describes its model."""


@dataclass(frozen=True)
class SavedPath:
    """The path of a checkpoint as the SDK writes it."""

    run: str
    """The model's id."""
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str) -> "SavedPath":
        """Parse a path. UsageError: it is malformed."""
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and len(parts) == 3:
            return cls(*parts).checked()
        raise UsageError(
            f"{path[:200]!r} is no path of a checkpoint", hint="tinker://RUN/weights/NAME or .../sampler_weights/NAME"
        )

    def checked(self) -> "SavedPath":
        """Return this path. UsageError: a part of it cannot be the name of a folder."""
        if self.kind not in KINDS or not RUN.fullmatch(self.run) or not NAME.fullmatch(self.name):
            raise UsageError(
                f"{str(self)[:200]!r} is no path of a checkpoint: a name has letters, digits, '.', '_' and '-'",
                hint="tinker://RUN/weights/NAME or .../sampler_weights/NAME",
            )
        return self

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class Checkpoints:
    """The checkpoints of all clients, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run_folder(self, run: str) -> Path:
        """Return the folder of a run, which has the id of its model."""
        if not RUN.fullmatch(run):
            raise UsageError(f"{run[:100]!r} is no training run", hint="list_training_runs() has those that there are")
        return self.folder / run.replace(":", "_")

    def place(self, path: SavedPath) -> Path:
        return self.run_folder(path.run) / path.kind / path.name

    def found(self, path: SavedPath) -> Path:
        """Return the folder of a checkpoint. UsageError: there is no such checkpoint."""
        folder = self.place(path)
        if not folder.is_dir():
            raise UsageError(f"{path} does not exist", hint="list_checkpoints() has those that there are")
        return folder

    def to_write(self, path: SavedPath, *, overwrite: bool) -> Path:
        """Return the folder for a new checkpoint, and create its parent. UsageError: the checkpoint exists already."""
        folder = self.place(path)
        if folder.exists():
            if not overwrite:
                raise UsageError(f"{path} exists already", hint="give it another name, or overwrite=True")
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def describe(self, run: str, about: dict[str, Any]) -> None:
        """Write the description of a run's model."""
        folder = self.run_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).write_text(json.dumps(about))

    def about(self, run: str) -> dict[str, Any]:
        """Return the description of a run's model. UsageError: there is no such run."""
        file = self.run_folder(run) / ABOUT
        if not file.is_file():
            raise UsageError(f"there is no training run {run}", hint="list_training_runs() has those that there are")
        about: dict[str, Any] = json.loads(file.read_text())
        return about

    def runs(self) -> list[str]:
        """Return all runs, the newest first."""
        files = sorted(self.folder.glob(f"*/{ABOUT}"), key=lambda file: file.stat().st_mtime, reverse=True)
        named = (re.sub(r"_train_(\d+)$", r":train:\1", file.parent.name) for file in files)
        return [run for run in named if RUN.fullmatch(run)]

    def of_run(self, run: str) -> Iterator[dict[str, Any]]:
        """Yield the checkpoints of a run in the format of the SDK."""
        for kind, type_ in KINDS.items():
            for folder in sorted((self.run_folder(run) / kind).glob("*/")):
                made = datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat()
                yield {
                    "checkpoint_id": f"{kind}/{folder.name}", "checkpoint_type": type_, "time": made,
                    "tinker_path": f"{SCHEME}{run}/{kind}/{folder.name}",
                    "size_bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
                }  # fmt: skip

    def delete(self, path: SavedPath) -> None:
        """Delete a checkpoint. UsageError: there is no such checkpoint."""
        shutil.rmtree(self.found(path))
