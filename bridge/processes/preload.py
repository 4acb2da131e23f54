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

    def __init__(self, child: Child | None) -> None:
        self._child = child

    def become(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child | None:
        """Let the process run a command of this Python's (`-m module`), and return it; None: start another process."""
        child, self._child = self._child, None
        if child is None:
            return None
        gc.enable()
        command = {"argv": list(argv), "environment": dict(environment), "log": str(log.absolute())}
        with contextlib.suppress(BrokenPipeError):  # it was killed
            if tuple(argv[:3]) == (*PYTHON, "-m") and child.process.stdin is not None:
                with child.process.stdin as pipe:
                    pipe.write(json.dumps(command).encode())
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
    argv = [*PYTHON, "-m", str(module)]
    child = children.start(argv, os.environ, Path(os.devnull), takes_input=True) if module else None
    if child is not None:
        gc.disable()
    with contextlib.closing(Preloaded(child)) as preloaded:
        yield preloaded
