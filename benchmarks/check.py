r"""Recompute the figures that README.md and the pages in docs/ quote, from the files in `benchmarks/results`.

    python -m benchmarks.check

A page declares its figures in a comment, which covers the text up to the next such comment or heading;
`<!-- figures -->` ends it earlier:

    <!-- figures
    kept = grpo-7b-kept-nvidia-h200-vllm-0.26.0-2026-11-25.json 7b/rows
    1.50 times = kept[bridge].tokens_per_s / kept[trl].tokens_per_s
    | kept["trl"].step_s | kept["trl"].sync_s * 1000 |
    -->

- `NAME = FILE PATH` names the content of a result file under `results`; several files or a pattern give a list.
- `TEXT = EXPRESSION` declares the source of the numbers in a phrase. The phrase must be in the text, with these numbers
  as rounded there; several numbers are a tuple. `TEXT = no file` declares that they have no file; these are listed.
- `| EXPRESSION | ... |` is a row of the table: one expression for each cell but the first, or nothing for a cell
  without figures.

Expressions are Python arithmetic with `mean`, `median`, `stdev`, `min`, `max`, `sum`, `abs` and `len`. `.key` looks
into a dictionary, or into each item of a list; `["words"]` picks the only item of a list whose `side` and `variant`
contain the words (or all such items), and a number picks by position; `[one]` is `["one"]`. `first` and `last` return
that item of each list.

A table without a result file needs `<!-- figures: no file -->`, and its text must say "no result file". In README.md
every number with a unit must be declared, and in docs/benchmarks.md every cell of every table.

Not covered: whether a phrase says the right thing about a number.
"""

