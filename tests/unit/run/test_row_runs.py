"""Runs on the rows of a file, and warm-ups: order, metrics, and resuming in either phase to the digit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.errors import UsageError
from bridge.rollouts.training_rows import Tokens, TrainingRow
from bridge.weights.attach import attach
from tests.unit.run.test_trainer_resume import comparable, kill, seed
from tests.unit.trainer_runs import Killed, Run, Running, runner, spoil


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return runner(tmp_path, monkeypatch)


def text(prompt: Sequence[int], completion: Sequence[int]) -> Tokens:
    return Tokens([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))


def rows(count: int = 10) -> list[TrainingRow]:
    """Return rows of different lengths; each is answered with its own number."""
    return [
        TrainingRow.of(text([1] + [5 + number] * (number % 3 + 1), [20 + number] * (number % 4 + 1)))
        for number in range(count)
    ]


def pairs(count: int = 10) -> list[TrainingRow]:
    """Return pairs that prefer the token 30 to the token 40, after prompts and in completions of different lengths."""
    return [
        TrainingRow.of(
            *(text([1] + [5 + number] * (number % 3 + 1), [preferred] * (number % 4 + 1)) for preferred in (30, 40))
        )
        for number in range(count)
    ]


CASES: dict[str, dict[str, Any]] = {
    "sft": {"loss": "sft", "data": "rows.jsonl", "group_size": ...},
    "dpo": {"loss": "dpo", "data": "rows.jsonl", "group_size": ...},
    "warm-up": {"warm_up_data": "rows.jsonl", "warm_up_steps": 3},
}


def choices_of(case: str, run: Run) -> dict[str, Any]:
    run.rows = pairs() if case == "dpo" else rows()
    reference = {"reference_model": run.mode.server.manifest.model} if case == "dpo" else {}
    return {"training_steps": 6, "save_interval": 1, "weight_decay": 0.01, "batch_size": 4, **CASES[case], **reference}


@pytest.mark.parametrize("killed_at", [2, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_killed_run_on_rows_resumes_as_if_uninterrupted(running: Running, case: str, killed_at: int) -> None:
    with running(folder="straight") as straight:
        straight.train(**choices_of(case, straight))
        weights, requests = straight.weights(), straight.requests
    with running(folder="killed") as run:
        kill(run, killed_at)
        run.stopped(Killed, **choices_of(case, run))
    with running(folder="killed") as resumed:
        spoil(attach(resumed.mode.server.manifest).model)
        resumed.go_on(**choices_of(case, resumed))
        assert comparable(resumed.metrics) == comparable(straight.metrics)
        for name, tensor in resumed.weights().items():
            assert torch.equal(tensor, weights[name]), name
        sampled = sorted(requests, key=seed)
        assert sorted(resumed.requests, key=seed) == sampled[len(sampled) - len(resumed.requests) :]
    same = [run.folder / "saved" / "step_6" for run in (straight, resumed)]
    for name in ("model.safetensors", "optimizer/optimizer-00001-of-00001.safetensors", "optimizer/state.json"):
        assert (same[0] / name).read_bytes() == (same[1] / name).read_bytes(), name


def test_warm_up_is_followed_by_sampled_steps(running: Running) -> None:
    with running() as run:
        run.train(**choices_of("warm-up", run))
        assert [row["objective"] for row in run.metrics] == ["sft"] * 3 + ["dapo"] * 3
        assert [row["reward_mean"] is None for row in run.metrics] == [True] * 3 + [False] * 3
        assert [row["tokens_generated"] > 0 for row in run.metrics] == [False] * 3 + [True] * 3
        assert {request["seed"] // 1_000_003 for request in run.requests} == {1, 2, 3}  # from the first problem on
        losses = [row["loss"] for row in run.metrics]
        assert losses[0] > losses[2] > 0
        assert (run.folder / "run" / "rollouts.jsonl").read_text().count('"step": 4') == 1
        assert '"step": 3' not in (run.folder / "run" / "rollouts.jsonl").read_text()


def test_supervised_run_learns_its_rows(running: Running) -> None:
    with running() as run:
        run.train(**{**choices_of("sft", run), "training_steps": 30, "save_interval": 0, "lr": 1e-2})
        assert not run.requests
        losses = [row["loss"] for row in run.metrics]
        assert losses[-1] < losses[0] / 4
        assert {row["objective"] for row in run.metrics} == {"sft"}
        assert not run.notes[1:]


def test_preference_run_lowers_the_loss_and_raises_the_margin(running: Running) -> None:
    with running() as run:
        run.train(**{**choices_of("dpo", run), "training_steps": 20, "save_interval": 0, "lr": 3e-3})
        first, last = run.metrics[0], run.metrics[-1]
        assert first["loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference: log 2
        assert first["margin"] == pytest.approx(0, abs=1e-3)
        assert last["loss"] < 0.5
        assert last["margin"] > 0.5
        assert last["preference_accuracy"] == 1


def test_rows_come_once_in_each_pass_in_the_order_of_the_seed(running: Running) -> None:
    digests = list[list[str]]()
    for order in (0, 0, 1):
        with running(folder=f"{len(digests)}") as run:
            run.train(**{**choices_of("sft", run), "training_steps": 5, "save_interval": 0, "seed": order})
            digests.append([row["rollouts"] for row in run.metrics])
            assert sum(row["tokens_trained"] for row in run.metrics) == 2 * sum(
                len(ids) for row in run.rows for ids, _ in row.completions
            )
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("case", ["sft", "warm-up"])
@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"seed": 1}, "--seed 1: .* is from step 1 of . on rows in batches of 4 in the order of --seed 0"),
        ({"batch_size": 8}, "--batch-size 8: .* is from step 1 of . on rows in batches of 4"),
        ({}, "rows.jsonl: these are not the rows that the run trained on"),
    ],
)
def test_resumed_run_needs_the_same_rows_in_the_same_order(
    running: Running, case: str, changes: dict[str, Any], fault: str
) -> None:
    with running() as run:
        kill(run, 2)
        run.stopped(Killed, **choices_of(case, run))
    with running() as resumed:
        choices = choices_of(case, resumed)
        resumed.rows = resumed.rows if changes else rows(11)
        with pytest.raises(UsageError, match=fault):
            resumed.go_on(**{**choices, **changes})


def test_rows_may_change_after_the_warm_up(running: Running) -> None:
    with running() as run:
        kill(run, 5)
        run.stopped(Killed, **choices_of("warm-up", run))
    with running() as resumed:
        choices = choices_of("warm-up", resumed)
        resumed.rows = rows(11)
        resumed.go_on(**choices)
        assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4, 5, 6]
