"""docs/troubleshooting.md: its headings are messages of the product, and its exit codes are those of the errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge import errors
from bridge.errors import BridgeError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)
EXIT_CODE = re.compile(r"^\| (\d) \|", re.MULTILINE)
VALUE = "\0"
"""Stands for the values in an f-string."""


def messages() -> Iterator[str]:
    """Yield every text of the product's source; values in f-strings are `VALUE`."""
    for package in ("bridge", "cli/bridge_cli", "patches/bridge_patches"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(messages())


@pytest.mark.parametrize("heading", HEADING.findall(PAGE.read_text()))
def test_every_troubleshooting_heading_is_a_message(heading: str, texts: list[str]) -> None:
    form = re.compile(".*".join(re.escape(part) for part in heading.split("...")), re.DOTALL)
    assert any(form.fullmatch(text) for text in texts)


def test_heading_that_no_code_prints_is_detected(texts: list[str]) -> None:
    with pytest.raises(AssertionError):
        test_every_troubleshooting_heading_is_a_message("vLLM was never ready within ... s", texts)


def test_exit_codes_are_those_of_the_errors() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BridgeError)]
    assert {int(code) for code in EXIT_CODE.findall(PAGE.read_text())} == {0, *(error.exit_code for error in classes)}
