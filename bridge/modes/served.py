"""The patched server that a mode works with: the connection to it, its version, and the fence around each write.

Not covered: finding and checking the manifest itself (`bridge/server/manifest.py`), what is written.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import ManifestError
from bridge.modes.mode import Engine
from bridge.run.run_directory import RunDirectory
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.server.manifest import Manifest
from bridge.server.protocol import Written
from bridge.weights import skeleton
from bridge.weights.attach import AttachedModel, attach, attach_again


def find(config: TrainConfig) -> Manifest:
    """Return the manifest of the server that serves the model to train.

    Raises:
        ManifestError: there is none, it cannot be used, or another model is served.
    """
    found = manifest.load(config.vllm_config_path)
    wanted = skeleton.absolute(config.model_name)
    if wanted != found.model:
        raise ManifestError(
            f"the server serves {found.model}, and --model-name asks for {wanted}",
            remedy=f"--model-name {shlex.quote(found.model)}, or another server: "
            f"bridge serve-vllm --model {shlex.quote(config.model_name)}",
        )
    return found


class PatchedServer:
    """One live server, in whose memory this process writes the model's weights, or an adapter."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, manifest: Manifest, *, writes: Written = "weights"
    ) -> None:
        """Take the lease of the server that wrote `manifest`, for `run`."""
        self._config, self._run, self._writes = config, run, writes
        self.version = self._connect(manifest)

    @property
    def endpoint(self) -> Endpoint:
        """The server, which tells its version with each answer."""
        return Endpoint(url=self.client.url)

    def attach(self) -> AttachedModel:
        """Return the model whose parameters are the server's weights; they are so again after `revive`."""
        self._attached = attach(self.manifest)
        return self._attached

    def update(
        self,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare`, then `write`, inside the fence, and publish the next version."""
        with deferred_interrupt():  # or an interrupt comes between the update and the note of its version
            times = fence.update(
                self.client, write, prepare=prepare, sleep=sleep, in_flight=self._config.in_flight,
                version=self.version, last_checkpoint=last_checkpoint, writes=self._writes,
            )  # fmt: skip
            self.version = times.version
        return times

    def restore(self, write: Callable[[], None], *, version: int, last_checkpoint: Path | None = None) -> None:
        """Run `write`, which sets all that is written, inside a fence that a torn server grants too."""
        with deferred_interrupt():
            times = fence.restore(
                self.client, write, version=version, last_checkpoint=last_checkpoint, writes=self._writes
            )
            self.version = times.version

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Start the server again with a saved model, and point the attached one at its weights."""
        self.close()
        engine.restart(checkpoint or self._config.model_name)
        self._connect(manifest.load(self._config.vllm_config_path))
        self._attached = attach_again(self._attached, self.manifest)
        self.restore(lambda: None, version=self.version + 1)

    def close(self) -> None:
        """Give the lease back, and close the connection."""
        self.client.close()

    def _connect(self, manifest: Manifest) -> int:
        """Connect to the server that wrote `manifest`, and return the version that it serves.

        Raises:
            AttachError: another trainer has the lease, or something is torn; resuming from a checkpoint repairs it, if
                that is what is written.
        """
        self.manifest = manifest
        url = self._config.server.url(manifest.url)
        self.client = BridgeClient(manifest, timeout_s=self._config.request_timeout_s, url=url)
        try:
            status = fence.when_free(lambda: self.client.take_lease(str(self._run.path.absolute())))
            if not (self._config.resume and status.writes == self._writes):
                status.refuse_torn()
        except BaseException:
            self.close()
            raise
        self.can_sleep = status.can_sleep
        return status.version
