"""A server that Bridge starts, watches, restarts with new weights, and stops with everything that it started.

vLLM's API server outlives an engine that was killed (seen with 0.32), and a server that hangs answers nothing: a
trainer's call to either would wait for its whole time limit. A watchdog kills such a server.

Not covered: servers that Bridge did not start, and an engine that hangs while its API server answers:
`--request-timeout-s` limits the calls to both.
"""

import contextlib
import http
import http.client
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from bridge.core.concurrency import is_readable
from bridge.core.interrupt import acting_interrupt, deferred_interrupt
from bridge.errors import BridgeError, ManifestError, ServerUnreachableError
from bridge.processes import Waiting, children, logged_wait, server_log
from bridge.processes.children import Child
from bridge.processes.preload import Preloaded
from bridge.processes.server_command import ServerCommand
from bridge.processes.start_checks import check_port, taking
from bridge.server import api_key, manifest

logger = logging.getLogger(__name__)

START_LIMIT_S = 1800.0
STOP_GRACE_S = 15.0
START_GRACE_S = 2.0
"""Time for a server that is starting or has died to exit after SIGTERM. It has no work to lose, and vLLM 0.32 ignores
SIGTERM while its engine starts."""
ASK_LIMIT_S = 2.0
LAST_THREADS_S = 10.0
"""Longest wait for the other threads of a server whose main thread has exited: CUDA's threads take seconds."""

SLICE_S = 0.25
"""Silence is counted in slices of this length, so that a slice in which the whole machine slept counts once."""
READ_LIMIT_S = 5.0
"""Longest wait for the remainder of an answer that has begun."""
PERIOD_S = 1.0
"""Time between two health checks of the watchdog."""
PATIENCE = 3
"""Consecutive bad answers after which the server is killed."""
HANG_LIMIT_S = 60.0
"""Silence after one health check until the server is killed; on two busy cores an answer takes seconds."""


