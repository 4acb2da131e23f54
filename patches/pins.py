"""The six kinds of statement that we pin about vLLM's source, each of which can tell what does not fit.

Not covered: which symbols are pinned (`symbols/`) and where the source comes from (`compatibility.py`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from patches.source import Source


@dataclass(frozen=True, kw_only=True)
class Pin(ABC):
    """One name of vLLM and why we need it."""

    module: str
    """Dotted path of the module that defines it."""
    name: str
    """Qualified name inside the module."""
    why: str
    """What Bridge does with it."""
    beside: str | None = None
    """Name in the same module without which Bridge does without the pinned one; None: it has to be there and fit."""

    @abstractmethod
    def fault(self, source: Source) -> str | None:
        """Say in one phrase what does not fit; None if all does."""


@dataclass(frozen=True, kw_only=True)
class Function(Pin):
    """A function or method that we call, wrap or stand in for."""

    use: Literal["call", "wrap", "replace"]
    """`call`: the parameters exist and every other has a default. `wrap`: they exist, the rest is passed through.
    `replace`: ours stands in its place, so these are all the parameters, in this order."""
    parameters: tuple[str, ...] = ()
    """The parameters that we rely on, `self` left out."""
    is_async: bool = False
    """True if we await it."""

    def fault(self, source: Source) -> str | None:
        """Say which parameter is missing, new and required, or whether sync and async changed places."""
        found = source.signature(self.name)
        if found is None:
            return "is missing"
        if found.is_async != self.is_async:
            return f"is {'async' if found.is_async else 'not async'}, expected the opposite"
        parameters = tuple(name for name in found.parameters if name != "self")
        shown = f"takes ({', '.join(parameters)}), expected ({', '.join(self.parameters)})"
        fits = parameters == self.parameters if self.use == "replace" else set(self.parameters) <= set(parameters)
        if not fits:
            return shown
        surprise = found.required - {"self", *self.parameters}
        return f"{shown}: {', '.join(sorted(surprise))} has no default" if self.use == "call" and surprise else None


@dataclass(frozen=True, kw_only=True)
class Class(Pin):
    """A class of which we read attributes."""

    attributes: tuple[str, ...] = ()
    """What it, or a base in the same file, declares, defines or assigns to `self`."""

    def fault(self, source: Source) -> str | None:
        """Say which attributes are missing."""
        found = source.attributes(self.name)
        if found is None:
            return "is missing"
        missing = [name for name in self.attributes if name not in found]
        return f"has no attribute {', '.join(missing)}" if missing else None


@dataclass(frozen=True, kw_only=True)
class Name(Pin):
    """A name that has to be there, whatever it is."""

    def fault(self, source: Source) -> str | None:
        """Say that it is missing."""
        return None if source.defines(self.name) else "is missing"


@dataclass(frozen=True, kw_only=True)
class Constant(Pin):
    """A module-level constant whose value we repeat."""

    value: str
    """The value that it has."""

    def fault(self, source: Source) -> str | None:
        """Say which value was found instead."""
        found = source.constant(self.name)
        return None if found == self.value else f"is {found!r}, expected {self.value!r}"


@dataclass(frozen=True, kw_only=True)
class Listed(Pin):
    """A list of strings inside a function, all of which we have to know."""

    variable: str
    """The local variable that holds the list."""
    known: frozenset[str]
    """What may be in it."""

    def fault(self, source: Source) -> str | None:
        """Say that the list is missing, or which strings in it we do not know."""
        found = source.strings_inside(self.name, self.variable)
        if found is None:
            return f"has no list {self.variable}"
        unknown = sorted(found - self.known)
        return f"lists {', '.join(unknown)}, which Bridge does not know" if unknown else None


@dataclass(frozen=True, kw_only=True)
class LateImport(Pin):
    """A function that imports a name each time it runs, so that replacing the name reaches it."""

    imports: tuple[str, str]
    """The module, and the name that is imported from it."""

    def fault(self, source: Source) -> str | None:
        """Say that the function is missing, or that it holds on to the name from elsewhere."""
        found = source.imports_inside(self.name)
        if found is None:
            return "is missing"
        return None if self.imports in found else f"does not import {'.'.join(self.imports)} when it runs"
