"""`none`: the trainer owns its copy of the weights, and a saved model brings each version to the server.

The server may be any that speaks the OpenAI protocol, on this host or another. Between two reloads it serves older
weights: the rollouts are off-policy by up to that many steps, which the loss corrects, since the log-probabilities that
it compares with are the server's own.

Not covered: how a server is reloaded (`reload.py`), models that do not fit twice (`shared_vllm.py`).
"""

import time
from collections.abc import Callable
from pathlib import Path

from bridge.config import TrainConfig
from bridge.modes.mode import Engine
from bridge.modes.reload import InPlace, Reload, Restart
from bridge.run.run_directory import RunDirectory
from bridge.server import fence
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.weights import loaded, model_folder
from bridge.weights.loaded import LoadedModel
from bridge.weights.opened_model import OpenedModel


class NoneMode:
    """One trainer process with weights of its own, and one server."""

    checkpoint_prefix = "step_"
    ends = False

    def __init__(self, config: TrainConfig, run: RunDirectory, engine: Engine | None = None) -> None:
        self._config = config
        self._reload: Reload = InPlace(config, run) if config.reload == "in-place" else Restart(config, run, engine)
        self._behind = 0
        """Steps that the server does not serve yet."""

    @property
    def endpoint(self) -> Endpoint:
        """The server, whichever weights it serves at this moment."""
        return self._reload.endpoint

    @property
    def max_model_len(self) -> int | None:
        """What the server reports."""
        return self._reload.max_model_len

    @property
    def can_sleep(self) -> bool:
        """False: the server generates while this process trains, or does not run at all."""
        return False

    @property
    def version(self) -> int:
        """Version that the server serves: without the patches, the number of its reloads."""
        return self._reload.version

    def open(self) -> OpenedModel:
        """Load the model into memory of its own."""
        model_folder.tokenizer_files(self._config.model_name)  # no checkpoint shall fail for want of them
        self._own: LoadedModel = loaded.load(
            self._config.model_name,
            device=self._config.trainer_device,
            dtype=self._reload.dtype,
            max_model_len=self.max_model_len,
        )
        self._reload.begin(self._own.model)
        return OpenedModel(
            model=self._own.model,
            device=self._own.device,
            lr_factors={name: 1.0 for name, _ in self._own.model.named_parameters()},
            open_s=self._own.load_s,
            weight_bytes=self._own.weight_bytes,
        )

    def publish(
        self,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare` and `write`, and let the server have the result if `vllm_restart_interval` steps have passed.

        Units: `publish_s` is the time of saving, and of restarting the server or of loading into it; 0 without either.
        """
        del last_checkpoint  # what the server is to have is saved just before, and is newer
        assert not sleep, "no fence stands around the writing, so that nothing wakes the server"
        start = time.perf_counter()
        fence.interruptible(prepare)
        prepared = time.perf_counter()
        write()
        written = time.perf_counter()
        self._behind += 1
        pause_s = publish_s = 0.0
        if self._behind >= self._config.vllm_restart_interval and not self.ends:
            pause_s = self._reload.hand_over(self._own.model)
            publish_s = time.perf_counter() - written - pause_s
            self._behind = 0
        return FenceTimes(
            version=self.version,
            pause_s=pause_s,
            prepare_s=prepared - start,
            write_s=written - prepared,
            publish_s=publish_s,
        )

    def catch_up(self) -> None:
        """Let the server have the newest weights now, whatever the interval."""
        if self._behind:
            self._reload.hand_over(self._own.model)
            self._behind = 0

    def save(self, folder: Path) -> None:
        """Write the weights as a plain Hugging Face model."""
        model_folder.save(self._own.model, self._config.model_name, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a checkpoint into the own copy, and let the server have it."""
        model_folder.load_into(self._own.model, checkpoint)
        self._reload.restore(checkpoint, version=version)
        self._behind = 0

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Start the dead server again with the newest weights."""
        self._reload.revive(engine, checkpoint)
        self._behind = 0

    def close(self) -> None:
        """Let go of the server; what is left of a run is its checkpoints."""
        self._reload.close()
