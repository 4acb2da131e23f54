"""Notice that a server of ours is of no use any more while a trainer waits for it, and end it.

vLLM's API server outlives an engine that was killed, and waits for open connections to close; a trainer's pause that
waits for requests, or a read of tensors, would wait for its whole time limit. Seen with vLLM 0.32.

Not covered: servers that somebody else started; a trainer has its `--request-timeout-s` for those.
"""

import contextlib
import http.client
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from cli.children import Child

PERIOD_S = 1.0
PATIENCE = 3
"""Bad answers in a row until the server is given up."""

Health = Literal["well", "unwell", "silent"]
"""`silent`: it did not answer in time, which a busy machine explains as well."""


@dataclass
class Watchdog:
    """Watches one child from a thread of its own."""

    child: Child
    """The server's process."""
    host: str
    """Where it answers."""
    port: int
    """Where it answers."""
    bit: bool = False
    """Whether the server was ended because its engine was gone."""
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """Watch for as long as the context lasts."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        bad = 0
        while bad < PATIENCE:
            if self._over.wait(PERIOD_S) or not self.child.is_alive():
                return
            bad = bad + 1 if health(self.host, self.port) == "unwell" else 0
        self.bit = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.process.pid, signal.SIGKILL)  # not reaped before we are over: the pid is its own


def health(host: str, port: int) -> Health:
    """Ask vLLM's `/health`, which knows whether the engine lives."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return "well" if connection.getresponse().status == http.HTTPStatus.OK else "unwell"
        except TimeoutError:
            return "silent"
        except (OSError, http.client.HTTPException):
            return "unwell"
