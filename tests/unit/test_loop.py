"""The training loop against a fake server: what each way of ending leaves behind."""

import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bridge.config import TrainConfig
from bridge.errors import BridgeError, RewardError, ServerUnreachableError, UsageError
from bridge.run_directory import RunDirectory
from bridge.training import batch, grpo, loop
from bridge.training.checkpoint import MARKER_NAME
from bridge.training.metrics import StepMetrics, Summary
from bridge.training.optimizer import SplitMasterAdamW
from bridge.types import Problem
from bridge.weights.attach import AttachedModel, attach
from bridge.weights.fence import FenceTimes
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import Asked, as_json, serving
from tests.unit.openai_server import Bend, openai, unbent
from tests.unit.toy_server import ToyServer

STEPS = 3


class Letters:
    """Rewards that differ within every group: the last letter's place in the alphabet."""

    def __init__(self, score: Callable[[str], float] = lambda text: float(ord(text[0]) % 7)) -> None:
        self._score = score

    def __iter__(self) -> Iterator[Problem]:
        for number in range(6):
            yield {"prompt": f"say {number}"}

    def held_out(self) -> list[Problem]:
        return [{"prompt": "say more"}]

    def score(self, problem: Problem, completion: str) -> float:
        return self._score(completion)


@dataclass
class FakeMode:
    """Publishes by writing, and nothing else."""

    server: ToyServer
    url: str
    version: int = 3
    calls: list[str] = field(default_factory=list)
    before_publish: Callable[[int], None] = lambda _: None

    def open(self) -> AttachedModel:
        self.calls.append("open")
        return attach(self.server.manifest)

    def publish(self, write: Callable[[], None]) -> FenceTimes:
        write()
        self.before_publish(self.version)
        self.version += 1
        self.calls.append("publish")
        return FenceTimes(version=self.version, pause_s=0.25, write_s=0.5, publish_s=1.0)

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class Run:
    folder: Path
    mode: FakeMode
    asked: list[Asked]
    reported: list[StepMetrics] = field(default_factory=list)

    def train(self, environment: Letters | None = None, **choices: Any) -> Summary:
        fixed = {"training_steps": STEPS, "batch_size": 8, "group_size": 4, "lr": 1e-3, "max_new_tokens": 8}
        folders = {"model_name": self.mode.server.manifest.model, "save_path": self.folder / "saved"}
        config = TrainConfig.model_validate(folders | fixed | choices)
        run = RunDirectory.create(self.folder / "run", environment="letters")
        return loop.train(config, environment or Letters(), run, self.reported.append)

    def stopped(self, kind: type[BaseException], environment: Letters | None = None, **choices: Any) -> BaseException:
        with pytest.raises(kind) as caught:
            self.train(environment, **choices)
        assert self.mode.calls[-1] == "close"
        return caught.value

    @property
    def metrics(self) -> list[dict[str, Any]]:
        text = (self.folder / "run" / "metrics.jsonl").read_text()
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]

    def saved(self) -> dict[str, dict[str, Any]]:
        """Checkpoint -> its marker."""
        folders = sorted((self.folder / "saved").glob("*")) if (self.folder / "saved").is_dir() else []
        return {folder.name: json.loads((folder / MARKER_NAME).read_text()) for folder in folders}

    def weights(self) -> dict[str, Tensor]:
        """What lies in the server's memory now."""
        model = attach(self.mode.server.manifest).model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def check_saved(self, name: str) -> None:
        """Check that a checkpoint holds what lies in the server's memory."""
        saved = load_file(self.folder / "saved" / name / "model.safetensors")
        for parameter, tensor in self.weights().items():
            assert torch.equal(saved[parameter], tensor), parameter


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @contextmanager
    def start(bend: Bend = unbent) -> Iterator[Run]:
        toy = toy_server.serve(tiny.llama(), tmp_path / "model")
        with serving(openai(bend)) as server:
            mode = FakeMode(toy, server.url)
            monkeypatch.setattr(loop, "MODES", {"shared_vllm": lambda _: mode})
            yield Run(tmp_path, mode, server.asked)

    return start


