"""What every mode offers to the training loop.

Not covered: the implementations, each in the file of its name.
"""

from collections.abc import Callable
from typing import Protocol

from bridge.weights.attach import AttachedModel
from bridge.weights.fence import FenceTimes


class Mode(Protocol):
    """One way for new weights to reach vLLM."""

    def open(self) -> AttachedModel:
        """Return the model to train, on the device where it lies."""
        ...

    @property
    def url(self) -> str:
        """Where the server that generates answers."""
        ...

    @property
    def version(self) -> int:
        """Version that the server serves now."""
        ...

    def publish(self, write: Callable[[], None]) -> FenceTimes:
        """Run `write`, which changes the model's parameters, and make the result the next version."""
        ...

    def close(self) -> None:
        """Let go of the server; it keeps serving what was published last."""
        ...
