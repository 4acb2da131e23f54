"""Logging helpers: each module of Bridge logs to its own logger below `bridge`."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Send log records of Bridge to `handler` while the block runs, at level INFO and above."""
    logger = logging.getLogger("bridge")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@functools.cache
def info_once(logger: logging.Logger, line: str) -> None:
    """Log a line only once per process."""
    logger.info(line)


@functools.cache
def warn_once(logger: logging.Logger, line: str) -> None:
    """Log a warning only once per process."""
    logger.warning(line)
