"""Checkpoints: model folders, written atomically, with a marker file that lists the size and hash of every file.

Not covered: when a run saves them (`bridge/run/saving.py`), and loading into live weights (`weights/model_folder.py`).
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from bridge.core import atomic_folder
from bridge.core.concurrency import map_in_threads
from bridge.errors import CheckpointError, UsageError
from bridge.ranks.world import Ranks
from bridge.server.manifest import Record
from bridge.server.protocol import Version
from bridge.types import TrainedProblems
from bridge.weights import model_files

MARKER_NAME = model_files.CHECKPOINT_MARKER
"""Name of the marker, which is written last: a folder with this file is a checkpoint of Bridge."""
MAX_THREADS = 8
"""Maximum number of files hashed concurrently; each thread hashes one to two GB per second."""


class Progress(Record):
    """Progress of a run at a checkpoint."""

    step: int
    """Number of steps taken."""
    weight_version: Version
    """The version under which the server served these weights."""
    problems_drawn: int
    """The weights were trained on all problems with a smaller index, which a resumed run skips."""
    problems_beyond: tuple[int, ...] = ()
    """Indices of further problems that they were trained on; left out of the marker if there are none."""
    samples_drawn: int = 0
    """Number of calls of `Policy.sample` in a library loop; left out of the marker if it is 0."""
    seed: int | None = None
    """Seed of the problems' order; None: the run has no problems of its own."""
    problems: str | None = None
    """Identifies the problems and their order (`bridge/run/resuming.py`)."""
    rows: str | None = None
    """Identifies the rows of a file that the first or all steps train on."""
    run_dir: Path
    """Absolute path of the run directory."""

    @property
    def trained(self) -> TrainedProblems:
        return TrainedProblems(below=self.problems_drawn, beyond=frozenset(self.problems_beyond))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    folder: Path
    progress: Progress

    def check_left(self, training_steps: int) -> None:
        """Raise UsageError if no step is left to train."""
        if (step := self.progress.step) >= training_steps:
            raise UsageError(
                f"{self.folder} is from step {step}, but --training-steps is {training_steps}: no step is left",
                hint=f"--training-steps {step + training_steps}, or start a new run without --resume",
            )


class _File(Record):
    num_bytes: int
    sha256: str


class _Marker(Record):
    progress: Progress
    files: Mapping[str, _File]
    """All other files, by their paths in the folder."""
    sha256: str
    """Checksum of the two fields above."""


def save(folder: Path, write: Callable[[Path], object], progress: Progress) -> Path:
    """Let `write` fill a new folder, add the marker, move the result to `folder`, and return its path."""
    with atomic_folder.write(folder, replaceable=is_checkpoint) as scratch:
        write(scratch)
        files = _files(scratch)
        sums = dict(zip(files, _checksums(files.values()), strict=True))
        held = {name: _File(num_bytes=path.stat().st_size, sha256=sums[name]) for name, path in files.items()}
        (scratch / MARKER_NAME).write_bytes(_marker(progress, held))
    return folder.resolve()


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint of Bridge; it may be damaged."""
    return (folder / MARKER_NAME).is_file()


def check_on_all_hosts(folder: Path, ranks: Ranks) -> None:
    """Check that every host sees the same checkpoint in `folder` as the first rank; called by all ranks.

    Raises:
        CheckpointError: a host sees a different checkpoint, or none.
    """
    hosts = ranks.all_gather_object((socket.gethostname(), fingerprint(folder)))
    for name, marker in hosts:
        if marker != hosts[0][1]:
            fault = "has no checkpoint" if marker is None else "has a different checkpoint"
            raise CheckpointError(
                f"{name} {fault} in {folder.absolute()}, but {hosts[0][0]} resumes from the checkpoint there",
                hint="keep checkpoints in a folder that all hosts share: --save-path FOLDER",
            )


def fingerprint(folder: Path) -> str | None:
    """Return the digest of a checkpoint's marker; None if the marker is missing or unreadable."""
    try:
        return hashlib.sha256((folder / MARKER_NAME).read_bytes()).hexdigest()
    except OSError:
        return None


