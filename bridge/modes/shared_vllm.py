"""`shared_vllm`: the trainer's parameters are vLLM's; nothing is copied, a fence is all that remains of sync.

Not covered: starting the server (`bridge serve-vllm`), tensor parallelism.
"""

from collections.abc import Callable
from pathlib import Path

from bridge.config import TrainConfig
from bridge.modes import served
from bridge.modes.mode import Engine
from bridge.modes.served import PatchedServer
from bridge.run.run_directory import RunDirectory
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.weights import model_folder
from bridge.weights.opened_model import OpenedModel


class SharedVllm:
    """One trainer process attached to one live server."""

    checkpoint_prefix = "step_"
    ends = False

    def __init__(self, config: TrainConfig, run: RunDirectory, engine: Engine | None = None) -> None:
        del engine  # it is given when the server died
        self._config = config
        self._server = PatchedServer(config, run, served.find(config))

    @property
    def endpoint(self) -> Endpoint:
        """The server itself, which tells its version with each answer."""
        return self._server.endpoint

    @property
    def max_model_len(self) -> int | None:
        """What its manifest says."""
        return self._server.manifest.max_model_len

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._server.version

    @property
    def can_sleep(self) -> bool:
        """Whether the server was started so that it can free its KV cache."""
        return self._server.can_sleep

    def open(self) -> OpenedModel:
        """Attach to the server's weights."""
        model_folder.tokenizer_files(self._config.model_name)  # no checkpoint shall fail for want of them
        attached = self._server.attach()
        self._model = attached.model
        return OpenedModel(
            model=attached.model,
            device=attached.device,
            lr_factors={name: 1.0 for name, _ in attached.model.named_parameters()},
            open_s=attached.attach_s,
            weight_bytes=attached.weight_bytes(),
        )

    def publish(
        self,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare` and `write` inside the fence."""
        return self._server.update(write, prepare=prepare, sleep=sleep, last_checkpoint=last_checkpoint)

    def catch_up(self) -> None:
        """Do nothing: every update is published at once."""

    def save(self, folder: Path) -> None:
        """Write the weights as a plain Hugging Face model."""
        model_folder.save(self._model, self._config.model_name, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a checkpoint into the live weights, in place."""
        model_folder.check(self._model, checkpoint)  # before the server is paused
        self._server.restore(
            lambda: model_folder.load_into(self._model, checkpoint), version=version, last_checkpoint=checkpoint
        )

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Restart the server from the weights that this process still holds, and attach to it anew."""
        self._server.revive(engine, checkpoint)

    def close(self) -> None:
        """Give the lease back, and close the connection."""
        self._server.close()
