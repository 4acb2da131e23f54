"""A server that we started: restarted with other weights, watched, and stopped with everything that it started.

Not covered: the command that starts it (`server_command.py`, `start_command.py`).
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
from cli.serve import check_port
from cli.server_command import Startable
from cli.watchdog import HANG_LIMIT_S, Address, Watchdog

START_LIMIT_S = 1800.0
STOP_GRACE_S = 15.0
START_GRACE_S = 2.0
"""A server that is still starting, or the rest of one that died, has nothing to lose; vLLM 0.32 ignores SIGTERM while
its engine starts."""
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
        """The server's process, if there is one."""
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
        """Stop whatever is left of the server, start it with the weights of `model`, and wait until it serves.

        Raises:
            ServerUnreachableError: it does not come up; the message says why, and names its log.
        """
        with acting_interrupt():  # nothing is half written while a server starts
            self._stop()
            self._restarts += 1
            self._start(model)

    def _start(self, model: str | Path | None) -> None:
        check_port(self._command.host, self._command.port)
        server_log.begin(self._log, "started" if model is None else f"restarted with {model}")
        with deferred_interrupt():  # a process that was started must be known, or nobody would stop it
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
        """Wait until it serves, and return where it reports its health."""
        address = None

        def is_ready() -> bool:
            nonlocal address
            address = self._answering(server)
            return address is not None

        what = "restarting" if self._restarts else "starting"
        with console.waiting(f"{what} vLLM (pid {server.process.pid}, log {self._log})") as detail:
            began = time.monotonic()
            children.wait_until(
                server,
                is_ready,
                limit_s=self._limit_s,
                tell=lambda elapsed: detail(f"{elapsed:.0f} s  {server_log.last_line(self._log)}"),
            )
        if address is None and server.is_alive():
            last = server_log.last_line(self._log)
            raise ServerUnreachableError(
                f"vLLM was not ready within {self._limit_s:.0f} s; last line of its log: {last}",
                remedy=f"read {self._log}, or allow more time with --start-limit-s",
            )
        if address is None:
            raise self._died(server)
        console.note(f"vLLM is ready after {time.monotonic() - began:.0f} s")
        return address

    def _answering(self, server: Child) -> Address | None:
        """Return where this very server reports that it is well; None while it does not."""
        path = self._command.awaited_manifest
        try:
            if path is not None and manifest.read(path).server != server.identity:
                return None
        except (FileNotFoundError, ManifestError):
            return None
        host = reachable(self._command.host)
        addresses = (Address(host, self._command.port, route) for route in self._command.routes)
        return next((address for address in addresses if address.health(limit_s=ASK_LIMIT_S) == "well"), None)

    def _explained(self, error: ServerUnreachableError) -> BridgeError:
        """Return the error of a trainer's call with what is known of the server: why it ended, and its log."""
        if self._server is None or self._server.is_alive():
            return ServerUnreachableError(error.message, remedy=f"{error.remedy} (its log: {self._log})")
        return self._died(self._server)

    def _died(self, server: Child) -> BridgeError:
        """Return the error of a server that ended by itself."""
        refused = server_log.own_error(self._log)
        if refused is not None:
            return refused
        how = self._watchdog.verdict if self._watchdog else ""
        code = server.exit_code()
        assert code is not None, "it has ended"
        how = how or f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        before = f", restarted {self._restarts} times," if self._restarts > 1 else ""
        return ServerUnreachableError(
            f"vLLM (pid {server.process.pid}){before} {how}: {server_log.root_error(self._log)}",
            remedy=f"read {self._log}",
        )


def reachable(host: str) -> str:
    """Return the address at which a server that listens on `host` answers."""
    return LOOPBACKS.get(host, host)
