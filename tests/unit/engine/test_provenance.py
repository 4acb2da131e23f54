"""Each start of a run records what it runs on, without secrets."""

import subprocess
import sys
from pathlib import Path

import pytest

import bridge
from bridge.engine import provenance


def test_start_record_has_versions_device_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["/somewhere/bin/bridge", "run", "--model", "a model", "--servers", "http://u:pw@h", "--api-key", "k1"]
    monkeypatch.setattr(sys, "argv", arguments)
    start = provenance.of_this_process()
    assert start["command"] == "bridge run --model 'a model' --servers 'http://***@h' --api-key '***'"
    assert start["bridge"] == bridge.__version__
    for name in ("torch", "transformers", "python", "device", "platform", "time"):
        assert start[name]


def test_commit_of_a_clone_reports_changed_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert provenance._commit(tmp_path) == {}
    git("init", "-q")
    assert provenance._commit(tmp_path) == {}, "without a commit nothing is recorded"
    (tmp_path / "a.py").write_text("1\n")
    git("add", "a.py")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert provenance._commit(tmp_path) == {"commit": commit}
    (tmp_path / "a.py").write_text("2\n")
    assert provenance._commit(tmp_path) == {"commit": f"{commit} with changes"}
