"""Paths as users write them: `~` is the home folder, and an invalid name means that the file does not exist."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

CONFIG_NAME = "config.json"
"""Configuration file of a transformers model."""
ADAPTER_CONFIG = "adapter_config.json"
"""Configuration file of a PEFT adapter."""


def expanded(path: str | Path) -> Path:
    """Expand a leading `~` or `~user` to the home folder, if it exists, as a shell does."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser raises for an unknown user


def temporary_folder(prefix: str) -> Path:
    """Create a folder that is removed when this process exits, but not when a fork of it exits."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    pid = os.getpid()

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def is_file(path: str | Path) -> bool:
    """Return whether the file exists; `Path.is_file` would raise if the name is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Return whether the folder exists; `Path.is_dir` would raise if the name is too long."""
    return os.path.isdir(path)  # noqa: PTH112
