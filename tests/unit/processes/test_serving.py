"""`bridge.serve`: what it leaves behind when it cannot start.

Not covered: a real server (`tests/cpu/test_library.py`).
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.errors import UsageError
from bridge.processes import PLAIN


@pytest.mark.parametrize("choices", [{"max_modellen": 8}, {"max_model_len": -1}])
def test_a_choice_that_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UsageError), bridge.serve(tmp_path, **choices):
        pass
    assert not [*tmp_path.glob("bridge-serve-*")]


def test_notes_go_to_stderr_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    PLAIN.note("vLLM\x1b[31m is ready", style="yellow")
    with PLAIN.waiting("starting vLLM") as detail:
        detail("loading")
    out, err = capsys.readouterr()
    assert out == ""
    assert "\x1b" not in err
    assert err.splitlines()[-1] == "starting vLLM ..."
    assert len(err.splitlines()) == 2