def test_a_run_leaves_complete_metrics_and_its_last_step(running: Callable[..., Any]) -> None:
    with running() as run:
        before = run.weights()
        summary = run.train(eval_samples=2)
        assert run.mode.calls == ["open", "publish", "publish", "publish", "close"]
        names = [field.name for field in dataclasses.fields(StepMetrics)]
        assert [list(row) for row in run.metrics] == [names] * STEPS
        for step, row in enumerate(run.metrics, start=1):
            assert (row["step"], row["weight_version"], row["tokens_generated"]) == (step, 3 + step, 24)
            assert (row["fence_pause_s"], row["fence_write_s"], row["fence_publish_s"]) == (0.25, 0.5, 1.0)
            assert row["reward_std"] > 0
            assert row["grad_norm"] > 0
            assert 0 < row["changed_weight_share"] <= 1
            assert row["logprob_diff_max"] >= row["logprob_diff_mean"] > 0
            assert min(row["rollout_s"], row["train_s"], row["peak_memory_gib"]) > 0
        assert run.reported == [StepMetrics(**row) for row in run.metrics]
        assert run.saved() == {"step_3": {"step": 3, "weight_version": 6}}
        run.check_saved("step_3")
        assert any(not torch.equal(before[name], tensor) for name, tensor in run.weights().items())
        assert (summary.steps, summary.weight_version, summary.weight_bytes) == (STEPS, 6, 0)
        assert summary.fence_p50_ms == 1250
        assert summary.reward_before is not None
        assert summary.reward_after is not None
        config = json.loads((run.folder / "run" / "config.json").read_text())
        assert config["lr"] == 1e-3


def test_each_step_asks_for_its_own_prompts_and_an_evaluation_for_the_held_out_ones(
    running: Callable[..., Any],
) -> None:
    with running() as run:
        run.train(eval_samples=2)
        requests = [asked.body for asked in run.asked if asked.method == "POST"]
    assert [request["n"] for request in requests] == [2, 4, 4, 4, 4, 4, 4, 2]
    assert requests[0] == requests[-1]
    seeds = [request["seed"] for request in requests[:-1]]
    assert len(set(seeds)) == len(seeds)
    prompts = [tuple(request["prompt"]) for request in requests[1:-1]]
    assert len(set(prompts)) == 6  # one whole pass


def test_every_interval_is_saved_and_the_last_step_once(running: Callable[..., Any]) -> None:
    with running() as run:
        run.train(save_interval=1)
        assert run.saved() == {f"step_{step}": {"step": step, "weight_version": 3 + step} for step in (1, 2, 3)}


def test_equal_rewards_teach_nothing_and_the_run_goes_on(running: Callable[..., Any]) -> None:
    with running() as run:
        before = run.weights()
        summary = run.train(Letters(lambda _: 1.0))
        assert [row["step"] for row in run.metrics] == [1, 2, 3]
        for row in run.metrics:
            assert (row["loss"], row["grad_norm"], row["changed_weight_share"], row["reward_std"]) == (0, 0, 0, 0)
            assert row["logprob_diff_mean"] is None
            assert row["logprob_diff_max"] is None
        assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())
        assert math.isnan(summary.logprob_diff_max)
        assert summary.steps == STEPS


