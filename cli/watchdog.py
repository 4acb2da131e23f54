"""Ask a server over HTTP how it is, and end one of ours that is of no use while a trainer waits for it.

vLLM's API server outlives an engine that was killed, and waits for open connections to close; a server that hangs
answers nothing at all. A trainer's call to either would wait for its whole time limit. Seen with vLLM 0.32.

Not covered: servers that somebody else started, for which a trainer has its `--request-timeout-s`; an engine that hangs
behind an API server that answers: the same limit ends the trainer's call.
"""

import contextlib
import http
import http.client
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from bridge.server import api_key
from cli import children, console
from cli.children import Child

SLICE_S = 0.25
"""Silence is counted in slices of this length: one that the whole machine slept through counts once."""
READ_LIMIT_S = 5.0
"""Longest wait for the rest of an answer that has begun."""
PERIOD_S = 1.0
PATIENCE = 3
"""Bad answers in a row until the server is given up."""
HANG_LIMIT_S = 60.0
"""Silence after one question until a living server is given up; on two busy cores an answer takes seconds."""

Health = Literal["well", "unwell", "silent"]
"""`unwell`: it says so, or nobody listens; `silent`: it took the question and did not answer in time."""


@dataclass(frozen=True)
class Address:
    """Where a server reports its health."""

    host: str
    """A host name or address that can be reached."""
    port: int
    """Its TCP port."""
    route: str = "/health"
    """vLLM's own checks the engine; any other that answers 200 will do."""

    def health(self, *, limit_s: float, is_over: Callable[[], bool] = lambda: False) -> Health:
        """Ask once, and wait up to `limit_s` seconds for the answer, or until `is_over`."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SLICE_S)
        with contextlib.closing(connection):
            try:
                slices = range(1 + round(limit_s / SLICE_S))  # the first one asks
                if not any(not is_over() and self._answers(connection) for _ in slices):
                    return "silent"
                connection.sock.settimeout(READ_LIMIT_S)
                return "well" if connection.getresponse().status == http.HTTPStatus.OK else "unwell"
            except (OSError, http.client.HTTPException):
                return "unwell"

    def _answers(self, connection: http.client.HTTPConnection) -> bool:
        """Tell whether an answer begins within one slice; ask first if that has not been done."""
        if connection.sock is None:
            with contextlib.suppress(TimeoutError):  # a busy server's queue of connections may be full
                connection.request("GET", self.route, headers=api_key.headers())
            return False
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        return bool(poll.poll(SLICE_S * 1e3))


@dataclass
class Watchdog:
    """Watches one child from its own thread."""

    child: Child
    """The server's process."""
    address: Address
    """Where it answers."""
    hang_limit_s: float = HANG_LIMIT_S
    """Seconds of silence after which it counts as hanging."""
    verdict: str = ""
    """Why the server was ended; empty: it was not."""
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
        """Watch until the server ends or is given up, or the watch is over."""
        bad = 0
        while not self._over.wait(PERIOD_S) and self.child.is_alive():
            health = self.address.health(limit_s=self.hang_limit_s, is_over=self._over.is_set)
            bad = bad + 1 if health == "unwell" else 0
            if bad == PATIENCE:
                self._bite("lost its engine")
            elif health == "silent":
                self._bite(f"gave no answer for {self.hang_limit_s:g} s")

    def _bite(self, verdict: str) -> None:
        if self._over.is_set() or not self.child.is_alive():  # it is being stopped, or has ended by itself
            return
        self.verdict = verdict
        pid, log = self.child.process.pid, self.child.log
        console.note(f"vLLM (pid {pid}) {verdict}: it was stopped; its log is {log}", style="yellow")
        children.kill(self.child)
        self._over.set()
