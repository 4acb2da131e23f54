"""Training on batches of a fake Atropos API, through the loop.

Not covered: the batches themselves (`test_atropos_stream.py`), the real API (`tests/cpu/test_atropos.py`).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bridge.atropos import atropos_stream
from bridge.errors import AtroposError
from tests.unit.atropos.atropos_api import FakeApi, pair, scored
from tests.unit.http_server import serving
from tests.unit.trainer_runs import STEPS, FakeEngine, Running, runner

CHOICES: dict[str, Any] = {"rollouts": "atropos", "batch_size": 16, "group_size": 4}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return runner(tmp_path, monkeypatch)


def batch() -> list[dict[str, Any]]:
    """Eight groups of two, among them a tool result, an override, unknown log-probabilities and a missing score."""
    tool = scored(((1, 5, 6, 7, 8), 1), ((1, 9), 1), masks=[[-100, 5, -100, -100, 8], [-100, 9]])
    return [
        *[pair() for _ in range(4)],
        tool,
        pair(overrides=[{}, {"set_advantage_to_zero": True}]),
        pair(inference_logprobs=None),
        pair(scores=[1.0, None]),
    ]


def test_run_learns_only_from_the_apis_batches(running: Running) -> None:
    api = FakeApi(batches=[batch() for _ in range(STEPS)])
    with serving(api) as server, running() as run:
        summary = run.train(atropos_url=server.url, **CHOICES)
        assert run.requests == []  # Bridge samples nothing itself
    assert summary.steps == STEPS
    assert api.batches == []
    for row in run.metrics:
        assert row["changed_weight_share"] > 0
        assert (row["unscored"], row["reward_mean"], row["retries"]) == (2, 0.5, 0)
        assert row["staleness"] is None  # these environments do not send versions
        assert json.dumps(row["loss"]) not in ("null", "NaN")
    assert sum("is left out: sequence 2 of 2 has the score nan" in line for line in run.notes) == 1


def test_run_is_saved_if_the_api_stays_empty(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atropos_stream, "SHORTEST_PAUSE_S", 0.01)
    api = FakeApi(batches=[batch()], num_waiting=2, largest=3)
    with serving(api) as server, running() as run:
        error = run.stopped(AtroposError, atropos_url=server.url, atropos_timeout_s=0.05, **CHOICES)
    assert "but do not form a batch of 16, which is not a multiple of 3" in str(error)
    assert list(run.saved()) == ["step_1"]


@dataclass
class LateEngine(FakeEngine):
    """A server that environments need before they send anything."""

    api: FakeApi = field(default_factory=FakeApi)

    def restart(self, model: str | Path) -> None:
        super().restart(model)
        self.api.batches = [batch() for _ in range(STEPS - 1)]


def test_dead_server_is_restarted_for_environments(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atropos_stream, "HEALTH_INTERVAL_S", 0.0)  # to the checks, the fake server looks dead
    api = FakeApi(batches=[batch()])
    with serving(api) as server, running() as run:
        engine = LateEngine(api=api)
        run.train(engine=engine, atropos_url=server.url, **CHOICES)
        assert len([request for request in server.requests if request.path == "/register"]) == 1
    assert len(engine.started_with) == 1
    assert run.mode.calls.count("revive") == 1
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
