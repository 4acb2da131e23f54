"""`shared_vllm`: the trainer's parameters are vLLM's weights. Nothing is copied; to publish is to pass the fence."""

from pathlib import Path

from bridge.config import TrainConfig
from bridge.modes.mode import RunContext
from bridge.modes.patched_server import PatchedServer, manifest_of
from bridge.weights import model_folder
from bridge.weights.opened_model import OpenedModel


class SharedVllm(PatchedServer):
    """One trainer process attached to one live server."""

    checkpoint_prefix = "step_"

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        super().__init__(config, run, manifest_of(config))

    def open(self) -> OpenedModel:
        model_folder.tokenizer_files(self._config.model_name)  # checkpoints need them
        return self.attach()

    def save(self, folder: Path) -> None:
        model_folder.save(self._attached.model, self._config.model_name, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        model = self._attached.model
        model_folder.check(model, checkpoint)  # before the server pauses
        self.overwrite(lambda: model_folder.load_into(model, checkpoint), checkpoint, version)
