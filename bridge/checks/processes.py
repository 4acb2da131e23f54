"""Check who listens on the server's port, and that no engine has outlived its server. Nothing is ever stopped here.

vLLM's engine and workers call themselves `VLLM::...`. If the API server is killed with -9 they may live on, and hold
memory, on a GPU most of it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from bridge.checks.result import Check, failed, passed, warned

SHOWN_COMMAND = 60
"""Characters of a command line that tell one program from another."""
ENGINE = "VLLM::"
OWNERS = ("vllm", "bridge", "python")
"""One of these is in the command line of whatever can own an engine, unlike that of init."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who listens on a port."""

    pid: int | None
    """None: a process of another user or container."""
    command: str
    """Its command line, cut short."""
    ancestors: tuple[int, ...]
    """The processes that started it, nearest first."""


def port(number: int, server_pid: int | None, others: Mapping[int, str] = MappingProxyType({})) -> Check:
    """Check who listens on a port."""
    taken: dict[int, int | None] = {}
    for connection in psutil.net_connections(kind="tcp"):
        if connection.laddr and connection.status == psutil.CONN_LISTEN:
            taken[connection.laddr.port] = connection.pid or taken.get(connection.laddr.port)
    listener = describe(taken[number]) if number in taken else None
    return port_free_or_ours(number, listener, server_pid, taken, others)


def describe(pid: int | None) -> Listener:
    """Return what may be known of the process `pid`."""
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
    number: int,
    listener: Listener | None,
    server_pid: int | None,
    taken: Collection[int] = (),
    others: Mapping[int, str] = MappingProxyType({}),
) -> Check:
    """Check that nobody but the manifest's server listens on a port.

    `others`: pid of each other living server of Bridge -> how to name it.
    """
    name, expected = f"Port {number}", "free, or taken by the manifest's server"
    if listener is None:
        if server_pid is None:
            return passed(name, "free", expected)
        remedy = "see why in its log, and restart it: bridge serve-vllm --model MODEL"
        return failed(name, f"free, although the server (pid {server_pid}) is alive", expected, remedy)
    known = (listener.pid, *listener.ancestors)
    if server_pid is not None and server_pid in known:
        return passed(name, f"our server, pid {listener.pid}", expected)
    free = next(candidate for candidate in range(number + 1, number + 1000) if candidate not in taken)
    remedy = f"bridge serve-vllm --port {free} ..."
    if listener.pid is None:
        return failed(name, "taken by another user's process, or another container's", expected, remedy)
    if ours := next((words for pid, words in others.items() if pid in known), None):
        found = f"taken by a server of Bridge that was started elsewhere, pid {listener.pid}"
        return warned(name, found, expected, f"to use that one: {ours}; for another one: {remedy}")
    found = f"taken by pid {listener.pid}" + (f": {listener.command}" if listener.command else "")
    return failed(name, found, expected, f"{remedy}, or end that process if it is yours: kill {listener.pid}")


@dataclass(frozen=True, kw_only=True)
class Running:
    """One process of this user."""

    pid: int
    """Process id."""
    parent: int
    """The process that started it, or that adopted it."""
    command: str
    """Its command line, which for an engine is its title."""


def running() -> Iterator[Running]:
    """Yield every process whose command line is readable."""
    for process in psutil.process_iter(["ppid", "cmdline"]):
        if process.info["cmdline"]:
            yield Running(pid=process.pid, parent=process.info["ppid"], command=" ".join(process.info["cmdline"]))


def engines_have_servers(processes: Iterable[Running]) -> Check:
    """Check that every engine's parent is a program that can own it."""
    name, expected = "Leftover engines", "every VLLM:: process has its server"
    known = {process.pid: process for process in processes}
    engines = [process for process in known.values() if process.command.startswith(ENGINE)]
    lost = [engine for engine in engines if not _owned(engine, known)]
    if not lost:
        return passed(name, f"none; {len(engines)} engine processes with their server" if engines else "none", expected)
    found = ", ".join(f"pid {engine.pid} {engine.command.strip()}" for engine in lost)
    remedy = f"if they are yours: kill {' '.join(str(engine.pid) for engine in lost)}"
    return warned(name, f"{found}: the server is gone, its memory is still held", expected, remedy)


def _owned(engine: Running, known: Mapping[int, Running]) -> bool:
    """Follow the parents up to the first that is no engine process itself."""
    parent = known.get(engine.parent)
    while parent and parent.command.startswith(ENGINE):
        parent = known.get(parent.parent)
    return parent is not None and any(owner in parent.command.lower() for owner in OWNERS)
