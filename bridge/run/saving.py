"""The checkpoints of one run: saved step by step, by all ranks together, and loaded when it resumes.

Not covered: what makes a folder a whole checkpoint, and the optimizer's state (`bridge/checkpoints`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, count
from pathlib import Path

from bridge.checkpoints import checkpoint, optimizer_state
from bridge.checkpoints.checkpoint import Progress, SavedCheckpoint
from bridge.checkpoints.optimizer_state import WholeState
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import CheckpointConfig
from bridge.core import atomic_folder, json_lines
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import RankError
from bridge.modes.mode import Mode
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.ranks.world import Ranks
from bridge.types import Group, TrainedProblems
from bridge.weights.attach import OpenedModel
from bridge.weights.parts import Parts


class Checkpoints:
    """The trained weights in memory, and the checkpoints of one run: its own, and the one that it resumed from."""

    def __init__(
        self,
        choices: CheckpointConfig,
        run: RunDirectory,
        mode: Mode,
        opened: OpenedModel,
        optimizer: InPlaceOptimizer,
        ranks: Ranks,
    ) -> None:
        self._choices = choices
        self._folder = choices.save_path or run.checkpoints
        self._run = run
        self._mode = mode
        self._ranks = ranks
        self._weights = {name: opened.model.get_parameter(name) for name in opened.lr_factors}
        self._state: InPlaceOptimizer | WholeState = optimizer
        if opened.cuts:
            assert isinstance(optimizer, ShardedOptimizer), "a loop of the user's has no parts"
            whole = WholeState(optimizer, self._weights, Parts(cuts=opened.cuts, tp_group=ranks.tp_group))
            self._state = whole
            if whole.codes is not None:
                run.note(
                    "checkpoints hold the optimizer's codes as a single process has them: those of tensor-parallel"
                    " ranks are decoded and coded again, which rounds where their blocks differ"
                )
        self.step = 0
        """Step of the weights in memory."""
        self.trained = TrainedProblems()
        """Problems that they were trained on."""
        self.order: tuple[int, str] | None = None
        """The seed of the problems' order, and what identifies them, on the rank that saves."""
        self._is_half_written = False
        """Whether an error interrupted a write: the weights in memory are unusable."""
        self._saved: dict[int, Path] = {}
        self._pinned: set[Path] = set()

    @property
    def last(self) -> Path | None:
        """The newest one; None before the first."""
        return self._saved[max(self._saved)] if self._saved else None

    @contextmanager
    def writing(self, step: int, groups: Iterable[Group]) -> Iterator[None]:
        """Let the block write the weights of `step`, which were trained on these groups, too."""
        self._is_half_written = True
        yield
        self._is_half_written = False
        self.step = step
        self.trained = self.trained.including(group.number for group in groups if group.number is not None)

    def is_torn(self) -> bool:
        """Return whether the weights in the memory of any rank are half-written."""
        return any(self._ranks.all_gather_object(self._is_half_written))

    def load(self, source: SavedCheckpoint) -> None:
        """Load the weights, the optimizer's state and the random state of a checkpoint."""
        progress = source.progress
        optimizer_state.read(source.folder, self._weights, self._state)
        self._mode.restore(source.folder, version=progress.weight_version)
        older = checkpoint.numbered(self._folder, self._mode.checkpoint_prefix)
        self._saved = {step: path for step, path in sorted(older.items()) if step < progress.step}
        self._saved[progress.step] = source.folder
        self.step = progress.step
        self.trained = progress.trained

    def is_due(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step`, unless it is the last one, which is always saved."""
        interval = self._choices.save_interval
        return interval > 0 and step % interval == 0

    def save(self) -> Path:
        """Save the weights in memory, unless they are saved already, and return the folder.

        Raises:
            UsageError: the disk is full or refuses, or a folder that is no checkpoint of Bridge is in the way.
        """
        if self.step not in self._saved:
            # With several ranks an interrupt is deferred: the others would wait for this one's part.
            with deferred_interrupt() if self._ranks.world_size > 1 else nullcontext():
                self._ranks.barrier()  # a rank that was interrupted reports it here, where no other waits for its part
                self._saved = self._ranks.run_and_gather(self._save)[0]
        return self._saved[self.step]

    def rescue(self) -> None:
        """Save what was published; if a rank was lost, without the optimizer's state."""
        try:
            if not self._ranks.is_broken and not self.is_torn():
                self.save()
        except RankError:  # a rank was lost
            if not self._ranks.is_broken:
                raise
        if not self._ranks.is_broken:
            return
        if self._ranks.tp_size > 1:
            self._run.note("weights of other tensor-parallel ranks were lost: continue from the last checkpoint")
        elif self._ranks.is_rank_zero and not self._is_half_written:
            folder = self._save_weights()
            self._run.note(f"the weights of step {self.step}, without the optimizer's state, are in {folder}")

    def pin(self, folder: Path) -> None:
        """Keep one for as long as the run lasts, because a server was started with it."""
        self._pinned.add(folder)

    def _save(self) -> dict[int, Path]:
        """Save, on rank 0, and return what is kept; the others send their part of weights and state."""
        to_send: list[Callable[[], None]] = [self._send_weights, lambda: self._write_state(None)]

        def fill(folder: Path) -> None:
            del to_send[0]
            self._mode.save(folder)
            to_send.clear()
            self._write_state(folder)

        saved: dict[int, Path] = {}
        try:
            if self._ranks.is_rank_zero:
                folder = self._run.writable(self._folder / f"{self._mode.checkpoint_prefix}{self.step}")
                json_lines.fsync(self._run.metrics)
                saved = {**self._saved, self.step: checkpoint.save(folder, fill, self._progress())}
        finally:
            for send in to_send:  # on other ranks, and here after an error: the others wait for it
                send()
        free = [path for path in saved.values() if path not in self._pinned]
        kept = {*checkpoint.keep_last(free, self._choices.keep_last), *self._pinned}
        return {number: path for number, path in saved.items() if path in kept}

    def _save_weights(self) -> Path:
        """Save the weights alone, as a model and not as a checkpoint to resume from, and return the folder."""
        name = f"weights_{self._mode.checkpoint_prefix}{self.step}"
        names = chain([name], (f"{name}-{number}" for number in count(2)))  # an earlier run may have ended there, too
        folder = next(path for name in names if not (path := self._run.writable(self._folder / name)).exists())
        with atomic_folder.write(folder, replaceable=lambda _: False) as scratch:
            self._mode.save(scratch)
        return folder

    def _progress(self) -> Progress:
        seed, problems = self.order or (None, None)
        return Progress(
            step=self.step,
            weight_version=self._mode.version,
            problems_drawn=self.trained.below,
            problems_beyond=tuple(sorted(self.trained.beyond)),
            seed=seed,
            problems=problems,
            run_dir=self._run.path.absolute(),
        )

    def _write_state(self, folder: Path | None) -> None:
        if self._choices.save_optimizer and (folder is not None or self._ranks.world_size > 1):
            optimizer_state.write(folder, self._weights, self._state)

    def _send_weights(self) -> None:
        """Send this part of the first replica's weights to the rank that saves them."""
        if self._ranks.tp_size > 1 and self._ranks.dp_rank == 0:
            self._mode.send_parts()
