"""What keeps an answer from coming, and whether asking again may help.

Not covered: asking again (`retries.py`).
"""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

from bridge.errors import ServerUnreachableError
from bridge.server.client import unreachable

Again = Literal["anywhere", "elsewhere", "once", "never"]
"""Where a request may be sent again: at any server; at another one, since this one would take as long again; at any one
but only once, since what answers nonsense twice means it; nowhere."""
PASSING = (408, 429, 500, 502, 503, 504)
"""Statuses of a server that is busy or unwell, and may be well in a moment."""
RETRY_AFTER_LIMIT_S = 30.0
"""Longest wait that a server can ask for."""


class Fault(Exception):  # noqa: N818  asking again may mend it: no error yet
    """One request that failed by the server's fault."""

    def __init__(self, words: str, again: Again, *, retry_after_s: float = 0.0) -> None:
        super().__init__(words)
        self.words, self.again, self.retry_after_s = words, again, retry_after_s

    def told(self, url: str, num_tries: int) -> ServerUnreachableError:
        """Return what a person is told who is to mend it."""
        tries = "tried once" if num_tries == 1 else f"tried {num_tries} times"
        error = unreachable(url, f"{self.words}; {tries}")
        if self.again != "elsewhere":
            return error
        remedy = f"{error.remedy}; or give it longer, --request-timeout-s, or less to do, --max-new-tokens"
        return ServerUnreachableError(error.message, remedy=remedy)


def of_status(status: int, words: str, retry_after: str | None) -> Fault:
    """Return the fault of an answer that says by its status that it is none."""
    again: Again = "anywhere" if status in PASSING else "never"
    return Fault(words, again, retry_after_s=_seconds(retry_after))


def _seconds(retry_after: str | None) -> float:
    """Return the wait that a server asks for, within limits; 0 where it asks for none or says it unreadably.

    Source: RFC 9110, 10.2.3: a number of seconds, or a date.
    """
    if retry_after is None:
        return 0.0
    try:
        seconds = float(retry_after) if retry_after.isdecimal() else _until(retry_after)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), RETRY_AFTER_LIMIT_S)


def _until(date: str) -> float:
    moment = parsedate_to_datetime(date)
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
