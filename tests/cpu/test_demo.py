"""`bridge demo` as a user runs it: it builds its model, trains it in place on a compiled vLLM, learns, and verifies."""

import json
from pathlib import Path

import pytest

from tests import scenarios

STEPS = 24
"""Fewer than the default, and enough to pass."""


@pytest.mark.slow
@pytest.mark.core
def test_the_demo_passes(tmp_path: Path) -> None:
    done = scenarios.bridge("demo", "--out", "demo", "--steps", str(STEPS), "--json", folder=tmp_path, cold=True)
    found = json.loads(done.stdout)
    assert (found["passed"], found["steps"], found["weight_bytes_copied"]) == (True, STEPS, 0), done.stderr
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == found
    assert (tmp_path / "demo" / "report.html").is_file()
