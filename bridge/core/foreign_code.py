"""Load and run users' code, named `file.py:Name`, and describe its errors and results in one safe line."""

import difflib
import importlib.util
import inspect
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from bridge.core import paths
from bridge.core.redaction import escaped
from bridge.errors import BridgeError, RewardError, UsageError

LIBRARIES = (
    "<",
    *(f"{Path(__file__).parents[2] / ours}/" for ours in ("bridge", "environments")),
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{site.getusersitepackages()}/",
)
"""Prefixes of files that error messages never point at."""
Choice = Literal["environment", "reward", "loss"]
"""The setting that names the object: its flag without the dashes."""
FORMS: Mapping[Choice, str] = {
    "environment": "path/to/file.py:ClassName",
    "reward": "path/to/file.py:function",
    "loss": "path/to/file.py:function",
}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
NOUNS: Mapping[Choice, str] = {"environment": "class", "reward": "function", "loss": "function"}


@contextmanager
def foreign_code(doing: str, file: str) -> Iterator[None]:
    """Convert any exception in the block to a RewardError, "`doing` raised ..."; `file` is the user's code."""
    try:
        yield
    except BridgeError:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything, or even call sys.exit
        location = location_of(error, file) or Path(file).name
        raise RewardError(
            f"{doing} raised {shortened(type(error).__name__)}{reason_of(error)} ({location})",
            hint=f"fix {location}, then run the same command again",
        ) from error


def is_async(function: Any) -> bool:
    """Return whether a call returns a coroutine: an async function, a partial of one, or an object with an async call.

    Source: `inspect.iscoroutinefunction` looks at the object itself, not at its `__call__`.
    """
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def reason_of(error: BaseException) -> str:
    """Return ": " and the exception's message on one line; empty if there is no message."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  its __str__ is foreign code, too
        return ""
    return f": {shortened(words, 200)}" if words else ""


def shortened(value: object, limit: int = 60) -> str:
    """Return `value` as a single line of at most `limit` characters, without control characters."""
    shown = escaped(" ".join(str(value).split())[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def described(value: object, limit: int = 60) -> str:
    """Return the shortened `repr` of a foreign value, or its type if `repr` fails."""
    try:
        return shortened(repr(value), limit)
    except Exception:  # noqa: BLE001  a foreign __repr__, too deep a nesting, or an integer with too many digits
        return f"a {shortened(type(value).__name__)} that cannot be printed"


def source_file(kind: type) -> str:
    """Return the file that defines the class `kind`, or its module's name if there is no file."""
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):  # a class defined interactively, or in C
        return kind.__module__


def location_of(error: BaseException, file: str) -> str | None:
    """Return where `error` was raised: the last frame in `file`, or in any file outside the libraries."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        frames.append((error.filename, error.lineno))  # a file with a syntax error never runs, so it has no frame
    return location_in(frames, file)


def location_in(frames: Sequence[tuple[str, int]], file: str) -> str | None:
    """Describe the last of the `frames` (file, line) in `file` or outside the libraries; None if there is none."""
    user_frames = [frame for frame in frames if frame[0] == file or not frame[0].startswith(LIBRARIES)]
    if not user_frames:
        return None
    name, line = user_frames[-1]
    return f"{shortened(Path(name).name)} line {line}"


def find_object(choice: Choice, name: str) -> Any:
    """Return the environment class, or the reward or loss function, that `name` (`file.py:Name`) refers to.

    While the file loads, its folder comes first on `sys.path`, as when Python runs the file, so it can import modules
    next to it; a file in a package can also import from the package. Imports inside functions that run later find only
    modules that are already imported. The file and the modules next to it are always compiled from their source.

    Raises:
        UsageError: the file does not exist, or has no such class or function.
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
        f"{problem}; it defines {', '.join(there) or f'no {noun} at all'}", hint=f"--{choice} {path}:{close[0]}"
    )


def check_file(choice: Choice, name: str) -> Path:
    """Return the file that `name` (`file.py:Name`) refers to, without reading it.

    Raises:
        UsageError: `name` does not include a class or function, or the file does not exist.
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
    """Return an instance of `kind`, the class of the environment `name`.

    Raises:
        UsageError: the class requires constructor arguments.
        RewardError: its code raised an exception.
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
    module_name = ".".join((*package, f"bridge_{choice}_{file.stem}"))
    loader = SourceLoader(module_name, str(file)) if file.suffix in SOURCE_SUFFIXES else None
    spec = importlib.util.spec_from_file_location(module_name, file, loader=loader)
    if spec is None or spec.loader is None:
        raise UsageError(f"{choice} {name!r}: {path} is not a Python file", hint=f"--{choice} {FORMS[choice]}")
    module = importlib.util.module_from_spec(spec)
    folders = dict.fromkeys((str(file.parent), str(root)))
    finder = SourceFinder(list(folders))
    sys.path[:0] = folders
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
    try:
        with foreign_code(f"importing {path}", str(file)):
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    finally:
        sys.meta_path.remove(finder)
        for folder in folders:
            sys.path.remove(folder)
    return module


class SourceLoader(SourceFileLoader):
    """Compile a module from its source, and neither read nor write bytecode.

    Python uses bytecode if its source has the same size and was last changed in the same second, so it could miss an
    edit.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class SourceFinder(MetaPathFinder):
    """Find modules in the user's `folders`, except those of libraries, and have them compiled from their source."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders
        self._finders = dict[str, FileFinder]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for folder in filter(self._is_users, self._folders if path is None else path):
            if folder not in self._finders:
                loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceLoader, SOURCE_SUFFIXES)
                self._finders[folder] = FileFinder(folder, *loaders)
            spec = self._finders[folder].find_spec(fullname, target)
            if spec is not None and spec.loader is not None:  # without a loader it is a folder, perhaps one of many
                return spec
        return None

    def _is_users(self, folder: str) -> bool:
        is_inside = any(f"{folder}/".startswith(f"{outer}/") for outer in self._folders)
        return is_inside and not f"{folder}/".startswith(LIBRARIES)


def _package(folder: Path) -> tuple[Path, list[str]]:
    """Return the folder that contains the outermost package of `folder`, and the package names below it."""
    names = list[str]()
    while folder.name.isidentifier() and paths.is_file(folder / "__init__.py"):
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, names
