"""The child process of the checks, and how its output becomes facts."""

import json
import time
from pathlib import Path

import pytest

from bridge.checks import child
from bridge.checks.child import Ended, Facts, run_child
from bridge.core.process import ProcessIdentity


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module that a child can run."""
    monkeypatch.setattr(child, "_ROOT", str(tmp_path))
    return tmp_path / "tried_program.py"


def test_child_gets_its_arguments_and_its_input(program: Path) -> None:
    program.write_text("import sys; print(sys.argv[1:], sys.stdin.read())")
    ended = run_child("a", "b", module=program.stem, timeout_s=20, stdin="input")
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
    assert run_child(module=program.stem, timeout_s=20).trouble() == trouble


def test_hanging_child_is_killed_with_its_children(program: Path) -> None:
    program.write_text(
        "import subprocess, time; print(subprocess.Popen(['sleep', '999']).pid, flush=True); time.sleep(999)"
    )
    ended = run_child(module=program.stem, timeout_s=5)
    assert ended.trouble() == "no answer within the time limit"
    try:
        grandchild = ProcessIdentity.of(int(ended.stdout))
    except ProcessLookupError:
        return
    while grandchild.is_alive():  # a killed process ends when it is next scheduled
        time.sleep(0.01)


def test_current_folder_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    ended = run_child("write-memfd", "/nowhere", timeout_s=20)
    assert ended.trouble() == "[Errno 2] No such file or directory: '/nowhere'"


def probed(*lines: object, returncode: int = 0) -> Facts:
    stdout = "".join(json.dumps({"probe": line}) + "\n" for line in lines)
    return child.parse(Ended(returncode=returncode, stdout="a library's banner\n" + stdout))


def test_facts_survive_a_later_crash() -> None:
    facts = probed(
        {"doing": "import torch"}, {"torch": "2.13.0"}, {"imports": {"torch": None}}, {"doing": "start CUDA"},
        returncode=-11,
    )  # fmt: skip
    crash = "Python was killed by SIGSEGV (start CUDA)"
    assert (facts.torch, facts.trouble, facts.gpus) == ("2.13.0", crash, ())
    assert (facts.import_error("torch"), facts.import_error("transformers")) == (None, crash)


def test_imports_add_up() -> None:
    facts = probed({"imports": {"torch": None}}, {"imports": {"transformers": "ImportError: x"}})
    assert facts.imports == {"torch": None, "transformers": "ImportError: x"}
    assert facts.trouble is None


def test_broken_imports_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('operator does not exist\\nand more')")
    monkeypatch.syspath_prepend(str(tmp_path))
    members = [("json", ("dumps",)), ("json", ("no_such_member",)), ("broken_library", ())]
    assert [child.try_import(*member) for member in members] == [True, False, False]
    imports = child.parse(Ended(returncode=0, stdout=capsys.readouterr().out)).imports
    assert imports["broken_library"] == "RuntimeError: operator does not exist"
    assert "no_such_member" in str(imports["json"])


def test_this_machine_has_torch_and_transformers() -> None:
    facts = child.gather()
    assert (facts.trouble, facts.import_error("transformers")) == (None, None)
    assert facts.torch is not None
