"""Read a Python module's source text: what it defines and with which parameters, without importing it.

Not covered: base classes of other files.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ImportedName = tuple[str, str]
"""A module, and the name imported from it."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a caller has to know about one function."""

    parameters: tuple[str, ...]
    """Every named parameter in order, `*args` and `**kwargs` left out."""
    required: frozenset[str]
    """Those without a default."""
    is_async: bool
    """True if calling it gives something to await."""


class Source:
    """The definitions of one module."""

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)

    def signature(self, name: str) -> Signature | None:
        """Return the signature of function `name` (`f` or `Class.f`), inherited or not; None if there is none."""
        node = self._find(name)
        return _signature(node) if isinstance(node, FunctionNode) else None

    def attributes(self, class_name: str) -> frozenset[str] | None:
        """Return what class `class_name` and its bases declare, define or assign to `self`; None if it is missing."""
        lineage = list(self._lineage(class_name))
        return frozenset(name for node in lineage for name in _attributes(node)) if lineage else None

    def constant(self, name: str) -> object | None:
        """Return the literal that module-level `name` is assigned; None if it is missing or computed."""
        node = self._find(name)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        return value.value if isinstance(value, ast.Constant) else None

    def imports_inside(self, name: str) -> frozenset[ImportedName] | None:
        """Return what function `name` imports each time that it runs; None if the function is missing."""
        node = self._find(name)
        return frozenset(_imports(node)) if isinstance(node, FunctionNode) else None

    def strings_inside(self, name: str, variable: str) -> frozenset[str] | None:
        """Return the strings of the list that function `name` assigns to `variable`; None if there is no such list."""
        node = self._find(name)
        children = ast.walk(node) if isinstance(node, FunctionNode) else ()
        lists = [child.value for child in children if isinstance(child, ast.Assign) and variable in _defined(child)]
        if len(lists) != 1 or not isinstance(lists[0], ast.List):
            return None
        return frozenset(str(item.value) for item in lists[0].elts if isinstance(item, ast.Constant))

    def imports_from(self, package: str) -> frozenset[ImportedName]:
        """Return every name that this source imports from `package` and below, wherever the import stands."""
        return frozenset(pair for pair in _imports(self._tree) if f"{pair[0]}.".startswith(f"{package}."))

    def defines(self, name: str) -> bool:
        """Tell whether module-level or class-level `name` is defined or declared, under an `if` or not."""
        return self._find(name) is not None

    def _find(self, name: str) -> ast.stmt | None:
        owner, _, leaf = name.rpartition(".")
        bodies = [node.body for node in self._lineage(owner)] if owner else [self._tree.body]
        return next((node for body in bodies for node in _statements(body) if leaf in _defined(node)), None)

    def _lineage(self, class_name: str) -> Iterator[ast.ClassDef]:
        """Yield the class and those of its bases that this file defines, nearest first."""
        for node in _statements(self._tree.body):
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                yield node
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id != class_name:
                        yield from self._lineage(base.id)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of `body`, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _defined(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, FunctionNode | ast.ClassDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _signature(node: FunctionNode) -> Signature:
    positional = [*node.args.posonlyargs, *node.args.args]
    without_default = positional[: len(positional) - len(node.args.defaults)]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required = [*without_default, *(argument for argument, default in pairs if default is None)]
    return Signature(
        parameters=tuple(argument.arg for argument in [*positional, *node.args.kwonlyargs]),
        required=frozenset(argument.arg for argument in required),
        is_async=isinstance(node, ast.AsyncFunctionDef),
    )


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        yield from _defined(statement)
    for child in ast.walk(node):
        match child:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _imports(node: ast.AST) -> Iterator[ImportedName]:
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield from ((child.module, alias.name) for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names)
