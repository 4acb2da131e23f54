"""Flags of `bridge tinker` reach the policy that it attaches. Not covered: the API (`tests/unit/tinker`)."""

import contextlib
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from typer.testing import CliRunner

from bridge import library
from bridge.config import ServeConfig
from bridge.engine import make_trainable
from bridge.errors import UsageError
from bridge.processes.preload import Preloaded
from bridge.tinker import wire
from bridge_cli.tinker import tinker

app = typer.Typer()
app.command()(tinker)


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the choices of the attached policy, at which the command then ends."""
    choices: dict[str, Any] = {}

    def attach(_: Path, **sections: Any) -> NoReturn:
        choices.update(sections)
        raise UsageError("attached", hint="nothing to do")

    monkeypatch.setattr(library, "attach", attach)
    monkeypatch.setattr(wire, "messages", lambda: None)
    return choices


def test_help_and_docs_name_the_default_port() -> None:
    url = f"TINKER_BASE_URL=http://127.0.0.1:{ServeConfig(model='m').port} "
    docs = Path(__file__).parents[2] / "docs" / "tinker.md"
    assert url in (tinker.__doc__ or "")
    assert url in docs.read_text()


def test_vllm_is_imported_early_only_for_a_started_server(
    attached: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = Preloaded(None)
    given: list[Preloaded] = []

    def serve(preloaded: Preloaded, *_: Any, **__: Any) -> NoReturn:
        given.append(preloaded)
        raise UsageError("served", hint="nothing to do")

    monkeypatch.setattr("bridge_cli.tinker.preloading", lambda: contextlib.nullcontext(early))
    monkeypatch.setattr(library, "serve_preloaded", serve)
    CliRunner().invoke(app, ["--model", "m"])
    assert (given, attached) == ([early], {})
    monkeypatch.setattr("bridge_cli.tinker.preloading", pytest.fail)
    CliRunner().invoke(app, ["--model", "m", "--vllm-config-path", "server.json"])
    assert attached


@pytest.mark.parametrize(("flags", "tokens"), [((), None), (("--micro-batch-tokens", "256"), 256)])
def test_micro_batch_tokens_bound_a_pass(attached: dict[str, Any], flags: tuple[str, ...], tokens: int | None) -> None:
    CliRunner().invoke(app, ["--model", "m", "--vllm-config-path", "server.json", *flags])
    assert attached["compute"].micro_batch_tokens == tokens


def test_no_default_learning_rate_is_announced(attached: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    CliRunner().invoke(app, ["--model", "m", "--vllm-config-path", "server.json"])
    with caplog.at_level("INFO"):
        make_trainable._log_rates(attached["optimizer"], attached["optimizer"].lr or 1e-6, "all weights")
    assert not caplog.messages, "each step has its client's rate, and there is no --lr"
