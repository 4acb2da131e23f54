"""A process that imports vLLM while its command is not known yet: the trainer imports and checks at the same time.

Where files are slow, each of the two takes half a minute, which they would otherwise take one after the other.
"""

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.processes import children
from bridge.processes.children import Child
from bridge.processes.server_command import PYTHON, plugin_module


class Preloaded:
    """A process that becomes one server; the next one is started as usual."""

    def __init__(self, child: Child | None, command: int = -1) -> None:
        self._child = child
        self._command = command
        """A file in memory for the command. It takes any length at once; a pipe takes 64 KiB, and then blocks for as
        long as the process imports."""

    def become(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child | None:
        """Let the process run a command of this Python's (`-m module`), and return it; None: start another process."""
        child, self._child = self._child, None
        if child is None:
            return None
        gc.enable()
        command = {"argv": list(argv), "environment": dict(environment), "log": str(log.absolute())}
        if tuple(argv[:3]) == (*PYTHON, "-m") and child.process.stdin is not None and child.is_alive():
            with os.fdopen(self._command, "wb") as file:
                file.write(json.dumps(command).encode())
            child.process.stdin.close()  # it reads the command now
            return replace(child, log=log)
        children.stop(child, grace_s=0)
        return None

    def close(self) -> None:
        """End the process if it became no server."""
        if self._child is not None:
            gc.enable()
            children.stop(self._child, grace_s=0)


@contextlib.contextmanager
def preloading() -> Iterator[Preloaded]:
    """Begin to import vLLM, if Bridge is installed where vLLM finds it.

    If it does, garbage is not collected until the server starts: this process imports and parses until then, and little
    of that is garbage.
    """
    module = plugin_module("preload")
    preloaded = Preloaded(None)
    if module:
        command = os.memfd_create("command of the server")
        argv = [*PYTHON, "-m", module, str(command)]
        preloaded = Preloaded(children.start(argv, os.environ, Path(os.devnull), inherits=[command]), command)
        gc.disable()
    with contextlib.closing(preloaded):
        yield preloaded
