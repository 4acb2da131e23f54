"""`shared_vllm`: the trainer's parameters are vLLM's; nothing is copied, a fence is all that remains of sync.

Not covered: starting the server (`bridge serve-vllm`), tensor parallelism.
"""

from collections.abc import Callable
from pathlib import Path

from bridge.client import BridgeClient
from bridge.config import TrainConfig
from bridge.modes import served
from bridge.modes.mode import Engine, OpenedModel
from bridge.rollouts import Endpoint
from bridge.run_directory import RunDirectory
from bridge.weights import fence, manifest, model_folder
from bridge.weights.attach import AttachedModel, attach, attach_again
from bridge.weights.fence import FenceTimes


class SharedVllm:
    """One trainer process attached to one live server."""

    checkpoint_prefix = "step_"

    def __init__(self, config: TrainConfig, run: RunDirectory, engine: Engine | None = None) -> None:
        del run, engine  # nothing lies between two checkpoints; an engine is given when the server died
        self._config = config
        self._manifest = served.find(config)
        self._connect()
        status = self._client.status()
        if not config.resume:  # which writes every weight anew
            status.refuse_torn()
        self.version = status.version

    @property
    def endpoint(self) -> Endpoint:
        """The server itself, which tells its version with each answer."""
        return Endpoint(url=self._client.url)

    def open(self) -> OpenedModel:
        """Attach to the server's weights."""
        model_folder.tokenizer_files(self._config.model_name)  # no checkpoint shall fail for want of them
        self._attached: AttachedModel = attach(self._manifest)
        return OpenedModel(
            model=self._attached.model,
            device=self._attached.device,
            lr_factors={name: 1.0 for name, _ in self._attached.model.named_parameters()},
            open_s=self._attached.attach_s,
            weight_bytes=self._attached.weight_bytes(),
        )

    def publish(self, write: Callable[[], None], *, last_checkpoint: Path | None) -> FenceTimes:
        """Run `write` inside the fence."""
        with fence.deferred_interrupt():  # or an interrupt comes between the update and the note of its version
            times = fence.update(self._client, write, in_flight=self._config.in_flight, last_checkpoint=last_checkpoint)
            self.version = times.version
        return times

    def catch_up(self) -> None:
        """Do nothing: every update is published at once."""

    def save(self, folder: Path) -> None:
        """Write the weights as a plain Hugging Face model."""
        model_folder.save(self._attached.model, self._config.model_name, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a checkpoint into the live weights, in place."""
        model_folder.check(self._attached.model, checkpoint)  # before the server is paused
        with fence.deferred_interrupt():
            times = fence.restore(
                self._client,
                lambda: model_folder.load_into(self._attached.model, checkpoint),
                version=version,
                last_checkpoint=checkpoint,
            )
            self.version = times.version

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Restart the server from the weights that this process still holds, and attach to it anew."""
        self._client.close()
        engine.restart(checkpoint or self._config.model_name)
        self._manifest = manifest.load(self._config.vllm_config_path)
        self._connect()
        self._attached = attach_again(self._attached, self._manifest)
        self.version = fence.restore(self._client, lambda: None, version=self.version + 1).version

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _connect(self) -> None:
        url = self._config.server_url(self._manifest.url)
        self._client = BridgeClient(self._manifest, timeout_s=self._config.request_timeout_s, url=url)
