"""What every source of rollouts offers to the training loop.

Not covered: the implementations, `experience.py` and `bridge/atropos/experience.py`.
"""

from collections.abc import Sequence
from typing import Protocol

from bridge.run.metrics import Evaluation
from bridge.server.endpoint import Endpoint
from bridge.types import Group, Problem


class Source(Protocol):
    """What is learnt from, step by step."""

    num_drawn: int
    """Problems taken so far."""
    num_retries: int
    """Requests of the last step that were sent again."""

    def draw(self, count: int) -> list[Problem]:
        """Take the next problems, or none where they come from elsewhere."""
        ...

    def groups(self, endpoint: Endpoint, problems: Sequence[Problem], *, step: int) -> list[Group]:
        """Return the rollouts of one step; after a failure it may be called again, with the same problems."""
        ...

    def evaluate(self, endpoint: Endpoint, *, step: int, version: int) -> Evaluation | None:
        """Sample and score the held-out problems by the weights of `version`; None where none are wanted."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
