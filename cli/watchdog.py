"""Notice that a server of ours is of no use any more while a trainer waits for it, and end it.

vLLM's API server outlives an engine that was killed, and waits for open connections to close; a server that hangs
answers nothing at all. A trainer's call to either would wait for its whole time limit. Seen with vLLM 0.32.

Not covered: servers that somebody else started; a trainer has its `--request-timeout-s` for those. An engine that hangs
behind an API server that answers: the same limit ends the trainer's call.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from cli import children, console
from cli.children import Child
from cli.health import Address

PERIOD_S = 1.0
PATIENCE = 3
"""Bad answers in a row until the server is given up."""
HANG_LIMIT_S = 60.0
"""Silence, of one question that stays open, until a server that lives is given up; on two busy cores an answer takes
seconds."""


@dataclass
class Watchdog:
    """Watches one child from a thread of its own."""

    child: Child
    """The server's process."""
    address: Address
    """Where it answers."""
    hang_limit_s: float = HANG_LIMIT_S
    """Seconds of silence after which it hangs."""
    verdict: str = ""
    """Why the server was ended; empty while it was not."""
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
        """Watch until the server ends, is given up, or is watched no longer."""
        bad = 0
        while not self._over.wait(PERIOD_S) and self.child.is_alive():
            health = self.address.health(limit_s=self.hang_limit_s, is_over=self._over.is_set)
            bad = bad + 1 if health == "unwell" else 0
            if bad == PATIENCE:
                self._bite("lost its engine")
            elif health == "silent":
                self._bite(f"gave no answer for {self.hang_limit_s:g} s")

    def _bite(self, verdict: str) -> None:
        if self._over.is_set() or not self.child.is_alive():  # a stop is under way, or was not needed
            return
        self.verdict = verdict
        console.note(
            f"vLLM (pid {self.child.process.pid}) {verdict}: it was ended; its log is {self.child.log}", style="yellow"
        )
        children.kill(self.child)
        self._over.set()
