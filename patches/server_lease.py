"""The server's lease: which process may update it, one at a time.

A process takes it before it changes anything, and gives it back at its end; the lease of a dead process is free.

Not covered: pausing and publishing (`server_fence.py`).
"""

import time

from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError
from bridge.server.protocol import Lease


class ServerLease:
    """Remembers who took the lease of one server."""

    def __init__(self) -> None:
        self._taken: Lease | None = None

    @property
    def held(self) -> Lease | None:
        """The lease of a process that lives; None: it is free."""
        return self._taken if self._taken and self._taken.holder.is_alive() else None

    def take(self, holder: ProcessIdentity, run: str) -> None:
        """Give the lease to `holder`, under a new name if it has it already.

        Raises:
            AttachError: another living process has it, or the server could not see the end of `holder`.
        """
        refuse_unseen(holder)
        self.refuse_others(holder)
        self._taken = Lease(holder=holder, run=run, since=time.time())

    def give_back(self, holder: ProcessIdentity) -> None:
        """Free the lease, if `holder` has it."""
        if self._taken and self._taken.holder == holder:
            self._taken = None

    def refuse_others(self, holder: ProcessIdentity) -> None:
        """Raise AttachError if another living process than `holder` has the lease."""
        held = self.held
        if held and held.holder != holder:
            pid = held.holder.pid
            raise AttachError(
                f"another trainer (pid {pid}, run {held.run}) is updating this server",
                remedy=f"wait for it to finish, stop it (kill -INT {pid}), or start a second server on another port",
            )


def refuse_unseen(holder: ProcessIdentity) -> None:
    """Raise AttachError unless `holder` is a living process whose end the server would notice."""
    if not (holder.is_visible() and holder.is_alive()):
        raise AttachError(
            f"process {holder.pid} is not visible to the server, which could not notice its end",
            remedy="run both in one pid namespace: docker run --pid=container:NAME",
        )
