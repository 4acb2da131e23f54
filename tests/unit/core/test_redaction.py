"""What other users can see of settings, log lines and commands; files with secrets are readable only by their owner."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.core import redaction
from bridge.processes import server_log
from bridge_cli import report as command
from bridge_cli.report import record
from tests.cli import report_runs

START = "HF_TOKEN=hidden-1 vllm serve {model} --api-key hidden-2"
URL = "http://me:hidden-3@127.0.0.1:8000/batch?key=hidden-4&page=hidden-5"


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    previous = os.umask(0)
    yield
    os.umask(previous)


def test_urls_are_redacted() -> None:
    shown = redaction.redact_urls(
        f"the Atropos API at {URL} and http://10.0.0.1:9001/health answered: a&b=c, mail@host"
    )
    assert "hidden" not in shown
    assert "http://***@127.0.0.1:8000/batch?key=***&page=***" in shown
    assert "http://10.0.0.1:9001/health answered" in shown
    assert shown.endswith("mail@host")


def test_commands_are_redacted() -> None:
    given = ["run", "--model", "m", "--start-command", START, "--atropos-url", URL, "--lr=1e-5", "--", "--api-key"]
    given += ["hidden-6", "--hf_token=hidden-7", "--max-new-tokens", "64"]
    shown = list(redaction.redacted_arguments(given))
    assert "hidden" not in " ".join(shown)
    assert len(shown) == len(given)
    assert [shown[3], shown[6], shown[7], shown[-3:]] == [
        "--start-command", URL_SHOWN, "--lr=1e-5", ["--hf_token=***", "--max-new-tokens", "64"],
    ]  # fmt: skip


URL_SHOWN = "http://***@127.0.0.1:8000/batch?key=***&page=***"


def test_files_readable_by_others_contain_no_secrets(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", mode="none", start_command=START)
    config = TrainConfig.of(model_name="m", mode="none", start_command=START).model_copy(update={"atropos_url": URL})
    run.write_config(config.document())
    run.record(f"the Atropos API at {URL} has this trainer now")
    server_log.begin_log(run.server_log, "started")
    with run.server_log.open("a") as file:
        file.write(f"non-default args: {START}\n")
    command.write([run.path], run.report)
    files = {path.name: path for path in run.path.rglob("*") if path.is_file()}
    assert {name for name, path in files.items() if "hidden-" in path.read_text()} == {"config.json", "serve.log"}
    for name in ("config.json", "serve.log"):
        assert files[name].stat().st_mode & 0o777 == 0o600
    assert "start-command" in files[run.report.name].read_text()


def test_existing_log_becomes_private_at_a_restart(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.server_log.touch(0o644)
    server_log.begin_log(run.server_log, "started again")
    assert run.server_log.stat().st_mode & 0o777 == 0o600


def test_events_of_older_versions_are_redacted(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run")
    with run.events.open("a") as file:
        file.write(f"2026-11-22T10:00:00+0000 the server at {URL} died\n")
    assert all("hidden" not in event.text for event in record.read(run.path).events)


HIDES = """
import os, subprocess, sys
from bridge.core import redaction
os.environ.pop("BRIDGE_SECRET")
os.environ["LATER_TOKEN"] = "set-later"
before = dict(os.environ)
redaction.hide_environment()
redaction.hide_environment()
assert dict(os.environ) == before
sys.stdout.buffer.write(open("/proc/self/environ", "rb").read() + b"\\nchild\\n")
sys.stdout.flush()
subprocess.run(["env"])
"""


def test_secrets_are_removed_from_the_initial_environment() -> None:
    given = {"BRIDGE_SECRET": "hidden-1", "HF_TOKEN": "hidden-2", "HF_HOME": "shown-1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", HIDES], env=given, capture_output=True, text=True, check=True)
    own, _, child = done.stdout.partition("\nchild\n")
    assert "shown-1" in own
    assert not any(word in own for word in ("hidden", "SECRET", "TOKEN"))
    assert {"HF_TOKEN=hidden-2", "HF_HOME=shown-1", "LATER_TOKEN=set-later"} <= set(child.split("\n"))
