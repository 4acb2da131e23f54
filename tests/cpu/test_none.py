"""`none` with the real vLLM on the CPU: the trainer's own copy reaches the server in place or by a restart.

Not covered: stock servers (`test_stock.py`), and servers other than vLLM (`tests/unit/modes/test_none.py`).
"""

import re
from pathlib import Path

import pytest

from bridge.core.address import free_port
from tests import scenarios
from tests.models import tiny
from tests.scenarios import LiveServer


def test_in_place_reload_needs_no_restart(llama: LiveServer, tmp_path: Path) -> None:
    pid = llama.manifest.server.pid
    scenarios.trains_in_place(llama, tmp_path, "--reload", "in-place", mode="none")
    assert llama.child.is_alive()
    assert llama.child.process.pid == pid
    scenarios.verifies(llama, tmp_path)
    assert not (tmp_path / "run" / "served").exists()


@pytest.mark.slow
def test_server_gets_every_second_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in scenarios.IN_THE_ENGINE.items():
        monkeypatch.setenv(name, value)
    done = scenarios.bridge(
        *("run", "--mode", "none", "--model", tiny.write(tiny.llama(), tmp_path / "model", std=0.06)),
        *("--training-steps", "5", "--vllm-restart-interval", "2", "--max-model-len", "2048"),
        *("--environment", f"{scenarios.ENVIRONMENT}:Vowels", "--batch-size", "16", "--group-size", "4"),
        *("--lr", "3e-3", "--max-new-tokens", "16", "--port", str(free_port("127.0.0.1"))),
        *("--run-dir", tmp_path / "run", "--save-path", tmp_path / "saved", "--", *scenarios.EAGER),
        folder=tmp_path,
    )
    steps = scenarios.metrics(tmp_path / "run")
    assert [step["weight_version"] for step in steps] == [0, 1, 1, 2, 2]
    fresh, stale = [steps[0], steps[2]], [steps[1], steps[3]]
    assert max(step["logprob_diff_mean"] for step in fresh) < scenarios.PARITY_LIMIT
    assert min(step["logprob_diff_mean"] for step in stale) > 3 * max(step["logprob_diff_mean"] for step in fresh)
    started = re.findall(r"=== .*started.* ===", (tmp_path / "run" / "serve.log").read_text())
    assert len(started) == 3, started
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "served").exists()
