"""Run users' code, and turn what it raises or returns into lines that are safe to print."""

import inspect
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bridge.core.private import cleaned
from bridge.errors import BridgeError, RewardError

LIBRARIES = (
    "<",
    f"{Path(__file__).parents[1]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Prefixes of files that error messages never point at."""


@contextmanager
def foreign_code(doing: str, file: str) -> Iterator[None]:
    """Turn whatever is raised inside into a RewardError, "`doing` raised ..."; `file` is the user's code."""
    try:
        yield
    except BridgeError:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything, and even call sys.exit
        location = place_of(error, file) or Path(file).name
        raise RewardError(
            f"{doing} raised {shortened(type(error).__name__)}{said(error)} ({location})",
            remedy=f"fix {location}, then run the same command again",
        ) from error


def said(error: BaseException) -> str:
    """Return ": " and the exception's message on one line; nothing if it is empty."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  its own __str__ is foreign code too
        return ""
    return f": {shortened(words, 200)}" if words else ""


def shortened(value: object, limit: int = 60) -> str:
    """Return `value` as text on one line of at most `limit` characters, without control characters."""
    line = " ".join(str(value).split())
    shown = cleaned(line[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def described(value: object, limit: int = 60) -> str:
    """Return the `repr` of a foreign value as `shortened` does; its type if `repr` fails."""
    try:
        return shortened(repr(value), limit)
    except Exception:  # noqa: BLE001  a foreign __repr__, a nesting too deep, an integer of too many digits
        return f"a {shortened(type(value).__name__)} that cannot be printed"


def source_file(kind: type) -> str:
    """Return the file that defines the class `kind`, or its module's name if there is none."""
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):  # defined interactively, or in C
        return kind.__module__


def place_of(error: BaseException, file: str) -> str | None:
    """Return the last line of `file`, or of any file outside the libraries, that ran before `error` was raised."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        return place_in([(error.filename, error.lineno)], error.filename)  # no frame of the file ever ran
    frames = traceback.extract_tb(error.__traceback__)
    return place_in([(frame.filename, frame.lineno or 0) for frame in frames], file)


def place_in(frames: Sequence[tuple[str, int]], file: str) -> str | None:
    """Return the last of the `frames` (file, line) in `file` or outside the libraries; None if there is none."""
    theirs = [frame for frame in frames if frame[0] == file or not frame[0].startswith(LIBRARIES)]
    if not theirs:
        return None
    name, line = theirs[-1]
    return f"{shortened(Path(name).name)} line {line}"
