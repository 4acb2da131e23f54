"""Training runs against a fake server and a fake mode, for the tests of the trainer."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from bridge.checkpoints import checkpoint
from bridge.checkpoints.metrics import StepMetrics, Summary
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.engine import policy
from bridge.errors import ServerUnreachableError
from bridge.modes.mode import RunContext, ServerProcess
from bridge.passes import preparation
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import ALONE
from bridge.rollouts.problems import WINDOW
from bridge.rollouts.training_rows import TrainingRow
from bridge.run import trainer
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update, Window
from bridge.types import Problem
from bridge.weights import model_folder
from bridge.weights.attach import OpenedModel, attach
from tests.listener import Listener
from tests.logged import logged
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import HttpRequest, serving
from tests.unit.openai_server import Bend, openai, unbent
from tests.unit.toy_server import ToyServer

STEPS = 3


class Letters:
    """Rewards that differ within every group, by the first letter of the completion."""

    def __init__(self, score: Callable[[str], float] = lambda text: float(ord(text[0]) % 7)) -> None:
        self._score = score

    def __iter__(self) -> Iterator[Problem]:
        for number in range(6):
            yield {"prompt": f"say {number}"}

    def held_out(self) -> list[Problem]:
        return [{"prompt": "say more"}]

    def score(self, problem: Problem, completion: str) -> float:
        return self._score(completion)


class Endless(Letters):
    """The same rewards for an endless stream of problems."""

    def __iter__(self) -> Iterator[Problem]:
        for number in count():
            assert number < 10 * WINDOW, "read without an end"
            yield {"prompt": f"say {number % 26}"}


class Killed(BaseException):
    """The process was killed: nothing more is written."""


class FakeWindow(Window):
    prepare_s = 0.0

    def __init__(self, calls: list[str]) -> None:
        super().__init__(0.0, None, ALONE)
        self._calls = calls

    @contextmanager
    def preparing(self) -> Iterator[None]:
        self._calls.append("prepare")
        self.prepare_s = 0.125
        with super().preparing():
            yield


@dataclass
class FakeMode:
    """Only writes, and counts that as publishing."""

    server: ToyServer
    url: str
    version: int = 3
    calls: list[str] = field(default_factory=list)
    before_pause: Callable[[int], None] = lambda _: None
    before_publish: Callable[[int], None] = lambda _: None
    after_evaluation: Callable[[int], None] = lambda _: None
    dropout: float = 0.0
    killed: bool = False
    can_sleep: bool = False
    interval: int = 1
    """Steps from one version of the server to the next."""
    max_model_len: int | None = None
    replayed_experts: tuple[int, int] | None = None
    last_checkpoints: list[Path | None] = field(default_factory=list)
    gradients_at_revival: list[int] = field(default_factory=list)
    """Number of gradients that the trainer held at each revival."""
    process: ServerProcess | None = None
    _num_published: int = 0
    checkpoint_prefix = "step_"
    is_half_written = False
    is_paused_by_us = False

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(url=self.url)

    def open(self) -> OpenedModel:
        self.calls.append("open")
        attached = attach(self.server.manifest)
        self.model = attached.model
        for layer in self.model.model.layers if self.dropout else ():
            layer.mlp.register_forward_hook(lambda _module, _given, made: functional.dropout(made, self.dropout))
        return attached.opened()

    @contextmanager
    def publish(self, update: Update) -> Iterator[Window]:
        self.last_checkpoints.append(update.last_checkpoint)
        self.before_pause(self.version)
        if update.sleep:
            self.calls.append("sleep")
        window = FakeWindow(self.calls)
        yield window
        self.before_publish(self.version)
        self._num_published += 1
        self.version += self._num_published % self.interval == 0
        self.calls.append("publish")
        window.times = FenceTimes(
            version=self.version, pause_s=0.25, prepare_s=window.prepare_s, write_s=0.5, publish_s=1.0
        )

    def check_served(self) -> None:
        self.after_evaluation(self.version)

    def catch_up(self) -> None:
        self.calls.append("catch up")

    def save(self, folder: Path) -> None:
        if self.killed:
            raise Killed
        model_folder.save(self.model, self.server.manifest.model, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        self.calls.append("restore")
        model_folder.load_into(self.model, checkpoint)
        self.version = version

    def revive(self, checkpoint: Path | None) -> None:
        assert self.process is not None
        self.calls.append("revive")
        self.gradients_at_revival.append(sum(parameter.grad is not None for parameter in self.model.parameters()))
        self.process.restart(checkpoint or self.server.manifest.model)
        spoil(self.model)  # the contents of the dead server's memory are lost
        model_folder.load_into(self.model, checkpoint or Path(self.server.manifest.model))
        self.version += 1

    def close(self) -> None:
        self.calls.append("close")


@torch.no_grad()
def spoil(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.fill_(0.5)


@dataclass
class Run:
    folder: Path
    mode: FakeMode
    http_requests: list[HttpRequest]
    reported: list[StepMetrics] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    report: Callable[[StepMetrics], None] = lambda _: None
    rows: Sequence[TrainingRow] = ()
    """Given completions to train on."""

    def train(self, environment: Letters | None = None, engine: ServerProcess | None = None, **choices: Any) -> Summary:
        run = RunDirectory.create(self.folder / "run", environment="letters")
        reporter = Listener(self._report)
        with run.recording():
            problems = environment or Letters()
            config = self.config(**choices)
            return trainer.Run(config, problems, run, reporter, rows=self.rows, process=engine).train()

    def go_on(self, environment: Letters | None = None, **choices: Any) -> Summary:
        """Resume from the newest checkpoint."""
        newest, _ = checkpoint.newest(self.folder / "saved", "step_")
        assert newest is not None
        run = RunDirectory.reopen(newest.progress.run_dir, newest.progress.step)
        problems = environment or Letters()
        with run.recording():
            reporter = Listener(self._report)
            return trainer.Run(self.config(**choices), problems, run, reporter, rows=self.rows, resume=newest).train()

    @property
    def told_before(self) -> list[str]:
        """The log line that the fake server was trained before, since it starts at version 3."""
        return [line for line in self.logged if line.startswith("the server was trained before")]

    @property
    def notes(self) -> list[str]:
        """All other lines that were logged."""
        return [line for line in self.logged if line not in self.told_before]

    def config(self, **choices: Any) -> TrainConfig:
        fixed: dict[str, Any] = {
            "training_steps": STEPS,
            "batch_size": 8,
            "group_size": 4,
            "lr": 1e-3,
            "max_new_tokens": 8,
        }
        fixed |= {"mismatch_alarm": 99, "max_retries": 0}  # the fake server's answers are made up; nothing is retried
        folders = {"model_name": self.mode.server.manifest.model, "save_path": self.folder / "saved"}
        given = folders | fixed | choices
        return TrainConfig.model_validate({name: value for name, value in given.items() if value is not ...})

    def _report(self, metrics: StepMetrics) -> None:
        self.reported.append(metrics)
        self.report(metrics)

    def stopped(self, kind: type[BaseException], environment: Letters | None = None, **choices: Any) -> BaseException:
        with pytest.raises(kind) as caught:
            self.train(environment, **choices)
        assert self.mode.calls[-1] == "close"
        return caught.value

    @property
    def metrics(self) -> list[dict[str, Any]]:
        text = (self.folder / "run" / "metrics.jsonl").read_text()
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Request bodies, in order of arrival."""
        return [request.body for request in self.http_requests if request.method == "POST"]

    def saved(self) -> dict[str, dict[str, Any]]:
        """Return the step and version of each checkpoint, by name; check that each is complete."""
        steps = sorted(checkpoint.numbered(self.folder / "saved", "step_").items())
        saved = [checkpoint.read(folder) for _, folder in steps]
        return {
            saved_step.folder.name: saved_step.progress.model_dump(include={"step", "weight_version"})
            for saved_step in saved
        }

    def weights(self) -> dict[str, Tensor]:
        """Copy the weights in the server's memory."""
        model = attach(self.mode.server.manifest).model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def check_saved(self, name: str) -> None:
        """Check that a checkpoint equals the weights in the server's memory."""
        saved = load_file(self.folder / "saved" / name / "model.safetensors")
        for parameter, tensor in self.weights().items():
            assert torch.equal(saved[parameter], tensor), parameter