def test_a_gradient_that_is_no_number_stops_before_it_is_written(
    running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as run:
        original, calls = grpo.clipped_loss, 0

        def poisoned(*arguments: Any, **choices: Any) -> Tensor:
            nonlocal calls
            calls += 1
            loss: Tensor = original(*arguments, **choices)
            return loss * (math.nan if calls == 3 else 1)

        monkeypatch.setattr(grpo, "clipped_loss", poisoned)
        error = run.stopped(UsageError)
        assert "nan at step 3" in str(error)
        assert run.mode.version == 5
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")
        assert all(tensor.isfinite().all() for tensor in run.weights().values())


def test_an_interrupt_while_sampling_saves_the_last_published_step(running: Callable[..., Any]) -> None:
    sent: list[int] = []

    def bend(document: dict[str, Any], asked: Asked) -> dict[str, Any]:
        if asked.body["seed"] // 1_000_003 == 3 and not sent:  # the third step; a second one would stop the saving too
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return document

    with running(bend) as run:
        run.stopped(KeyboardInterrupt)
        assert [row["step"] for row in run.metrics] == [1, 2]
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_an_interrupt_inside_the_fence_acts_once_the_step_is_whole_and_noted(running: Callable[..., Any]) -> None:
    with running() as run:
        run.mode.before_publish = lambda version: os.kill(os.getpid(), signal.SIGINT) if version == 4 else None
        run.stopped(KeyboardInterrupt)
        assert run.mode.version == 5
        assert [row["weight_version"] for row in run.metrics] == [4, 5]
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_a_server_that_goes_in_mid_run_costs_no_published_step(running: Callable[..., Any]) -> None:
    def bend(document: dict[str, Any], asked: Asked) -> dict[str, Any] | None:
        return None if asked.body["seed"] // 1_000_003 >= 3 else document

    with running(bend) as run:
        error = run.stopped(ServerUnreachableError)
        assert isinstance(error, BridgeError)
        assert error.exit_code == 5
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_a_server_that_goes_before_the_first_step_leaves_nothing_to_save(running: Callable[..., Any]) -> None:
    with running(lambda *_: as_json({}, 500)) as run:
        run.stopped(ServerUnreachableError)
        assert run.saved() == {}
        assert run.mode.calls == ["open", "close"]


def test_weights_that_were_written_but_not_published_are_whole_and_saved(running: Callable[..., Any]) -> None:
    def gone(version: int) -> None:
        if version == 4:
            raise ServerUnreachableError("gone", remedy="restart")

    with running() as run:
        run.mode.before_publish = gone
        run.stopped(ServerUnreachableError)
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 4}}
        run.check_saved("step_2")


@pytest.mark.parametrize("error", [UsageError("torn", remedy=""), ZeroDivisionError(), KeyboardInterrupt()])
def test_an_error_in_the_middle_of_the_write_saves_no_torn_weights(
    running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with running() as run:
        original, calls = SplitMasterAdamW.step, 0

        def torn(self: Any, *arguments: Any, **choices: Any) -> None:
            nonlocal calls
            calls += 1
            original(self, *arguments, **choices)
            if calls == 2:
                raise error

        monkeypatch.setattr(SplitMasterAdamW, "step", torn)
        run.stopped(type(error))
        assert run.mode.calls == ["open", "publish", "close"]
        assert run.saved() == {}


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, OSError])
def test_a_mistake_of_ours_costs_no_published_step(
    running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with running() as run:
        original, calls = batch.micro_batches, 0

        def broken(*arguments: Any, **choices: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise error
            return original(*arguments, **choices)

        monkeypatch.setattr(batch, "micro_batches", broken)
        run.stopped(error)
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}


@pytest.mark.parametrize("score", [lambda _: math.nan, lambda _: 1 / 0, lambda _: "1"])
def test_a_bad_score_ends_the_run_and_costs_no_published_step(
    running: Callable[..., Any], score: Callable[[str], float]
) -> None:
    with running() as run:
        calls = 0

        def later(text: str) -> float:
            nonlocal calls
            calls += 1
            return float(calls % 3) if calls <= 16 else score(text)

        run.stopped(RewardError, Letters(later))
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}


def test_a_model_without_tokenizer_is_refused_before_the_server_is_asked(running: Callable[..., Any]) -> None:
    with running() as run:
        for file in Path(run.mode.server.manifest.model).glob("tokenizer*"):
            file.unlink()
        with pytest.raises(UsageError, match="tokenizer"):
            run.train()
        assert run.mode.calls == []
        assert run.asked == []


def test_checkpointed_activations_give_the_same_step(running: Callable[..., Any]) -> None:
    losses = []
    for checkpointing in (False, True):
        with running() as run:
            run.train(gradient_checkpointing=checkpointing, training_steps=1)
            losses.append((run.reported[0].loss, run.reported[0].grad_norm))
            (run.folder / "run" / "metrics.jsonl").unlink()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
