"""Classes and functions of a user's file, `file.py:Name`: find them, and say what is wrong where there are none.

Not covered: what they are to do (`inspection.py`, `rewards.py`).
"""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bridge.core.foreign_code import foreign_code, source_file
from bridge.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is looked for in a file."""

    choice: str
    """The choice that names it; with two dashes in front it is the flag."""
    noun: str
    """What it is."""
    form: str
    """How one is named."""
    fits: Callable[[object], bool]
    """Tells whether something is one."""


ENVIRONMENT = Kind(
    choice="environment",
    noun="class",
    form="path/to/file.py:ClassName",
    fits=lambda found: isinstance(found, type),
)
REWARD = Kind(
    choice="reward",
    noun="function",
    form="path/to/file.py:function",
    fits=lambda found: callable(found) and not isinstance(found, type),
)


def find(kind: Kind, name: str) -> Any:
    """Return what `name`, in the form `file.py:Name`, names.

    While the file is loaded its folder comes first on `sys.path`, as when Python runs the file, so it can import its
    neighbours; imports inside functions that run later find them only if they were imported before.

    Raises:
        UsageError: there is no such file, or nothing of that kind in it.
        RewardError: its code raised.
    """
    path, _, attribute = name.rpartition(":")
    if not path:
        raise UsageError(f"{kind.choice} {name!r} names no {kind.noun}", remedy=f"--{kind.choice} {name}:{_last(kind)}")
    return _attribute(kind, _module(kind, Path(path).expanduser(), name), attribute, path)


def made(kind: type, name: str) -> Any:
    """Return an object of the class `kind`, which the environment `name` is.

    Raises:
        UsageError: it needs constructor arguments.
        RewardError: its code raised.
    """
    with foreign_code(f"environment {name}: making {kind.__name__}()", source_file(kind)):
        if needed := [
            parameter.name for parameter in inspect.signature(kind).parameters.values() if _is_needed(parameter)
        ]:
            raise UsageError(
                f"environment {name}: {kind.__name__} needs constructor arguments ({', '.join(needed)}), expected none",
                remedy=f"give each of them a default in {kind.__name__}.__init__",
            )
        return kind()


def _module(kind: Kind, path: Path, name: str) -> ModuleType:
    what, remedy = f"{kind.choice} {name!r}", f"--{kind.choice} {kind.form}"
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else f"there is no such file, seen from {Path.cwd()}"
        raise UsageError(f"{what}: cannot read {path}: {found}", remedy=remedy)
    file = path.resolve()
    # Prefixed, or else a file called random.py would pose as the standard library's module.
    spec = importlib.util.spec_from_file_location(f"bridge_{kind.choice}_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{what}: {path} is no Python file", remedy=remedy)
    module = importlib.util.module_from_spec(spec)
    with _first_on_path(file.parent), foreign_code(f"importing {path}", str(file)):
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _attribute(kind: Kind, module: ModuleType, name: str, path: str) -> Any:
    found = getattr(module, name, None)
    if kind.fits(found):
        return found
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    there = [key for key, value in own.items() if kind.fits(value)]
    problem = f"no {kind.noun} {name!r} in {path}" if found is None else f"{name} in {path} is no {kind.noun}"
    close = difflib.get_close_matches(name, there, n=1) or there[:1] or [_last(kind)]
    raise UsageError(
        f"{problem}, it defines {', '.join(there) or f'no {kind.noun} at all'}",
        remedy=f"--{kind.choice} {path}:{close[0]}",
    )


def _last(kind: Kind) -> str:
    return kind.form.rpartition(":")[2]


def _is_needed(parameter: inspect.Parameter) -> bool:
    takes_any_number = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not takes_any_number
