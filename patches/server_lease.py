"""The server's lease: who may update it, one at a time.

A trainer takes the lease before it changes anything, and returns it when it ends. When all of a holder's processes have
ended, its lease is free.
"""

import time

from bridge.errors import AttachError
from bridge.server.protocol import Holder, Lease


def refuse_unseen(holder: Holder) -> None:
    """Raise AttachError unless all of `holder` is running, and the server would notice its end."""
    if not (holder.is_visible() and holder.is_whole()):
        raise AttachError(
            f"process {holder.pid} is not visible to the server, which could not notice its end",
            remedy="run both in one pid namespace: docker run --pid=container:NAME",
        )


class ServerLease:
    """Remembers who took the lease of one server."""

    def __init__(self) -> None:
        self._taken: Lease | None = None

    @property
    def held(self) -> Lease | None:
        """The lease, unless its holder is gone."""
        return self._taken if self._taken and not self._taken.holder.is_gone() else None

    @property
    def trainer(self) -> str:
        """The holder, for messages."""
        assert self.held is not None
        return f"trainer (pid {self.held.holder.pid}, run {self.held.run})"

    def take(self, holder: Holder, run: str) -> None:
        """Give the lease to `holder`, under a new name if it has it already, or raise AttachError."""
        refuse_unseen(holder)
        self.refuse_others(holder)
        self._taken = Lease(holder=holder, run=run, since=time.time())

    def give_back(self, holder: Holder) -> None:
        """Free the lease if `holder` has it."""
        if self._taken and self._taken.holder == holder:
            self._taken = None

    def refuse_others(self, holder: Holder) -> None:
        """Raise AttachError if another holder has the lease."""
        held = self.held
        if held and held.holder != holder:
            raise AttachError(
                f"another {self.trainer} is updating this server",
                remedy=f"wait for it to finish, stop it (kill -INT {held.holder.pid}), or start a second server on"
                " another port",
            )
