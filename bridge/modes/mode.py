"""What a mode is: the protocol that each implements, and what it needs from its run."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bridge.core.whole_folder import written_whole
from bridge.errors import ServerUnreachableError
from bridge.ranks.world import ALONE, Ranks
from bridge.server.client import VllmClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update
from bridge.weights.attach import OpenedModel


class ServerProcess(Protocol):
    """A server that this run started."""

    def restart(self, model: str | Path) -> None:
        """Stop what is left of it, start it with the weights of `model`, and wait until it serves.

        Raises:
            ServerUnreachableError: it does not start; the message names its log.
        """


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The run that a mode works for."""

    name: str
    """Names the run to other trainers that want the same server."""
    scratch: Path
    """Folder for weights and adapters that a server loads."""
    note: Callable[[str], None]
    """Logs a line."""
    resumes: bool = False
    """The weights will be loaded from a checkpoint, so the server's may be half-written now."""
    process: ServerProcess | None = None
    """The server, if this run started it."""
    ranks: Ranks = ALONE
    """The processes that train together, each with its own server."""

    def saved(self, name: str, save: Callable[[Path], None]) -> Path:
        """Let `save` fill a scratch folder and return it; not durable, since no server survives the machine."""
        folder = (self.scratch / name).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(folder, replaceable=lambda _: True, durable=False) as partial:
            save(partial)
        return folder

    def discard(self, name: str) -> None:
        """Remove a scratch folder, and its parent if that is empty then."""
        shutil.rmtree(self.scratch / name, ignore_errors=True)
        with suppress(OSError):
            self.scratch.rmdir()

    def has_lost(self, client: VllmClient) -> bool:
        """Return whether this replica's server is the one that died: a single one's is."""
        if self.ranks.num_replicas == 1:
            return True
        try:
            client.models()
        except ServerUnreachableError:
            return True
        return False

    def restart_server(self, model: str | Path) -> None:
        """Restart it; called by the first part of its replica."""
        assert self.process is not None, "only a server that this run started is restarted"
        self.process.restart(model)


class Mode(Protocol):
    """One way of publishing new weights to vLLM, connected to its server."""

    checkpoint_prefix: str
    """Name of a checkpoint's folder without the number of its step."""

    @property
    def endpoint(self) -> Endpoint:
        """Where to sample rollouts now."""

    @property
    def version(self) -> int:
        """The version that is served now."""

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence that the server takes, in tokens; None if it does not report one."""

    @property
    def can_sleep(self) -> bool:
        """Whether the server can free its KV cache during an update."""

    def open(self) -> OpenedModel:
        """Return the model to train; called once."""

    def publish(self, update: Update) -> FenceTimes:
        """Run `update`, which writes the model's parameters, and publish the result."""

    def catch_up(self) -> None:
        """Publish what was written and not published yet."""

    def save(self, folder: Path) -> None:
        """Write the trained weights and the tokenizer into `folder`, as transformers or PEFT load them.

        If there are several parts of them, the first one calls this, and the others `pass_on`.
        """

    def pass_on(self) -> None:
        """Send this part of the weights to the rank that saves them."""

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load the weights of a checkpoint and publish them as `version`, or as the next one if that is later."""

    def revive(self, checkpoint: Path | None) -> None:
        """Restart the server if it is dead, and publish the newest weights; parameters stay the same objects.

        Called on all ranks if a server of one died. `checkpoint` holds the weights that the model has now; None: those
        that it was opened with.
        """

    def close(self) -> None:
        """Disconnect; the server keeps serving what was published last."""
