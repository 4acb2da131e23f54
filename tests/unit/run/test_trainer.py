"""The trainer with a fake server: its steps, and what it leaves behind however it ends."""

import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.checkpoints import checkpoint
from bridge.checkpoints.metrics import RECORDED
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.core import atomic_folder, json_lines
from bridge.engine import measuring
from bridge.errors import AttachError, BridgeError, RewardError, ServerUnreachableError, UsageError
from bridge.learn import policy_loss
from bridge.learn.policy_loss import Sums
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.passes import packing
from bridge.passes.budget import Budget
from bridge.run import learner
from bridge.run.learner import Learner
from bridge.types import Completion, Problem
from tests.cli import report_runs
from tests.unit.http_server import HttpRequest, as_json
from tests.unit.trainer_runs import STEPS, Letters, Run, Running, runner


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return runner(tmp_path, monkeypatch)


def test_run_leaves_complete_metrics_and_its_last_step(running: Running) -> None:
    with running() as run:
        before = run.weights()
        summary = run.train(eval_samples=2)
        assert run.mode.calls == ["open", "publish", "publish", "publish", "catch up", "close"]
        assert [tuple(row) for row in run.metrics] == [RECORDED] * STEPS
        for step, row in enumerate(run.metrics, start=1):
            assert (row["step"], row["weight_version"], row["tokens_generated"]) == (step, 3 + step, 24)
            assert (row["fence_pause_s"], row["fence_write_s"], row["fence_publish_s"]) == (0.25, 0.5, 1.0)
            assert row["reward_std"] > 0
            assert row["grad_norm"] > 0
            assert 0 < row["changed_weight_share"] <= 1
            assert row["logprob_diff_max"] >= row["logprob_diff_mean"] > 0
            assert min(row["rollout_s"], row["train_s"], row["peak_memory_gib"]) > 0
        reported = [json.loads(json_lines.line(metrics)) for metrics in run.reported]
        assert reported == run.metrics
        assert run.saved() == {"step_3": {"step": 3, "weight_version": 6}}
        run.check_saved("step_3")
        assert any(not torch.equal(before[name], tensor) for name, tensor in run.weights().items())
        assert (summary.steps, summary.weight_version, summary.weight_bytes) == (STEPS, 6, 0)
        assert summary.fence_p50_ms == 1750  # pausing, writing and publishing
        assert summary.updates == STEPS
        assert summary.reward_before is not None
        assert summary.reward_after is not None
        assert RunDirectory(run.folder / "run").choices()["lr"] == 1e-3


