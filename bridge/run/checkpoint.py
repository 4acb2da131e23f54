"""Checkpoints: plain folders of weights with a marker that lists every file's bytes, written whole or not at all.

Not covered: what is in them (`Mode.save`, `trainer_state.py`), and loading into live weights
(`bridge/weights/model_folder.py`).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from bridge.config import TrainConfig
from bridge.core import whole_folder
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import CheckpointError, UsageError
from bridge.modes.mode import Mode
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.ranks.world import ALONE, Ranks
from bridge.run import trainer_state, whole_state
from bridge.run.run_directory import RunDirectory
from bridge.run.whole_state import WholeState
from bridge.server.protocol import Version
from bridge.types import TrainedProblems
from bridge.weights.parts import Cut, Parts

MARKER_NAME = "bridge_checkpoint.json"
"""Written last: a folder that holds it is a checkpoint of Bridge."""
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")
"""Files that a loader may take for weights: a checkpoint has none that was not saved with it."""
MAX_THREADS = 8
"""Files that are hashed at once; each thread hashes one to two GB a second."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Progress(_Record):
    """How far a run had come."""

    step: int
    """Steps taken."""
    weight_version: Version
    """Version under which the server served these weights."""
    problems_drawn: int
    """The weights were trained on every problem with a smaller number: a resumed run skips them."""
    problems_beyond: tuple[int, ...] = ()
    """Problems that they were trained on ahead of an earlier one; left out of the marker if there are none."""
    samples_drawn: int = 0
    """Calls of `Policy.sample` in a library loop; left out of the marker if there are none."""
    run_dir: Path
    """The run directory, absolute."""

    @property
    def trained(self) -> TrainedProblems:
        return TrainedProblems(below=self.problems_drawn, beyond=frozenset(self.problems_beyond))


@dataclass(frozen=True)
class Found:
    """A whole checkpoint."""

    folder: Path
    progress: Progress

    def check_left(self, training_steps: int) -> None:
        """Refuse to resume where no step is left.

        Raises:
            UsageError: none is.
        """
        if (step := self.progress.step) >= training_steps:
            raise UsageError(
                f"{self.folder} is of step {step}, and --training-steps is {training_steps}: no step is left",
                remedy=f"--training-steps {step + training_steps}, or start another run without --resume",
            )


class _File(_Record):
    num_bytes: int
    sha256: str


class _Marker(_Record):
    progress: Progress
    files: Mapping[str, _File]
    """Every other file, by its path in the folder."""
    sha256: str
    """Checksum of the two above."""


