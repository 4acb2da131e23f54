"""Classes and functions in a user's file, named `file.py:Name`."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from bridge.core.foreign_code import foreign_code, source_file
from bridge.errors import UsageError

Choice = Literal["environment", "reward", "loss"]
"""The choice that names the object: its flag without the dashes."""
FORMS: Mapping[Choice, str] = {
    "environment": "path/to/file.py:ClassName",
    "reward": "path/to/file.py:function",
    "loss": "path/to/file.py:function",
}
NOUNS: Mapping[Choice, str] = {"environment": "class", "reward": "function", "loss": "function"}


def find(choice: Choice, name: str) -> Any:
    """Return the class of an environment or the function of a reward or a loss that `name`, `file.py:Name`, refers to.

    While the file is loaded its folder comes first on `sys.path`, as when Python runs the file, so it can import its
    neighbors; imports inside functions that run later find only those that are imported already.

    Raises:
        UsageError: there is no such file, or no such class or function in it.
        RewardError: its code raised.
    """
    path, _, attribute = name.rpartition(":")
    noun, example = NOUNS[choice], FORMS[choice].rpartition(":")[2]
    if not path:
        raise UsageError(f"{choice} {name!r} does not name a {noun}", remedy=f"--{choice} {name}:{example}")
    module = _module(choice, Path(path).expanduser(), name)
    target = getattr(module, attribute, None)
    if _fits(choice, target):
        return target
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    there = [key for key, value in own.items() if _fits(choice, value)]
    problem = f"no {noun} {attribute!r} in {path}" if target is None else f"{attribute} in {path} is not a {noun}"
    close = difflib.get_close_matches(attribute, there, n=1) or there[:1] or [example]
    raise UsageError(
        f"{problem}, it defines {', '.join(there) or f'no {noun} at all'}", remedy=f"--{choice} {path}:{close[0]}"
    )


def _fits(choice: Choice, value: object) -> bool:
    return isinstance(value, type) if choice == "environment" else callable(value) and not isinstance(value, type)


def made(kind: type, name: str) -> Any:
    """Return an instance of the class `kind` of the environment `name`.

    Raises:
        UsageError: it needs constructor arguments.
        RewardError: its code raised.
    """
    with foreign_code(f"environment {name}: making {kind.__name__}()", source_file(kind)):
        needed = [
            parameter.name
            for parameter in inspect.signature(kind).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise UsageError(
                f"environment {name}: {kind.__name__} needs constructor arguments ({', '.join(needed)}), expected none",
                remedy=f"give each of them a default in {kind.__name__}.__init__",
            )
        return kind()


def _module(choice: Choice, path: Path, name: str) -> ModuleType:
    what, remedy = f"{choice} {name!r}", f"--{choice} {FORMS[choice]}"
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else f"there is no such file in {Path.cwd()}"
        raise UsageError(f"{what}: cannot read {path}: {reason}", remedy=remedy)
    file = path.resolve()
    # With a prefix, because a file called random.py would replace the standard library's module.
    spec = importlib.util.spec_from_file_location(f"bridge_{choice}_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{what}: {path} is not a Python file", remedy=remedy)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        with foreign_code(f"importing {path}", str(file)):
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
