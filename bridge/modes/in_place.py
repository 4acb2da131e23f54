"""`none --reload in-place`: each version is saved, and loaded into the weights that the server shares."""

from pathlib import Path

import torch

from bridge.config import TrainConfig
from bridge.modes.mode import RunContext
from bridge.modes.own_copy import OwnCopy
from bridge.modes.patched_server import PatchedServer, manifest_of
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update
from bridge.weights import model_folder
from bridge.weights.opened_model import OpenedModel


class InPlace(OwnCopy):
    """A patched server beside a copy of the same type, so that what is loaded is bitwise what was saved."""

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        self._server = PatchedServer(config, run, manifest_of(config))
        exported = self._server.manifest
        super().__init__(config, run, max_model_len=exported.max_model_len, dtype=getattr(torch, exported.dtype))

    @property
    def version(self) -> int:
        """The server's own count."""
        return self._server.version

    @property
    def endpoint(self) -> Endpoint:
        """The server, which reports the version with each answer."""
        return self._server.endpoint

    def open(self) -> OpenedModel:
        """Load the model, attach to the server, and reload it if an earlier run has trained it."""
        opened = super().open()
        self._served = self._server.attach().model
        if self.version > 0:
            self._reload()
        return opened

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a checkpoint, here and in the server."""
        model_folder.load_into(self._model, checkpoint)
        self._load(checkpoint, version=version, takeover=True)

    def revive(self, checkpoint: Path | None) -> None:
        """Restart the server, and attach again."""
        self._server.revive(checkpoint)
        self._behind = 0

    def close(self) -> None:
        """Return the lease, and disconnect."""
        self._server.close()

    def _reload(self) -> float:
        folder = self._saved()
        pause_s = self._load(folder)
        self._run.discard(folder.name)  # not after an error: it repairs the torn server
        return pause_s

    def _load(self, folder: Path, *, version: int | None = None, takeover: bool = False) -> float:
        def write() -> None:
            model_folder.load_into(self._served, folder)

        update = Update(write, version=version, takeover=takeover, last_checkpoint=folder)
        pause_s = self._server.publish(update).pause_s
        self._behind = 0
        return pause_s
