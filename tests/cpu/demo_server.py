"""Serve and train the demo's model on the real vLLM on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.checkpoints.metrics import StepMetrics, Summary
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import ServeConfig, TrainConfig
from bridge.core.address import free_port
from bridge.processes.server_command import ServerCommand
from bridge.processes.server_process import StartedServer
from bridge.run.trainer import Run
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.weights import model_folder
from bridge.weights.attach import attach
from bridge_cli import demo_model
from bridge_environments import registry
from tests.listener import Listener
from tests.scenarios import EAGER, START_LIMIT_S, with_forked_engine


@dataclass(frozen=True)
class DemoServer:
    """A patched vLLM that serves the demo's model."""

    manifest: Path
    model: Path
    pid: int

    def load_initial_weights(self) -> None:
        """Load the initial weights into the live ones, and publish them as a new version."""
        exported = manifest.load(self.manifest)
        live = attach(exported).model
        with BridgeClient(exported, timeout_s=60) as client:
            version = client.status().version + 1
            with fence.publish(client, Update(version=version, takeover=True)):
                model_folder.load_into(live, self.model)

    def train(self, folder: Path, report: Callable[[StepMetrics], None], **choices: Any) -> Summary:
        """Train in this process, in place, with the demo's settings unless `choices` override them."""
        demo = {"batch_size": 128, "max_new_tokens": 4, "lr": 2e-4, "save_path": folder / "saved"}
        where = {"model_name": str(self.model), "vllm_config_path": self.manifest}
        config = TrainConfig.model_validate(where | demo | choices)
        run = RunDirectory.create(folder / "run", environment=config.task.environment)
        return Run(config, registry.load(config.task), run, Listener(report)).train()


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[DemoServer]:
    """Run a server for the demo's model, which is built once and cached."""
    model = demo_model.make(demo_model.cache_folder(), progress=lambda *_: None)
    exported = folder / manifest.MANIFEST_NAME
    config = ServeConfig(model=str(model), port=free_port("127.0.0.1"), device="cpu", vllm_config_path=exported)
    command = with_forked_engine(ServerCommand.of(config, [*flags, *EAGER]))
    with StartedServer(command, folder / "serve.log", limit_s=START_LIMIT_S).running():
        yield DemoServer(exported, model, manifest.read(exported).server.pid)
