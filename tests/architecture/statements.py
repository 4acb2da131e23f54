"""Print the size of the product by package: `python -m tests.architecture.statements`.

Statements are those of Python's syntax tree, without docstrings, so neither joining nor splitting lines changes it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("bridge", "cli", "environments", "patches")


@dataclass(frozen=True)
class Size:
    """The size of one file."""

    file: Path
    """Relative to the repository."""
    statements: int
    lines: int


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def product_files() -> Iterator[Path]:
    for folder in PRODUCT:
        yield from sorted((ROOT / folder).rglob("*.py"))


def sizes() -> list[Size]:
    """Return the size of every file of the product."""
    measured = []
    for file in product_files():
        text = file.read_text()
        statements = sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(ast.parse(text)))
        measured.append(Size(file.relative_to(ROOT), statements, len(text.splitlines())))
    return measured


def main() -> None:
    """Print one row per package, and their sum."""
    measured = sizes()
    print(f"{'package':36} {'statements':>10} {'lines':>7} {'files':>6}")  # noqa: T201
    for package in [*sorted({size.file.parent for size in measured}), Path()]:
        inside = [size for size in measured if package in {size.file.parent, Path()}]
        statements = sum(size.statements for size in inside)
        lines = sum(size.lines for size in inside)
        name = "all" if package == Path() else str(package)
        print(f"{name:36} {statements:10,} {lines:7,} {len(inside):6}")  # noqa: T201


if __name__ == "__main__":
    main()
