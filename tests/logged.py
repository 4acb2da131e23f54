"""What Bridge logs in a block, for tests that run it inside a function."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from bridge.core import logs


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the lines, in the order in which they are logged."""
    handler = _Lines()
    with logs.handled_by(handler):
        yield handler.lines


@contextmanager
def nothing_logged() -> Iterator[None]:
    with logged() as lines:
        yield
    assert lines == []
