"""The training loop against a fake server: what each way of ending leaves behind."""

import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.errors import BridgeError, RewardError, ServerUnreachableError, UsageError
from bridge.training import batch, grpo
from bridge.training.metrics import StepMetrics
from bridge.training.optimizer import SplitMasterAdamW
from tests.unit.http_server import Asked, as_json
from tests.unit.loop_runs import STEPS, Letters, Running, runner


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return runner(tmp_path, monkeypatch)


def test_a_run_leaves_complete_metrics_and_its_last_step(running: Running) -> None:
    with running() as run:
        before = run.weights()
        summary = run.train(eval_samples=2)
        assert run.mode.calls == ["open", "publish", "publish", "publish", "catch up", "close"]
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
    running: Running,
) -> None:
    with running() as run:
        run.train(eval_samples=2)
        requests = run.requests
    assert [request["n"] for request in requests] == [2, 4, 4, 4, 4, 4, 4, 2]
    assert requests[0] == requests[-1]
    seeds = [request["seed"] for request in requests[:-1]]
    assert len(set(seeds)) == len(seeds)
    prompts = [tuple(request["prompt"]) for request in requests[1:-1]]
    assert len(set(prompts)) == 6  # one whole pass


def test_every_interval_is_saved_and_the_last_step_once(running: Running) -> None:
    with running() as run:
        run.train(save_interval=1)
        assert run.saved() == {f"step_{step}": {"step": step, "weight_version": 3 + step} for step in (1, 2, 3)}


def test_equal_rewards_teach_nothing_and_the_run_goes_on(running: Running) -> None:
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
    running: Running, monkeypatch: pytest.MonkeyPatch
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


def test_an_interrupt_while_sampling_saves_the_last_published_step(running: Running) -> None:
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


def test_an_interrupt_inside_the_fence_acts_once_the_step_is_whole_and_noted(running: Running) -> None:
    with running() as run:
        run.mode.before_publish = lambda version: os.kill(os.getpid(), signal.SIGINT) if version == 4 else None
        run.stopped(KeyboardInterrupt)
        assert run.mode.version == 5
        assert [row["weight_version"] for row in run.metrics] == [4, 5]
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_a_server_that_goes_in_mid_run_costs_no_published_step(running: Running) -> None:
    def bend(document: dict[str, Any], asked: Asked) -> dict[str, Any] | None:
        return None if asked.body["seed"] // 1_000_003 >= 3 else document

    with running(bend) as run:
        error = run.stopped(ServerUnreachableError)
        assert isinstance(error, BridgeError)
        assert error.exit_code == 5
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_a_server_that_goes_before_the_first_step_leaves_nothing_to_save(running: Running) -> None:
    with running(lambda *_: as_json({}, 500)) as run:
        run.stopped(ServerUnreachableError)
        assert run.saved() == {}
        assert run.mode.calls == ["open", "close"]


def test_weights_that_were_written_but_not_published_are_whole_and_saved(running: Running) -> None:
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
    running: Running, monkeypatch: pytest.MonkeyPatch, error: BaseException
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
    running: Running, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
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
def test_a_bad_score_ends_the_run_and_costs_no_published_step(running: Running, score: Callable[[str], float]) -> None:
    with running() as run:
        calls = 0

        def later(text: str) -> float:
            nonlocal calls
            calls += 1
            return float(calls % 3) if calls <= 16 else score(text)

        run.stopped(RewardError, Letters(later))
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}


def test_a_model_without_tokenizer_is_refused_before_the_server_is_asked(running: Running) -> None:
    with running() as run:
        for file in Path(run.mode.server.manifest.model).glob("tokenizer*"):
            file.unlink()
        with pytest.raises(UsageError, match="tokenizer"):
            run.train()
        assert run.mode.calls == ["close"]
        assert run.asked == []


def test_checkpointed_activations_give_the_same_step(running: Running) -> None:
    losses = []
    for checkpointing in (False, True):
        with running() as run:
            run.train(gradient_checkpointing=checkpointing, training_steps=1)
            losses.append((run.reported[0].loss, run.reported[0].grad_norm))
            (run.folder / "run" / "metrics.jsonl").unlink()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_last_checkpoints_are_kept_and_a_removed_one_is_no_remedy(running: Running) -> None:
    with running() as run:
        run.train(save_interval=1, keep_last=2, training_steps=4)
        assert list(run.saved()) == ["step_3", "step_4"]
        saved = run.folder / "saved"
        assert run.mode.last_checkpoints == [None, saved / "step_1", saved / "step_2", saved / "step_3"]
