"""The child process of the checks, and how the probe's output becomes facts."""

import json
import time
from pathlib import Path

import pytest

from bridge.checks import child, facts
from bridge.checks.child import Ended, run_module
from bridge.core.process import ProcessIdentity


def as_module(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> str:
    (folder / "tried_program.py").write_text(program)
    monkeypatch.setattr(child, "_ROOT", str(folder))
    return "tried_program"


def test_a_child_gets_its_arguments_and_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = as_module(tmp_path, monkeypatch, "import sys; print(sys.argv[1:], sys.stdin.read())")
    ended = run_module(name, "a", "b", timeout_s=20, stdin="said")
    assert ended.trouble() is None
    assert ended.stdout == "['a', 'b'] said\n"


@pytest.mark.parametrize(
    ("program", "trouble"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os.kill(os.getpid(), 11)", "Python was killed by SIGSEGV"),
        ("raise SystemExit(7)", "exit status 7"),
        ("import sys; sys.stderr.write('error: mine\\nwarning: later\\n'); sys.exit(1)", "mine"),
    ],
)
def test_a_child_that_fails_says_why(
    program: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_module(as_module(tmp_path, monkeypatch, program), timeout_s=20).trouble() == trouble


def test_a_child_that_hangs_is_stopped_with_its_own_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '999']).pid, flush=True); time.sleep(999)"
    ended = run_module(as_module(tmp_path, monkeypatch, program), timeout_s=2)
    assert ended.trouble() == "no answer within the time limit"
    try:
        grandchild = ProcessIdentity.of(int(ended.stdout))
    except ProcessLookupError:
        return
    while grandchild.is_alive():  # a killed process ends when it is next scheduled
        time.sleep(0.01)


def test_the_current_folder_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert run_module("bridge.checks.sharing", "memfd", "/nowhere", timeout_s=20).trouble() == (
        "[Errno 2] No such file or directory: '/nowhere'"
    )


def probed(*lines: object, returncode: int | None = 0, error: str = "") -> facts.Facts:
    stdout = "".join(json.dumps({"probe": line}) + "\n" for line in lines)
    return facts.parse(Ended(returncode=returncode, stdout="a library's banner\n" + stdout, last_error_line=error))


def test_facts_survive_a_crash_that_comes_after_them() -> None:
    torch = {"torch": "2.13.0", "torch_cuda": "13.0"}
    known = probed(
        {"doing": "import torch"}, torch, {"imports": {"torch": None}}, {"doing": "start CUDA"}, returncode=-11
    )
    assert known.torch == "2.13.0"
    assert known.import_error("torch") is None
    assert known.trouble == "Python was killed by SIGSEGV (start CUDA)"
    assert known.import_error("transformers") == "Python was killed by SIGSEGV (start CUDA)"
    assert known.gpus == ()


def test_imports_add_up() -> None:
    known = probed({"imports": {"torch": None}}, {"imports": {"transformers": "ImportError: x"}})
    assert known.imports == {"torch": None, "transformers": "ImportError: x"}
    assert known.trouble is None


def test_the_probe_tells_a_broken_import_from_a_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('operator does not exist\\nand more')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert facts.try_import("json", ("dumps",))
    assert not facts.try_import("json", ("no_such_member",))
    assert not facts.try_import("broken_library")
    known = facts.parse(Ended(returncode=0, stdout=capsys.readouterr().out, last_error_line=""))
    assert known.imports["broken_library"] == "RuntimeError: operator does not exist"
    assert "no_such_member" in str(known.imports["json"])
