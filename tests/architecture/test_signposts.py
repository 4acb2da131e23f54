"""Every file, test, make target, command and flag named in docstrings and docs exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bridge_cli import main

ROOT = Path(__file__).parents[2]
PACKAGES = ("bridge", "cli", "environments", "patches", "benchmarks", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
"""Text in backquotes; it may contain one line break."""
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^]]*\]\(([^)#\s]*)[^)]*\)")
ANCHOR = re.compile(r"\[[^]]*\]\(([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)
SOURCE = re.compile(r"^ *Source: .*", re.MULTILINE | re.DOTALL)
FILE = re.compile(
    r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml)(?:::\w+)?"
    r"|(?:bridge|cli|environments|patches|benchmarks|docs|tests)(?:/[\w-]+)+/?"
)
COMMAND = re.compile(r"(?:^|(?<=[\s$]))bridge ([a-z][a-z-]*)((?:[ \t]+(?!-- )[^\s|#;&]+)*)", re.MULTILINE)
FLAG = re.compile(r"(?<=\s)--[a-z][a-z-]*")
TARGET = re.compile(r"(?:^|(?<=\s))make ([a-z][a-z-]*)\b", re.MULTILINE)
OF_OTHERS = ("vllm", "torch", "transformers", "https:", "http:")
"""Prefixes of names outside this repository."""


def docstrings(file: Path) -> Iterator[str]:
    """Yield every docstring of a file, including those of fields."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def pages() -> list[Path]:
    return [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every piece of quoted code with its file."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for text in docstrings(file):
                yield from ((file, code) for code in CODE.findall(SOURCE.sub("", text)))
    for page in pages():
        text = page.read_text().replace("\\\n", "")
        yield from ((page, code) for code in (*FENCED.findall(text), *CODE.findall(LINK.sub("", FENCED.sub("", text)))))


@cache
def exists(name: str, near: Path) -> bool:
    """Return whether `name` is a file relative to a parent folder of `near` or to a package."""
    path, _, test = name.partition("::")
    folders = [*near.parents, *(ROOT / package for package in PACKAGES)]
    paths = [folder / path for folder in folders if folder.is_relative_to(ROOT) and (folder / path).exists()]
    return any(not test or f"def {test}(" in file.read_text() for file in paths)


@cache
def flags_of(command: str) -> set[str]:
    """Return the flags of a command, including hidden ones."""
    context = main.LazyCommand(command, *main.COMMANDS[command]).make_context(command, [], resilient_parsing=True)
    return {
        "--help",
        *(flag for parameter in context.command.params for flag in (*parameter.opts, *parameter.secondary_opts)),
    }


def stale(text: str, near: Path) -> Iterator[str]:
    """Yield the names in `text` that do not exist."""
    if FILE.fullmatch(text) and text.partition("/")[0] not in OF_OTHERS and not exists(text, near):
        yield text
    for command, arguments in COMMAND.findall(text):
        if command not in main.COMMANDS:
            yield f"bridge {command}"
        else:
            yield from (f"bridge {command} {flag}" for flag in FLAG.findall(arguments) if flag not in flags_of(command))
    yield from (f"make {target}" for target in TARGET.findall(text) if target not in make_targets())


@cache
def make_targets() -> list[str]:
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_named_file_test_and_flag_exists() -> None:
    stale_names = {f"{file.relative_to(ROOT)}: {name}" for file, text in texts() for name in stale(text, file)}
    assert sorted(stale_names) == []


def test_every_link_points_to_a_file() -> None:
    links = [(page, link) for page in pages() for link in LINK.findall(page.read_text())]
    inside = [(page, link) for page, link in links if link and not link.startswith(OF_OTHERS)]
    assert len(inside) > 10
    assert [f"{page.name}: {link}" for page, link in inside if not (page.parent / link).exists()] == []


def test_every_link_anchor_is_a_heading() -> None:
    links = [(page, *link) for page in pages() for link in ANCHOR.findall(page.read_text())]
    inside = [(page, path, anchor) for page, path, anchor in links if not path.startswith(OF_OTHERS)]
    assert inside
    assert [link for link in inside if link[2] not in anchors((link[0].parent / link[1]) if link[1] else link[0])] == []


def anchors(page: Path) -> set[str]:
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_site_has_every_page_of_the_docs() -> None:
    shown = re.findall(r"^  - .*: ([\w.]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(["index.md", *(page.name for page in (ROOT / "docs").glob("*.md"))])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("test_signposts.py", []),
        ("tests/architecture/test_signposts.py::test_every_named_file_test_and_flag_exists", []),
        ("tests/architecture/test_signposts.py::test_nothing", ["tests/architecture/test_signposts.py::test_nothing"]),
        ("test_nothing.py", ["test_nothing.py"]),
        ("vllm/no/such/file.py", []),
        ("bridge train --lr 1 -- --no-such-flag", []),
        ("bridge train --no-such-flag", ["bridge train --no-such-flag"]),
        ("bridge no-such-command", ["bridge no-such-command"]),
        ("make test no-such-target", []),
        ("make no-such-target", ["make no-such-target"]),
    ],
)
def test_stale_names_are_detected(text: str, expected: list[str]) -> None:
    assert list(stale(text, Path(__file__))) == expected
