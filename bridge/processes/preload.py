"""Import vLLM in a process whose command is not known yet, while the trainer imports and checks.

On a slow file system each import takes half a minute, so they run concurrently.
"""

import contextlib
import gc
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.processes import children
from bridge.processes.children import Child
from bridge.processes.server_command import PYTHON, plugin_module

logger = logging.getLogger(__name__)

MODULE = "preloaded_server"
"""Name of the module, next to Bridge's plugin, that the process runs."""


class Preloaded:
    """A process that becomes one server; later servers are started as usual."""

    def __init__(self, child: Child | None, command: int = -1, *, resumes_gc: bool = False) -> None:
        self._child = child
        self._command = command
        """An in-memory file for the command, which may have any length; a pipe would block after 64 KiB until the
        process has imported vLLM."""
        self._resumes_gc = resumes_gc
        """Whether garbage collection is off in this process until the server starts."""

    def become(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child | None:
        """Make the process run a `-m module` command of this Python, and return it; None: start a new process."""
        child, self._child = self._child, None
        if child is None:
            return None
        self._resume_gc()
        command = {"argv": list(argv), "environment": dict(environment), "log": str(log.absolute())}
        if tuple(argv[:3]) == (*PYTHON, "-m") and child.process.stdin is not None and child.is_alive():
            with os.fdopen(self._command, "wb") as file:
                file.write(json.dumps(command).encode())
            child.process.stdin.close()  # now the process reads the command
            return replace(child, log=log)
        if not child.is_alive():
            logger.warning(
                "vLLM was not imported early, so it starts later: that process ended with exit code %s",
                child.exit_code(),
            )
        children.stop(child, grace_s=0)
        return None

    def close(self) -> None:
        """End the process if it has not become a server."""
        if self._child is not None:
            self._resume_gc()
            children.stop(self._child, grace_s=0)

    def _resume_gc(self) -> None:
        if self._resumes_gc:
            gc.enable()


@contextlib.contextmanager
def preloading() -> Iterator[Preloaded]:
    """Start importing vLLM, if Bridge is installed where vLLM finds it.

    Garbage collection is off in this process until the server starts, because imports and parsing leave little
    garbage.
    """
    module = plugin_module(MODULE)
    preloaded = Preloaded(None)
    if module:
        command = os.memfd_create("command of the server")
        argv = [*PYTHON, "-m", module, str(command)]
        child = children.start(argv, os.environ, Path(os.devnull), inherits=[command])
        preloaded = Preloaded(child, command, resumes_gc=gc.isenabled())
        gc.disable()
    with contextlib.closing(preloaded):
        yield preloaded
