"""The probe: how the lines of its process become facts."""

import json
from pathlib import Path

import pytest

from bridge.checks import probe
from bridge.checks.probe import Facts
from bridge.core.python_child import Ended


def probed(*lines: object, returncode: int = 0) -> Facts:
    stdout = "".join(json.dumps({"probe": line}) + "\n" for line in lines)
    return probe.parse(Ended(returncode=returncode, stdout="a library's banner\n" + stdout))


def test_facts_survive_a_later_crash() -> None:
    facts = probed(
        {"doing": "import torch"}, {"torch": "2.13.0"}, {"imports": {"torch": None}}, {"doing": "start CUDA"},
        returncode=-11,
    )  # fmt: skip
    crash = "Python was killed by SIGSEGV (start CUDA)"
    assert (facts.torch, facts.trouble, facts.gpus) == ("2.13.0", crash, ())
    assert (facts.import_error("torch"), facts.import_error("transformers")) == (None, crash)


def test_import_reports_are_merged() -> None:
    facts = probed({"imports": {"torch": None}}, {"imports": {"transformers": "ImportError: x"}})
    assert facts.imports == {"torch": None, "transformers": "ImportError: x"}
    assert facts.trouble is None


def test_broken_imports_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('operator does not exist\\nand more')")
    monkeypatch.syspath_prepend(str(tmp_path))
    members = [("json", ("dumps",)), ("json", ("no_such_member",)), ("broken_library", ())]
    assert [probe.try_import(*member) for member in members] == [True, False, False]
    imports = probe.parse(Ended(returncode=0, stdout=capsys.readouterr().out)).imports
    assert imports["broken_library"] == "RuntimeError: operator does not exist"
    assert "no_such_member" in str(imports["json"])


def test_probe_finds_torch_and_transformers() -> None:
    facts = probe.ask("imports", "cuda")
    assert (facts.trouble, facts.import_error("transformers")) == (None, None)
    assert facts.torch is not None
