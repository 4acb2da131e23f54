"""`none --reload restart`: the server is started again with each version, which any server of our own can do."""

from pathlib import Path

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.modes.mode import RunContext
from bridge.modes.own_copy import OwnCopy
from bridge.server.client import max_model_len
from bridge.server.endpoint import Endpoint
from bridge.weights import model_folder


class Restart(OwnCopy):
    """A server that this run started; it knows no versions, so they are counted here."""

    version = 0

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        if run.process is None:
            raise UsageError(
                "--reload restart starts the server again for each version, but Bridge did not start this server",
                remedy="bridge run --mode none, or --start-command 'vllm serve {model} --port N', or bridge serve-vllm"
                " and --reload in-place",
            )
        self._process, self._url = run.process, config.server.url()
        super().__init__(config, run, max_model_len=max_model_len(self._url))

    @property
    def endpoint(self) -> Endpoint:
        """The server, and the version that it was started with."""
        return Endpoint(url=self._url, version=self.version)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a checkpoint, and start the server again with it."""
        model_folder.load_into(self._model, checkpoint)
        self._start(checkpoint, max(version, self.version + 1))

    def revive(self, checkpoint: Path | None) -> None:
        """Start the server again."""
        self._start(checkpoint or self._config.model_name, self.version + 1)

    def close(self) -> None:
        """Remove the saved version: the server that was started with it ends with this run."""
        self._discard_versions()

    def _reload(self) -> float:
        self._start(self._saved(), self.version + 1)
        return 0.0

    def _start(self, model: str | Path, version: int) -> None:
        self._process.restart(model)
        self.version, self._behind = version, 0
        self._discard_versions(but=model)

    def _discard_versions(self, *, but: str | Path | None = None) -> None:
        for folder in self._run.scratch.glob("version_*"):
            if folder.absolute() != but:
                self._run.discard(folder.name)
