"""How a server gets the weights of a trainer that owns its copy: by a restart, or into the weights that it shares.

Not covered: the copy itself and when the server gets it (`none.py`), starting processes (`bridge run`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.core import whole_folder
from bridge.errors import UsageError
from bridge.modes import served
from bridge.modes.mode import Engine
from bridge.modes.served import PatchedServer
from bridge.rollouts import limits
from bridge.run.run_directory import RunDirectory
from bridge.server.endpoint import Endpoint
from bridge.weights import model_folder


class Reload(Protocol):
    """One way for a whole model to reach a server."""

    @property
    def version(self) -> int:
        """Version that the server serves."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """The server, as the rollouts ask it."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence that it serves; None where it does not say."""
        ...

    @property
    def dtype(self) -> torch.dtype | None:
        """Type that the copy has to have; None: its configuration's."""
        ...

    def begin(self, model: PreTrainedModel) -> None:
        """Make sure that the server serves `model`, as it was loaded from the name that both were given."""
        ...

    def hand_over(self, model: PreTrainedModel) -> float:
        """Let the server serve `model` as its next version; return the seconds until it had paused."""
        ...

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Let the server serve a saved model as `version` or a later one."""
        ...

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Start the dead server again with a saved model; None: the one that it was started with."""
        ...

    def close(self) -> None:
        """Let go of the server."""
        ...


class Restart:
    """Each version is a folder that the server is started again with: any server that we start can do that."""

    dtype: torch.dtype | None = None

    def __init__(self, config: TrainConfig, run: RunDirectory, engine: Engine | None) -> None:
        if engine is None:
            raise UsageError(
                "--reload restart starts the server again for each version, and this one was not started by us",
                remedy="bridge run --mode none, or --start-command 'vllm serve {model} --port N', or bridge serve-vllm"
                " and --reload in-place",
            )
        self._config, self._run, self._engine = config, run, engine
        self.version = 0

    @property
    def endpoint(self) -> Endpoint:
        """The server, which knows of no versions."""
        return Endpoint(url=self._config.server.url(), version=self.version)

    @cached_property
    def max_model_len(self) -> int | None:
        """What the server itself reports, which need not be one of ours."""
        return limits.max_model_len(self.endpoint.url)

    def begin(self, model: PreTrainedModel) -> None:
        """Do nothing: the server was started for this run, with the model's name."""

    def hand_over(self, model: PreTrainedModel) -> float:
        """Save `model` and start the server again with it; nothing is paused before."""
        folder = _save(self._run.served / f"version_{self.version + 1}", model, self._config)
        self._start(self._engine, folder, self.version + 1)
        return 0.0

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Start the server again with a checkpoint."""
        self._start(self._engine, checkpoint, max(version, self.version + 1))

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Start the server again."""
        self._start(engine, checkpoint or self._config.model_name, self.version + 1)

    def close(self) -> None:
        """Remove the folder that the server was started with: it holds its weights, and ends with this run."""
        _remove_versions(self._run.served)
        _remove_empty(self._run.served)

    def _start(self, engine: Engine, model: str | Path, version: int) -> None:
        engine.restart(model)
        self.version = version
        _remove_versions(self._run.served, but=model)


class InPlace:
    """Each version is a folder whose weights are loaded into those that the server shares, inside the fence."""

    def __init__(self, config: TrainConfig, run: RunDirectory) -> None:
        self._config, self._run = config, run
        self._server = PatchedServer(config, run, served.find(config))

    @property
    def version(self) -> int:
        """Version of the server's weights."""
        return self._server.version

    @property
    def endpoint(self) -> Endpoint:
        """The server, which tells its version with each answer."""
        return self._server.endpoint

    @property
    def max_model_len(self) -> int | None:
        """What its manifest says."""
        return self._server.manifest.max_model_len

    @property
    def dtype(self) -> torch.dtype | None:
        """The server's own: its weights are loaded as they are saved, to the bit."""
        return getattr(torch, self._server.manifest.dtype, None)

    def begin(self, model: PreTrainedModel) -> None:
        """Attach, and hand `model` over to a server that holds what an earlier run has trained."""
        self._served = self._server.attach().model
        if self.version > 0:
            self.hand_over(model)

    def hand_over(self, model: PreTrainedModel) -> float:
        """Save `model`, then load it inside the fence."""
        with self._saved(model) as folder:
            return self._server.update(lambda: self._load(folder), last_checkpoint=folder).pause_s

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a checkpoint inside a fence that a torn server grants too."""
        self._server.restore(lambda: self._load(checkpoint), version=version, last_checkpoint=checkpoint)

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Start the server again and attach to it anew."""
        self._server.revive(engine, checkpoint)

    def close(self) -> None:
        """Close the connection."""
        self._server.close()
        _remove_empty(self._run.served)

    def _load(self, folder: Path) -> None:
        model_folder.load_into(self._served, folder)

    @contextmanager
    def _saved(self, model: PreTrainedModel) -> Iterator[Path]:
        """Save `model` while the block lasts; after an error it stays: a torn server names it as its remedy."""
        folder = _save(self._run.served / f"version_{self.version + 1}", model, self._config)
        yield folder
        _remove_versions(self._run.served)


def _save(folder: Path, model: PreTrainedModel, config: TrainConfig) -> Path:
    """Write `model` whole; not durably: a machine that goes down takes the server with it."""
    with whole_folder.written_whole(folder, replaceable=lambda _: True, durable=False) as scratch:
        model_folder.save(model, config.model_name, scratch)
    return folder.absolute()


def _remove_versions(served_folder: Path, *, but: str | Path | None = None) -> None:
    for folder in served_folder.glob("version_*"):
        if folder.absolute() != but:
            whole_folder.remove(folder)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it was never made, or holds what a torn server is to be mended with
        folder.rmdir()
