"""Ask a server over HTTP how it is.

Not covered: what follows from its answer (`watchdog.py`, `engine.py`).
"""

import contextlib
import http
import http.client
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bridge.server import api_key

SLICE_S = 0.25
"""Silence is counted in slices of this length: one that the whole machine slept through counts once."""
READ_LIMIT_S = 5.0
"""Longest wait for the rest of an answer that has begun."""

Health = Literal["well", "unwell", "silent"]
"""`unwell`: it says so, or nobody listens; `silent`: it took the question and did not answer in time."""


@dataclass(frozen=True)
class Address:
    """Where a server tells how it is."""

    host: str
    """A host name or address that can be reached."""
    port: int
    """Its TCP port."""
    route: str = "/health"
    """vLLM's own, which knows whether the engine lives; any other that answers 200 will do."""

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
        """Tell whether an answer begins within one slice; ask first where that is still to be done."""
        if connection.sock is None:
            with contextlib.suppress(TimeoutError):  # a busy server's queue of connections may be full
                connection.request("GET", self.route, headers=api_key.headers())
            return False
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        return bool(poll.poll(SLICE_S * 1e3))
