"""Check that no engine has outlived its server: it would hold memory, on a GPU most of it, for nobody.

vLLM's engine and workers call themselves `VLLM::...`; when the API server is killed with -9 they may live on.

Not covered: who listens on the port (`port.py`). Nothing is ever stopped here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil

from bridge.checks.result import Check, passed, warned

ENGINE = "VLLM::"
OWNERS = ("vllm", "bridge", "python")
"""One of these is in the command line of whatever can own an engine; init and its like have none."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """One process of this user."""

    pid: int
    """Process id."""
    parent: int
    """The process that started it, or that took it in when that one ended."""
    command: str
    """Its command line, which for an engine is its title."""


def running() -> Iterator[Running]:
    """Yield every process whose command line we may read."""
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


def _owned(engine: Running, known: dict[int, Running]) -> bool:
    """Follow the parents up through other engine processes to the first that is none."""
    parent = known.get(engine.parent)
    while parent and parent.command.startswith(ENGINE):
        parent = known.get(parent.parent)
    return parent is not None and any(owner in parent.command.lower() for owner in OWNERS)
