"""Check who listens on the server's port, and that no engine has outlived its server. Nothing is ever stopped here.

vLLM's engine and workers call themselves `VLLM::...`. If the API server is killed with -9, they may keep running and
hold memory, most of it on a GPU. With tensor parallelism on a CPU, vLLM leaves files in /dev/shm whenever it ends (seen
in vLLM 0.32).
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil

from bridge.checks.result import Check, failed, judged, passed, warned

SHOWN_COMMAND = 60
"""Longest command line in a message, in characters."""
ENGINE = "VLLM::"
MAILBOXES = "vllm_dist_*cpushm_*"
"""Files in /dev/shm of vLLM's ranks on a CPU."""
OWNERS = ("vllm", "bridge", "python")
"""Any process that can own an engine has one of these in its command line; init has none."""
NOBODY: Mapping[int, str] = MappingProxyType({})


class Listener(NamedTuple):
    """The process that listens on a port."""

    pid: int | None
    """None: a process of another user or container."""
    command: str = ""
    """Its command line, cut to `SHOWN_COMMAND`; empty if it cannot be read."""
    ancestors: tuple[int, ...] = ()
    """The processes that started it, nearest first."""


class Running(NamedTuple):
    """One process of this user."""

    pid: int
    parent: int
    """The process that started or adopted it."""
    command: str
    """Its command line; for an engine, its title."""


def listening() -> dict[int, int | None]:
    """Return the TCP ports that are listened on, with the pid of the listener; None: another user's or container's."""
    taken: dict[int, int | None] = {}
    for connection in psutil.net_connections(kind="tcp"):
        if connection.laddr and connection.status == psutil.CONN_LISTEN:
            taken[connection.laddr.port] = connection.pid or taken.get(connection.laddr.port)
    return taken


def describe(pid: int | None) -> Listener:
    """Return what can be known about the process `pid`."""
    if pid is None:
        return Listener(pid=None)
    try:
        process = psutil.Process(pid)
        program, *arguments = process.cmdline() or [process.name()]
        ancestors = tuple(parent.pid for parent in process.parents())
    except psutil.Error:
        return Listener(pid=pid)
    command = " ".join([Path(program).name, *arguments])
    cut = command if len(command) <= SHOWN_COMMAND else command[: SHOWN_COMMAND - 3] + "..."
    return Listener(pid=pid, command=cut, ancestors=ancestors)


def port(number: int, server_pid: int | None, others: Mapping[int, str] = NOBODY) -> Check:
    """Check that only the manifest's server listens on a port.

    `others`: pid of each other running server of Bridge -> its name in messages.
    """
    taken = listening()
    name, expected = f"Port {number}", "free, or taken by the manifest's server"
    if number not in taken:
        found = "free" if server_pid is None else f"free, although the server (pid {server_pid}) is running"
        remedy = "see why in its log, and restart it: bridge serve-vllm --model MODEL"
        return judged(name, server_pid is None, found, expected, remedy)
    listener = describe(taken[number])
    known = (listener.pid, *listener.ancestors)
    if server_pid is not None and server_pid in known:
        return passed(name, f"our server, pid {listener.pid}", expected)
    free = next(candidate for candidate in range(number + 1, number + 1000) if candidate not in taken)
    remedy = f"bridge serve-vllm --port {free} ..."
    if listener.pid is None:
        return failed(name, "taken by another user's process, or another container's", expected, remedy)
    if ours := next((words for pid, words in others.items() if pid in known), None):
        found = f"taken by a server of Bridge that was started elsewhere, pid {listener.pid}"
        return warned(name, found, expected, f"to use that one: {ours}; to start another one: {remedy}")
    found = f"taken by pid {listener.pid}" + (f": {listener.command}" if listener.command else "")
    return failed(name, found, expected, f"{remedy}, or stop that process if it is yours: kill {listener.pid}")


def running() -> Iterator[Running]:
    """Yield every process whose command line is readable."""
    for process in psutil.process_iter(["ppid", "cmdline"]):
        if process.info["cmdline"]:
            yield Running(process.pid, process.info["ppid"], " ".join(process.info["cmdline"]))


def engines_have_servers(processes: Iterable[Running]) -> Check:
    known = {process.pid: process for process in processes}
    engines = [process for process in known.values() if process.command.startswith(ENGINE)]
    lost = [engine for engine in engines if not _owned(engine, known)]
    found = f"none; engine processes with their server: {len(engines)}" if engines else "none"
    if lost:
        named = ", ".join(f"pid {engine.pid} {engine.command.strip()}" for engine in lost)
        found = f"{named}: the server is gone, but they still hold its memory"
    remedy = f"if they are yours: kill {' '.join(str(engine.pid) for engine in lost)}"
    expected = "every VLLM:: process has its server"
    return judged("Leftover engines", not lost, found, expected, remedy, otherwise="WARN")


def leftover_mailboxes(folder: Path = Path("/dev/shm"), processes: Path = Path("/proc")) -> list[Path]:  # noqa: S108
    """Return the files through which ranks of vLLM on a CPU reduce tensors, and which no process has mapped."""
    found = {str(path): path for path in sorted(folder.glob(MAILBOXES))}
    for maps in processes.glob("[0-9]*/maps") if found else ():
        with suppress(OSError):
            for line in maps.read_text().splitlines():
                _, _, name = line.partition(f"{folder}/")
                found.pop(f"{folder}/{name}", None)
    return [*found.values()]


def mailboxes_have_ranks(lost: Sequence[Path]) -> Check:
    megabytes = sum(path.stat().st_size for path in lost) / 2**20
    found = f"{len(lost)}, {megabytes:.0f} MiB together, the first: {lost[0]}" if lost else "none"
    remedy = "if they are yours: rm " + " ".join(shlex.quote(str(path)) for path in lost)
    expected = "every mailbox of vLLM's ranks in /dev/shm has its server"
    return judged("Leftover mailboxes", not lost, found, expected, remedy, otherwise="WARN")


def _owned(engine: Running, known: Mapping[int, Running]) -> bool:
    """Follow the parents to the first one that is not an engine process."""
    parent = known.get(engine.parent)
    while parent and parent.command.startswith(ENGINE):
        parent = known.get(parent.parent)
    return parent is not None and any(owner in parent.command.lower() for owner in OWNERS)
