import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from bridge.checks.result import failed, passed
from bridge.config import ServeConfig, TrainConfig
from bridge.errors import ServerUnreachableError, UnsupportedModelError, UsageError
from bridge.training.metrics import StepMetrics
from cli import children, demo, run, train, verify, watchdog
from cli.serve import free_port
from cli.server_command import ServerCommand

FAKE_VLLM = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from bridge.process import ProcessIdentity
from tests.cli.test_serve_command import written

port, path, status = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(status)
        self.end_headers()

    def log_message(self, *given):
        pass

server = HTTPServer(("127.0.0.1", port), Health)
written(path, ProcessIdentity.current())
print("ready", flush=True)
server.serve_forever()
"""


def fake(tmp_path: Path, code: str = FAKE_VLLM, status: int = 200) -> tuple[ServeConfig, ServerCommand]:
    """Return the command of a server that answers /health with `status`."""
    config = ServeConfig(model="m", port=free_port("127.0.0.1"))
    path = tmp_path / "manifest.json"
    argv = (sys.executable, "-c", code, str(config.port), str(path), str(status))
    return config, ServerCommand(argv=argv, environment={**os.environ}, manifest=path, notes=())


def interrupt(child: children.Child) -> None:
    assert child.is_alive()
    raise KeyboardInterrupt


def ask_a_server_that_was_killed(child: children.Child) -> None:
    os.kill(child.process.pid, signal.SIGKILL)
    while child.is_alive():
        time.sleep(0.01)
    raise ServerUnreachableError("no answer", remedy="-")


def test_the_server_is_ready_inside_and_gone_with_its_manifest_after(tmp_path: Path) -> None:
    config, command = fake(tmp_path)
    with run.serving(config, command, tmp_path / "log", limit_s=60) as child:
        assert child.is_alive()
        assert command.manifest.exists()
    assert not child.is_alive()
    assert not command.manifest.exists()


def test_an_interrupt_stops_the_server(tmp_path: Path) -> None:
    config, command = fake(tmp_path)
    with pytest.raises(KeyboardInterrupt), run.serving(config, command, tmp_path / "log", limit_s=60) as child:
        interrupt(child)
    assert not child.is_alive()
    assert not command.manifest.exists()


def test_a_server_that_is_never_well_is_given_up_and_stopped(tmp_path: Path) -> None:
    config, command = fake(tmp_path, status=503)
    with (
        pytest.raises(ServerUnreachableError, match="not ready within 3 s; its log says: ready"),
        run.serving(config, command, tmp_path / "log", limit_s=3),
    ):
        raise AssertionError("it was never ready")
    assert not command.manifest.exists()


def test_a_server_that_dies_while_starting_is_told_by_its_root_error(tmp_path: Path) -> None:
    config, command = fake(tmp_path, "raise MemoryError('no room for the KV cache')")
    with (
        pytest.raises(ServerUnreachableError) as refused,
        run.serving(config, command, tmp_path / "log", limit_s=60),
    ):
        raise AssertionError("it was never ready")
    assert "ended with exit code 1: MemoryError: no room for the KV cache" in refused.value.message
    assert refused.value.remedy == f"read {tmp_path / 'log'}"


def test_a_refusal_inside_the_server_keeps_its_class(tmp_path: Path) -> None:
    code = (
        "from bridge.errors import UnsupportedModelError as E; raise E('w is repacked', remedy='serve it in bfloat16')"
    )
    config, command = fake(tmp_path, code)
    with (
        pytest.raises(UnsupportedModelError) as refused,
        run.serving(config, command, tmp_path / "log", limit_s=60),
    ):
        raise AssertionError("it was never ready")
    assert (refused.value.message, refused.value.remedy) == ("w is repacked", "serve it in bfloat16")


def test_a_server_that_dies_in_mid_run_is_told_with_its_log(tmp_path: Path) -> None:
    config, command = fake(tmp_path)
    with (
        pytest.raises(
            ServerUnreachableError, match="ended with SIGKILL: no error in its log, which ends with: ready"
        ) as refused,
        run.serving(config, command, tmp_path / "log", limit_s=60) as child,
    ):
        ask_a_server_that_was_killed(child)
    assert refused.value.remedy == f"read {tmp_path / 'log'}"


def test_the_fault_of_a_request_to_a_live_server_is_left_as_it_is(tmp_path: Path) -> None:
    config, command = fake(tmp_path)
    with (
        pytest.raises(ServerUnreachableError, match=r"^no answer"),
        run.serving(config, command, tmp_path / "log", limit_s=60),
    ):
        raise ServerUnreachableError("no answer", remedy="-")


def test_the_watchdog_ends_a_server_whose_engine_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.05)
    config, command = fake(tmp_path, status=503)
    child = children.start(command.argv, command.environment, tmp_path / "log")
    assert children.wait_until(child, command.manifest.exists, limit_s=60, tell=lambda _: None)
    with watchdog.Watchdog(child, "127.0.0.1", config.port).watching() as dog:
        children.wait_until(child, lambda: False, limit_s=20, tell=lambda _: None)
        assert child.exit_code() == -signal.SIGKILL
    assert dog.bit
    children.stop(child)


def test_the_watchdog_leaves_a_well_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.05)
    config, command = fake(tmp_path)
    child = children.start(command.argv, command.environment, tmp_path / "log")
    assert children.wait_until(child, command.manifest.exists, limit_s=60, tell=lambda _: None)
    with watchdog.Watchdog(child, "127.0.0.1", config.port).watching() as dog:
        time.sleep(1)
    assert not dog.bit
    assert child.is_alive()
    assert threading.active_count() == 1
    children.stop(child)


def test_the_trainer_is_pointed_at_the_server_that_was_started(tmp_path: Path) -> None:
    config, command = fake(tmp_path)
    everywhere = config.model_copy(update={"host": "0.0.0.0"})
    config_path = run.attached_to(TrainConfig(model_name="m"), everywhere, command)
    assert (config_path.vllm_host, config_path.vllm_port) == ("127.0.0.1", config.port)
    assert config_path.vllm_config_path == command.manifest


def test_a_step_is_one_line() -> None:
    step = StepMetrics(
        step=3, weight_version=3, reward_mean=0.5, reward_std=0.25, loss=0.1, grad_norm=1.0, logprob_diff_mean=0.003,
        logprob_diff_max=0.03, changed_weight_share=0.01, rollout_s=2.0, train_s=1.0, fence_pause_s=0.004,
        fence_write_s=0.002, fence_publish_s=0.001, tokens_generated=4000, peak_memory_gib=1.0,
    )  # fmt: skip
    line = train.step_line(step, 60)
    assert "\n" not in line
    for part in ("step  3/60", "reward  0.500", "fence   7.0 ms", "2,000 tok/s"):
        assert part in line


def test_every_check_is_shown_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [passed("storages", "2 of 2", "all"), failed("digests", "1 differs", "0 differ", "restart the server")]
    assert verify.shown(iter(checks), as_json=True) == checks
    out, err = capsys.readouterr()
    assert [json.loads(line)["status"] for line in out.splitlines()] == ["PASS", "FAIL"]
    assert "restart the server" in err


def test_the_demo_replaces_its_own_run_and_nothing_else(tmp_path: Path) -> None:
    ours = tmp_path / "demo"
    ours.mkdir()
    (ours / "summary.json").write_text("{}")
    (ours / "metrics.jsonl").write_text("{}\n")
    assert list(demo._fresh(ours).path.iterdir()) == []
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="holds no run of Bridge"):
        demo._fresh(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "thesis.txt").exists()