import argparse
import ast
import json
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/*.md")
HEADLINES = "README.md"
"""The page on which every number with a unit must be declared."""
WHOLE = "docs/benchmarks.md"
"""The page on which every table must be declared."""
COMMENT = re.compile(r"<!-- figures(: no file)?\s(.*?)-->", re.DOTALL)
END = re.compile(r"<!-- figures|^#", re.MULTILINE)
NO_FILE = "no result file"
"""What the text of a table without a result file must say."""
NOWHERE = "no file"
"""The expression for a phrase whose numbers are in no file."""
NUMBER = re.compile(r"(?<![\w.,-])(?:-(?=\d))?\d+(?:,\d{3})*(?:\.\d+)?(?!\w|[.,]\d)")
"""A number in a text; it excludes the 7 in 7B and the 8 in top-8."""
UNIT = re.compile(NUMBER.pattern + r"(?=(?: to \d[\d.,]*)?\s*(?:%|(?:s|ms|GiB|GB/s|times|seconds|minutes|tokens)\b))")
CELL_END = re.compile(r"(?<!\\)\|")
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
"""A fenced block of code or output."""
CODE = re.compile(r"`[^`\n]*`|\]\([^)]*\)|\b\d{4}-\d{2}-\d{2}\b")
"""Text without figures: code, links and dates."""
ALIAS = re.compile(r"(\w+) = (\S+\.json(?: \S+\.json)*)(?: (\S+))?$")
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "mean": statistics.fmean, "median": statistics.median, "stdev": statistics.stdev, "min": min, "max": max,
    "sum": sum, "abs": abs, "len": len,
    "first": lambda lists: [one[0] for one in lists],
    "last": lambda lists: [one[-1] for one in lists],
}  # fmt: skip


class NotHeldError(Exception):
    """A value is in no file; the message says which one."""


@dataclass(frozen=True)
class Marked:
    """A comment and the text that it covers."""

    page: str
    line: int
    has_file: bool
    claims: str
    text: str

    def at(self, message: str) -> str:
        """Return a problem, prefixed by the comment's page and line."""
        return f"{self.page}:{self.line}: {message}"


def main() -> None:
    """Print all problems; exit with 1 if there are any."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = problems()
    for problem in found:
        print(problem)
    print(*without_file(ROOT), sep="\n")
    if found:
        raise SystemExit(1)
    print(f"{sum(len(lines_of(marked)) for marked in all_marked(ROOT))} marked lines agree with benchmarks/results")


def without_file(root: Path) -> list[str]:
    """Return the quoted figures that are in no file."""
    every = all_marked(root)
    tables = [marked.at("no file holds this table, as its text says") for marked in every if not marked.has_file]
    phrases = [
        marked.at(f"no file holds {phrase!r}")
        for marked in every
        for phrase, _, expression in (line.partition(" = ") for line in lines_of(marked))
        if expression == NOWHERE
    ]
    return tables + phrases


def problems(root: Path = ROOT, results: Path = RESULTS) -> list[str]:
    """Return figures that differ from the results, that are in no file, or that are not declared but must be."""
    every = all_marked(root)
    wrong = [problem for marked in every for problem in differences(marked, results)]
    return [*wrong, *_unclaimed_headlines(root, every), *_unclaimed_tables(root, every)]


def all_marked(root: Path) -> list[Marked]:
    """Return all comments of all pages, each with its text."""
    pages = [path for pattern in PAGES for path in sorted(root.glob(pattern))]
    return [marked for path in pages for marked in marked_in(path.read_text(), path.relative_to(root).as_posix())]


def marked_in(text: str, page: str) -> Iterator[Marked]:
    """Yield the comments of a page, each with its text."""
    for comment in COMMENT.finditer(text):
        rest = text[comment.end() :]
        end = END.search(rest)
        yield Marked(
            page=page, line=text.count("\n", 0, comment.start()) + 1, has_file=comment[1] is None, claims=comment[2],
            text=rest[: end.start()] if end else rest,
        )  # fmt: skip


def differences(marked: Marked, results: Path) -> list[str]:
    """Return the declarations of one text that are wrong or cannot be computed."""
    if not marked.has_file:
        return [] if NO_FILE in _flat(marked.text) else [marked.at(f'the text does not say "{NO_FILE}"')]
    names, found, rows = dict[str, Any](), list[str](), iter(table_rows(marked.text))
    for line in lines_of(marked):
        try:
            if alias := ALIAS.match(line):
                names[alias[1]] = _held(results, alias[2].split(), alias[3])
            elif line.startswith("|"):
                found += _row_differences(line, next(rows, None), names)
            else:
                found += _phrase_differences(line, marked.text, names)
        except NotHeldError as error:
            found.append(f"{line!r}: {error}")
    if any(line.startswith("|") for line in lines_of(marked)) and (left := next(rows, None)):
        found.append(f"no line for the row {left[0]!r}")
    return [marked.at(message) for message in found]


def lines_of(marked: Marked) -> list[str]:
    """Return the lines of a comment."""
    return [line.strip() for line in marked.claims.splitlines() if line.strip()]


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows, without header rows."""
    rows = list[list[str]]()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_rule = set(line) <= set("|-: ")
        is_head = number + 1 < len(lines) and "-" in lines[number + 1] and set(lines[number + 1]) <= set("|-: ")
        if line.startswith("|") and not is_rule and not is_head:
            rows.append([cell.strip() for cell in CELL_END.split(line.strip().strip("|"))])
    return rows


def agrees(shown: str, value: float) -> bool:
    """Return whether a number on a page is `value`, rounded to the digits shown."""
    half_a_digit: float = 0.5 / 10 ** len(shown.partition(".")[2])
    return abs(value - float(shown.replace(",", ""))) <= half_a_digit * (1 + 1e-9)


def numbers(text: str) -> list[str]:
    """Return the numbers in a text, except those in code, links and dates."""
    return NUMBER.findall(CODE.sub(" ", text.replace(r"\|", " ")))


def computed(expression: str, names: Mapping[str, Any]) -> list[float]:
    """Evaluate an expression."""
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise NotHeldError("not an expression") from error
    value = _value(tree, names)
    values = list(value) if isinstance(value, tuple) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise NotHeldError(f"{expression} is {type(one).__name__}, expected a number")
    return values


def _row_differences(line: str, cells: list[str] | None, names: Mapping[str, Any]) -> list[str]:
    if cells is None:
        return [f"{line!r}: the table has no row for it"]
    expressions = [part.strip() for part in line.strip("|").split("|")]
    if len(expressions) != len(cells) - 1:
        return [f"{cells[0]!r}: {len(expressions)} expressions for {len(cells) - 1} cells"]
    found = list[str]()
    for cell, expression in zip(cells[1:], expressions, strict=True):
        if expression:
            found += _compared(cell, expression, names, place=f"{cells[0]!r}, {cell!r}")
        elif numbers(cell):
            found.append(f"{cells[0]!r}: no expression for {cell!r}")
    return found


def _phrase_differences(line: str, text: str, names: Mapping[str, Any]) -> list[str]:
    phrase, is_claim, expression = line.partition(" = ")
    if not is_claim:
        return [f"{line!r}: expected NAME = FILE, TEXT = EXPRESSION, or a row of expressions"]
    if _flat(phrase) not in _flat(text):
        return [f"{phrase!r} is not in the text"]
    if expression == NOWHERE:
        return []
    return _compared(phrase, expression, names, place=repr(phrase))


def _compared(text: str, expression: str, names: Mapping[str, Any], *, place: str) -> list[str]:
    shown = numbers(text)
    try:
        values = computed(expression, names)
    except NotHeldError as error:
        return [f"{place}: {error}"]
    if len(shown) != len(values):
        return [f"{place}: {len(values)} values for {len(shown)} numbers"]
    pairs = zip(shown, values, strict=True)
    return [f"{place}: {one} is {value:.6g} in the results" for one, value in pairs if not agrees(one, value)]


@cache
def _document(path: Path) -> Any:
    document = json.loads(path.read_text())
    return document.get("results", document)


def _held(results: Path, patterns: Sequence[str], path: str | None) -> Any:
    files = [file for pattern in patterns for file in sorted(results.glob(pattern))]
    if not files:
        raise NotHeldError("there is no such file in benchmarks/results")
    roots = [_document(file) for file in files]
    for key in path.split("/") if path else ():
        roots = [_entry(root, key) for root in roots]
    if len(files) == 1:
        return roots[0]
    return [item for root in roots for item in (root if isinstance(root, list) else [root])]


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() as constant):
            return constant
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names) for part in parts)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, names)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=function), args=arguments) if function in FUNCTIONS:
            return FUNCTIONS[function](*(_value(argument, names) for argument in arguments))
        case ast.Attribute(value=inner, attr=key):
            return _entry(_value(inner, names), key)
        case ast.Subscript(value=inner, slice=ast.Name(id=words)):
            return _entry(_value(inner, names), words)
        case ast.Subscript(value=inner, slice=place):
            return _entry(_value(inner, names), _value(place, names))
    raise NotHeldError(f"{ast.unparse(node)} is not known here")


def _entry(held: Any, key: Any) -> Any:
    """Look up a key, a position, or the only item that contains the words; in a list, look up the key in each item."""
    if isinstance(held, dict) and key in held:
        return held[key]
    if isinstance(held, list) and isinstance(key, int) and key < len(held):
        return held[key]
    if isinstance(held, list) and isinstance(key, str):
        if held and all(isinstance(item, dict) and key in item for item in held):
            return [item[key] for item in held]
        named = [item for item in held if isinstance(item, dict) and key in f"{item.get('side')} {item.get('variant')}"]
        if len(named) == 1:
            return named[0]
        if named:
            return named
    raise NotHeldError(f"no file holds {key!r} there")


def _flat(text: str) -> str:
    return " ".join(text.split())


def _unclaimed_headlines(root: Path, every: Sequence[Marked]) -> list[str]:
    text = CODE.sub(" ", BLOCK.sub(" ", COMMENT.sub(" ", (root / HEADLINES).read_text())))
    claimed = " ".join(_phrases(marked) for marked in every if marked.page == HEADLINES)
    flat = _flat(text)
    return [
        f"{HEADLINES}: no claim says where {flat[max(0, one.start() - 30) : one.end() + 12]!r} comes from"
        for one in UNIT.finditer(flat)
        if one[0] not in numbers(claimed)
    ]


def _phrases(marked: Marked) -> str:
    return " ".join(line.partition(" = ")[0] for line in lines_of(marked) if not ALIAS.match(line))


def _unclaimed_tables(root: Path, every: Sequence[Marked]) -> list[str]:
    rows = table_rows(COMMENT.sub(" ", (root / WHOLE).read_text()))
    known = [row for marked in every if marked.page == WHOLE for row in table_rows(marked.text)]
    return [f"{WHOLE}: no comment says where the row {row[0]!r} comes from" for row in rows if row not in known]


if __name__ == "__main__":
    main()
