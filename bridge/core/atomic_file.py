"""Write files atomically (a power failure may still lose one), and report write errors in one line."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.errors import UsageError


def replace(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write `content` to `path` in one step; `mode` is subject to the umask.

    Raises:
        UsageError: the disk is full, or the write fails; `path` is unchanged.
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
    """Convert an OSError while writing `path` into a UsageError with the path and the free space."""
    try:
        yield
    except OSError as error:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        raise UsageError(
            f"cannot write {path}: {error.strerror} (with {shutil.disk_usage(nearest).free} bytes free)",
            hint="free some disk space, and continue with --resume",
        ) from error
