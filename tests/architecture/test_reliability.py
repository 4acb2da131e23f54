"""`docs/reliability.md`: every cell names a test that exists, or gives the reason why there is none."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
MARK = re.compile(r"\[(\d+)\]")
REASON = "—"
"""Prefix of a cell that no test covers; the reason follows."""


def table() -> list[list[str]]:
    """Return the cells of the page's table; the first row holds the phases."""
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def notes() -> dict[str, str]:
    """Return the notes below the table by number."""
    return dict(re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", PAGE, re.MULTILINE))


def _tests_in(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def test_every_test_named_on_the_page_exists() -> None:
    references = NAMED.findall(PAGE)
    assert references
    assert [f"{file}::{name}" for file, name in references if name not in _tests_in(ROOT / file)] == []


def test_every_cell_names_an_outcome_and_a_test() -> None:
    phases, *faults = table()
    assert len(phases) == 6
    assert len(faults) >= 15
    known = notes().keys()
    for fault, *cells in faults:
        assert len(cells) == len(phases) - 1, fault
        for phase, cell in zip(phases[1:], cells, strict=True):
            marks = MARK.findall(cell)
            assert MARK.sub("", cell).strip(f"{REASON} "), (fault, phase)
            assert marks or cell.startswith(REASON), (fault, phase)
            assert set(marks) <= known, (fault, phase)


def test_every_note_names_a_test_and_is_used() -> None:
    assert set(MARK.findall(PAGE)) == notes().keys()
    assert [number for number, note in notes().items() if not NAMED.search(note)] == []
