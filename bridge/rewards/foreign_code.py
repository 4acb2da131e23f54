"""Run code that is not ours, and turn whatever it raises into an error that names the exception and its line.

Not covered: what the code is to return (`scoring.py`, `environments/registry.py`).
"""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.errors import BridgeError, RewardError

MAX_SHOWN_CHARACTERS = 60


@contextmanager
def foreign_code(doing: str, file: str, subject: str = "") -> Iterator[None]:
    """Turn whatever foreign code raises inside into an error that names the exception and its line in `file`.

    Raises:
        RewardError: "`doing` raised ..., `subject`".
    """
    try:
        yield
    except BridgeError:  # ours, and clear already
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything, and may even call sys.exit
        what = shortened(f"{type(error).__name__}: {error}".removesuffix(": "), 200)
        raise RewardError(
            f"{doing} raised {what} ({_place(error, file)}){subject}",
            remedy=f"mend that line of {Path(file).name}, then run the same command again",
        ) from error


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


def _place(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # no frame of the file ever ran
        return f"{Path(error.filename).name} line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name} line {last.lineno}"
