"""Curves of a run in TensorBoard and Weights & Biases, which follow the run as reporters do.

Both are foreign code, imported when a run begins. One that fails during a run is reported once and dropped: no run ends
because of a curve.
"""

import html
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol, Self

from bridge.config import TrainConfig
from bridge.config.choices import flattened
from bridge.core import atomic_file, private
from bridge.core.foreign_code import shortened
from bridge.errors import UsageError
from bridge.run import reporting
from bridge.run.metrics import Evaluation, StepMetrics
from bridge.run.reporting import Phase, Sample
from bridge.run.run_directory import RunDirectory
from bridge.types import Group

NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
"""Package, which is the flag's name too -> what people call it."""
LONGEST_TEXT = 8000
"""Characters of a sample; a page shows no more of it."""


class Tracker(Protocol):
    """Draws curves."""

    def log(self, step: int, values: Mapping[str, float], sample: str | None = None) -> None:
        """Draw the next point of each curve, and show a text."""
        ...

    def close(self, *, failed: bool) -> None:
        """Hand over everything."""
        ...


class TensorBoard:
    """Writes a folder that `tensorboard --logdir` reads."""

    def __init__(self, config: TrainConfig, run: RunDirectory, first_step: int) -> None:
        """Write into `run`; curves of an earlier process end before `first_step`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first_step, flush_secs=10)
        self._writer.add_text("config", _indented(json.dumps(_shown(config), indent=1)))

    def log(self, step: int, values: Mapping[str, float], sample: str | None = None) -> None:
        """Write one point a curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if sample is not None:
            self._writer.add_text("sample", _indented(sample), step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - the protocol's
        """Write what is still in memory."""
        self._writer.close()


class Wandb:
    """Sends to Weights & Biases, or writes for it, as its own variables say: WANDB_MODE, WANDB_PROJECT and others.

    A point that is sent again after a run went on from an earlier step is kept beside the first one, not dropped.
    """

    def __init__(self, config: TrainConfig, run: RunDirectory) -> None:
        """Begin a run there, or go on with the one that `run` knows."""
        wandb: Any = import_module("wandb")
        self._html = wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bridge"),
            name=os.environ.get("WANDB_NAME", run.path.name),
            dir=os.environ.get("WANDB_DIR", str(run.path)),
            id=_run_id(run),
            resume="allow",
            config=_shown(config),
            settings=wandb.Settings(console="off"),  # the terminal is ours
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], sample: str | None = None) -> None:
        """Send one point a curve."""
        shown = {} if sample is None else {"sample": self._html(f"<pre>{html.escape(sample)}</pre>", inject=False)}
        self._run.log({"step": step, **values, **shown})

    def close(self, *, failed: bool) -> None:
        """Send what is still here."""
        self._run.finish(exit_code=int(failed))


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
        self._each(lambda tracker: tracker.log(metrics.step, metrics.curves(), text))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Draw how the held-out problems were answered."""
        self._each(lambda tracker: tracker.log(evaluation.step, evaluation.curves()))

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


def _run_id(run: RunDirectory) -> str:
    """Return the id of the run at Weights & Biases, a new one the first time."""
    if not run.wandb_id.exists():
        new = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        atomic_file.replace(run.wandb_id, f"{new}\n".encode())
    return run.wandb_id.read_text().strip()


def _indented(text: str) -> str:
    """Return `text` as Markdown shows it letter by letter, whatever is in it."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _shown(config: TrainConfig) -> dict[str, Any]:
    return private.shown(flattened(TrainConfig, config.model_dump(mode="json")))
