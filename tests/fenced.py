"""Pass a fence in one call."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from bridge.server.fence import FenceTimes, Window


def publish(
    fence: AbstractContextManager[Window],
    write: Callable[[], object] = lambda: None,
    prepare: Callable[[], object] | None = None,
) -> FenceTimes:
    """Enter `fence`, `prepare` if there is something to prepare, `write`, and return the times."""
    with fence as window:
        if prepare is not None:
            with window.preparing():
                prepare()
        write()
    return window.times
