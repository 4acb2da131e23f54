"""`none`: the trainer has its own copy of the weights, and the server reloads each saved version in one of two ways.

`--reload restart` restarts a server of any kind that this run started; `--reload in-place` loads the version into the
weights that a patched server shares. Between two reloads the server has older weights, so rollouts are off-policy by
up to that many steps. The loss corrects for this: it compares with the log-probabilities that the server reported.

With several ranks, each has its own copy and server. Copies are trained in lockstep, and servers are reloaded at the
same steps.
"""

import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bridge.core.interrupt import deferred_interrupt
from bridge.errors import UsageError
from bridge.modes.mode import Mode
from bridge.modes.shared_vllm import SharedVllm
from bridge.server import fence
from bridge.server.client import VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update, Window
from bridge.weights import loaded, model_folder
from bridge.weights.attach import OpenedModel


class OwnCopy(Mode):
    """A trainer process with its own weights, next to a server that may generate at the same time."""

    _dtype: torch.dtype | None = None
    """Dtype of the trainer's copy; None: the model's."""
    _num_behind = 0
    """Number of steps by which the served weights lag behind the trainer's."""

    def open(self) -> OpenedModel:
        name = self._config.model_name
        device = self._config.trainer_device
        opened = loaded.load(name, device=device, dtype=self._dtype, max_model_len=self.max_model_len)
        self._model = opened.model
        model_folder.saved_form(self._model, model_folder.state(self._model))  # raises now instead of after training
        return opened

    @contextmanager
    def publish(self, update: Update) -> Iterator[Window]:
        """Let the block write, and reload the server every `--vllm-restart-interval` steps.

        Units: `publish_s` includes saving the model and reloading the server; it is 0 without a reload.
        """
        assert not update.sleep, "nothing pauses the server, so nothing would wake it"
        with deferred_interrupt():
            with fence.run(update, lambda: self.version, ranks=self._run.ranks) as window:
                yield window
            self._num_behind += 1
            pause_s = publish_s = 0.0
            if self._num_behind >= self._config.publishing.restart_interval and not update.is_last:
                start = time.perf_counter()
                pause_s = self._reload()  # outside the fence, whose time limit is too short for a restart
                publish_s = time.perf_counter() - start - pause_s
            window.times = replace(window.times, version=self.version, pause_s=pause_s, publish_s=publish_s)

    def catch_up(self) -> None:
        if self._num_behind:
            self._reload()

    def save(self, folder: Path) -> None:
        self._log_missing(model_folder.save(self._model, self._config.model_name, folder))

    def _saved(self) -> Path:
        """Save the newest weights on every rank, since hosts need not share a disk."""
        return self._run.ranks.run_on_all(lambda: self._run.saved(f"version_{self.version + 1}", self.save))

    def _discard_versions(self, *, but: str | Path | None = None) -> None:
        for folder in self._run.scratch.glob("version_*"):
            if folder.absolute() != but:
                self._run.discard(folder.name)

    @abstractmethod
    def _reload(self) -> float:
        """Let the server load the newest weights, and return the seconds until it was paused."""


class Restart(OwnCopy):
    """`--reload restart`: restart the server for each version. Versions are counted here: it does not report them."""

    version = 0

    def _connect(self) -> None:
        if self._run.process is None:
            raise UsageError(
                "--reload restart restarts the server for each version, but Bridge did not start this server",
                hint="use bridge run --mode none, or --start-command 'vllm serve {model} --port N', or"
                " bridge serve-vllm with --reload in-place",
            )
        self._process = self._run.process
        self._url = self._config.server.url()
        self.max_model_len = max_model_len(self._url)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(url=self._url, version=self.version, starts=self._num_starts)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        model_folder.load_into(self._model, checkpoint)
        self._start(checkpoint, max(version, self.version + 1))

    def revive(self, checkpoint: Path | None) -> None:
        """Restart the dead server with the newest weights, and the other ranks' servers if theirs are older."""
        with VllmClient(self._url) as client:
            is_lost = self._run.server_is_lost(client)
        model = checkpoint or self._config.model_name
        self._start(model, self.version + 1, is_needed=is_lost or self._num_behind > 0)

    def close(self) -> None:
        """Remove the saved version: the server that loaded it exits with this run."""
        self._discard_versions()

    def _reload(self) -> float:
        self._start(self._saved(), self.version + 1)
        return 0.0

    def _start(self, model: str | Path, version: int, *, is_needed: bool = True) -> None:
        """Serve `model` as `version`. Unless `is_needed`, the server already has these weights and keeps running."""
        self._run.ranks.run_on_all(lambda: self._process.restart(model) if is_needed else None)
        self.version = version
        self._num_behind = 0
        if is_needed:
            self._num_starts += 1
            self._discard_versions(but=model)


class InPlace(OwnCopy):
    """`--reload in-place`: a patched server loads each version; the copy has its dtype, so loading is bit-exact."""

    def _connect(self) -> None:
        self._server = SharedVllm(self._config, self._run)
        self._dtype = getattr(torch, self._server.manifest.dtype)
        self.max_model_len = self._server.max_model_len

    @property
    def version(self) -> int:
        return self._server.version

    @property
    def endpoint(self) -> Endpoint:
        return replace(self._server.endpoint, reports_experts=False)

    def open(self) -> OpenedModel:
        """Load the model, attach to the server, and reload the server if an earlier run trained it."""
        own = super().open()
        self._served = self._server.open().model
        if self.version > 0:
            self._reload()
        return own

    def restore(self, checkpoint: Path, *, version: int) -> None:
        model_folder.load_into(self._model, checkpoint)
        self._server.restore(checkpoint, version=version)
        self._num_behind = 0

    def revive(self, checkpoint: Path | None) -> None:
        self._server.revive(checkpoint)
        if self._num_behind and self._run.ranks.world_size > 1:
            self._reload()  # the other ranks' servers have older weights
        self._num_behind = 0

    def close(self) -> None:
        self._server.close()

    def _reload(self) -> float:
        folder = self._saved()
        with self._server.publish(Update(last_checkpoint=folder)) as window:
            model_folder.load_into(self._served, folder)
        self._discard_versions()  # not after an error: the newest version repairs a torn server
        self._num_behind = 0
        return window.times.pause_s
