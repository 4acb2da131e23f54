"""Check who listens on the server's port.

Not covered: whether that server is well (`server.py`). Nothing is ever stopped here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from bridge.checks.result import Check, failed, passed, warned

SHOWN_COMMAND = 60
"""Characters of a command line that tell one program from another."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who listens on a port."""

    pid: int | None
    """None: a process of another user or container."""
    command: str
    """Its command line, cut short."""
    ancestors: tuple[int, ...]
    """The processes that started it, nearest first."""


def listening_ports() -> dict[int, int | None]:
    """Return each TCP port that somebody listens on, and the listener's pid where the kernel tells it."""
    ports: dict[int, int | None] = {}
    for connection in psutil.net_connections(kind="tcp"):
        if connection.laddr and connection.status == psutil.CONN_LISTEN:
            ports[connection.laddr.port] = connection.pid or ports.get(connection.laddr.port)
    return ports


def describe(pid: int | None) -> Listener:
    """Return who `pid` is, as far as we may know."""
    try:
        process = psutil.Process(pid) if pid else None
        if process is None:
            return Listener(pid=None, command="", ancestors=())
        program, *arguments = process.cmdline() or [process.name()]
        command = " ".join([Path(program).name, *arguments])
        ancestors = tuple(parent.pid for parent in process.parents())
    except psutil.Error:
        return Listener(pid=pid, command="", ancestors=())
    cut = command if len(command) <= SHOWN_COMMAND else command[: SHOWN_COMMAND - 3] + "..."
    return Listener(pid=pid, command=cut, ancestors=ancestors)


def port_free_or_ours(
    port: int,
    listener: Listener | None,
    server_pid: int | None,
    taken: Collection[int] = (),
    others: Mapping[int, str] = MappingProxyType({}),
) -> Check:
    """Check that nobody but the manifest's server listens on `port`.

    `others`: pid of each other living server of Bridge -> how to name it.
    """
    name = f"Port {port}"
    expected = "free, or taken by the manifest's server"
    if listener is None:
        if server_pid is None:
            return passed(name, "free", expected)
        remedy = "look into its log: it has stopped listening; restart it with: bridge serve-vllm --model MODEL"
        return failed(name, f"free, although the server, pid {server_pid}, lives", expected, remedy)
    if server_pid is not None and server_pid in (listener.pid, *listener.ancestors):
        return passed(name, f"our server, pid {listener.pid}", expected)
    other = next(candidate for candidate in range(port + 1, port + 1000) if candidate not in taken)
    remedy = f"bridge serve-vllm --port {other} ..."
    if listener.pid is None:
        return failed(name, "taken by another user's process, or another container's", expected, remedy)
    known = [others[pid] for pid in (listener.pid, *listener.ancestors) if pid in others]
    if known:
        found = f"taken by a server of Bridge that was started elsewhere, pid {listener.pid}"
        return warned(name, found, expected, f"to use that one: {known[0]}; for another one: {remedy}")
    who = f"pid {listener.pid}" + (f": {listener.command}" if listener.command else "")
    return failed(
        name, f"taken by {who}", expected, f"{remedy}, or end that process if it is yours: kill {listener.pid}"
    )


def check(port: int, server_pid: int | None, others: Mapping[int, str] = MappingProxyType({})) -> Check:
    """Look who listens on `port`, and judge it."""
    taken = listening_ports()
    listener = describe(taken[port]) if port in taken else None
    return port_free_or_ours(port, listener, server_pid, taken, others)
