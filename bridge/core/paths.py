"""Paths as people write them: `~` is the home folder, and a name that no file can have names no file."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

CONFIG_NAME = "config.json"
"""File of a transformers model."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of a PEFT adapter."""


def expanded(path: str | Path) -> Path:
    """Return a path with a leading `~` or `~user` replaced by that home folder, if there is one, as a shell does."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser raises where there is no such user


def temporary_folder(prefix: str) -> Path:
    """Make a folder that is removed when this process ends; a fork of this process, which may end first, leaves it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    pid = os.getpid()

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def is_file(path: str | Path) -> bool:
    """Return whether there is such a file; `Path.is_file` raises where a name is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Return whether there is such a folder; `Path.is_dir` raises where a name is too long."""
    return os.path.isdir(path)  # noqa: PTH112
