"""Which environment variables rewards, tools and agents can read, and how the user learns about hidden ones."""

import asyncio
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.agents.tools import Tools
from bridge.core import redaction
from bridge.errors import UsageError
from bridge.scoring.scorer import Scorer
from tests.unit.scoring.test_processes import LIMIT_S, PROBLEM, scoring
from tests.unit.tools_sample import Bench

SECRETS = (
    "JUDGE_API_KEY", "HF_TOKEN", "DB_PASSWORD", "aws_secret_access_key", "GOOGLE_APPLICATION_CREDENTIALS",
    "SMTP_PASS", "MYSQL_PWD", "GH_PAT", "REGISTRY_AUTH", "MINIO_SECRETKEY",
)  # fmt: skip
PLAIN = (
    "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "HF_HOME", "PWD", "OLDPWD", "KEYBOARD", "MONKEY_PATCH", "SSH_AUTH_SOCK",
    "XAUTHORITY", "GIT_ASKPASS",
)  # fmt: skip


def test_worker_gets_only_the_listed_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *PLAIN):
        monkeypatch.setenv(name, "abc")
    with scoring(tmp_path) as ours:
        assert ours.rewards(*(f"reads {name}" for name in (*SECRETS, *PLAIN))) == [None] * 10 + [3.0] * 10
        for way in ("reads", "misses"):
            fault = ours.fault(f"{way} HF_TOKEN")
            hint = "; HF_TOKEN is hidden from rewards, tools and agents; to pass it on: --worker-env HF_TOKEN"
            assert fault.line.endswith(hint)
            assert "HF_TOKEN" not in fault.kind
        assert "hidden" not in ours.fault("raises HF_TOKENIZER").line
        assert "hidden" not in ours.fault("raises 7 HF_TOKEN").line, "the completion names it, and not the error"
    with scoring(tmp_path, variables=("HF_TOKEN", "HF_HOME")) as ours:
        assert ours.rewards("reads HF_TOKEN", "reads JUDGE_API_KEY", "reads HF_HOME") == [3.0, None, 3.0]
        assert "hidden" not in ours.fault("misses HF_TOKEN").line


@pytest.mark.parametrize(
    "message",
    [
        "DatasetNotFoundError: Dataset 'o/d' doesn't exist on the Hub or cannot be accessed.",
        "GatedRepoError: 401 Client Error. Cannot access gated repo for url https://huggingface.co/o/d",
        "Dataset 'o/d' is a gated dataset on the Hub. You must be authenticated to access it.",
    ],
)
def test_hub_error_names_its_hidden_token(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "abc")
    assert redaction.env_hint(message, ()).endswith("pass it on: --worker-env HF_TOKEN")
    assert redaction.env_hint(message, ("HF_TOKEN",)) == redaction.env_hint("KeyError: 'answer'", ()) == ""


def test_listed_variable_that_is_not_set_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="--worker-env NOT_SET_KEY: not set") as met,
        scoring(tmp_path, variables=["NOT_SET_KEY"]),
    ):
        pass
    assert met.value.hint == "export NOT_SET_KEY=..."


def test_tool_that_lacks_a_secret_is_reported_to_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEARCH_API_KEY", "abc")

    async def called(scorer: Scorer) -> list[Any]:
        async with scorer.trajectory(PROBLEM) as trajectory:
            return [await trajectory.call("misbehave", {"how": "searches"}) for _ in range(2)]

    with closing(Scorer(partial(Tools, Bench), processes=1, timeout_s=LIMIT_S)) as scorer:
        replies = asyncio.run(called(scorer))
    assert [reply.text for reply in replies] == ["error: KeyError: 'SEARCH_API_KEY'"] * 2
    assert capsys.readouterr().err.count("--worker-env SEARCH_API_KEY") == 1
