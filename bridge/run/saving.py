"""The checkpoints of one run: all ranks save them together, and load one when the run resumes.

Not covered: what makes a folder a complete checkpoint, and the optimizer's state (`bridge/checkpoints`).
"""

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress, SavedCheckpoint
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import CheckpointConfig
from bridge.config.optimizers import BytesPerParameter, OptimizerName
from bridge.core import atomic_folder, json_lines
from bridge.core.interrupt import deferred_interrupt
from bridge.engine.policy import Policy
from bridge.errors import RankError, UsageError
from bridge.planning.memory import GIB
from bridge.types import Group, TrainedProblems

logger = logging.getLogger(__name__)


class Order(NamedTuple):
    """What the order of a run's problems and rows depends on; None: it has none."""

    seed: int | None = None
    problems: str | None = None
    """The problems' digest."""
    rows: str | None = None
    """The rows' digest."""


class Checkpoints:
    """The progress of the weights in memory, and a run's checkpoints, including the one that it resumed from."""

    def __init__(
        self,
        choices: CheckpointConfig,
        run: RunDirectory,
        policy: Policy,
    ) -> None:
        self._choices = choices
        self._folder = choices.save_path or run.checkpoints
        self._run = run
        self._policy = policy
        self._prefix = policy.mode.checkpoint_prefix
        self._ranks = policy.ranks
        self.step = 0
        """The step of the weights in memory."""
        self.trained = TrainedProblems()
        """The problems that these weights were trained on."""
        self.order = Order()
        """On the rank that saves: what the order of problems and rows depends on."""
        self._is_half_written = False
        """Whether an error interrupted a write, so that the weights in memory are unusable."""
        self._saved: dict[int, Path] = {}
        self._pinned: set[Path] = set()

    @property
    def last(self) -> Path | None:
        """The newest checkpoint; None before the first."""
        return self._saved[max(self._saved)] if self._saved else None

    @contextmanager
    def writing(self, step: int, groups: Iterable[Group]) -> Iterator[None]:
        """Let the block write the weights of `step`, which was also trained on these groups."""
        self._is_half_written = True
        yield
        self._is_half_written = False
        self.step = step
        self.trained = self.trained.including(group.number for group in groups if group.number is not None)

    def is_torn(self) -> bool:
        """Return whether the weights in any rank's memory are half-written."""
        return any(self._ranks.all_gather_object(self._is_half_written))

    def load(self, source: SavedCheckpoint) -> None:
        """Load the weights, the optimizer's state and the random state of a checkpoint."""
        progress = source.progress
        self._policy.read_state(source, has_optimizer=True)
        older = checkpoint.numbered(self._folder, self._prefix)
        self._saved = {step: path for step, path in sorted(older.items()) if step < progress.step}
        self._saved[progress.step] = source.folder
        self.step = progress.step
        self.trained = progress.trained

    def log_lack_of_room(self, optimizer: OptimizerName) -> None:
        """Log a note if the disk has no room for the checkpoint at the end of the run."""
        least = 0.0
        for parameter in self._policy.trainable.weights.values():
            state = BytesPerParameter.of(optimizer, weight_bytes=parameter.itemsize).device
            least += parameter.numel() * (parameter.itemsize + (state if self._choices.save_optimizer else 0))
        least *= self._ranks.tp_size / GIB
        folder = next(path for path in (self._folder.absolute(), *self._folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free / GIB
        if free < least:
            logger.warning(
                f"a checkpoint takes at least {least:.2f} GiB, and {folder} has {free:.2f} GiB free: make room, since"
                " the last step is always saved, or choose another folder with --save-path"
            )

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`; the last step is saved in any case."""
        interval = self._choices.save_interval
        return interval > 0 and step % interval == 0

    def save(self) -> Path:
        """Save the weights in memory, unless they are saved already, and return the folder.

        Raises:
            UsageError: the disk is full, writing fails, or a folder that is not a Bridge checkpoint is in the way.
        """
        if self.step not in self._saved:
            # With several ranks an interrupt is deferred, since the others would wait for this rank's part.
            with deferred_interrupt() if self._ranks.world_size > 1 else nullcontext():
                self._ranks.barrier()  # ranks report interrupts here, where no other rank waits for a part
                self._saved = self._ranks.run_and_gather(self._save)[0]
        return self._saved[self.step]

    def rescue(self) -> None:
        """Save what was published; without the optimizer's state if a rank was lost or the disk has no room for it.

        Raises:
            UsageError: there was no room for the full checkpoint.
        """
        try:
            if not self._ranks.is_broken and not self.is_torn():
                self._save_what_fits()
        except RankError:  # a rank was lost
            if not self._ranks.is_broken:
                raise
        if not self._ranks.is_broken:
            return
        if self._ranks.tp_size > 1:
            logger.warning("weights of other tensor-parallel ranks were lost: continue from the last checkpoint")
        elif self._ranks.is_rank_zero and not self._is_half_written:
            folder = self._weights_folder()
            with atomic_folder.write(folder, replaceable=lambda _: False) as scratch:
                self._policy.mode.save(scratch)
            self._log_weights(folder)

    def pin(self, folder: Path) -> None:
        """Keep a checkpoint for the rest of the run, because a server was started from it."""
        self._pinned.add(folder)

    def _save(self) -> dict[int, Path]:
        """Save on rank 0, to which the others send their weights and state, and return the kept checkpoints by step."""
        folder = self._folder / f"{self._prefix}{self.step}"
        if self._ranks.is_rank_zero:
            json_lines.fsync(self._run.writable(self._run.metrics))
        written = self._policy.write_state(folder, self._progress(), has_optimizer=self._choices.save_optimizer)
        saved = {} if written is None else {**self._saved, self.step: written}
        free = [path for path in saved.values() if path not in self._pinned]
        kept = {*checkpoint.keep_last(free, self._choices.keep_last), *self._pinned}
        return {number: path for number, path in saved.items() if path in kept}

    def _save_what_fits(self) -> None:
        """Save a checkpoint; if that is impossible, save only the weights, if possible, and raise the reason."""
        try:
            self.save()
        except UsageError:
            folder = self._ranks.run_on_rank_zero(self._weights_folder)
            with suppress(UsageError):
                self._policy.save(folder)
                if self._ranks.is_rank_zero:
                    self._log_weights(folder)
            raise

    def _weights_folder(self) -> Path:
        """Return a new folder for only the weights, which is a model and not a checkpoint to resume from."""
        name = f"weights_{self._prefix}{self.step}"
        path = self._run.writable(self._folder / name)
        number = 1
        while path.exists():  # an earlier process may have used this name
            number += 1
            path = self._run.writable(self._folder / f"{name}-{number}")
        return path

    def _log_weights(self, folder: Path) -> None:
        logger.info(f"the weights of step {self.step}, without the optimizer's state, are in {folder}")

    def _progress(self) -> Progress:
        return Progress(
            step=self.step,
            weight_version=self._policy.version,
            problems_drawn=self.trained.below,
            problems_beyond=tuple(sorted(self.trained.beyond)),
            seed=self.order.seed,
            problems=self.order.problems,
            rows=self.order.rows,
            run_dir=self._run.path.absolute(),
        )
