"""Reporters that draw a run's curves in TensorBoard and Weights & Biases.

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
from bridge.core.foreign_code import said
from bridge.errors import UsageError
from bridge.run.metrics import Evaluation, StepMetrics
from bridge.run.reporting import Phase, Reporter, prompt_text, sample
from bridge.run.run_directory import RunDirectory
from bridge.types import Group

NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
"""Package, which is the flag's name too -> name used in messages."""
LONGEST_TEXT = 8000
"""Characters of a prompt or a completion that are shown."""


class Tracker(Protocol):
    """Draws curves."""

    def log(self, step: int, values: Mapping[str, float], text: str | None = None) -> None:
        """Draw the next point of each curve, and show a text."""

    def close(self, *, failed: bool) -> None:
        """Finish writing; `failed`: the run ended with an error."""


class TensorBoard:
    """Writes a folder that `tensorboard --logdir` reads."""

    def __init__(self, config: TrainConfig, run: RunDirectory, first_step: int) -> None:
        """Write into `run`; curves of an earlier process end before `first_step`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first_step, flush_secs=10)
        self._writer.add_text("config", _indented(json.dumps(_shown(config), indent=1)))

    def log(self, step: int, values: Mapping[str, float], text: str | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if text is not None:
            self._writer.add_text("sample", _indented(text), step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - the protocol's
        self._writer.close()


class Wandb:
    """Sends to Weights & Biases, or writes for it, as its own variables say: WANDB_MODE, WANDB_PROJECT and others.

    A point that is sent again after a run resumed from an earlier step is kept beside the first one.
    """

    def __init__(self, config: TrainConfig, run: RunDirectory) -> None:
        """Begin a run there, or resume the one that `run` knows."""
        wandb: Any = import_module("wandb")
        if not run.wandb_id.exists():
            new = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
            atomic_file.replace(run.wandb_id, f"{new}\n".encode())
        self._html = wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bridge"),
            name=os.environ.get("WANDB_NAME", run.path.name),
            dir=os.environ.get("WANDB_DIR", str(run.path)),
            id=run.wandb_id.read_text().strip(),
            resume="allow",
            config=_shown(config),
            settings=wandb.Settings(console="off"),  # the terminal is ours
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], text: str | None = None) -> None:
        shown = {} if text is None else {"sample": self._html(f"<pre>{html.escape(text)}</pre>", inject=False)}
        self._run.log({"step": step, **values, **shown})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackers(Reporter):
    """All trackers of one run."""

    def __init__(
        self, open_all: Callable[[], Mapping[str, Tracker]], note: Callable[[str], None], *, shows_texts: bool
    ) -> None:
        """Use the trackers that `open_all` returns, by name; `note` reports one that fails.

        `open_all` is called when the run has begun: a refused run leaves no trace.
        """
        self._open_all, self._note, self._shows_texts = open_all, note, shows_texts
        self._trackers: dict[str, Tracker] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trackers is not None:
            self._each(lambda tracker: tracker.close(failed=kind is not None))
        self._trackers = {}

    def phase(self, name: Phase) -> None:  # noqa: ARG002 - the base's
        """Open the trackers, once.

        Raises:
            UsageError: one that was requested cannot be used.
        """
        if self._trackers is None:
            self._trackers = {}  # once, even if it fails
            self._trackers |= self._open_all()

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        text = _sample_text(groups) if self._shows_texts else None
        self._each(lambda tracker: tracker.log(metrics.step, metrics.curves(), text))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._each(lambda tracker: tracker.log(evaluation.step, evaluation.curves()))

    def _each(self, do: Callable[[Tracker], None]) -> None:
        self.phase("rollouts")
        trackers = self._trackers or {}
        for name, tracker in list(trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001 - foreign code, on which nothing depends
                del trackers[name]
                self._note(f"{name} failed and gets nothing more of this run: {_in_a_line(error)}")


def check(config: TrainConfig) -> None:
    """Check that the requested packages are installed, before anything is started.

    Raises:
        UsageError: one is not.
    """
    for package, name in NAMES.items():
        if getattr(config.tracking, package) and not is_installed(package):
            raise UsageError(
                f"--{package} needs {name}, and its package {package} is not installed here",
                remedy=f"pip install {package}, or leave --{package} out",
            )


def of(config: TrainConfig, run: RunDirectory, *, first_step: int = 1) -> Trackers:
    """Return the trackers of `run`, whose next step is `first_step`; only rank 0 opens any.

    Raises:
        UsageError: a requested package is not installed.
    """
    check(config)
    return Trackers(lambda: _open_all(config, run, first_step), run.note, shows_texts=config.tracking.save_rollouts)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name, a namespace package to Python, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _open_all(config: TrainConfig, run: RunDirectory, first_step: int) -> dict[str, Tracker]:
    """Open the requested trackers, and TensorBoard if it is installed; one that nobody requested may fail."""
    wanted: dict[str, Callable[[], Tracker]] = {}
    if is_installed("tensorboard") if config.tracking.tensorboard is None else config.tracking.tensorboard:
        wanted["tensorboard"] = lambda: TensorBoard(config, run, first_step)
    if config.tracking.wandb:
        wanted["wandb"] = lambda: Wandb(config, run)
    opened: dict[str, Tracker] = {}
    for package, make in wanted.items() if run.is_writer else ():
        try:
            opened[NAMES[package]] = make()
        except Exception as error:
            line = f"{NAMES[package]} cannot be used: {_in_a_line(error)}"
            if getattr(config.tracking, package):
                for tracker in opened.values():
                    with suppress(Exception):  # foreign code too
                        tracker.close(failed=True)
                raise UsageError(line, remedy=f"fix that, or leave --{package} out") from error
            run.note(line)
    return opened


def _sample_text(groups: Sequence[Group]) -> str | None:
    found = sample(groups)
    if found is None:
        return None
    prompt, answer = prompt_text(found.group)[-LONGEST_TEXT:], found.completion.text[:LONGEST_TEXT]
    text = f"{prompt}\n\n--- reward {found.reward:.3f} ---\n\n{answer}"
    return text.encode(errors="backslashreplace").decode()  # a lone surrogate is not valid UTF-8


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}{said(error)}"


def _indented(text: str) -> str:
    """Return `text` as a Markdown code block: nothing in it is interpreted."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _shown(config: TrainConfig) -> dict[str, Any]:
    return private.shown(flattened(TrainConfig, config.settled().model_dump(mode="json")))
