"""The base class of the modes, the context that a run passes to its mode, and when the mode's server pauses."""

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, Self

from bridge.config import PublishingConfig, TrainConfig
from bridge.core import atomic_folder
from bridge.errors import ServerUnreachableError, UsageError, first_few
from bridge.ranks.world import ALONE, Ranks
from bridge.server.client import VllmClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update, Window
from bridge.weights.attach import OpenedModel

logger = logging.getLogger(__name__)


class ServerProcess(Protocol):
    """A server that this run started."""

    def restart(self, model: str | Path) -> None:
        """Stop the server if it still runs, start it with the weights of `model`, and wait until it is ready."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a mode needs to know about its run."""

    name: str
    """Name of the run, which other trainers that want the same server see."""
    scratch: Path
    """Folder for weights and adapters that servers load."""
    resumes: bool = False
    """Whether a checkpoint will be restored, so that the server's weights may be half-written."""
    process: ServerProcess | None = None
    """The server process, if this run started it."""
    ranks: Ranks = ALONE
    """The processes that train together, each with its own server."""
    several_adapters: bool = False
    """Whether adapters take turns in the model, and the server loads those that are sampled."""
    reads_only: bool = False
    """Whether this process never writes, so that a different process may train on the same server."""

    def saved(self, name: str, save: Callable[[Path], None]) -> Path:
        """Let `save` fill a scratch folder, and return it. It is not fsynced: a machine crash also ends the servers."""
        folder = (self.scratch / name).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder.write(folder, replaceable=lambda _: True, durable=False) as partial:
            save(partial)
        return folder

    def discard(self, name: str) -> None:
        """Remove a scratch folder, and its parent if that becomes empty."""
        shutil.rmtree(self.scratch / name, ignore_errors=True)
        with suppress(OSError):
            self.scratch.rmdir()

    def server_is_lost(self, client: VllmClient) -> bool:
        """Return whether this replica's server died. With a single replica, a dead server is always this replica's."""
        if self.ranks.dp_size == 1:
            return True
        try:
            client.models()
        except ServerUnreachableError:
            return True
        return False

    def restart_server(self, model: str | Path) -> None:
        """Restart the replica's server; only the replica's first rank calls this."""
        assert self.process is not None, "only a server that this run started is restarted"
        self.process.restart(model)


@dataclass(frozen=True, kw_only=True)
class PausePolicy:
    """Decides whether the server pauses while this process computes a step."""

    kv_sleeps: bool | None
    """Whether its KV cache frees its memory; None: decided by the first training batch."""
    stops_sampling: bool

    @classmethod
    def of(cls, publishing: PublishingConfig, *, max_staleness: int, can_sleep: bool, shares_gpu: bool) -> Self:
        """Derive the policy for a run.

        `can_sleep`: the server can free its KV cache. `shares_gpu`: the server samples on the GPU on which this process
        computes on, so that overlapping the two would only slow both down.
        """
        if publishing.kv_sleep == "always" and not can_sleep:
            raise UsageError(
                "--kv-sleep always, but the server's KV cache cannot sleep",
                hint="bridge serve-vllm enables vLLM's --enable-sleep-mode on a GPU; or leave out --kv-sleep",
            )
        is_open = publishing.kv_sleep == "auto" and can_sleep
        chosen = publishing.pause_while_training
        return cls(
            kv_sleeps=None if is_open else publishing.kv_sleep == "always",
            stops_sampling=max_staleness > 0 and shares_gpu if chosen is None else chosen,
        )

    @property
    def computes_inside(self) -> bool:
        """Whether the passes before the first write run inside the fence instead of before it."""
        return bool(self.kv_sleeps) or self.stops_sampling


class Mode(ABC):
    """One way of publishing new weights to vLLM, connected to its server.

    A new mode implements the abstract members, and is registered in `bridge.modes.WAYS`.
    """

    checkpoint_prefix: ClassVar[str] = "step_"
    """Name of a checkpoint folder without its step number."""
    max_model_len: int | None
    """Longest sequence that the server accepts, in tokens; None if it does not report one."""
    is_paused_by_us = False
    """Whether earlier code in this process left the server paused."""
    is_half_written = False
    """Whether an error interrupted a write into the server's memory, which is not served until it is rewritten."""

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        self._config = config
        self._run = run
        self._num_starts = 0
        """Number of times this run has restarted the server."""
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Connect to the server; raise BridgeError if it cannot be used."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version that is currently served."""

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint:
        """The server and model to sample rollouts from."""

    @property
    def can_sleep(self) -> bool:
        """Whether the server can free its KV cache during an update, while it is paused."""
        return False

    @property
    def replayed_experts(self) -> tuple[int, int] | None:
        """(Layers for which the server reports each token's experts, experts per layer); None: no router replay."""
        return None

    @abstractmethod
    def open(self) -> OpenedModel:
        """Return the model to train; called once."""

    @abstractmethod
    def publish(self, update: Update) -> AbstractContextManager[Window]:
        """Let the block write the model's parameters, and publish the result."""

    def refuse_torn(self) -> None:  # noqa: B027 - most servers are never half-written
        """Raise AttachError if the server's weights are half-written, ServerUnreachableError if it does not answer."""

    def check_served(self) -> None:  # noqa: B027 - most servers report the version of each token
        """Raise AttachError if a server does not have the weights that it was last sent."""

    def catch_up(self) -> None:  # noqa: B027 - most modes have nothing to do
        """Publish updates that were written but not published yet; a no-op where every update is published."""

    def sampling(self, model: str | None) -> AbstractContextManager[object]:  # noqa: ARG002 - most servers keep a model
        """Return a block that sends requests to a model, which is served until its end."""
        return nullcontext()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained weights and the tokenizer into `folder`, in the format that transformers or PEFT loads.

        If several ranks hold parts of the weights, the first one calls this, and the others call `send_parts`.
        """

    def _log_missing(self, missing: Sequence[str]) -> None:
        """Log the files that a saved folder lacks; its weights are complete."""
        if missing:
            logger.info(f"the weights were saved, but these files are missing: {first_few(missing)}")

    def send_parts(self) -> None:  # noqa: B027 - same reason
        """Send this rank's part of the weights to the rank that saves; a no-op where every rank has all weights."""

    @abstractmethod
    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load the weights of a checkpoint and publish them as `version`, or as the next one if that is higher."""

    @abstractmethod
    def revive(self, checkpoint: Path | None) -> None:
        """Restart the server if it is dead, and publish the newest weights; parameters remain the same Python objects.

        Called on all ranks if any rank's server died. `checkpoint` holds the model's current weights; None: the model
        still has the weights that it was opened with.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect; the server keeps serving the last published version."""
