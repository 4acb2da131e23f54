"""The base class of the modes, what a mode needs from its run, and when its server pauses."""

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
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
        """Stop what is left of it, start it with the weights of `model`, and wait until it serves."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Settings of a run that a mode needs."""

    name: str
    """Names the run to other trainers that want the same server."""
    scratch: Path
    """Folder for weights and adapters that a server loads."""
    resumes: bool = False
    """The weights will be loaded from a checkpoint, so the server's may be half-written now."""
    process: ServerProcess | None = None
    """The server, if this run started it."""
    ranks: Ranks = ALONE
    """The processes that train together, each with its own server."""
    reads_only: bool = False
    """Nothing is written, so that another process may train the server."""

    def saved(self, name: str, save: Callable[[Path], None]) -> Path:
        """Let `save` fill a scratch folder and return it; not durable, since no server survives the machine."""
        folder = (self.scratch / name).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder.write(folder, replaceable=lambda _: True, durable=False) as partial:
            save(partial)
        return folder

    def discard(self, name: str) -> None:
        """Remove a scratch folder, and its parent if that is empty then."""
        shutil.rmtree(self.scratch / name, ignore_errors=True)
        with suppress(OSError):
            self.scratch.rmdir()

    def server_is_lost(self, client: VllmClient) -> bool:
        """Return whether this replica's server died; with a single replica it is the one."""
        if self.ranks.dp_size == 1:
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


@dataclass(frozen=True, kw_only=True)
class PausePolicy:
    """Decides whether the server pauses while this process computes a step's passes."""

    kv_sleeps: bool | None
    """Whether its KV cache gives up its memory; None: the first batch that is trained on decides."""
    stops_sampling: bool

    @classmethod
    def of(cls, publishing: PublishingConfig, *, max_staleness: int, can_sleep: bool, shares_gpu: bool) -> Self:
        """Derive the policy of a run.

        `can_sleep`: the server can free its KV cache. `shares_gpu`: it samples on the GPU that this process computes
        on, so that sampling at the same time would only slow both down.
        """
        if publishing.kv_sleep == "always" and not can_sleep:
            raise UsageError(
                "--kv-sleep always, but the server's KV cache cannot sleep",
                hint="bridge serve-vllm on a GPU switches vLLM's --enable-sleep-mode on; or leave --kv-sleep out",
            )
        is_open = publishing.kv_sleep == "auto" and can_sleep
        chosen = publishing.pause_while_training
        return cls(
            kv_sleeps=None if is_open else publishing.kv_sleep == "always",
            stops_sampling=max_staleness > 0 and shares_gpu if chosen is None else chosen,
        )

    @property
    def computes_inside(self) -> bool:
        """Whether the passes before the first write are computed inside the fence, and not before it."""
        return bool(self.kv_sleeps) or self.stops_sampling


class Mode(ABC):
    """One way of publishing new weights to vLLM, connected to its server.

    A new one defines `_connect` and the abstract members, and is listed in `bridge.modes.WAYS`.
    """

    checkpoint_prefix: ClassVar[str] = "step_"
    """Name of a checkpoint's folder without the number of its step."""
    max_model_len: int | None
    """Longest sequence that the server takes, in tokens; None if it does not report one."""
    is_paused_by_us = False
    """Whether an earlier user of this process has left the server paused."""
    is_half_written = False
    """Whether an error interrupted a write into the server's memory, which is served no more until it is rewritten."""

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        self._config = config
        self._run = run
        self._num_starts = 0
        """Restarts of the server by this run."""
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Connect to the server; refuse one that cannot be used."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version that is served now."""

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint:
        """The server and model to sample rollouts from."""

    @property
    def can_sleep(self) -> bool:
        """Whether the server can free its KV cache during an update, which has to pause it."""
        return False

    @property
    def replayed_experts(self) -> tuple[int, int] | None:
        """Layers for which the server reports a token's experts, and experts per layer; None: none are replayed."""
        return None

    @abstractmethod
    def open(self) -> OpenedModel:
        """Return the model to train; called once."""

    @abstractmethod
    def publish(self, update: Update) -> AbstractContextManager[Window]:
        """Let the block write the model's parameters, and publish the result."""

    def refuse_torn(self) -> None:  # noqa: B027 - other servers are never half-written
        """Raise AttachError if what the server has is half-written, ServerUnreachableError if it does not answer."""

    def check_served(self) -> None:  # noqa: B027 - most servers report the version of each token
        """Raise AttachError if a server has other weights than it was sent last."""

    def catch_up(self) -> None:  # noqa: B027 - most modes have nothing to do
        """Publish what was written and not published yet: nothing, where every update is published."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained weights and the tokenizer into `folder`, as transformers or PEFT load them.

        If several ranks hold parts of them, the first one calls this, and the others `send_parts`.
        """

    def _log_missing(self, missing: Sequence[str]) -> None:
        """Log what a saved folder lacks: its weights are whole."""
        if missing:
            logger.info(f"the weights were saved, and beside them is missing: {first_few(missing)}")

    def send_parts(self) -> None:  # noqa: B027 - the same
        """Send this rank's part of the weights to the rank that saves them: nothing, where each has all of them."""

    @abstractmethod
    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load the weights of a checkpoint and publish them as `version`, or as the next one if that is later."""

    @abstractmethod
    def revive(self, checkpoint: Path | None) -> None:
        """Restart the server if it is dead, and publish the newest weights; parameters stay the same objects.

        Called on all ranks if a server of one died. `checkpoint` holds the weights that the model has now; None: those
        that it was opened with.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect; the server keeps serving what was published last."""
