"""Reporters receive the progress of a run; trackers draw its curves in TensorBoard and Weights & Biases.

Both trackers are third-party code, imported when a run begins. A tracker that fails during a run is reported once and
dropped, because a run should not end for its curves.

Not covered: showing a run to a person (`bridge_cli`).
"""

import html
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Literal, Protocol

from bridge.checkpoints.metrics import Evaluation, StepMetrics
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrackingConfig
from bridge.core import atomic_file, redaction
from bridge.core.foreign_code import reason_of
from bridge.errors import UsageError
from bridge.types import Group

logger = logging.getLogger(__name__)

TRACKERS = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
"""Names of trackers in messages, by package; the flag has the package's name."""
LONGEST_TEXT = 8000
"""Longest prompt or completion that is shown, in characters; longer ones are truncated."""
Phase = Literal["rollouts", "train", "fence", "evaluation", "save"]


class Reporter:
    """Base class that ignores all progress of a run. The trainer waits for every call, so all must be quick."""

    def phase(self, name: Phase) -> None:
        """Called when a phase begins."""

    def progress(self, done: int, total: int) -> None:
        """Called when `done` of `total` groups of this phase have been scored."""

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Called when a step was published; it was trained on `groups`."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Called when the held-out problems were evaluated."""


class Reporters(Reporter):
    """Passes every call on to several reporters, in order."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def phase(self, name: Phase) -> None:
        for reporter in self._reporters:
            reporter.phase(name)

    def progress(self, done: int, total: int) -> None:
        for reporter in self._reporters:
            reporter.progress(done, total)

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        for reporter in self._reporters:
            reporter.step(metrics, groups)

    def evaluation(self, evaluation: Evaluation) -> None:
        for reporter in self._reporters:
            reporter.evaluation(evaluation)


def sample(groups: Sequence[Group]) -> Group | None:
    """Return the group whose first completion represents a step: one with rewards, neither the best nor the worst."""
    return next((group for group in groups if group.rewards), None)


def prompt_text(group: Group) -> str:
    """Return the prompt of a group as one text, with the role before each chat message."""
    prompt = group.problem["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)


class Tracker(Protocol):
    """A service that draws curves."""

    def log(self, step: int, values: Mapping[str, float], text: str | None = None) -> None:
        """Draw the next point of each curve, and show `text`, if any."""

    def close(self, *, failed: bool) -> None:
        """Finish writing; `failed`: the run ended with an error."""


class TensorBoard:
    """Writes files that `tensorboard --logdir` reads."""

    def __init__(self, run: RunDirectory, choices: Mapping[str, Any], first_step: int) -> None:
        """Write into the run directory; curves of an earlier process are cut before `first_step`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first_step, flush_secs=10)
        self._writer.add_text("config", _indented(json.dumps(choices, indent=1)))

    def log(self, step: int, values: Mapping[str, float], text: str | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if text is not None:
            self._writer.add_text("sample", _indented(text), step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - the protocol's
        self._writer.close()


class Wandb:
    """Sends to Weights & Biases or writes files for it, depending on WANDB_MODE, WANDB_PROJECT and its other variables.

    If a run resumes from an earlier step, repeated points are kept in addition to the first ones.
    """

    def __init__(self, run: RunDirectory, choices: Mapping[str, Any]) -> None:
        """Begin a Weights & Biases run, or resume the one whose id is in the run directory."""
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
            config=choices,
            settings=wandb.Settings(console="off"),  # Bridge owns the terminal
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], text: str | None = None) -> None:
        shown = {} if text is None else {"sample": self._html(f"<pre>{html.escape(text)}</pre>", inject=False)}
        self._run.log({"step": step, **values, **shown})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackers(AbstractContextManager["Trackers"], Reporter):
    """All trackers of one run."""

    def __init__(self, open_all: Callable[[], Mapping[str, Tracker]], *, shows_texts: bool) -> None:
        """Use the trackers that `open_all` returns, by name; a tracker that fails is logged.

        `open_all` is called only when the run has begun, so that a refused run leaves no trace.
        """
        self._open_all = open_all
        self._shows_texts = shows_texts
        self._trackers: dict[str, Tracker] | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trackers is not None:
            self._call(lambda tracker: tracker.close(failed=kind is not None))
        self._trackers = {}

    def phase(self, name: Phase) -> None:  # noqa: ARG002 - the base's
        """Open the trackers, once.

        Raises:
            UsageError: a requested tracker cannot be used.
        """
        if self._trackers is None:
            self._trackers = {}  # opened once, even if it fails
            self._trackers |= self._open_all()

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        text = _sample_text(groups) if self._shows_texts else None
        self._call(lambda tracker: tracker.log(metrics.step, metrics.curves(), text))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._call(lambda tracker: tracker.log(evaluation.step, evaluation.curves()))

    def _call(self, do: Callable[[Tracker], None]) -> None:
        self.phase("rollouts")
        trackers = self._trackers or {}
        for name, tracker in list(trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001 - foreign code, on which nothing depends
                del trackers[name]
                logger.warning(
                    f"{name} failed, and is no longer used in this run: {type(error).__name__}{reason_of(error)}"
                )


def check_trackers(tracking: TrackingConfig) -> None:
    """Check that the requested trackers are installed, before anything is started.

    Raises:
        UsageError: a package is not installed.
    """
    for package, name in TRACKERS.items():
        if getattr(tracking, package) and not is_installed(package):
            raise UsageError(
                f"--{package} needs {name}, and its package {package} is not installed here",
                hint=f"pip install {package}, or leave --{package} out",
            )


def trackers_of(
    tracking: TrackingConfig, choices: Mapping[str, Any], run: RunDirectory, *, first_step: int
) -> Trackers:
    """Return the trackers of `run`, whose next step is `first_step`. Only rank 0 opens them, with `choices`."""
    shown = redaction.redacted(choices)
    return Trackers(lambda: _open_all(tracking, shown, run, first_step), shows_texts=tracking.save_rollouts)


def is_installed(package: str) -> bool:
    """Return whether a package is installed; a mere folder of that name (a namespace package) does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _open_all(
    tracking: TrackingConfig, choices: Mapping[str, Any], run: RunDirectory, first_step: int
) -> dict[str, Tracker]:
    """Open the requested trackers, and TensorBoard if it is installed; only requested trackers must not fail."""
    wanted: dict[str, Callable[[], Tracker]] = {}
    if is_installed("tensorboard") if tracking.tensorboard is None else tracking.tensorboard:
        wanted["tensorboard"] = lambda: TensorBoard(run, choices, first_step)
    if tracking.wandb:
        wanted["wandb"] = lambda: Wandb(run, choices)
    opened: dict[str, Tracker] = {}
    for package, make in wanted.items() if run.is_writer else ():
        try:
            opened[TRACKERS[package]] = make()
        except Exception as error:
            line = f"{TRACKERS[package]} cannot be used: {type(error).__name__}{reason_of(error)}"
            if getattr(tracking, package):
                for tracker in opened.values():
                    with suppress(Exception):  # third-party code may raise anything
                        tracker.close(failed=True)
                raise UsageError(line, hint=f"fix that, or leave --{package} out") from error
            logger.warning(line)
    return opened


def _sample_text(groups: Sequence[Group]) -> str | None:
    shown = sample(groups)
    if shown is None:
        return None
    prompt = prompt_text(shown)[-LONGEST_TEXT:]
    answer = shown.completions[0].text[:LONGEST_TEXT]
    text = f"{prompt}\n\n--- reward {shown.rewards[0]:.3f} ---\n\n{answer}"
    return text.encode(errors="backslashreplace").decode()  # a lone surrogate is not valid UTF-8


def _indented(text: str) -> str:
    """Return `text` as a Markdown code block, in which nothing is interpreted."""
    return "".join(f"    {line}\n" for line in text.splitlines())
