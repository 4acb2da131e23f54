"""Print notes on stderr and data on stdout, with terminal escape sequences made harmless."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from bridge.core import logs
from bridge.core.redaction import escaped, redact_urls

people = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
"""Prints without colors if stderr is not a terminal or NO_COLOR is set."""

LONGEST_FAULT = 8_000
"""Maximum number of characters of an error or a hint, which may quote a value as long as a file."""
LONGEST_LOGGED = 10_000
"""Maximum number of characters printed of a line that Bridge logs."""
LOG_STYLES = {"bridge.processes.server_command": "dim"}
"""Logger -> the style of its lines; the lines of other loggers have no style."""
OF_STARTS = "bridge.processes", "bridge.engine.compile_ahead"
"""Loggers of the processes and the compilation that each rank starts."""
STATUS_STYLES = {"PASS": "bold green", "WARN": "bold yellow", "FAIL": "bold red", "SKIP": "dim"}

_view: tuple[Callable[[Text], None], Callable[[str], None]] | None = None
"""Two functions of the live view: print a line above it, and show what Bridge is waiting for; None: no live view."""


@contextlib.contextmanager
def shared_with(say: Callable[[Text], None], wait_for: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, where the live view owns the terminal, pass notes to `say` and waits to `wait_for`."""
    global _view  # noqa: PLW0603 - there is one terminal
    _view = say, wait_for
    try:
        yield
    finally:
        _view = None


def note(text: str, *, style: str = "") -> None:
    """Print a line for a person."""
    line = Text(escaped(redact_urls(text)), style=style)
    if _view is None:
        people.print(line)
    else:
        _view[0](line)


class _LogHandler(logging.Handler):
    """Prints Bridge's log records as notes, warnings in yellow."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else LOG_STYLES.get(record.name, "")
        note(record.getMessage()[:LONGEST_LOGGED], style=style)


_LOG_HANDLER = _LogHandler()


@contextlib.contextmanager
def printing_logs() -> Iterator[None]:
    """Inside the block, print Bridge's log records, and hide them from handlers that a user's program installs."""
    logger = logging.getLogger("bridge")
    propagates = logger.propagate
    with logs.handled_by(_LOG_HANDLER):
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = propagates


@contextlib.contextmanager
def printing_only(*loggers: str) -> Iterator[None]:
    """Inside the block, print the log records of `loggers` and their children only."""
    filters = [logging.Filter(name) for name in loggers]

    def is_printed(record: logging.LogRecord) -> bool:
        return any(wanted.filter(record) for wanted in filters)

    _LOG_HANDLER.addFilter(is_printed)
    try:
        yield
    finally:
        _LOG_HANDLER.removeFilter(is_printed)


def verdict(status: str, text: str) -> None:
    """Print a line that begins with PASS, WARN, FAIL or SKIP."""
    people.print(Text.assemble((f"{status:4}", STATUS_STYLES[status]), "  ", escaped(text)))


def error(message: str, hint: str) -> None:
    people.print(Text.assemble(("error: ", "bold red"), _bounded(message)))
    people.print()
    people.print(Text.assemble(("hint: ", "bold cyan"), _bounded(hint)))


def _bounded(text: str) -> str:
    """Return `text` escaped, leaving out its middle if it is longer than `LONGEST_FAULT`."""
    left_out = len(text) - LONGEST_FAULT
    if left_out > 0:
        end = LONGEST_FAULT // 2
        text = f"{text[:end]} [... {left_out:,} characters left out ...] {text[-end:]}"
    return escaped(redact_urls(text))


def data(line: str) -> None:
    """Print a line for a program and flush it; the bytes of file names survive whatever the terminal's encoding is."""
    if sys.stdout.isatty():
        line = escaped(line)
    try:
        sys.stdout.write(line + "\n")
    except UnicodeEncodeError:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(line + "\n"))
    sys.stdout.flush()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show what Bridge is waiting for; the yielded function updates the detail after it.

    On a terminal this is one line that is redrawn; elsewhere `what` is printed once, without details.
    """
    what = escaped(what)
    if _view is not None:
        wait_for = _view[1]
        wait_for(what)
        try:
            yield lambda detail: wait_for(_in_line(what, escaped(detail), people.width // 2))
        finally:
            wait_for("")
    elif not people.is_terminal:
        note(f"{what} ...")
        yield lambda _: None
    else:
        with people.status(Text(what), spinner="line") as status:
            yield lambda detail: status.update(Text(_in_line(what, escaped(detail), people.width - 4)))


def _in_line(what: str, detail: str, width: int) -> str:
    """Join `what` and `detail` in a line of at most `width` characters; `what` is cut first, since `detail` changes."""
    room = max(width - len(detail) - 2, 0)
    start = what if len(what) <= room else f"{what[: max(room - 3, 0)]}..."
    return f"{start}  {detail}"[:width]
