"""What every mode offers to the training loop, and what it may ask for itself.

Not covered: the implementations, each in the file of its name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.weights.opened_model import OpenedModel


class Engine(Protocol):
    """A server that this run started, and may start again."""

    def restart(self, model: str | Path) -> None:
        """End what is left of it, start it with the weights of `model` under its old name, and wait until it serves.

        Raises:
            ServerUnreachableError: it does not come up; the message names its log.
        """
        ...


class Mode(Protocol):
    """One way for new weights to reach vLLM."""

    checkpoint_prefix: str
    """Name of a checkpoint's folder before the number of its step."""
    ends: bool
    """Set before the last publication if no server will be asked after it: one that needs a restart gets none then."""

    def open(self) -> OpenedModel:
        """Return the model to train; called once."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """Whom the rollouts ask, and for what."""
        ...

    @property
    def version(self) -> int:
        """Version that the server serves now."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence that the server takes; None where it does not say. Known before `open`."""
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether the server can free its KV cache while `publish` runs; asked once the mode is open."""
        ...

    def publish(
        self,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare`, then `write`, which changes the trained parameters, and make the result the next version.

        Where the parameters are the server's, generation stands still for both. An interrupt acts at once in
        `prepare`, which drops what it computed if it raises, so that the server goes on as it was; in `write` it waits.
        With `sleep`, for `can_sleep` alone, both have the memory of the KV cache, and `write` gives it back.
        `last_checkpoint` is what a server that is left torn names as its remedy.
        """
        ...

    def catch_up(self) -> None:
        """Let the server serve the newest weights, where it does not yet."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained weights into `folder`, as transformers or PEFT load them."""
        ...

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Bring the weights of `checkpoint` back, here and in the server, as `version` or a later one."""
        ...

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Start the dead server again with the newest weights and go on; the model's parameters stay the same objects.

        `checkpoint` holds the weights of the model as it is now; None: they are those that it was opened with.
        """
        ...

    def close(self) -> None:
        """Let go of the server; it keeps serving what was published last."""
        ...
