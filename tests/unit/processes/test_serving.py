"""`bridge.serve`: what it leaves behind when it cannot start.

Not covered: a real server (`tests/cpu/test_library.py`).
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.errors import UsageError
from bridge.processes import logged_wait


@pytest.mark.parametrize("choices", [{"max_modellen": 8}, {"max_model_len": -1}])
def test_refused_choice_leaves_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UsageError), bridge.serve(tmp_path, **choices):
        pass
    assert not [*tmp_path.glob("bridge-serve-*")]


def test_wait_is_logged_without_details(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with logged_wait("starting vLLM") as detail:
        detail("loading")
    assert caplog.record_tuples == [("bridge.processes", logging.INFO, "starting vLLM ...")]
    assert capsys.readouterr() == ("", "")