class StartedServer:
    """One server at a time, on one port; implements `bridge.modes.mode.ServerProcess`."""

    def __init__(
        self,
        command: ServerCommand,
        log: Path,
        *,
        limit_s: float = START_LIMIT_S,
        hang_limit_s: float = HANG_LIMIT_S,
        waiting: Waiting = logged_wait,
        preloaded: Preloaded | None = None,
    ) -> None:
        self._command = command
        self._log = log
        self._host = command.client_host
        self._limit_s = limit_s
        self._hang_limit_s = hang_limit_s
        self._waiting = waiting
        self._preloaded = preloaded or Preloaded(None)
        self._server: Child | None = None
        self._is_ready = False
        self._watchdog = contextlib.ExitStack()
        self._verdict = ""
        """Why the watchdog killed the server; empty: it did not."""
        self._restarts = 0

    @contextlib.contextmanager
    def running(self, check_abort: Callable[[], None] = lambda: None) -> Iterator["StartedServer"]:
        """Run the server for the duration of the block: ready at its start, stopped at its end.

        `check_abort` is called while the server starts, and may raise to abort the start.
        """
        try:
            with taking(self._command.host, self._command.port, self._command.awaited_manifest):
                self._start(None, check_abort)
                yield self
        except ServerUnreachableError as error:
            if str(self._log) in error.hint:
                raise
            if self._server is None or self._server.is_alive():
                hint = f"{error.hint} (its log: {self._log})"
                raise ServerUnreachableError(error.message, hint=hint) from error
            raise self._died(self._server) from error
        finally:
            self._stop()

    def restart(self, model: str | Path) -> None:
        """Stop the server if it still runs, start it with the weights of `model`, and wait until it is ready."""
        with acting_interrupt():  # an interrupt is safe here: no weights are being written
            self._stop()
            self._restarts += 1
            self._start(model)

    def _start(self, model: str | Path | None, check_abort: Callable[[], None] = lambda: None) -> None:
        check_port(self._command.host, self._command.port)
        server_log.begin_log(self._log, "started" if model is None else f"restarted with {model}")
        command = self._command.argv_for(model), self._command.environment, self._log
        with deferred_interrupt():  # otherwise Bridge could lose track of the process, and never stop it
            self._server = self._preloaded.become(*command) or children.start(*command)
        route = self._wait(self._server, check_abort)
        self._is_ready = True
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(self._server, route, over), name="watchdog", daemon=True)

        def end_watch() -> None:
            over.set()
            watch.join()

        watch.start()
        self._watchdog.callback(end_watch)

    def _stop(self) -> None:
        """Stop the watchdog, then the server, if there is one."""
        server, self._server = self._server, None
        if server is not None and not server.is_own():  # this process was forked inside the block
            return
        serves = server is not None and self._is_ready and server.is_alive()
        try:
            self._watchdog.close()
            self._is_ready = False
            self._verdict = ""
        finally:
            if server is not None:
                try:
                    children.stop(server, grace_s=STOP_GRACE_S if serves else START_GRACE_S)
                finally:
                    if self._command.awaited_manifest is not None:
                        manifest.remove_own(self._command.awaited_manifest, server.identity)

    def _watch(self, server: Child, route: str, over: threading.Event) -> None:
        """Kill `server` if it loses its engine or hangs, until `over` is set."""
        bad = 0
        while not over.wait(PERIOD_S) and server.is_alive():
            answer = health(self._host, self._command.port, route, limit_s=self._hang_limit_s, is_over=over.is_set)
            bad = bad + 1 if answer == "unwell" else 0
            if bad < PATIENCE and answer != "silent":
                continue
            if over.is_set() or not server.is_alive():  # the server is being stopped, or has exited
                return
            self._verdict = "lost its engine" if bad else f"gave no answer for {self._hang_limit_s:g} s"
            stopped = f"vLLM (pid {server.process.pid}) {self._verdict}: it was stopped"
            logger.warning(f"{stopped}; its log is {self._log}")
            children.kill(server)
            return

    def _wait(self, server: Child, check_abort: Callable[[], None]) -> str:
        """Wait until `server` is ready, and return the route that reports its health."""
        began = time.monotonic()
        phases = server_log.StartPhases(self._log)

        def progress(elapsed: float) -> None:
            check_abort()
            detail(f"{elapsed:.0f} s  {phases.measure(elapsed)}")

        what = "restarting" if self._restarts else "starting"
        with self._waiting(f"{what} vLLM (pid {server.process.pid}, log {self._log})") as detail:
            route = children.wait_until(
                server, lambda: self._answering(server), limit_s=self._limit_s, progress=progress
            )
        if route is not None:
            logger.info(f"vLLM is ready after {time.monotonic() - began:.0f} s{phases.summary()}")
            return route
        if not server.is_alive():
            raise self._died(server)
        last = server_log.last_line(self._log)
        raise ServerUnreachableError(
            f"vLLM was not ready within {self._limit_s:.0f} s; last line of its log: {last}",
            hint=f"read {self._log}, run bridge doctor, or allow more time with --start-limit-s",
        )

    def _answering(self, server: Child) -> str | None:
        """Return the route on which this server reports that it is healthy; None if only an earlier server answers."""
        path = self._command.awaited_manifest
        try:
            if path is not None and manifest.read(path).server != server.identity:
                return None
        except (FileNotFoundError, ManifestError):
            return None
        for route in self._command.routes:
            if health(self._host, self._command.port, route, limit_s=ASK_LIMIT_S) == "well":
                return route
        return None

    def _died(self, server: Child) -> BridgeError:
        """Return the error of a server that ended or was killed."""
        if refused := server_log.own_error(self._log):
            return refused
        how = self._verdict or _ended_with(server)
        before = f", restarted {self._restarts} times," if self._restarts > 1 else ""
        return ServerUnreachableError(
            f"vLLM (pid {server.process.pid}){before} {how}: {server_log.root_error(self._log)}",
            hint=f"bridge doctor, or read {self._log}",
        )


def _ended_with(server: Child) -> str:
    """Return how a server ended: its exit code may be unreadable for some time after its main thread has exited."""
    deadline = time.monotonic() + LAST_THREADS_S
    while (code := server.exit_code()) is None and time.monotonic() < deadline:
        time.sleep(children.POLL_S)
    if code is None:
        return f"ended, but some of its threads still run after {LAST_THREADS_S:g} s"
    return f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def health(
    host: str, port: int, route: str = "/health", *, limit_s: float, is_over: Callable[[], bool] = lambda: False
) -> Literal["well", "unwell", "silent"]:
    """Send one health request, and wait up to `limit_s` seconds for the answer, or until `is_over`.

    `unwell`: a status other than 200, or no connection; `silent`: no answer in time.
    """
    connection = http.client.HTTPConnection(host, port, timeout=SLICE_S)
    with contextlib.closing(connection):
        try:
            for _ in range(1 + round(limit_s / SLICE_S)):
                if is_over():
                    break
                if connection.sock is None:
                    with contextlib.suppress(TimeoutError):  # the listen queue of a busy server may be full
                        connection.request("GET", route, headers=api_key.headers())
                elif is_readable(connection.sock, SLICE_S):
                    connection.sock.settimeout(READ_LIMIT_S)
                    return "well" if connection.getresponse().status == http.HTTPStatus.OK else "unwell"
        except (OSError, http.client.HTTPException):
            return "unwell"
    return "silent"
