"""What the trainer takes its groups from; implemented in `environment.py` and `bridge/atropos/stream.py`."""

from collections.abc import Sequence
from typing import Protocol

from bridge.server.endpoint import Endpoint
from bridge.types import Group, TrainedProblems


class Stream(Protocol):
    """Groups to train on, in the order in which they are trained on."""

    num_retries: int
    """Requests that were sent again for the last step."""

    @property
    def skipped(self) -> Sequence[Group]:
        """Groups without signal that others took the place of in the last step."""

    @property
    def num_in_flight(self) -> int:
        """Groups that have begun, and that no step has taken yet."""

    def served(self, endpoint: Endpoint, version: int) -> None:
        """Announce that `endpoint` serves `version` of the weights from now on.

        Called before the first `take`, after each publication, and after each restart of the server.
        """

    def resume(self, trained: TrainedProblems) -> None:
        """Skip the problems in `trained`; called before the first `take`."""

    def take(self, count: int, *, step: int) -> list[Group]:
        """Wait for the `count` groups of a step; if that fails, a repeated call returns groups of the same problems."""

    def evaluate(self, *, step: int) -> list[Group] | None:
        """Return groups of the held-out problems, sampled after `step`; None if the run evaluates nothing."""

    def close(self) -> None: ...
