"""A server that we started: started again with other weights, watched, and stopped with everything that it started.

Not covered: what it is started with (`server_command.py`, `start_command.py`), and noticing that it is of no use any
more (`watchdog.py`).
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bridge.core.interrupt import acting_interrupt, deferred_interrupt
from bridge.errors import BridgeError, ManifestError, ServerUnreachableError
from bridge.server import manifest
from cli import children, console, server_log
from cli.children import Child
from cli.health import Address
from cli.serve import check_port
from cli.startable import Startable
from cli.watchdog import HANG_LIMIT_S, Watchdog

START_LIMIT_S = 1800.0
STOP_GRACE_S = 15.0
START_GRACE_S = 2.0
"""A server that is still starting, or what is left of one that died, has nothing to lose. vLLM 0.32 heeds no SIGTERM
while its engine starts."""
ASK_LIMIT_S = 2.0
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  where a server that listens everywhere answers


class StartedServer:
    """One server at a time, in one place; implements `bridge.modes.mode.ServerProcess`."""

    def __init__(
        self,
        command: Startable,
        log: Path,
        *,
        limit_s: float = START_LIMIT_S,
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self._command, self._log = command, log
        self._limit_s, self._hang_limit_s = limit_s, hang_limit_s
        self._server: Child | None = None
        self._watchdog: Watchdog | None = None
        self._watch = contextlib.ExitStack()
        self._restarts = 0

    @property
    def pid(self) -> int | None:
        """The server's process; None while there is none."""
        return self._server.process.pid if self._server else None

    @contextlib.contextmanager
    def running(self) -> Iterator["StartedServer"]:
        """Serve for as long as the context lasts; the server is ready when it begins and gone when it ends.

        Raises:
            ServerUnreachableError: it was not ready in time, or died, then or later.
            BridgeError: whatever the patches refused inside it.
        """
        try:
            self._start(None)
            yield self
        except ServerUnreachableError as error:
            if str(self._log) in error.remedy:
                raise
            raise self._explained(error) from error
        finally:
            self._stop()

    def restart(self, model: str | Path) -> None:
        """End whatever is left of the server, start it with the weights of `model`, and wait until it serves.

        Raises:
            ServerUnreachableError: it does not come up; the message says why, and names its log.
        """
        with acting_interrupt():  # nothing is half written while a server starts
            self._stop()
            self._restarts += 1
            self._start(model)

    def _start(self, model: str | Path | None) -> None:
        check_port(self._command.host, self._command.port)
        server_log.begin(self._log, "started" if model is None else f"started again with {model}")
        with deferred_interrupt():  # a process that was started has to be known, or nobody would stop it
            self._server = children.start(self._command.argv_for(model), self._command.environment, self._log)
        address = self._wait(self._server)
        self._watchdog = Watchdog(self._server, address, self._hang_limit_s)
        self._watch.enter_context(self._watchdog.watching())

    def _stop(self) -> None:
        """End the server, if there is one, and its watchdog before it."""
        server, self._server = self._server, None
        serves = server is not None and self._watchdog is not None and server.is_alive()
        try:
            self._watch.close()
            self._watchdog = None
        finally:
            if server is not None:
                children.stop(server, grace_s=STOP_GRACE_S if serves else START_GRACE_S)
                if self._command.awaited_manifest is not None:
                    manifest.remove_own(self._command.awaited_manifest, server.identity)

    def _wait(self, server: Child) -> Address:
        """Wait until it serves, and return where it tells so."""
        address = None

        def is_ready() -> bool:
            nonlocal address
            address = self._answering(server)
            return address is not None

        again = "again " if self._restarts else ""
        with console.waiting(f"starting vLLM {again}(pid {server.process.pid}, log {self._log})") as detail:
            began = time.monotonic()
            children.wait_until(
                server,
                is_ready,
                limit_s=self._limit_s,
                tell=lambda elapsed: detail(f"{elapsed:.0f} s  {server_log.last_line(self._log)}"),
            )
        if address is None:
            raise self._late() if server.is_alive() else self._died(server)
        console.note(f"vLLM is ready after {time.monotonic() - began:.0f} s")
        return address

    def _answering(self, server: Child) -> Address | None:
        """Return where this very server says that it is well; None while it does not."""
        if not self._has_exported(server):
            return None
        host = reachable(self._command.host)
        addresses = (Address(host, self._command.port, route) for route in self._command.routes)
        return next((address for address in addresses if address.health(limit_s=ASK_LIMIT_S) == "well"), None)

    def _has_exported(self, server: Child) -> bool:
        path = self._command.awaited_manifest
        try:
            return path is None or manifest.read(path).server == server.identity
        except (FileNotFoundError, ManifestError):
            return False

    def _late(self) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"vLLM was not ready within {self._limit_s:.0f} s; its log says: {server_log.last_line(self._log)}",
            remedy=f"read {self._log}, or give it more time with --start-limit-s",
        )

    def _explained(self, error: ServerUnreachableError) -> BridgeError:
        """Return the error of a trainer's call with what is known of the server: why it ended, and its log."""
        if self._server is None or self._server.is_alive():
            return ServerUnreachableError(error.message, remedy=f"{error.remedy} (its log: {self._log})")
        return self._died(self._server)

    def _died(self, server: Child) -> BridgeError:
        """Return what a person has to know of a server that ended by itself."""
        refused = server_log.own_error(self._log)
        if refused is not None:
            return refused
        verdict = self._watchdog.verdict if self._watchdog else ""
        how = verdict or f"ended with {_in_words(server.exit_code())}"
        before = f", started again {self._restarts} times," if self._restarts > 1 else ""
        return ServerUnreachableError(
            f"vLLM (pid {server.process.pid}){before} {how}: {server_log.root_error(self._log)}",
            remedy=f"read {self._log}",
        )


def reachable(host: str) -> str:
    """Return the address at which a server that listens on `host` answers."""
    return LOOPBACKS.get(host, host)


def _in_words(exit_code: int | None) -> str:
    assert exit_code is not None, "it has ended"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