def test_steps_and_evaluations_sample_different_prompts(
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
    assert len(set(prompts)) == 6  # one full epoch


def test_default_completion_length_fits_the_server(running: Running) -> None:
    with running(max_model_len=256) as run:
        run.train(max_new_tokens=...)
        assert {request["max_tokens"] for request in run.requests} == {128}
        assert run.notes == ["--max-new-tokens defaults to 128, half of the server's longest sequence of 256 tokens"]
        assert RunDirectory(run.folder / "run").choices()["max_new_tokens"] == 128


def test_completions_without_room_for_a_prompt_are_refused(running: Running) -> None:
    with running(max_model_len=256) as run:
        error = run.stopped(UsageError, max_new_tokens=256)
        assert "--max-new-tokens 256 leaves no room for a prompt" in str(error)
        assert run.requests == []
        assert "open" not in run.mode.calls


def test_checkpoints_follow_the_interval_and_the_last_step(running: Running) -> None:
    with running() as run:
        run.train(save_interval=1)
        assert run.saved() == {f"step_{step}": {"step": step, "weight_version": 3 + step} for step in (1, 2, 3)}


def test_run_ends_with_the_first_step_that_reaches_its_goal(running: Running) -> None:
    with running() as run:
        summary = run.train(training_steps=6, stop_at="weight_version>=5")  # it begins at 3
        assert [row["step"] for row in run.metrics] == [1, 2]
        assert (summary.steps, [*run.saved()]) == (2, ["step_2"])
        assert run.notes == ["--stop-at weight_version>=5: reached after step 2"]


def test_run_ends_with_the_evaluation_that_reaches_its_goal(running: Running) -> None:
    choices: dict[str, Any] = {"training_steps": 6, "eval_samples": 2, "eval_interval": 2}
    with running() as run:
        summary = run.train(**choices, stop_at="eval_truncated_share <= 0")  # the one before training reaches it, too
        evaluations = (run.folder / "run" / "evaluations.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in evaluations] == [0, 2]
        assert (summary.steps, summary.reward_after) == (2, json.loads(evaluations[-1])["reward_mean"])
        assert run.notes == ["--stop-at eval_truncated_share <= 0: reached after step 2"]
    with pytest.raises(ValueError, match="--stop-at eval_kl>=1 has no effect without --eval-interval"):
        TrainConfig.of(model_name="m", stop_at="eval_kl>=1", eval_samples=2)


def test_reward_of_different_weights_is_not_recorded(running: Running) -> None:
    """For example a stock server that was restarted during the evaluation: its tokens carry no version."""

    def restarted(version: int) -> None:
        if version == 5:
            raise AttachError("restarted", hint="")

    with running() as run:
        run.mode.after_evaluation = restarted
        run.stopped(AttachError, training_steps=6, eval_samples=2, eval_interval=2)
        evaluations = (run.folder / "run" / "evaluations.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in evaluations] == [0]
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}


def test_goal_that_no_step_reaches_changes_nothing(running: Running) -> None:
    with running() as run:
        run.train(stop_at="kl>=0.5")
        assert ([row["step"] for row in run.metrics], run.notes) == ([1, 2, 3], [])


def test_equal_rewards_skip_the_update(running: Running) -> None:
    with running() as run:
        before = run.weights()
        summary = run.train(Letters(lambda _: 1.0))
        assert [row["step"] for row in run.metrics] == [1, 2, 3]
        for row in run.metrics:
            assert (row["loss"], row["grad_norm"], row["changed_weight_share"], row["reward_std"]) == (0, 0, 0, 0)
            assert row["logprob_diff_mean"] is None
            assert row["logprob_diff_max"] is None
            assert (row["updates"], row["tokens_trained"], {*row["logprob_diff_histogram"]}) == (0, 0, {None})
        assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())
        assert math.isnan(summary.logprob_diff_max)
        assert summary.steps == STEPS


def poisoned(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the gradients of these steps non-finite; each step has one micro-batch."""
    original, calls = policy_loss.policy_loss, 0

    def bent(*arguments: Any) -> tuple[Tensor, Sums]:
        nonlocal calls
        calls += 1
        loss, statistics = original(*arguments)
        return loss * (math.nan if calls in steps else 1), statistics

    monkeypatch.setattr(learner, "policy_loss", bent)


@pytest.mark.parametrize("choices", [{}, {"gradient_release": True}, {"offload_optimizer": True}])
def test_step_with_a_nonfinite_gradient_is_skipped(
    running: Running, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    poisoned(monkeypatch, 2, 3, 5, 6)
    with running() as run:
        published = list[dict[str, Tensor]]()
        run.report = lambda _: published.append(run.weights())
        summary = run.train(training_steps=7, save_interval=3, **choices)
        assert (summary.steps, summary.weight_version) == (7, 10)
        assert [row["weight_version"] for row in run.metrics] == list(range(4, 11))
        assert [row["updates"] for row in run.metrics] == [1, 0, 0, 1, 0, 0, 1]
        assert [row["skipped_updates"] for row in run.metrics] == [0, 1, 1, 0, 1, 1, 0]
        assert [row["grad_norm"] is None for row in run.metrics] == [False, True, True, False, True, True, False]
        assert [row["changed_weight_share"] > 0 for row in run.metrics] == [row["updates"] > 0 for row in run.metrics]
        pairs = pairwise(published)
        changed = [any(not torch.equal(one[name], other[name]) for name in one) for one, other in pairs]
        assert changed == [False, False, True, False, False, True]
        assert [line.split(":")[0] for line in run.notes] == ["step 2", "step 3", "step 5", "step 6"]
        assert (
            "its update was skipped: no weight was changed (2 consecutive steps; the run ends after 3)" in run.notes[1]
        )
        assert [progress["step"] for progress in run.saved().values()] == [3, 6, 7]
        run.check_saved("step_7")


def test_consecutive_skipped_steps_end_a_run_with_a_checkpoint(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, 3, 4, 5)
    with running() as run:
        error = run.stopped(UsageError, training_steps=9)
        assert "the gradients of 3 consecutive steps were not finite; these steps changed no weight" in str(error)
        assert run.mode.version == 8
        assert run.saved() == {"step_5": {"step": 5, "weight_version": 8}}
        run.check_saved("step_5")
        assert all(tensor.isfinite().all() for tensor in run.weights().values())
    with running() as resumed:
        assert resumed.go_on(training_steps=6).steps == 6
        assert resumed.metrics[-1]["updates"] == 1


def test_interrupt_while_sampling_saves_the_last_step(running: Running) -> None:
    sent: list[int] = []

    def bend(document: dict[str, Any], request: HttpRequest) -> dict[str, Any]:
        if (
            request.body["seed"] // 1_000_003 == 3 and not sent
        ):  # in the third step; a second interrupt would also stop the saving
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return document

    with running(bend) as run:
        run.stopped(KeyboardInterrupt)
        assert [row["step"] for row in run.metrics] == [1, 2]
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_interrupt_in_the_fence_takes_effect_after_the_step(running: Running) -> None:
    with running() as run:
        run.mode.before_publish = lambda version: os.kill(os.getpid(), signal.SIGINT) if version == 4 else None
        run.stopped(KeyboardInterrupt)
        assert run.mode.version == 5
        assert [row["weight_version"] for row in run.metrics] == [4, 5]
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_lost_server_loses_no_published_step(running: Running) -> None:
    def bend(document: dict[str, Any], request: HttpRequest) -> dict[str, Any] | None:
        return None if request.body["seed"] // 1_000_003 >= 3 else document

    with running(bend) as run:
        error = run.stopped(ServerUnreachableError)
        assert isinstance(error, BridgeError)
        assert error.exit_code == 5
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")


def test_server_lost_before_the_first_step_saves_nothing(running: Running) -> None:
    with running(lambda *_: as_json({}, 500)) as run:
        run.stopped(ServerUnreachableError)
        assert run.saved() == {}
        assert run.mode.calls == ["open", "close"]


def test_weights_written_but_not_published_are_saved(running: Running) -> None:
    def lose_server(version: int) -> None:
        if version == 4:
            raise ServerUnreachableError("gone", hint="restart")

    with running() as run:
        run.mode.before_publish = lose_server
        run.stopped(ServerUnreachableError)
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 4}}
        run.check_saved("step_2")


@pytest.mark.parametrize("error", [UsageError("torn", hint=""), ZeroDivisionError(), KeyboardInterrupt()])
def test_error_during_the_write_saves_no_torn_weights(
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
def test_internal_error_loses_no_published_step(
    running: Running, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with running() as run:
        original, calls = packing.packs, 0

        def broken(*arguments: Any, **choices: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise error
            return original(*arguments, **choices)

        monkeypatch.setattr("bridge.passes.budget.packs", broken)
        run.stopped(error)
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}


def test_lack_of_disk_space_is_logged_at_the_start(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as run:
        run.train()
        checkpoint_bytes = sum(path.stat().st_size for path in (run.folder / "saved" / "step_3").rglob("*.safetensors"))
    notes = []
    for free in (0.95 * checkpoint_bytes, 1.05 * checkpoint_bytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(0, 0, free))
        with running(folder=f"of {free}") as run:
            run.train()
            notes.append(run.notes)
    assert [note.partition(" GiB")[0] for note in notes[0]] == ["a checkpoint takes at least 0.00"]
    assert notes[1] == []


@pytest.mark.parametrize("full_for", ["optimizer", "model.safetensors"])
def test_weights_are_kept_if_the_disk_lacks_space_for_state(
    running: Running, monkeypatch: pytest.MonkeyPatch, full_for: str
) -> None:
    """The server, and its memory with the weights, may end with the run."""
    fsync = atomic_folder._fsync

    def full(path: Path) -> None:
        if path.name == full_for:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(path)

    with running() as run:
        monkeypatch.setattr(atomic_folder, "_fsync", full)
        error = run.stopped(UsageError)
        saved = run.folder / "saved"
        assert isinstance(error, UsageError)
        assert error.message.startswith(f"cannot write {saved / 'step_3'}: [Errno 28] No space left on device (after ")
        if full_for == "optimizer":
            weights = saved / "weights_step_3"
            assert run.notes == [f"the weights of step 3, without the optimizer's state, are in {weights}"]
            run.check_saved("weights_step_3")
        assert [path.name for path in saved.iterdir()] == (["weights_step_3"] if full_for == "optimizer" else [])


@pytest.mark.parametrize("score", [lambda _: math.nan, lambda _: 1 / 0, lambda _: "1"])
def test_invalid_score_ends_the_run_without_losing_a_step(running: Running, score: Callable[[str], float]) -> None:
    with running() as run:
        calls = 0

        def later(text: str) -> float:
            nonlocal calls
            calls += 1
            return float(calls % 3) if calls <= 16 else score(text)

        run.stopped(RewardError, Letters(later))
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}


def test_model_without_a_tokenizer_is_refused_immediately(running: Running) -> None:
    with running() as run:
        for file in Path(run.mode.server.manifest.model).glob("tokenizer*"):
            file.unlink()
        with pytest.raises(UsageError, match="tokenizer"):
            run.train()
        assert run.mode.calls == ["close"]
        assert run.http_requests == []


def test_checkpointed_activations_give_the_same_step(running: Running) -> None:
    losses = []
    for checkpointing in (False, True):
        with running() as run:
            run.train(gradient_checkpointing=checkpointing, training_steps=1)
            losses.append((run.reported[0].loss, run.reported[0].grad_norm))
            (run.folder / "run" / "metrics.jsonl").unlink()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_newest_checkpoints_are_kept_for_repairs(running: Running) -> None:
    with running() as run:
        run.train(save_interval=1, keep_last=2, training_steps=4)
        assert list(run.saved()) == ["step_3", "step_4"]
        saved = run.folder / "saved"
        assert run.mode.last_checkpoints == [None, saved / "step_1", saved / "step_2", saved / "step_3"]


SLEEPS = ["sleep", "prepare", "publish"]


def outcome(run: Run) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return a run's metrics, without times and memory, and its weights."""
    times = {"rollout_s", "train_s", "fence_prepare_s", "peak_memory_gib"}
    return [{key: value for key, value in row.items() if key not in times} for row in run.metrics], run.weights()


def check_same_outcome(run: Run, other: Run) -> None:
    (rows, weights), (other_rows, other_weights) = outcome(run), outcome(other)
    assert rows == other_rows
    assert all(torch.equal(tensor, other_weights[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("choices", [{}, {"updates_per_batch": 2, "passes_per_batch": 2}])
def test_sleep_and_pause_do_not_change_results(running: Running, choices: dict[str, Any]) -> None:
    with running(folder="awake", can_sleep=True) as awake:
        awake.train(kv_sleep="never", **choices)
        assert awake.mode.calls == ["open", *["publish"] * STEPS, "catch up", "close"]
        assert {row["fence_prepare_s"] for row in awake.metrics} == {0}
    with running(folder="asleep", can_sleep=True) as asleep:
        asleep.train(kv_sleep="always", **choices)
        assert asleep.mode.calls == ["open", *SLEEPS * STEPS, "catch up", "close"]
        for row in asleep.metrics:
            assert row["fence_prepare_s"] == 0.125
            assert row["train_s"] > 0.125
        assert asleep.notes == []
        check_same_outcome(asleep, awake)
    with running(folder="paused", can_sleep=True) as paused:
        paused.train(kv_sleep="never", pause_while_training=True, **choices)
        assert paused.mode.calls == ["open", *["prepare", "publish"] * STEPS, "catch up", "close"]
        assert {row["fence_prepare_s"] for row in paused.metrics} == {0.125}
        check_same_outcome(paused, awake)


@pytest.mark.parametrize("wants", [True, False])
def test_first_batch_decides_whether_the_kv_cache_sleeps(
    running: Running, monkeypatch: pytest.MonkeyPatch, wants: bool
) -> None:
    calls_before = []

    def wants_sleep(_: Learner) -> bool:
        calls_before.append(run.mode.calls.copy())
        return wants

    monkeypatch.setattr(Learner, "wants_sleep", wants_sleep)
    with running(can_sleep=True) as run:
        run.train()
        assert calls_before == [["open"]]
        assert run.mode.calls == ["open", *(SLEEPS if wants else ["publish"]) * STEPS, "catch up", "close"]
        assert run.notes == ["the server's KV cache sleeps while training, which needs its memory"] * wants


@pytest.mark.parametrize("choices", [{"kv_sleep": "never"}, {"can_sleep": False}])
def test_cache_that_cannot_sleep_is_not_measured(
    running: Running, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    monkeypatch.setattr(Learner, "wants_sleep", lambda _: pytest.fail("memory was measured"))
    with running(can_sleep=choices.pop("can_sleep", True)) as run:
        run.train(**choices)
        assert "sleep" not in run.mode.calls


def test_first_batch_without_signal_does_not_decide_on_sleep(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "is_short", lambda *_: True)
    scored: list[str] = []

    def later(text: str) -> float:
        scored.append(text)
        return float(ord(text[0]) % 7) if len(scored) > 8 else 1.0

    with running(can_sleep=True) as run:
        run.train(Letters(later))
        assert run.mode.calls == ["open", "publish", *SLEEPS * 2, "catch up", "close"]


def test_impossible_kv_sleep_is_refused_without_a_trace(running: Running) -> None:
    with running() as run:
        before = run.weights()
        error = run.stopped(UsageError, kv_sleep="always")
        assert "cannot sleep" in str(error)
        assert run.mode.calls == ["open", "close"]
        assert run.http_requests == []
        assert not (run.folder / "run" / "config.json").exists()
        assert not (run.folder / "saved").exists()
        assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())


@pytest.mark.parametrize("kv_sleep", ["always", "never"])
def test_interrupt_during_a_pass_loses_no_published_step(
    running: Running, monkeypatch: pytest.MonkeyPatch, kv_sleep: str
) -> None:
    original, calls = policy_loss.policy_loss, 0

    def interrupted(*arguments: Any) -> tuple[Tensor, Sums]:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(learner, "policy_loss", interrupted)
    with running(can_sleep=True) as run:
        run.stopped(KeyboardInterrupt, kv_sleep=kv_sleep)
        assert run.mode.version == 5
        assert run.mode.calls.count("publish") == 2
        assert [row["step"] for row in run.metrics] == [1, 2]
        assert run.saved() == {"step_2": {"step": 2, "weight_version": 5}}
        run.check_saved("step_2")
        assert all(parameter.grad is None for parameter in run.mode.model.parameters())


def test_mismatch_alarm_is_logged_each_time_it_starts(running: Running) -> None:
    def bend(document: dict[str, Any], request: HttpRequest) -> dict[str, Any]:
        if request.body["seed"] // 1_000_003 in {2, 3, 5}:
            for choice in document["choices"]:
                choice["logprobs"]["token_logprobs"] = [-50.0 for _ in choice["token_ids"]]
        return document

    num_notes: list[tuple[int, int]] = []
    with running(bend) as run:
        run.report = lambda metrics: num_notes.append((metrics.step, len(run.notes)))
        run.train(training_steps=6, mismatch_alarm=10)
        assert num_notes == [(1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
        assert all(line.startswith("the log-probs of vLLM and the trainer differ by 4") for line in run.notes)
        unhealthy = [row["step"] for row in run.metrics if row["logprob_diff_mean"] > 10]
        assert unhealthy == [2, 3, 5]
        assert [row["corrected_share"] > 0.9 for row in run.metrics if row["step"] in unhealthy] == [True] * 3


def test_mismatch_is_checked_only_after_a_reload(running: Running) -> None:
    def bend(document: dict[str, Any], _: HttpRequest) -> dict[str, Any]:
        for choice in document["choices"]:
            choice["logprobs"]["token_logprobs"] = [-50.0 for _ in choice["token_ids"]]
        return document

    num_notes: list[int] = []
    with running(bend, interval=3) as run:
        run.report = lambda _: num_notes.append(len(run.notes))
        run.train(training_steps=6, mismatch_alarm=10)
    assert num_notes == [1, 1, 1, 2, 2, 2]


def test_run_records_its_machine_and_every_default(running: Running) -> None:
    with running() as run:
        run.train(training_steps=1, loss="gspo")
        folder = run.folder / "run"
        (start,) = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
        assert start["torch"] == torch.__version__
        document = json.loads((folder / "config.json").read_text())
        assert (document["loss"]["clip_low"], document["optimizer"]["beta2"]) == (None, 0.999)
        derived = {name: document["derived"][name] for name in ("clip_low", "clip_high", "ratio_level")}
        assert derived == {"clip_low": 3e-4, "clip_high": 4e-4, "ratio_level": "sequence"}


def test_metrics_cover_every_update_and_the_staleness(running: Running) -> None:
    with running() as run:
        run.train(updates_per_batch=2, passes_per_batch=2, lr=3e-2, mask_truncated=True)
        assert [row["staleness"] for row in run.metrics] == [0, 1, 2]  # the fake server's version never changes
        for row in run.metrics:
            assert row["updates"] == 4
            assert row["tokens_trained"] == row["tokens_generated"] == 24
            assert row["entropy"] > 0
            assert row["kl"] == 0
            assert len(row["logprob_diff_histogram"]) == 8
            assert sum(row["logprob_diff_histogram"]) == pytest.approx(1)
            assert 0 <= row["corrected_share"] <= 1
            assert 0 < row["importance_weight"] <= 2
            assert 0 < row["effective_share"] <= 1
            assert row["clipped_low_share"] + row["clipped_high_share"] > 0
            assert row["device"] == "cpu"


@pytest.mark.parametrize(
    ("score", "cause"),
    [
        (lambda _: 0.0, "every reward is 0; compare the completions in rollouts.jsonl"),
        (lambda _: 1.0, "every reward is 1; compare"),
    ],
)
def test_run_without_signal_logs_the_likely_cause_once(
    running: Running, score: Callable[[str], float], cause: str
) -> None:
    with running() as run:
        summary = run.train(Letters(score))
        assert [row["no_signal_share"] for row in run.metrics] == [1, 1, 1]
        (line,) = run.notes
        assert line.startswith("step 1 has nothing to learn from: in each group all rewards are equal; likely cause: ")
        assert cause in line
        assert (summary.steps, summary.updates) == (STEPS, 0)
        assert math.isnan(summary.logprob_diff_max)


class Solved(Letters):
    """A task in which every second problem is always solved, so that there is nothing to learn from it."""

    def score(self, problem: Problem, completion: str) -> float:
        return 9.0 if int(str(problem["prompt"]).rpartition(" ")[2]) % 2 else super().score(problem, completion)


def test_rollout_metrics_include_replaced_groups(running: Running) -> None:
    with running() as run:
        run.train(Solved(), skip_without_signal=True, eval_samples=0)
        rows = [json.loads(line) for line in (run.folder / "run" / "rollouts.jsonl").read_text().splitlines()]
        assert sum(row["skipped_groups"] for row in run.metrics) > 0
        for row in run.metrics:
            groups = [group["completions"] for group in rows if group["step"] == row["step"]]
            rewards = [[completion["reward"] for completion in group] for group in groups]
            assert len(rewards) == 2 + row["skipped_groups"]
            assert row["reward_mean"] == pytest.approx(sum(map(sum, rewards)) / sum(map(len, rewards)))
            assert row["no_signal_share"] == sum(len(set(of_group)) == 1 for of_group in rewards) / len(rewards)
            assert row["tokens_generated"] == 24 / 2 * len(rewards)
            assert row["completion_tokens_mean"] == 3


def test_advice_for_an_alarm_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    alarms = measuring.Alarms(mismatch_limit=9)
    for step, no_signal_share in enumerate([1, 1, 0, 1, 0, 1]):
        metrics = report_runs.metrics(step, 5, no_signal_share=no_signal_share, reward_mean=step, reward_std=0)
        alarms.check(metrics, is_published=True)
    always = "has nothing to learn from: in each group all rewards are equal; likely cause: every reward is"
    assert caplog.messages[0].startswith(f"step 0 {always} 0; compare the completions")
    assert caplog.messages[1:] == [f"step {step} {always} {step}" for step in (3, 5)]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_step_without_rewards_reports_the_missing_rewards() -> None:
    metrics = report_runs.metrics(
        3, 5, no_signal_share=1.0, reward_mean=math.nan, reward_std=math.nan, unscored=4, truncated_share=1.0
    )
    line = measuring.nothing_learnt(metrics)
    assert line is not None
    assert line.startswith("step 3 has nothing to learn from: none of its 4 completions has a reward; ")


@pytest.mark.parametrize("version", ["", "2-3"])
def test_completions_of_unknown_version_have_no_staleness(running: Running, version: str) -> None:
    with running(version=version) as run:
        run.train()
        assert [row["staleness"] for row in run.metrics] == [None] * STEPS


@pytest.mark.parametrize(
    ("versions", "expected"),
    [([(5, 5), (4, 5)], 2), ([(6, 6)], 0), ([(4, None), (None, None)], 2), ([(None,), ()], math.nan), ([], math.nan)],
)
def test_staleness_is_that_of_the_oldest_known_token(versions: list[tuple[int | None, ...]], expected: float) -> None:
    completions = [
        Completion(
            token_ids=(7,) * len(of_completion),
            logprobs=(-1.0,) * len(of_completion),
            text="",
            finish_reason="stop",
            versions=of_completion,
        )
        for of_completion in versions
    ]
    assert max(measuring.lags(completions, 6), default=math.nan) == pytest.approx(expected, nan_ok=True)


def test_eval_interval_without_evaluations_is_refused() -> None:
    for key, name in (("interval", "interval"), ("temperature", "temperature"), ("pass_reward", "pass-reward")):
        with pytest.raises(ValueError, match=f"--eval-{name} 2 has no effect without --eval-samples"):
            TrainConfig.of(model_name="m", **{f"eval_{key}": 2})
    with pytest.raises(ValueError, match="--eval-temperature 0 samples the same completion each time"):
        TrainConfig.of(model_name="m", eval_temperature=0, eval_samples=2)
    assert TrainConfig.of(model_name="m", eval_temperature=0, eval_samples=1).evaluation.temperature == 0


@pytest.mark.parametrize("version", [0, 3])
def test_new_run_on_an_already_trained_server_is_logged(running: Running, version: int) -> None:
    with running() as run:
        run.mode.version = version
        run.train(training_steps=1)
        model = run.mode.server.manifest.model
        assert len(run.told_before) == (version > 0)
        for line in run.told_before:
            assert "step 1 starts from its weights, version 3, not from those of" in line
            assert f"bridge restore {model}" in line


def test_checkpoints_go_to_the_run_directory_by_default(running: Running) -> None:
    with running() as run:
        summary = run.train(training_steps=1, save_path=None)
        own = run.folder / "run" / "checkpoints"
        assert summary.checkpoint == own / "step_1"
        assert checkpoint.read(summary.checkpoint).progress.step == 1
        assert RunDirectory(run.folder / "run").choices()["save_path"] == str(own)