Running = Callable[..., AbstractContextManager[Run]]


def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Return a context manager that starts a fake server and replaces the mode with a fake one."""

    @contextmanager
    def start(bend: Bend = unbent, folder: str = ".", version: str = "3", **choices: Any) -> Iterator[Run]:
        toy = toy_server.serve(tiny.llama(), tmp_path / folder / "model")
        with serving(openai(bend, version=lambda: version)) as server, logged() as lines:
            mode = FakeMode(toy, server.url, **choices)

            def made(_: TrainConfig, context: RunContext) -> FakeMode:
                mode.process = context.process
                return mode

            monkeypatch.setattr(policy, "WAYS", defaultdict(lambda: made))
            if mode.dropout:  # so that two passes give different results
                monkeypatch.setattr(preparation, "prepare", lambda model, *_, **__: PreparedModel(model))
            yield Run(tmp_path / folder, mode, server.requests, logged=lines)

    return start


@dataclass
class FakeEngine:
    """A server that can be restarted `num_lives` times."""

    num_lives: int = 99
    alive: bool = True
    started_with: list[str] = field(default_factory=list)

    def restart(self, model: str | Path) -> None:
        self.started_with.append(str(model))
        if len(self.started_with) > self.num_lives:
            raise ServerUnreachableError("it does not come up", hint="read its log")
        self.alive = True

    def bend(self, dies: Callable[[int], bool]) -> Bend:
        """Answer until a step for which `dies` is true, and again after a restart."""

        def bend(document: dict[str, Any], request: HttpRequest) -> dict[str, Any] | None:
            if self.alive and dies(request.body["seed"] // 1_000_003):
                self.alive = False
            return document if self.alive else None

        return bend


def once(step: int) -> Callable[[int], bool]:
    left = [step]
    return lambda current: bool(left) and current == left[0] and bool(left.pop())
