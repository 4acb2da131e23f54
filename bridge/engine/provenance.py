"""What a run ran on: versions, commit, device and command, one line of `starts.jsonl` per start."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import bridge
from bridge.checks import software
from bridge.core import redaction

PACKAGES = ("torch", "transformers", "peft", "trl", "datasets")
"""Packages besides vLLM whose versions may change what a run computes."""
GIT_LIMIT_S = 5.0


def of_this_process() -> dict[str, Any]:
    """Return what this process runs on; it contains no secrets, and omits what is unknown."""
    versions = {"bridge": bridge.__version__, **_commit(Path(bridge.__file__).parents[1])}
    versions |= {"python": platform.python_version(), **software.installed_vllm()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(_command()),
        **versions,
        "device": _device(),
        "platform": platform.platform(),
    }


def _command() -> Iterator[str]:
    """Yield this process's command line without secrets, and without the program's folder."""
    program, *arguments = sys.argv
    yield Path(program).name if Path(program).name != "__main__.py" else "bridge"
    yield from redaction.redacted_arguments(arguments)


def _commit(folder: Path) -> dict[str, str]:
    """Return the commit of the clone in `folder`, and whether files were changed; empty for an installed package."""
    if not (folder / ".git").exists():
        return {}
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", folder, *command], capture_output=True, text=True, check=True, timeout=GIT_LIMIT_S
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit + (" with changes" if changes else "")}


def _device() -> str:
    if not torch.cuda.is_initialized():  # on a GPU machine the trainer may still run on the CPU
        return f"cpu, {os.cpu_count()} cores"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
