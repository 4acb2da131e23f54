"""Reporters: what hears of a run while it runs.

Not covered: showing it to a person (`bridge_cli`), and curves (`trackers.py`).
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from bridge.run.metrics import Evaluation, StepMetrics
from bridge.types import Completion, Group

Phase = Literal["rollouts", "train", "fence", "evaluation", "save"]


class Reporter:
    """Hears of a run; the base class ignores everything. The trainer waits for every call, so none may take long."""

    def phase(self, name: Phase) -> None:
        """A phase begins."""

    def progress(self, done: int, total: int) -> None:
        """So many groups of this phase have been scored."""

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """A step was published; it was trained on `groups`."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """The held-out problems were evaluated."""


class Listener(Reporter):
    """Passes the metrics of each step to a function."""

    def __init__(self, on_step: Callable[[StepMetrics], object] = lambda _: None) -> None:
        self._on_step = on_step

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:  # noqa: ARG002 - the base's
        self._on_step(metrics)


class Several(Reporter):
    """Passes everything to several reporters, in order."""

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


class Sample(NamedTuple):
    """One completion of a step, for a person to read."""

    group: Group
    completion: Completion
    reward: float


def sample(groups: Sequence[Group]) -> Sample | None:
    """Return the first completion that has a reward, neither the best nor the worst; None if there is none."""
    return next((Sample(group, group.completions[0], group.rewards[0]) for group in groups if group.completions), None)


def prompt_text(group: Group) -> str:
    """Return the prompt of a group as one text, with the role before each chat message."""
    prompt = group.problem["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)