class Checkpoints:
    """The checkpoints that one run has written, and the one that it resumed from."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        mode: Mode,
        trained: Mapping[str, nn.Parameter],
        optimizer: InPlaceOptimizer,
        ranks: Ranks = ALONE,
        cuts: Sequence[Mapping[str, Cut]] = (),
    ) -> None:
        """Prepare to save and load them; `cuts` are what each part of a replica holds, if there are several."""
        self._ranks = ranks
        parts = Parts(cuts=cuts, within=ranks.within) if cuts else None
        self._state = whole_state.of(optimizer, trained, parts)
        self._config, self._run, self._mode, self._trained = config, run, mode, trained
        self._folder = config.checkpoints.save_path or run.checkpoints
        self._has_told = False
        self._saved: dict[int, Path] = {}
        self._pinned: set[Path] = set()

    @property
    def last(self) -> Path | None:
        """The newest one; None before the first."""
        return self._saved[max(self._saved)] if self._saved else None

    def load(self, found: Found) -> None:
        """Load the weights, the optimizer's state and the random state of a checkpoint.

        Raises:
            UsageError: it is of another model, or has no optimizer state.
        """
        trainer_state.read(found.folder, self._trained, self._state)
        self._tell_of_codes()
        self._mode.restore(found.folder, version=found.progress.weight_version)
        older = numbered(self._folder, self._mode.checkpoint_prefix)
        self._saved = {step: path for step, path in sorted(older.items()) if step < found.progress.step}
        self._saved[found.progress.step] = found.folder

    def is_due(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step`."""
        interval = self._config.checkpoints.save_interval
        return step == self._config.training_steps or (interval > 0 and step % interval == 0)

    def save(self, step: int, trained: TrainedProblems) -> Path:
        """Save the weights of `step`, unless they are saved already, and return the folder.

        They were trained on the problems in `trained`.

        Raises:
            UsageError: the disk is full or refuses, or a folder that is no checkpoint of Bridge is in the way.
        """
        if step not in self._saved:
            progress = Progress(
                step=step,
                weight_version=self._mode.version,
                problems_drawn=trained.below,
                problems_beyond=tuple(sorted(trained.beyond)),
                run_dir=self._run.path.absolute(),
            )
            self._saved = self._ranks.agreed(lambda: self._save(step, progress))[0]
        return self._saved[step]

    def save_weights(self, step: int) -> Path:
        """Save the weights alone, as a model and not as a checkpoint to resume from, and return the folder."""
        name = f"weights_{self._mode.checkpoint_prefix}{step}"
        names = chain([name], (f"{name}-{number}" for number in count(2)))  # an earlier run may have ended there, too
        folder = next(path for each in names if not (path := self._run.writable(self._folder / each)).exists())
        with whole_folder.written_whole(folder, replaceable=lambda _: False) as scratch:
            self._mode.save(scratch)
        return folder

    def pin(self, folder: Path) -> None:
        """Keep one for as long as the run lasts, because a server was started with it."""
        self._pinned.add(folder)

    def _save(self, step: int, progress: Progress) -> dict[int, Path]:
        """Save, on the first rank, and return what is kept; the others pass on their part of weights and state."""
        if not self._ranks.leads:
            self._pass_on_weights()
            self._write_state(None)
            return {}
        waiting: list[Callable[[], None]] = [self._pass_on_weights, lambda: self._write_state(None)]

        def fill(folder: Path) -> None:
            del waiting[0]
            with self._whole():
                self._mode.save(folder)
            waiting.clear()
            self._write_state(folder)
            self._tell_of_codes()

        try:
            folder = self._run.writable(self._folder / f"{self._mode.checkpoint_prefix}{step}")
            self._run.settle()
            saved = {**self._saved, step: save(folder, fill, progress)}
        except BaseException:
            for pass_on in waiting:
                pass_on()
            raise
        free = [path for path in saved.values() if path not in self._pinned]
        kept = {*keep_last(free, self._config.checkpoints.keep_last), *self._pinned}
        return {number: path for number, path in saved.items() if path in kept}

    def _write_state(self, folder: Path | None) -> None:
        if self._config.checkpoints.save_optimizer and (folder is not None or self._ranks.size > 1):
            with self._whole():
                trainer_state.write(folder, self._trained, self._state)

    def _pass_on_weights(self) -> None:
        """Send this part of the first replica's weights to the rank that saves them."""
        if self._ranks.num_parts > 1 and self._ranks.replica == 0:
            with self._whole():
                self._mode.pass_on()

    def _whole(self) -> AbstractContextManager[object]:
        """Defer an interrupt if there are several ranks: the others would wait for this one's part."""
        return deferred_interrupt() if self._ranks.size > 1 else nullcontext()

    def _tell_of_codes(self) -> None:
        if isinstance(self._state, WholeState) and self._state.is_coded and not self._has_told:
            self._has_told = True
            self._run.note(
                "checkpoints hold the optimizer's codes as a single process has them: those of parts are decoded and"
                " coded anew, which rounds where their blocks differ"
            )


def save(folder: Path, write: Callable[[Path], None], progress: Progress) -> Path:
    """Let `write` fill a new folder, move it to `folder` with its marker, and return the folder.

    Raises:
        UsageError: `folder` exists and is no checkpoint of Bridge, or the disk is full or refuses; nothing is left.
    """
    with whole_folder.written_whole(folder, replaceable=is_checkpoint) as scratch:
        write(scratch)
        files = _files(scratch)
        sums = dict(zip(files, _checksums(files.values()), strict=True))
        held = {name: _File(num_bytes=path.stat().st_size, sha256=sums[name]) for name, path in files.items()}
        (scratch / MARKER_NAME).write_bytes(_marker(progress, held))
    return folder.resolve()


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint of Bridge; it may have been damaged since."""
    return (folder / MARKER_NAME).is_file()


def marker(folder: Path) -> str | None:
    """Return what tells the checkpoint in `folder` from any other one; None if there is none that can be read."""
    try:
        return hashlib.sha256((folder / MARKER_NAME).read_bytes()).hexdigest()
    except OSError:
        return None


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file of a checkpoint, the marker last."""
    return {name: path.stat().st_size for name, path in (*_files(folder).items(), (MARKER_NAME, folder / MARKER_NAME))}


