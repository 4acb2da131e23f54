"""`bridge.serve`: what it leaves behind when it cannot start.

Not covered: a real server (`tests/cpu/test_library.py`).
"""

import contextlib
import logging
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

import bridge
from bridge import library
from bridge.errors import UsageError
from bridge.processes import logged_wait
from bridge.processes.preload import Preloaded


@pytest.mark.parametrize("choices", [{"max_modellen": 8}, {"max_model_len": -1}])
def test_refused_choice_leaves_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UsageError), bridge.serve(tmp_path, **choices):
        pass
    assert not [*tmp_path.glob("bridge-serve-*")]


def test_server_gets_the_process_that_imported_vllm_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = Preloaded(None)
    started: list[Preloaded] = []

    def start(_command: object, _log: Path, *, preloaded: Preloaded) -> NoReturn:
        started.append(preloaded)
        raise UsageError("started", hint="nothing to do")

    monkeypatch.setattr(library, "preloading", lambda: contextlib.nullcontext(early))
    monkeypatch.setattr(library, "prepare", lambda config, flags: (config, flags))
    monkeypatch.setattr(library, "StartedServer", start)
    with pytest.raises(UsageError, match="started"), bridge.serve(tmp_path):
        pass
    assert started == [early]


def test_wait_is_logged_without_details(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with logged_wait("starting vLLM") as detail:
        detail("loading")
    assert caplog.record_tuples == [("bridge.processes", logging.INFO, "starting vLLM ...")]
    assert capsys.readouterr() == ("", "")
