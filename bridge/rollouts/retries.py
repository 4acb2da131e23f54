"""How often, where and when a request is sent again that failed.

Not covered: what failed (`faults.py`).
"""

import random

from bridge.rollouts.faults import Fault
from bridge.rollouts.servers import Server, Servers

FIRST_WAIT_S = 0.5
"""Longest wait before the first retry; before each further one it may be twice as long, up to the limit. The default
number of retries then takes less than 8 s: who owns a server wants to know soon that it is dead."""
WAIT_LIMIT_S = 8.0


class Tries:
    """The tries of one request, at all servers together."""

    def __init__(self, servers: Servers, max_retries: int) -> None:
        self._servers, self._max_retries = servers, max_retries
        self._slow: set[Server] = set()
        """Servers that took too long for this request, and would again."""
        self._last: Server | None = None
        self._num_failed, self._num_nonsense = 0, 0

    def next_server(self) -> Server:
        """Return whom to ask next."""
        self._last = self._servers.next(self._slow)
        return self._last

    def after(self, fault: Fault) -> float:
        """Return how many seconds to wait before the next try.

        Raises:
            ServerUnreachableError: there is none.
        """
        assert self._last is not None, "nobody was asked"
        self._num_failed += 1
        self._num_nonsense += fault.again == "once"
        if fault.again == "elsewhere":
            self._slow.add(self._last)
        if fault.again == "never" or self._num_nonsense > 1 or self._are_used_up():
            raise fault.told(self._last.endpoint.url, self._num_failed) from fault
        wanted_s = 0.0 if self._servers.another_is_well(self._last, self._slow) else fault.retry_after_s
        return wanted_s + wait_s(self._num_failed)

    def _are_used_up(self) -> bool:
        return self._num_failed > self._max_retries or self._servers.are_all_among(self._slow)


def wait_s(num_failed: int) -> float:
    """Return how long to wait after a request has failed `num_failed` times.

    Source: "full jitter" of Marc Brooker, Exponential Backoff And Jitter (AWS Architecture Blog, 2015).
    """
    longest = min(WAIT_LIMIT_S, FIRST_WAIT_S * 2 ** min(num_failed - 1, 16))
    return random.uniform(0.0, longest)  # noqa: S311  a delay, not a secret
