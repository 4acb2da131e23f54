"""What Bridge relies on in vLLM, checked in vLLM's source text without importing vLLM or torch.

Each file of this package lists what it needs in `PINS` at its top: vLLM modules, each with one statement after a colon
or several indented below it. A statement continues on lines that are indented further; comments start with #.

    call f(a, b)          f takes a and b, and no other arguments without a default
    wrap C.f(a)           f of class C takes a; other arguments are passed through
    replace f(a, b)       f takes exactly these arguments, in this order
    call async f()        `async` in any of the three: f is a coroutine function
    C: a, b               class C, or a base in the same file, declares, defines or assigns to `self` a and b
    name                  is defined
    NAME = 'value'        a constant whose value Bridge repeats
    C.a = field(...)      a default that Bridge knows; ` | ` separates several
    f lists names: a, b   the list `names` inside f has no other items
    f imports m.name      f imports it each time it runs, so replacing the name takes effect
    if name: statement    applies only if the module defines `name`; otherwise Bridge does not need it
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Groups = dict[str, str]
"""The parts of a parsed statement, by name."""
PATCHES = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One statement about a vLLM module."""

    module: str
    statement: str
    patch: str = ""
    """The file of this package that needs the pinned symbol, without `.py`."""

    def fault(self, source: ast.Module | None) -> str | None:
        """Return a phrase that says how `source` does not fit; None if it fits."""
        groups, check = self.parsed()
        if groups.get("condition") and (source is None or find(source, groups["condition"]) is None):
            return None
        fault = "is missing with its module" if source is None else check(source, groups)
        return fault and f"{self.module}.{groups['name']} {fault}"

    def parsed(self) -> "tuple[Groups, Callable[[ast.Module, Groups], str | None]]":
        """Return the parts of the statement, and the function that checks them."""
        for form, check in FORMS.items():
            if match := re.fullmatch(form, self.statement):
                return match.groupdict(""), check
        raise ValueError(f"{self.patch}: {self.statement!r} is not a statement about {self.module}")


def collect() -> list[Pin]:
    return [pin for file in sorted(PATCHES.glob("*.py")) for pin in of_file(file)]


def of_file(file: Path) -> Iterator[Pin]:
    node = find(ast.parse(file.read_text(encoding="utf-8")), "PINS")
    text = ast.literal_eval(node.value) if isinstance(node, ast.Assign) else ""
    module = ""
    for line in re.sub(r"\n {8}\s*", " ", text).splitlines():
        statement = line.partition("#")[0].rstrip()
        if statement and not statement.startswith(" "):
            module, _, statement = statement.partition(": ")
        if statement:
            yield Pin(module=module, statement=statement.strip(), patch=file.stem)


def find(source: ast.Module, name: str) -> ast.stmt | None:
    """Return the statement that defines `name` (`f`, `Class` or `Class.f`), also within `if` or in a base class."""
    owner, _, leaf = name.rpartition(".")
    bodies = [node.body for node in _lineage(source, owner)] if owner else [source.body]
    return next((node for body in bodies for node in _statements(body) if leaf in _defined(node)), None)


def imports_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, imported name or "") for each import anywhere in `node`."""
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield from ((child.module, alias.name) for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names)


def _signature_fault(source: ast.Module, groups: Groups) -> str | None:
    node = find(source, groups["name"])
    if not isinstance(node, FunctionNode):
        return "is missing"
    if isinstance(node, ast.AsyncFunctionDef) != bool(groups["is_async"]):
        return f"is {'not async' if groups['is_async'] else 'async'}, expected the opposite"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    first_default = len(arguments) - len(node.args.defaults) - len(node.args.kwonlyargs)
    defaults = [*[None] * first_default, *node.args.defaults, *node.args.kw_defaults]
    has_default = {argument.arg: value is not None for argument, value in zip(arguments, defaults, strict=True)}
    has_default.pop("self", None)
    expected = _names(groups)
    taken = f"takes ({', '.join(has_default)}), expected ({groups['names']})"
    fits = has_default.keys() >= set(expected)
    if groups["use"] == "replace":
        fits = list(has_default) == expected
    if not fits:
        return taken
    required = sorted(name for name in has_default if not has_default[name] and name not in expected)
    if groups["use"] == "call" and required:
        return f"{taken}: {', '.join(required)} has no default"
    return None


def _definition_fault(source: ast.Module, groups: Groups) -> str | None:
    if find(source, groups["name"]) is None:
        return "is missing"
    attributes = {name for node in _lineage(source, groups["name"]) for name in _attributes(node)}
    missing = [name for name in _names(groups) if name not in attributes]
    return f"has no attribute {', '.join(missing)}" if missing else None


def _constant_fault(source: ast.Module, groups: Groups) -> str | None:
    node = find(source, groups["name"])
    value = None
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
        value = ast.unparse(node.value)
    if value in groups["value"].split(" | "):
        return None
    return f"is {value}, expected {groups['value']}"


def _list_fault(source: ast.Module, groups: Groups) -> str | None:
    statements = ast.walk(find(source, groups["name"]) or ast.Pass())
    assigned = [child for child in statements if isinstance(child, ast.Assign)]
    lists = [child.value for child in assigned if groups["variable"] in _defined(child)]
    if len(lists) != 1 or not isinstance(lists[0], ast.List):
        return f"has no list {groups['variable']}"
    unknown = sorted({str(ast.literal_eval(item)) for item in lists[0].elts} - set(_names(groups)))
    return f"lists {', '.join(unknown)}, which Bridge does not know" if unknown else None


def _import_fault(source: ast.Module, groups: Groups) -> str | None:
    node = find(source, groups["name"])
    if not isinstance(node, FunctionNode):
        return "is missing"
    module, _, leaf = groups["imported"].rpartition(".")
    return None if (module, leaf) in imports_of(node) else f"does not import {groups['imported']} when it runs"


IF = r"(if (?P<condition>[\w.]+): )?"
NAME = r"(?P<name>[\w.]+)"
NAMES = r"(?P<names>[\w, ]*)"
FORMS = {
    rf"{IF}(?P<use>call|wrap|replace) (?P<is_async>async )?{NAME}\({NAMES}\)": _signature_fault,
    rf"{IF}{NAME}(: {NAMES})?": _definition_fault,
    rf"{IF}{NAME} = (?P<value>'.+'|field\(.+\))": _constant_fault,
    rf"{NAME} lists (?P<variable>\w+): {NAMES}": _list_fault,
    rf"{NAME} imports (?P<imported>[\w.]+)": _import_fault,
}


def _names(groups: Groups) -> list[str]:
    return groups["names"].split(", ") if groups["names"] else []


def _lineage(source: ast.Module, class_name: str) -> Iterator[ast.ClassDef]:
    """Yield the class and its bases that are defined in this file, nearest first."""
    for node in _statements(source.body):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            yield node
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id != class_name:
                    yield from _lineage(source, base.id)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _defined(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, FunctionNode | ast.ClassDef):
        return (node.name,)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    yield from (name for statement in node.body for name in _defined(statement))
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and ast.unparse(child.value) == "self":
            yield child.attr
