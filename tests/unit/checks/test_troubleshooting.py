"""docs/troubleshooting.md is generated from the checks of `bridge doctor`, and no finding of a check is missing."""

import ast
import sys
from pathlib import Path

import pytest

from bridge import checks
from bridge.checks import Check, hardware, software
from tests import troubleshooting
from tests.troubleshooting import FINDINGS, PAGE, page

ROOT = Path(__file__).parents[3]
CHECKS = [*sorted((ROOT / "bridge" / "checks").glob("*.py")), ROOT / "cli" / "bridge_cli" / "doctor.py"]
OTHERS = {"__init__.py", "verify.py", "quantized.py"}
REPORTS = {"failed", "warned", "judged"}


def reports(file: Path) -> list[ast.Call]:
    """Return every call in `file` that can make a WARN or a FAIL."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in REPORTS]
    return [*named, *(call for call in calls if isinstance(call.func, ast.IfExp))]


def test_the_page_in_the_docs_is_the_one_that_the_checks_make() -> None:
    assert PAGE.read_text() == page(), "python -m tests.troubleshooting"


def test_the_page_has_every_finding_of_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_variable_and_every_cause_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert [rule.name for rule in software.RULES if f"### {rule.name}\n" not in text] == []
    causes = [meaning for _, meaning, _ in (*hardware.SURE, *hardware.LIKELY)]
    assert [meaning for meaning in causes if meaning not in text] == []


def test_nothing_of_this_machine_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert [name for name in (sys.prefix, str(ROOT), "/tmp") if f"{name}/" in text] == []
    assert troubleshooting._cell("a | b *c* <d>") == r"a \| b \*c\* &lt;d>"
