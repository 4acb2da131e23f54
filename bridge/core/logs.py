"""Logging as all of Bridge uses it: each module logs to its own logger below `bridge`."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Send what Bridge logs in the block to `handler`, from INFO on."""
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
    """Log a line, once in a process."""
    logger.info(line)


@functools.cache
def warn_once(logger: logging.Logger, line: str) -> None:
    """Log a line as a warning, once in a process."""
    logger.warning(line)
