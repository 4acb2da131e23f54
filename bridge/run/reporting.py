"""Who is told of a run while it runs: what every reporter can be told, and the plainest one.

Not covered: showing it to a person (`cli`), and curves (`trackers.py`), which are told as reporters are.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from bridge.run.metrics import Evaluation, StepMetrics
from bridge.types import Completion, Group

Phase = Literal["rollouts", "train", "fence", "evaluation", "save"]
"""What the training loop is at."""


class Reporter(Protocol):
    """Hears of a run as it goes; the loop waits for every call, so none may take long."""

    def phase(self, name: Phase) -> None:
        """Hear what is being done from now on."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Hear how many groups of this phase have been scored, of how many."""
        ...

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Hear of a step that was published, and of what it was learnt from."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """Hear how the held-out problems were answered."""
        ...


class Listener:
    """Passes the metrics of each step on to a function, if there is one, and ignores the rest."""

    def __init__(self, on_step: Callable[[StepMetrics], object] = lambda _: None) -> None:
        self._on_step = on_step

    def phase(self, name: Phase) -> None:
        """Ignore it."""

    def progress(self, done: int, total: int) -> None:
        """Ignore it."""

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:  # noqa: ARG002 - the protocol's
        """Pass the metrics on."""
        self._on_step(metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Ignore it."""


class Several:
    """Passes everything on to several reporters, in their order."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def phase(self, name: Phase) -> None:
        """Pass it on."""
        for reporter in self._reporters:
            reporter.phase(name)

    def progress(self, done: int, total: int) -> None:
        """Pass it on."""
        for reporter in self._reporters:
            reporter.progress(done, total)

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Pass it on."""
        for reporter in self._reporters:
            reporter.step(metrics, groups)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Pass it on."""
        for reporter in self._reporters:
            reporter.evaluation(evaluation)


class Sample(NamedTuple):
    """One completion of a step, for a person to read."""

    group: Group
    """What was asked, and everything that was answered."""
    completion: Completion
    """One of the answers."""
    reward: float
    """Its reward."""


def sample(groups: Sequence[Group]) -> Sample | None:
    """Return the first completion that has a reward, neither the best nor the worst; None where there is none."""
    return next((Sample(group, group.completions[0], group.rewards[0]) for group in groups if group.completions), None)


def prompt_text(group: Group) -> str:
    """Return the prompt of a group as one text; of chat messages each with its role in front."""
    prompt = group.problem["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)
