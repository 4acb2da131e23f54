"""Every finding that a check of `bridge doctor` can report is produced here, and says how to fix it."""

import ast
import sys
from pathlib import Path

import pytest

from bridge import checks
from bridge.checks import Check, hardware, software
from tests.unit.checks_findings import FINDINGS

ROOT = Path(__file__).parents[3]
CHECKS = [*sorted((ROOT / "bridge" / "checks").glob("*.py")), ROOT / "cli" / "bridge_cli" / "doctor.py"]
OTHERS = {"__init__.py", "one_copy_proof.py"}
REPORTS = {"failed", "warned", "judged"}


def reports(file: Path) -> list[ast.Call]:
    """Return every call in `file` that can produce a WARN or a FAIL."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in REPORTS]
    return [*named, *(call for call in calls if isinstance(call.func, ast.IfExp))]


def test_every_report_of_every_check_has_a_test_case(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: set[tuple[str, int]] = set()

    def record(check: Check) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename in ("<string>", checks.__file__) and frame.f_back:
            frame = frame.f_back
        if check.status in ("WARN", "FAIL"):
            executed.add((frame.f_code.co_filename, frame.f_lineno))

    monkeypatch.setattr(Check, "__post_init__", record)
    for findings in FINDINGS.values():
        list(findings())
    calls = [(str(file), call) for file in CHECKS if file.name not in OTHERS for call in reports(file)]
    assert len(calls) > 40
    missing = [
        f"{file}:{call.lineno}"
        for file, call in calls
        if not any((file, line) in executed for line in range(call.lineno, (call.end_lineno or 0) + 1))
    ]
    assert missing == []


def test_every_finding_has_a_fix() -> None:
    findings = [check for section in FINDINGS.values() for check in section() if check.status in ("WARN", "FAIL")]
    assert [check.name for check in findings if not (check.found and check.expected and check.hint)] == []


def test_every_variable_and_cause_has_a_finding() -> None:
    findings = [check for section in FINDINGS.values() for check in section() if check.status in ("WARN", "FAIL")]
    assert {rule.name for rule in software.RULES} <= {check.name for check in findings}
    found = " ".join(check.found for check in findings)
    assert [cause for _, cause, _ in (*hardware.SURE, *hardware.LIKELY) if cause not in found] == []
