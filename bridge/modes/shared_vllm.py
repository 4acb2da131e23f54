"""`shared_vllm`: the trainer's parameters are vLLM's weights. Nothing is copied; to publish is to pass the fence."""

from pathlib import Path

from bridge.config import TrainConfig
from bridge.modes.mode import RunContext
from bridge.modes.patched_server import PatchedServer, manifest_of
from bridge.weights import model_folder
from bridge.weights.attach import OpenedModel
from bridge.weights.parts import Parts


class SharedVllm(PatchedServer):
    """A trainer attached to one live server, by a process for each part of the weights."""

    checkpoint_prefix = "step_"

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        super().__init__(config, run, manifest_of(config))

    def open(self) -> OpenedModel:
        model_folder.tokenizer_files(self._config.model_name)  # checkpoints need them
        return self.attach()

    def save(self, folder: Path) -> None:
        model_folder.save(self._attached.model, self._config.model_name, folder, self._parts)

    def pass_on(self) -> None:
        if self._parts is not None:
            model_folder.pass_on(self._attached.model, self._parts)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        model, parts = self._attached.model, self._parts
        model_folder.check(model, checkpoint, parts)  # before the server pauses
        self.overwrite(lambda: model_folder.load_into(model, checkpoint, parts), checkpoint, version)

    @property
    def _parts(self) -> Parts | None:
        ranks = self._run.ranks
        return Parts(cuts=self._attached.cuts, within=ranks.within) if ranks.num_parts > 1 else None
