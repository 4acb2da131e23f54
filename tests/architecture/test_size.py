"""The product stays small: limits on statements, files and functions. Lower a limit whenever it can be lowered.

`python -m tests.architecture.statements` prints the sizes by package.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.statements import ROOT, is_docstring, product_files, sizes

MOST_STATEMENTS = 22_249
MOST_FILES = 241
MOST_LINES_OF_A_FILE = 320
MOST_LINES_OF_A_FUNCTION = 45
MOST_WHOLE_CONFIGS = 21
"""Functions that take all choices of a run, although few use more than a section."""


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in product_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file.relative_to(ROOT), node


def test_the_product_is_no_larger_than_it_was() -> None:
    measured = sizes()
    assert sum(size.statements for size in measured) <= MOST_STATEMENTS
    assert len(measured) <= MOST_FILES


def test_no_file_is_long() -> None:
    assert [str(size.file) for size in sizes() if size.lines > MOST_LINES_OF_A_FILE] == []


def test_no_function_is_long() -> None:
    """Counted without its docstring."""
    lengths = {}
    for file, node in functions():
        docstring = node.body[0]
        described = (docstring.end_lineno or 0) - docstring.lineno + 1 if is_docstring(docstring) else 0
        lengths[f"{file}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1 - described
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def test_few_functions_take_the_whole_configuration() -> None:
    takers = []
    for file, node in functions():
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = (ast.unparse(one.annotation) for one in parameters if one.annotation is not None)
        if any("TrainConfig" in annotation for annotation in annotations):
            takers.append(f"{file}: {node.name}")
    assert len(takers) <= MOST_WHOLE_CONFIGS, takers


def test_no_statement_sets_two_attributes() -> None:
    """A search for `self._name =` finds every place that sets it."""
    double = []
    for file in product_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Assign):
                continue
            elements = [element for target in node.targets for element in getattr(target, "elts", [target])]
            if sum(isinstance(element, ast.Attribute) for element in elements) > 1 or (
                isinstance(node.targets[0], ast.Attribute) and len(node.targets) > 1
            ):
                double.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert double == []