def read(folder: Path) -> Found:
    """Check every byte of a checkpoint and return how far it had come.

    Raises:
        CheckpointError: it is not whole; the message names the first fault.
    """
    try:
        text = (folder / MARKER_NAME).read_bytes()
        marker = _Marker.model_validate_json(text)
    except OSError as error:
        raise _not_whole(folder, f"{MARKER_NAME} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise _not_whole(folder, f"{MARKER_NAME} is no marker of this version of Bridge") from error
    if text != _marker(marker.progress, marker.files):
        raise _not_whole(folder, f"{MARKER_NAME} was changed")
    fault = next(_faults(folder, marker.files), None)
    if fault is not None:
        raise _not_whole(folder, fault)
    return Found(folder, marker.progress)


def newest(save_path: Path, prefix: str) -> tuple[Found | None, tuple[str, ...]]:
    """Return the whole checkpoint of the highest step, and a line about each newer one that is not whole."""
    passed_over = []
    for step, folder in sorted(numbered(save_path, prefix).items(), reverse=True):
        try:
            found = read(folder)
            if found.progress.step != step:
                raise _not_whole(folder, f"its name says step {step}, its marker step {found.progress.step}")
        except CheckpointError as error:
            passed_over.append(error.message)
        else:
            return found, tuple(passed_over)
    return None, tuple(passed_over)


def numbered(save_path: Path, prefix: str) -> dict[int, Path]:
    """Return everything that is named like a checkpoint, by the step in the name."""
    name = re.compile(rf"{re.escape(prefix)}(0|[1-9][0-9]*)")
    paths = save_path.iterdir() if save_path.is_dir() else ()
    return {int(match[1]): path for path in paths if (match := name.fullmatch(path.name))}


def keep_last(folders: Sequence[Path], count: int) -> list[Path]:
    """Remove all but the last `count` (0: keep all) and return those that remain, in order."""
    older = folders[:-count] if count else ()
    for folder in older:
        if is_checkpoint(folder):
            with suppress(OSError):  # it remains, and the next save tries again
                whole_folder.remove(folder)
    return [folder for folder in folders if folder not in older or is_checkpoint(folder)]


def _files(folder: Path) -> dict[str, Path]:
    """Return every file but the marker, by its path in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in names.items() if name != MARKER_NAME}


def _marker(progress: Progress, files: Mapping[str, _File]) -> bytes:
    """Return the marker's exact bytes, so that comparing them finds any change."""
    held = {name: file.model_dump() for name, file in files.items()}
    body = {"progress": progress.model_dump(mode="json", exclude_defaults=True), "files": held}
    whole = {**body, "sha256": hashlib.sha256(json.dumps(body).encode()).hexdigest()}
    return (json.dumps(whole, indent=1) + "\n").encode()


def _checksums(paths: Iterable[Path]) -> Iterator[str]:
    def checksum(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        yield from pool.map(checksum, paths)


def _faults(folder: Path, files: Mapping[str, _File]) -> Iterator[str]:
    """Yield what is wrong, the cheapest to find first."""
    found = _files(folder)
    for name, file in files.items():
        num_bytes = found[name].stat().st_size if name in found else None
        if num_bytes is None:
            yield f"{name} is missing"
        elif num_bytes != file.num_bytes:
            how = "was cut short" if num_bytes < file.num_bytes else "has grown"
            yield f"{name} {how}: {num_bytes} bytes, expected {file.num_bytes}"
    extra = [name for name in found if name not in files and name.endswith(WEIGHT_SUFFIXES)]
    yield from (f"{name} was not saved with it" for name in extra)
    try:
        for (name, file), checksum in zip(files.items(), _checksums([found[name] for name in files]), strict=True):
            if checksum != file.sha256:
                yield f"{name} has another checksum than when it was saved"
    except OSError as error:
        yield f"it cannot be read: {error}"


def _not_whole(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} is not whole: {fault}", remedy="take an older one, or save it again"
    )
