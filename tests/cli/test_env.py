"""`bridge env`: what it prints while it feeds an Atropos API, and how it ends."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bridge.atropos import feeder
from bridge.atropos.feeder import FeedProgress
from bridge_cli import env
from bridge_cli.main import answer
from tests.models import tiny
from tests.unit import openai_server
from tests.unit.atropos.test_feeder import FakeApi
from tests.unit.http_server import serving

PROGRESS = FeedProgress(
    seconds=61.4, step=3, num_steps=5, queued_batches=1.5, groups=24, reward_mean=0.25, tokens_per_s=1234.5, too_long=0,
    unscored=0, unanswered=0, retries=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("model"))


def arguments(model: Path, atropos: str, vllm: str, *more: str) -> list[str]:
    where = ["--model", str(model), "--atropos-url", atropos, "--server-url", vllm]
    return ["env", *where, "--group-size", "4", "--reward-processes", "0", *more]


def test_progress_line_without_problems() -> None:
    assert env.progress_line(PROGRESS) == "step 3/5  24 groups sent  reward 0.250  1,234 tok/s  queue 1.5 batches"
    assert env.summary_line(PROGRESS) == "done: the trainer has its 5 batches  24 groups sent  reward 0.250  61 s"


def test_environment_with_tools_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[1] / "unit/tools_sample.py"
    assert answer(["env", "--model", "m", "--environment", f"{file}:Bench"]) == 2
    assert "takes several turns, but bridge env feeds an Atropos API with single turns only" in capfd.readouterr().err


def test_progress_line_names_every_problem() -> None:
    troubled = FeedProgress(
        **{**vars(PROGRESS), "too_long": 1, "unscored": 2, "unanswered": 3, "retries": 4, "reward_mean": None}
    )
    line = env.progress_line(troubled)
    assert line.endswith("  1 too long  2 without a reward  3 unanswered  4 retries")
    assert "reward -" in line


def test_named_environment_is_fed(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder, "REPORT_S", 0.0)
    monkeypatch.setattr(feeder, "JOIN_POLL_S", 0.01)
    api = FakeApi(num_steps=2)
    with serving(api) as atropos, serving(openai_server.openai()) as vllm:
        more = ("--environment", "no_such_one", "--json", "arithmetic")
        assert answer(arguments(model, atropos.url, vllm.url, *more)) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["step"] == lines[-1]["num_steps"] == 2
    assert lines[-1]["groups"] > 0
    assert len(lines) >= 2
    assert err.splitlines()[-1].startswith("done: the trainer has its 2 batches")
    assert api.registration["desired_name"] == "arithmetic"


def test_unknown_environment_is_refused_before_any_request(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi()
    with serving(api) as atropos:
        assert answer(arguments(model, atropos.url, atropos.url, "arithmetics")) == 2
        assert atropos.requests == []
    assert "arithmetics" in capsys.readouterr().err


def test_missing_api_is_reported_in_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(FakeApi()) as closed:
        pass
    monkeypatch.setattr("bridge.atropos.api.FIRST_WAIT_S", 0.0)
    assert answer(arguments(model, closed.url, closed.url)) == 5
    error, _, hint = capsys.readouterr().err.partition("\n\n")
    assert error.startswith(f"error: the Atropos API at {closed.url}")
    assert "run-api" in hint


def test_ctrl_c_disconnects_from_the_api(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    posts = itertools.count()

    class Pressed(FakeApi):
        def scored_data_list(self, body: list[dict[str, Any]]) -> Any:
            if next(posts) == 0:  # only once: a second interrupt would cut the disconnection short
                os.kill(os.getpid(), signal.SIGINT)
            return super().scored_data_list(body)

    api, before = Pressed(num_steps=1000), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with serving(api) as atropos, serving(openai_server.openai()) as vllm:
            assert answer(arguments(model, atropos.url, vllm.url)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert api.left == [3]
