"""Files that are there whole or not at all, and one line where the disk refuses.

Not covered: folders (`whole_folder.py`), and a power cut: a file may be lost then, but is never half there.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.errors import UsageError


def replace(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Put `content` in the place of the file `path`, if there is one, in one step; `mode` is subject to the umask.

    Raises:
        UsageError: the disk is full or refuses; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with one_line_errors(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Turn what the system says when `path` is written into an error that names it and the room that is left.

    Raises:
        UsageError: the disk is full or refuses.
    """
    try:
        yield
    except OSError as error:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        raise UsageError(
            f"cannot write {path}: {error.strerror} (with {shutil.disk_usage(nearest).free} bytes free)",
            remedy="make room there, and go on with --resume",
        ) from error
