"""`shared_vllm`: the trainer's parameters are vLLM's weights. Nothing is copied; publishing is passing the fence."""

from pathlib import Path

from bridge.config import TrainConfig
from bridge.modes.mode import RunContext
from bridge.modes.patched_server import PatchedServer, manifest_of
from bridge.server.fence import Update
from bridge.weights import model_folder
from bridge.weights.opened_model import OpenedModel


class SharedVllm(PatchedServer):
    """One trainer process attached to one live server."""

    checkpoint_prefix = "step_"

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        super().__init__(config, run, manifest_of(config))

    def open(self) -> OpenedModel:
        """Attach to the server's weights."""
        model_folder.tokenizer_files(self._config.model_name)  # checkpoints need them
        opened = self.attach()
        self._model = opened.model
        return opened

    def save(self, folder: Path) -> None:
        """Write the weights as a plain Hugging Face model."""
        model_folder.save(self._model, self._config.model_name, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a checkpoint into the live weights."""
        model_folder.check(self._model, checkpoint)  # before the server pauses

        def write() -> None:
            model_folder.load_into(self._model, checkpoint)

        self.publish(Update(write, version=version, takeover=True, last_checkpoint=checkpoint))
