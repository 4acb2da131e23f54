"""The server's lease: who may update it, one at a time; and the only place that compares holders.

A trainer takes the lease before it changes anything, and returns it when it ends. The lease of a dead process is free.
"""

import time
from typing import TypeAlias

from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError
from bridge.server.protocol import Lease

Holder: TypeAlias = ProcessIdentity
"""Who holds the lease or the fence."""


def is_same(one: Holder | None, other: Holder | None) -> bool:
    """Return whether both are the same holder."""
    return one == other


def is_alive(holder: Holder) -> bool:
    """Return whether `holder` still runs."""
    return holder.is_alive()


def pids(holder: Holder) -> str:
    """Return the holder's process id, as `kill` takes it."""
    return str(holder.pid)


def refuse_unseen(holder: Holder) -> None:
    """Raise AttachError unless `holder` is alive and the server would notice its end."""
    if not (holder.is_visible() and holder.is_alive()):
        raise AttachError(
            f"process {pids(holder)} is not visible to the server, which could not notice its end",
            remedy="run both in one pid namespace: docker run --pid=container:NAME",
        )


class ServerLease:
    """Remembers who took the lease of one server."""

    def __init__(self) -> None:
        self._taken: Lease | None = None

    @property
    def held(self) -> Lease | None:
        """The lease of a living process, if there is one."""
        return self._taken if self._taken and is_alive(self._taken.holder) else None

    @property
    def trainer(self) -> str:
        """The living holder, for messages."""
        assert self.held is not None
        return f"trainer (pid {pids(self.held.holder)}, run {self.held.run})"

    def take(self, holder: Holder, run: str) -> None:
        """Give the lease to `holder`, under a new name if it has it already, or raise AttachError."""
        refuse_unseen(holder)
        self.refuse_others(holder)
        self._taken = Lease(holder=holder, run=run, since=time.time())

    def give_back(self, holder: Holder) -> None:
        """Free the lease if `holder` has it."""
        if self._taken and is_same(self._taken.holder, holder):
            self._taken = None

    def refuse_others(self, holder: Holder) -> None:
        """Raise AttachError if another living process than `holder` has the lease."""
        held = self.held
        if held and not is_same(held.holder, holder):
            raise AttachError(
                f"another {self.trainer} is updating this server",
                remedy=f"wait for it to finish, stop it (kill -INT {pids(held.holder)}), or start a second server on"
                " another port",
            )
