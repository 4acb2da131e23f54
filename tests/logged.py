"""Collect Bridge's log lines in a block, for tests that cannot use `caplog`."""

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
    """Yield a list that collects the log lines, in order."""
    handler = _Lines()
    with logs.handled_by(handler):
        yield handler.lines


@contextmanager
def nothing_logged() -> Iterator[None]:
    with logged() as lines:
        yield
    assert lines == []
