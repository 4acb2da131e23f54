"""A run that is killed and resumed, and one whose server dies, compared with an undisturbed run."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.checkpoints import checkpoint, optimizer_state
from bridge.checkpoints.metrics import StepMetrics
from bridge.core.interrupt import acting_interrupt
from bridge.errors import BridgeError, CheckpointError, ServerUnreachableError, UsageError
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.rollouts.stream import EnvironmentStream
from bridge.run import trainer
from bridge.server.endpoint import Endpoint
from bridge.types import Group, Problem, TrainedProblems
from bridge.weights.attach import attach
from tests.models import tiny
from tests.unit.trainer_runs import STEPS, Endless, FakeEngine, Killed, Letters, Run, Running, once, runner, spoil


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return runner(tmp_path, monkeypatch)


TIMES = {"rollout_s", "train_s", "peak_memory_gib"}
VERSIONS = "weight_version", "staleness", "staleness_mean", "lag_shares"
"""Metrics that differ after a server restart."""


def comparable(rows: list[dict[str, Any]], *left_out: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES | {*left_out}} for row in rows]


def seed(request: dict[str, Any]) -> int:
    """Return the sort key of concurrent requests: the seed, which grows with the step."""
    return int(request["seed"])


def kill(run: Run, step: int) -> None:
    """Kill the trainer once `step` has been reported."""

    def die(metrics: StepMetrics) -> None:
        if metrics.step == step:
            run.mode.killed = True
            raise Killed

    run.report = die


@pytest.mark.parametrize("killed_at", [3, 5])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_killed_run_resumes_as_if_uninterrupted(running: Running, dropout: float, killed_at: int) -> None:
    choices: dict[str, Any] = {"training_steps": 6, "save_interval": 2, "weight_decay": 0.01}
    with running(folder="straight", dropout=dropout) as straight:
        torch.manual_seed(1)
        straight.train(**choices)
        weights, requests = straight.weights(), straight.requests
    with running(folder="killed", dropout=dropout) as run:
        torch.manual_seed(1)
        kill(run, killed_at)
        run.stopped(Killed, **choices)
        assert list(run.saved()) == [f"step_{step}" for step in (2, 4) if step < killed_at]
    with running(folder="killed", dropout=dropout) as resumed:
        spoil(attach(resumed.mode.server.manifest).model)
        torch.manual_seed(2)
        summary = resumed.go_on(**choices)
        assert resumed.mode.calls[:2] == ["open", "restore"]
        assert comparable(resumed.metrics) == comparable(straight.metrics)
        assert [metrics.step for metrics in resumed.reported] == list(range(killed_at, 7))
        assert sorted(resumed.requests, key=seed) == sorted(requests, key=seed)[2 * (killed_at - 1) :]
        for name, tensor in resumed.weights().items():
            assert torch.equal(tensor, weights[name]), name
    assert summary.steps == 6
    same = [run.folder / "saved" / "step_6" for run in (straight, resumed)]
    for name in ("model.safetensors", "optimizer/optimizer-00001-of-00001.safetensors", "optimizer/state.json"):
        assert (same[0] / name).read_bytes() == (same[1] / name).read_bytes(), name
    lost = run.folder / "run" / "metrics_lost.jsonl"
    assert [json.loads(line)["step"] for line in lost.read_text().splitlines()] == [killed_at]


@pytest.mark.parametrize(
    "choices",
    [
        {"updates_per_batch": 2, "passes_per_batch": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"gradient_release": True},
        {"optimizer": "adamw-8bit", "gradient_release": True, "lr_scheduler_type": "linear"},
        {"optimizer": "adamw-4bit"},
        {"offload_optimizer": True},
        {"offload_optimizer": True, "gradient_release": True, "micro_batch_tokens": 12},
    ],
)
def test_every_optimizer_resumes_as_if_uninterrupted(running: Running, choices: dict[str, Any]) -> None:
    choices |= {"training_steps": 4, "save_interval": 2, "max_grad_norm": 0.1}
    with running(folder="straight") as straight:
        straight.train(**choices)
        weights = straight.weights()
    with running(folder="killed") as run:
        kill(run, 3)
        run.stopped(Killed, **choices)
    with running(folder="killed") as resumed:
        spoil(attach(resumed.mode.server.manifest).model)
        resumed.go_on(**choices)
        assert comparable(resumed.metrics) == comparable(straight.metrics)
        for name, tensor in resumed.weights().items():
            assert torch.equal(tensor, weights[name]), name


class Hinted(Letters):
    """The same problems, with a hint for the teacher."""

    def __iter__(self) -> Iterator[Problem]:
        for problem in super().__iter__():
            yield {**problem, "hint": "7 7"}


@pytest.mark.parametrize("teacher", ["self", "model"])
def test_distillation_resumes_as_if_uninterrupted(running: Running, tmp_path: Path, teacher: str) -> None:
    if teacher == "model":
        teacher = str(tiny.write(tiny.llama(), tmp_path / "teacher", seed=3))
    choices: dict[str, Any] = {
        "training_steps": 4,
        "save_interval": 2,
        "loss": "distill",
        "teacher": teacher,
        "divergence": "jsd",
    }
    with running(folder="straight") as straight:
        straight.train(Hinted(), **choices)
        weights = straight.weights()
        assert all(row["divergence"] > 0 for row in straight.metrics)
    with running(folder="killed") as run:
        kill(run, 3)
        run.stopped(Killed, Hinted(), **choices)
    with running(folder="killed") as resumed:
        spoil(attach(resumed.mode.server.manifest).model)
        resumed.go_on(Hinted(), **choices)
        assert comparable(resumed.metrics) == comparable(straight.metrics)
        for name, tensor in resumed.weights().items():
            assert torch.equal(tensor, weights[name]), name


def test_endless_problems_resume_with_the_next_problem(running: Running) -> None:
    choices: dict[str, Any] = {"training_steps": 4, "save_interval": 2}
    with running(folder="straight") as straight:
        straight.train(Endless(), **choices)
        weights, requests = straight.weights(), sorted(straight.requests, key=seed)
    with running(folder="killed") as run:
        kill(run, 3)
        run.stopped(Killed, Endless(), **choices)
    with running(folder="killed") as resumed:
        spoil(attach(resumed.mode.server.manifest).model)
        resumed.go_on(Endless(), **choices)
        assert sorted(resumed.requests, key=seed) == requests[4:]
        assert comparable(resumed.metrics) == comparable(straight.metrics)
        for name, tensor in resumed.weights().items():
            assert torch.equal(tensor, weights[name]), name


def test_without_the_random_state_dropout_would_differ(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: dict[str, Any] = {"training_steps": 4, "save_interval": 2}
    with running(folder="straight", dropout=0.2) as straight:
        straight.train(**choices)
    with running(folder="killed", dropout=0.2) as run:
        kill(run, 3)
        run.stopped(Killed, **choices)
    with running(folder="killed", dropout=0.2) as resumed:
        monkeypatch.setattr(optimizer_state, "_set_random", lambda _: torch.manual_seed(2))
        resumed.go_on(**choices)
    assert comparable(resumed.metrics)[2:] != comparable(straight.metrics)[2:]


def test_resume_without_steps_or_state_left_is_refused(running: Running) -> None:
    with running() as run:
        run.train()
        before = run.weights()
        with pytest.raises(UsageError, match=r"step_3 is from step 3, but --training-steps is 3: no step is left"):
            run.go_on()
        assert run.mode.calls[-2:] == ["open", "close"]
        (run.folder / "run" / "metrics.jsonl").unlink()
        run.train(save_optimizer=False)
        assert not (run.folder / "saved" / "step_3" / "optimizer").exists()
        after = run.weights()
        with pytest.raises(CheckpointError, match="saved with --no-save-optimizer"):
            run.go_on(training_steps=5)
        assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
        assert all(torch.equal(after[name], tensor) for name, tensor in run.weights().items())
        assert run.mode.calls[-2:] == ["open", "close"]


@pytest.mark.parametrize("step", [1, 3])
def test_server_restarted_while_sampling_gets_newest_weights(running: Running, step: int) -> None:
    with running(folder="straight") as straight:
        straight.train()
    engine = FakeEngine()
    with running(engine.bend(once(step)), folder="disturbed") as run:
        summary = run.train(engine=engine)
        newest = run.mode.server.manifest.model if step == 1 else str(run.folder / "saved" / "step_2")
        assert engine.started_with == [newest]
        assert comparable(run.metrics, *VERSIONS) == comparable(straight.metrics, *VERSIONS)
        assert summary.steps == STEPS
        for name, tensor in straight.weights().items():
            assert torch.equal(run.weights()[name], tensor), name
        assert [line.partition(":")[0] for line in run.notes] == [
            "the server died",
            f"the server was restarted with the weights of step {step - 1}",
        ]
        events = (run.folder / "run" / "events.log").read_text().splitlines()
        *before, began, first, second, done = [event.partition(" ")[2] for event in events]
        assert (before, [first, second]) == (run.told_before, run.notes)
        assert began == f"training {run.mode.server.manifest.model} by --mode shared_vllm: steps 1 to 3"
        assert done == f"done after step 3; checkpoint {run.folder / 'saved' / 'step_3'}"


@pytest.mark.parametrize("step", [1, 3])
def test_stream_gets_each_version_before_sampling(running: Running, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    heard: list[str | int] = []
    served, take = EnvironmentStream.served, EnvironmentStream.take

    def serve(self: Any, endpoint: Endpoint, version: int) -> None:
        heard.append(version)
        served(self, endpoint, version)

    def taken(self: Any, count: int, *, step: int) -> list[Group]:
        heard.append(f"step {step}")
        return take(self, count, step=step)

    monkeypatch.setattr(EnvironmentStream, "served", serve)
    monkeypatch.setattr(EnvironmentStream, "take", taken)
    engine = FakeEngine()
    with running(engine.bend(once(step))) as run:
        run.train(engine=engine)
        assert checkpoint.read(run.folder / "saved" / "step_3").progress.trained == TrainedProblems(below=2 * STEPS)
    died = {1: [3, "step 1", 4, "step 1", 5, "step 2", 6, "step 3", 7]}
    died[3] = [3, "step 1", 4, "step 2", 5, "step 3", 6, "step 3", 7]
    assert heard == died[step]


def test_update_written_before_a_server_loss_is_not_repeated(running: Running) -> None:
    with running(folder="straight") as straight:
        straight.train()
    engine, dying = FakeEngine(), [4]

    def die(version: int) -> None:
        if version in dying:
            dying.remove(version)
            raise ServerUnreachableError("gone", hint="restart")

    with running(folder="disturbed", before_publish=die) as run:
        run.train(engine=engine)
        assert run.mode.calls == ["open", "publish", "revive", "publish", "publish", "close"]
        assert engine.started_with == [str(run.folder / "saved" / "step_2")]
        assert comparable(run.metrics, *VERSIONS) == comparable(straight.metrics, *VERSIONS)
        for name, tensor in straight.weights().items():
            assert torch.equal(run.weights()[name], tensor), name


def test_interrupt_while_the_server_dies_ends_the_run(running: Running) -> None:
    def pressed(version: int) -> None:
        if version == 4:
            os.kill(os.getpid(), signal.SIGINT)
            raise ServerUnreachableError("gone", hint="restart")

    class Engine(FakeEngine):
        def restart(self, model: str | Path) -> None:
            with acting_interrupt():  # as the real server process does
                super().restart(model)

    engine = Engine()
    with running() as run:
        run.mode.before_publish = pressed
        run.stopped(KeyboardInterrupt, engine=engine)
        assert engine.started_with == []
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 4}}
        run.check_saved("step_2")


@pytest.mark.parametrize("choices", [{}, {"updates_per_batch": 2, "passes_per_batch": 2}])
@pytest.mark.parametrize("moment", ["before_pause", "before_publish"])
def test_lost_sleeping_server_loses_only_gradients(running: Running, moment: str, choices: dict[str, Any]) -> None:
    choices |= {"kv_sleep": "always"}
    with running(folder="straight", can_sleep=True) as straight:
        straight.train(**choices)
    engine, dying = FakeEngine(), [4]

    def die(version: int) -> None:
        if version in dying:
            dying.remove(version)
            raise ServerUnreachableError("gone", hint="restart")

    with running(folder="disturbed", can_sleep=True, **{moment: die}) as run:
        run.train(engine=engine, **choices)
        written = moment == "before_publish"
        recovery = ["sleep", "prepare", "revive", "sleep"] if written else ["revive", "sleep", "prepare"]
        asleep = ["sleep", "prepare", "publish"]
        assert run.mode.calls == ["open", *asleep, *recovery, "publish", *asleep, "close"]
        assert engine.started_with == [str(run.folder / "saved" / f"step_{2 if written else 1}")]
        assert run.mode.gradients_at_revival == [0]
        for name, tensor in straight.weights().items():
            assert torch.equal(run.weights()[name], tensor), name
        left_out = (*VERSIONS, "fence_prepare_s")
        assert comparable(run.metrics, *left_out) == comparable(straight.metrics, *left_out)


def test_gradients_survive_a_lost_server_that_was_awake(running: Running) -> None:
    engine, dying = FakeEngine(), [4]

    def die(version: int) -> None:
        if version in dying:
            dying.remove(version)
            raise ServerUnreachableError("gone", hint="restart")

    with running(before_pause=die) as run:
        run.train(engine=engine)
        num_parameters = len(run.weights())
        assert run.mode.gradients_at_revival == [num_parameters]


def test_server_that_dies_repeatedly_ends_the_run(running: Running) -> None:
    engine = FakeEngine()
    with running(engine.bend(lambda step: step == 3)) as run:
        run.stopped(ServerUnreachableError, engine=engine)
        assert engine.started_with == [str(run.folder / "saved" / "step_2")] * trainer.RESTARTS
        assert [row["step"] for row in run.metrics] == [1, 2]
        assert list(run.saved()) == ["step_2"]


def test_failed_restart_loses_no_published_step(running: Running) -> None:
    engine = FakeEngine(num_lives=0)
    with running(engine.bend(once(3))) as run:
        error = run.stopped(ServerUnreachableError, engine=engine)
        assert isinstance(error, BridgeError)
        assert error.message == "it does not come up"
        assert list(run.saved()) == ["step_2"]
        assert len(run.notes) == 1


def test_half_written_weights_are_never_served(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: Any, **__: Any) -> None:
        raise ServerUnreachableError("torn", hint="")

    engine = FakeEngine()
    with running() as run:
        monkeypatch.setattr(SplitMasterAdamW, "step", torn)
        run.stopped(ServerUnreachableError, engine=engine)
        assert engine.started_with == []
        assert run.saved() == {}


def test_resumed_run_keeps_its_baseline_reward(running: Running) -> None:
    with running() as run:
        before = run.train(training_steps=2, save_interval=2, eval_samples=2).reward_before
        assert before is not None
        summary = run.go_on(training_steps=3, eval_samples=2)
        rows = [json.loads(line) for line in (run.folder / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert summary.reward_before == rows[0]["reward_mean"] == before
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert summary.reward_after == rows[-1]["reward_mean"]


@pytest.mark.parametrize("is_killed", [True, False])
def test_interrupted_evaluation_is_repeated_on_resume(running: Running, is_killed: bool) -> None:
    def evaluated(version: int) -> None:
        if is_killed and version == 3 + 2:
            raise Killed

    fixed: dict[str, Any] = {"save_interval": 2, "eval_interval": 2, "eval_samples": 2}
    with running(after_evaluation=evaluated) as run:
        if is_killed:
            run.stopped(Killed, training_steps=4, **fixed)
        else:
            run.train(training_steps=2, **fixed)
        run.mode.after_evaluation = lambda _: None
        run.go_on(training_steps=4, **fixed)
        rows = [json.loads(line) for line in (run.folder / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4]
