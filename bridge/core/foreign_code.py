"""Run code that is not ours, and turn whatever it raises into an error that names the exception and its line.

Not covered: what the code is to return (`scoring.py`, `environments/registry.py`).
"""

import inspect
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bridge.errors import BridgeError, RewardError

MAX_SHOWN_CHARACTERS = 60
LIBRARIES = (
    "<",
    f"{Path(__file__).parents[1]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""How the names of files begin whose lines nobody is asked to mend."""


@contextmanager
def foreign_code(doing: str, file: str) -> Iterator[None]:
    """Turn whatever foreign code raises inside into an error that names the exception and its line.

    `file` is theirs, wherever it lies.

    Raises:
        RewardError: "`doing` raised ...".
    """
    try:
        yield
    except BridgeError:  # ours, and clear already
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything, and may even call sys.exit
        place = place_of(error, file) or Path(file).name
        raise RewardError(
            f"{doing} raised {type(error).__name__}{said(error)} ({place})",
            remedy=f"mend {place}, then run the same command again",
        ) from error


def said(error: BaseException) -> str:
    """Return ": " and what the exception says, on one line; nothing where it says nothing."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  its own __str__ is foreign code too
        return ""
    return f": {shortened(words, 200)}" if words else ""


def shortened(value: object, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return `value` on one line of at most `limit` characters; strings inside are as Python quotes them."""
    line = " ".join(str(value).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def source_file(kind: type) -> str:
    """Return the file that defines the class `kind`, or its module's name when there is none."""
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):  # defined interactively, or in C
        return kind.__module__


def place_of(error: BaseException, file: str) -> str | None:
    """Return where to mend what raised `error`: the last line that ran in `file`, or in any file of no library."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # no frame of the file ever ran
        return f"{Path(error.filename).name} line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return place_in([(frame.filename, frame.lineno or 0) for frame in frames], file)


def place_in(frames: Sequence[tuple[str, int]], file: str) -> str | None:
    """Return the last of the `frames` (file, line) in `file` or in any file of no library; None where none is."""
    theirs = [frame for frame in frames if frame[0] == file or not frame[0].startswith(LIBRARIES)]
    if not theirs:
        return None
    name, line = theirs[-1]
    return f"{Path(name).name} line {line}"
