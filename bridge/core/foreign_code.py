"""Load and run users' code, named `file.py:Name`, and report what it raises or returns in one safe line."""

import difflib
import importlib.util
import inspect
import json
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from bridge.core import paths
from bridge.core.redaction import escaped
from bridge.errors import BridgeError, RewardError, UsageError

LIBRARIES = (
    "<",
    *(f"{Path(__file__).parents[2] / ours}/" for ours in ("bridge", "environments")),
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Prefixes of files that error messages never point at."""
Choice = Literal["environment", "reward", "loss"]
"""The choice that names the object: its flag without the dashes."""
FORMS: Mapping[Choice, str] = {
    "environment": "path/to/file.py:ClassName",
    "reward": "path/to/file.py:function",
    "loss": "path/to/file.py:function",
}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
NOUNS: Mapping[Choice, str] = {"environment": "class", "reward": "function", "loss": "function"}


@contextmanager
def foreign_code(doing: str, file: str) -> Iterator[None]:
    """Turn whatever is raised inside into a RewardError, "`doing` raised ..."; `file` is the user's code."""
    try:
        yield
    except BridgeError:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything, and even call sys.exit
        location = location_of(error, file) or Path(file).name
        raise RewardError(
            f"{doing} raised {shortened(type(error).__name__)}{reason_of(error)} ({location})",
            hint=f"fix {location}, then run the same command again",
        ) from error


def reason_of(error: BaseException) -> str:
    """Return ": " and the exception's message on one line; nothing if it is empty."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  its own __str__ is foreign code too
        return ""
    return f": {shortened(words, 200)}" if words else ""


def shortened(value: object, limit: int = 60) -> str:
    """Return `value` as text on one line of at most `limit` characters, without control characters."""
    shown = escaped(" ".join(str(value).split())[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def described(value: object, limit: int = 60) -> str:
    """Return the `repr` of a foreign value as `shortened` does; its type if `repr` fails."""
    try:
        return shortened(repr(value), limit)
    except Exception:  # noqa: BLE001  a foreign __repr__, a nesting too deep, an integer of too many digits
        return f"a {shortened(type(value).__name__)} that cannot be printed"


def surrogate_fault(prompt: Any) -> str:
    """Return what is wrong with the characters of a prompt, text or messages; empty if nothing is."""
    text = json.dumps(prompt, ensure_ascii=False, default=str, skipkeys=True)
    is_broken = LONE_SURROGATE.search(text) is not None
    return f"{shortened(ascii(prompt))} has half of a surrogate pair, which is no character" if is_broken else ""


def source_file(kind: type) -> str:
    """Return the file that defines the class `kind`, or its module's name if there is none."""
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):  # defined interactively, or in C
        return kind.__module__


def location_of(error: BaseException, file: str) -> str | None:
    """Return the last line of `file`, or of any file outside the libraries, that ran before `error` was raised."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        frames.append((error.filename, error.lineno))  # no frame of the file ever ran
    return location_in(frames, file)


def location_in(frames: Sequence[tuple[str, int]], file: str) -> str | None:
    """Return the last of the `frames` (file, line) in `file` or outside the libraries; None if there is none."""
    theirs = [frame for frame in frames if frame[0] == file or not frame[0].startswith(LIBRARIES)]
    if not theirs:
        return None
    name, line = theirs[-1]
    return f"{shortened(Path(name).name)} line {line}"


def find_object(choice: Choice, name: str) -> Any:
    """Return the class of an environment or the function of a reward or a loss that `name`, `file.py:Name`, refers to.

    While the file is loaded its folder comes first on `sys.path`, as when Python runs the file, so it can import its
    neighbors; a file of a package can import from the package, too. Imports inside functions that run later find only
    what is imported already.

    Raises:
        UsageError: there is no such file, or no such class or function in it.
        RewardError: its code raised.
    """
    file = check_file(choice, name)
    path, _, attribute = name.rpartition(":")
    noun = NOUNS[choice]
    example = FORMS[choice].rpartition(":")[2]
    module = _module(choice, file, name)
    target = getattr(module, attribute, None)
    if _fits(choice, target):
        return target
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    there = [key for key, value in own.items() if _fits(choice, value)]
    problem = f"no {noun} {attribute!r} in {path}" if target is None else f"{attribute} in {path} is not a {noun}"
    close = difflib.get_close_matches(attribute, there, n=1) or there[:1] or [example]
    raise UsageError(
        f"{problem}, it defines {', '.join(there) or f'no {noun} at all'}", hint=f"--{choice} {path}:{close[0]}"
    )


def check_file(choice: Choice, name: str) -> Path:
    """Return the file that `name`, `file.py:Name`, refers to, without reading it.

    Raises:
        UsageError: it names no class or function, or there is no such file.
    """
    written, _, _ = name.rpartition(":")
    if not written:
        noun = NOUNS[choice]
        example = FORMS[choice].rpartition(":")[2]
        raise UsageError(f"{choice} {name!r} does not name a {noun}", hint=f"--{choice} {name}:{example}")
    path = paths.expanded(written)
    if not paths.is_file(path):
        reason = "it is a folder" if paths.is_folder(path) else f"there is no such file in {Path.cwd()}"
        raise UsageError(f"{choice} {name!r}: cannot read {path}: {reason}", hint=f"--{choice} {FORMS[choice]}")
    return path


def _fits(choice: Choice, value: object) -> bool:
    return isinstance(value, type) if choice == "environment" else callable(value) and not isinstance(value, type)


def instance_of(kind: type, name: str) -> Any:
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
                hint=f"give each of them a default in {kind.__name__}.__init__",
            )
        return kind()


def _module(choice: Choice, path: Path, name: str) -> ModuleType:
    file = path.resolve()
    root, package = _package(file.parent)
    # With a prefix, because a file called random.py would replace the standard library's module.
    spec = importlib.util.spec_from_file_location(".".join((*package, f"bridge_{choice}_{file.stem}")), file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{choice} {name!r}: {path} is not a Python file", hint=f"--{choice} {FORMS[choice]}")
    module = importlib.util.module_from_spec(spec)
    folders = dict.fromkeys((str(file.parent), str(root)))
    sys.path[:0] = folders
    try:
        with foreign_code(f"importing {path}", str(file)):
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    finally:
        for folder in folders:
            sys.path.remove(folder)
    return module


def _package(folder: Path) -> tuple[Path, list[str]]:
    """Return the folder that holds the package `folder`, and the names from there on; without a package, none."""
    names = list[str]()
    while folder.name.isidentifier() and paths.is_file(folder / "__init__.py"):
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, names
