"""The checkpoints of one run: which are due, what goes into one, and which stay.

Not covered: writing one whole (`checkpoint.py`), its files (`trainer_state.py`, and the mode's own).
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from bridge.config import TrainConfig
from bridge.modes.mode import Mode
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.run import checkpoint, trainer_state
from bridge.run.checkpoint import Found, Progress
from bridge.run.run_directory import RunDirectory


class Series:
    """The checkpoints that one run has written, or goes on from."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        mode: Mode,
        trained: Mapping[str, nn.Parameter],
        optimizer: InPlaceOptimizer,
    ) -> None:
        self._config, self._run, self._mode, self._trained, self._optimizer = config, run, mode, trained, optimizer
        self._folder = config.checkpoints.save_path or run.checkpoints
        self._saved: dict[int, Path] = {}
        self._pinned: set[Path] = set()

    @property
    def last(self) -> Path | None:
        """The newest one; None before the first."""
        return self._saved[max(self._saved)] if self._saved else None

    def load(self, found: Found) -> None:
        """Take over the weights, the optimizer's and the random state of a checkpoint.

        Raises:
            UsageError: it is of another model, or holds no state of an optimizer.
        """
        trainer_state.read(found.folder, self._trained, self._optimizer)
        self._mode.restore(found.folder, version=found.progress.weight_version)
        older = checkpoint.numbered(self._folder, self._mode.checkpoint_prefix)
        self._saved = {step: path for step, path in sorted(older.items()) if step < found.progress.step}
        self._saved[found.progress.step] = found.folder

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is wanted after `step`."""
        interval = self._config.checkpoints.save_interval
        return step == self._config.training_steps or (interval > 0 and step % interval == 0)

    def save(self, step: int, *, problems_drawn: int) -> Path:
        """Save what is in memory, which is of `step`, unless it is saved already; return its folder.

        Raises:
            UsageError: the disk is full or refuses, or something of somebody else's is in the way.
        """
        if step not in self._saved:
            progress = Progress(
                step=step,
                weight_version=self._mode.version,
                problems_drawn=problems_drawn,
                run_dir=self._run.path.absolute(),
            )
            folder = self._folder / f"{self._mode.checkpoint_prefix}{step}"
            self._run.settle()
            self._saved[step] = checkpoint.save(folder, self._fill, progress)
            free = [path for path in self._saved.values() if path not in self._pinned]
            kept = {*checkpoint.keep_last(free, self._config.checkpoints.keep_last), *self._pinned}
            self._saved = {number: path for number, path in self._saved.items() if path in kept}
        return self._saved[step]

    def pin(self, folder: Path) -> None:
        """Keep one for as long as the run lasts, because a server was started with it."""
        self._pinned.add(folder)

    def _fill(self, folder: Path) -> None:
        self._mode.save(folder)
        if self._config.checkpoints.save_optimizer:
            trainer_state.write(folder, self._trained, self._optimizer)
