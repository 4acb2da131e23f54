"""All that draw the curves of one run: they are told of it as reporters are.

One that fails in the middle of a run is told of once, and left out from then on: no run ends for the sake of a curve.

Not covered: which curves there are (`curves.py`), and who draws them (`tracker.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Self

from bridge.config import TrainConfig
from bridge.core.foreign_code import shortened
from bridge.errors import UsageError
from bridge.run import curves, reporting
from bridge.run.metrics import Evaluation, StepMetrics
from bridge.run.reporting import Phase, Sample
from bridge.run.run_directory import RunDirectory
from bridge.run.tracker import TensorBoard, Tracker, Wandb
from bridge.types import Group

NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
"""Package, which is the flag's name too -> what people call it."""
LONGEST_TEXT = 8000
"""Characters of a sample; a page shows no more of it."""


class Trackers:
    """All that draw curves of one run."""

    def __init__(
        self, open_all: Callable[[], Mapping[str, Tracker]], tell: Callable[[str], None], *, shows_texts: bool
    ) -> None:
        """Tell what `open_all` returns, each by its name; `tell` hears of one that fails.

        It is called when the run has begun: one that is refused leaves no trace.
        """
        self._open_all, self._tell, self._shows_texts = open_all, tell, shows_texts
        self._trackers: dict[str, Tracker] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def phase(self, name: Phase) -> None:  # noqa: ARG002 - the protocol's
        """Open what is not open yet.

        Raises:
            UsageError: what was asked for cannot be used.
        """
        self._opened()

    def progress(self, done: int, total: int) -> None:
        """Ignore it."""

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Draw what a step did, and show one of its completions."""
        found = reporting.sample(groups) if self._shows_texts else None
        text = _as_text(found) if found else None
        self._each(lambda tracker: tracker.log(metrics.step, curves.of_step(metrics), text))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Draw how the held-out problems were answered."""
        self._each(lambda tracker: tracker.log(evaluation.step, curves.of_evaluation(evaluation)))

    def close(self, *, failed: bool = False) -> None:
        """Let all finish; `failed`: the run ended by an error."""
        if self._trackers is not None:
            self._each(lambda tracker: tracker.close(failed=failed))
        self._trackers = {}

    def _opened(self) -> dict[str, Tracker]:
        if self._trackers is None:
            self._trackers = {}  # once, whatever comes of it
            self._trackers |= self._open_all()
        return self._trackers

    def _each(self, do: Callable[[Tracker], None]) -> None:
        trackers = self._opened()
        for name, tracker in list(trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001 - foreign code, on which nothing depends
                del trackers[name]
                self._tell(f"{name} failed, and is told nothing more of this run: {_in_a_line(error)}")


def check(config: TrainConfig) -> None:
    """Refuse what cannot be tracked, before anything is started.

    Raises:
        UsageError: a package is asked for and not installed.
    """
    for package, name in NAMES.items():
        if getattr(config.tracking, package) and not is_installed(package):
            raise UsageError(
                f"--{package} needs {name}, and its package {package} is not installed here",
                remedy=f"pip install {package}, or leave --{package} out",
            )


def of(config: TrainConfig, run: RunDirectory, *, first_step: int = 1) -> Trackers:
    """Return what draws the curves of `run`, which takes `first_step` next.

    Raises:
        UsageError: a package is asked for and not installed.
    """
    check(config)
    return Trackers(lambda: _open_all(config, run, first_step), run.note, shows_texts=config.tracking.save_rollouts)


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported; a folder of its name that Python could take for one does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _open_all(config: TrainConfig, run: RunDirectory, first_step: int) -> dict[str, Tracker]:
    """Open what is wanted; what nobody asked for may fail."""
    wanted: dict[str, Callable[[], Tracker]] = {}
    if is_installed("tensorboard") if config.tracking.tensorboard is None else config.tracking.tensorboard:
        wanted["tensorboard"] = lambda: TensorBoard(config, run, first_step)
    if config.tracking.wandb:
        wanted["wandb"] = lambda: Wandb(config, run)
    opened: dict[str, Tracker] = {}
    for package, make in wanted.items():
        try:
            opened[NAMES[package]] = make()
        except Exception as error:
            line = f"{NAMES[package]} cannot be used: {_in_a_line(error)}"
            if getattr(config.tracking, package):
                for tracker in opened.values():
                    with suppress(Exception):  # foreign code too
                        tracker.close(failed=True)
                raise UsageError(line, remedy=f"mend that, or leave --{package} out") from error
            run.note(line)
    return opened


def _as_text(sample: Sample) -> str:
    prompt, answer = reporting.prompt_text(sample.group)[-LONGEST_TEXT:], sample.completion.text[:LONGEST_TEXT]
    text = f"{prompt}\n\n--- reward {sample.reward:.3f} ---\n\n{answer}"
    return text.encode(errors="backslashreplace").decode()  # half a pair of UTF-16 is no text to anybody else


def _in_a_line(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}", 200)