def read(folder: Path) -> SavedCheckpoint:
    """Verify every byte of a checkpoint, and return it with its progress.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; the message names the first fault.
    """
    try:
        text = (folder / MARKER_NAME).read_bytes()
        marker = _Marker.model_validate_json(text)
    except OSError as error:
        raise _damaged(folder, f"{MARKER_NAME} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise _damaged(folder, f"{MARKER_NAME} is not a valid marker for this version of Bridge") from error
    if text != _marker(marker.progress, marker.files):
        raise _damaged(folder, f"{MARKER_NAME} was changed")
    fault = next(_faults(folder, marker.files), None)
    if fault is not None:
        raise _damaged(folder, fault)
    return SavedCheckpoint(folder, marker.progress)


def newest(save_path: Path, prefix: str) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """Return the newest complete checkpoint, and a line for each newer checkpoint that is incomplete or damaged."""
    skipped = []
    for step, folder in sorted(numbered(save_path, prefix).items(), reverse=True):
        try:
            checkpoint = read(folder)
            if checkpoint.progress.step != step:
                raise _damaged(folder, f"its name says step {step}, its marker step {checkpoint.progress.step}")
        except CheckpointError as error:
            skipped.append(error.message)
        else:
            return checkpoint, tuple(skipped)
    return None, tuple(skipped)


def numbered(save_path: Path, prefix: str) -> dict[int, Path]:
    """Return the folders with names of checkpoints, by step."""
    name = re.compile(rf"{re.escape(prefix)}(0|[1-9][0-9]*)")
    paths = save_path.iterdir() if save_path.is_dir() else ()
    return {int(match[1]): path for path in paths if (match := name.fullmatch(path.name))}


def keep_last(folders: Sequence[Path], count: int) -> list[Path]:
    """Remove all but the last `count` checkpoints (0: keep all), and return the remaining folders in order."""
    older = folders[:-count] if count else ()
    for folder in older:
        if is_checkpoint(folder):
            with suppress(OSError):  # the folder stays, and the next save tries again
                atomic_folder.remove(folder)
    return [folder for folder in folders if folder not in older or is_checkpoint(folder)]


def _files(folder: Path) -> dict[str, Path]:
    """Return all files except the marker, by their paths in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in names.items() if name != MARKER_NAME}


def _marker(progress: Progress, files: Mapping[str, _File]) -> bytes:
    """Return the exact bytes of the marker, so that a comparison detects any change."""
    held = {name: file.model_dump() for name, file in files.items()}
    body = {"progress": progress.model_dump(mode="json", exclude_defaults=True), "files": held}
    whole = {**body, "sha256": hashlib.sha256(json.dumps(body).encode()).hexdigest()}
    return (json.dumps(whole, indent=1) + "\n").encode()


def _checksums(paths: Iterable[Path]) -> Iterator[str]:
    def checksum(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return map_in_threads(checksum, paths, min(MAX_THREADS, os.cpu_count() or 1))


def _faults(folder: Path, files: Mapping[str, _File]) -> Iterator[str]:
    """Yield each fault of a checkpoint's files; cheap checks come first."""
    held = _files(folder)
    for name, file in files.items():
        num_bytes = held[name].stat().st_size if name in held else None
        if num_bytes is None:
            yield f"{name} is missing"
        elif num_bytes != file.num_bytes:
            how = "is truncated" if num_bytes < file.num_bytes else "has grown"
            yield f"{name} {how}: {num_bytes} bytes, expected {file.num_bytes}"
    extra = [name for name in held if name not in files and model_files.is_loaded(name)]  # such as Python code
    yield from (f"{name} was added after saving" for name in extra)
    try:
        for (name, file), checksum in zip(files.items(), _checksums([held[name] for name in files]), strict=True):
            if checksum != file.sha256:
                yield f"{name} has changed: its checksum differs from when it was saved"
    except OSError as error:
        yield f"it cannot be read: {error}"


def _damaged(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} is incomplete or damaged: {fault}", hint="use an older checkpoint, or save it again"
    )
