"""A module in a child Python process: its arguments, failures and time limit."""

import time
from pathlib import Path

import pytest

from bridge.core import python_child
from bridge.core.process import ProcessIdentity
from bridge.core.python_child import run_child


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a module that a child can run."""
    monkeypatch.setattr(python_child, "_ROOT", str(tmp_path))
    return tmp_path / "tried_program.py"


def test_child_gets_its_arguments_and_input(program: Path) -> None:
    program.write_text("import sys; print(sys.argv[1:], sys.stdin.read())")
    ended = run_child(program.stem, "a", "b", timeout_s=20, stdin="input")
    assert (ended.trouble(), ended.stdout) == (None, "['a', 'b'] input\n")


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os.kill(os.getpid(), 11)", "Python was killed by SIGSEGV"),
        ("raise SystemExit(7)", "exit status 7"),
        ("import sys; sys.stderr.write('error: mine\\nwarning: later\\n'); sys.exit(1)", "mine"),
    ],
)
def test_failing_child_reports_why(code: str, trouble: str, program: Path) -> None:
    program.write_text(code)
    assert run_child(program.stem, timeout_s=20).trouble() == trouble


def test_hanging_child_is_killed_with_its_children(program: Path) -> None:
    program.write_text(
        "import subprocess, time; print(subprocess.Popen(['sleep', '999']).pid, flush=True); time.sleep(999)"
    )
    ended = run_child(program.stem, timeout_s=5)
    assert ended.trouble() == "no answer within the time limit"
    try:
        grandchild = ProcessIdentity.of(int(ended.stdout))
    except ProcessLookupError:
        return
    while grandchild.is_alive():  # a killed process exits when it is next scheduled
        time.sleep(0.01)


def test_current_folder_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    ended = run_child("bridge.checks.hardware", "write-memfd", "/nowhere", timeout_s=20)
    assert ended.trouble() == "[Errno 2] No such file or directory: '/nowhere'"
