"""Values are called what they hold: words that say nothing of a value name none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.statements import PRODUCT, ROOT

SAY_NOTHING = {"again", "alike", "asked", "each", "found", "gone", "heed", "led"}
SAY_NOTHING |= {"place", "places", "said", "tells", "told"}
CHECKS = Path("bridge/checks")
"""`Check.found` is public, beside `expected`: what a check measured."""
ALLOWED = {CHECKS: {"found"}, Path("bridge/server/protocol.py"): {"found"}}


def bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that is given to a value, a function or a class, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno


def silent_names(file: Path) -> list[str]:
    path = file.relative_to(ROOT)
    allowed = next((names for part, names in ALLOWED.items() if path == part or part in path.parents), set())
    return [
        f"{path}:{line}: {name}"
        for name, line in bound(ast.parse(file.read_text()))
        if (word := name.strip("_").lower()) in SAY_NOTHING and word not in allowed
    ]


@pytest.mark.parametrize("folder", [*PRODUCT, "tests", "benchmarks"])
def test_names_say_what_they_hold(folder: str) -> None:
    assert [name for file in sorted((ROOT / folder).rglob("*.py")) for name in silent_names(file)] == []


@pytest.mark.parametrize(
    "code", ["told = 1", "def f(place): ...", "self._found = 2", "class Again: ...", "for each in x: ..."]
)
def test_a_name_that_says_nothing_is_seen(code: str) -> None:
    assert [name.strip("_").lower() in SAY_NOTHING for name, _ in bound(ast.parse(code))].count(True) == 1
