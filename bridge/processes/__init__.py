"""Start stock vLLM with Bridge's plugins, watch it, restart it, and stop it and every process that it started.

`start_checks` refuses what cannot work, `server_command` derives the command line (`vllm_flags`, `accelerator`),
`server_process` runs it (`children`, `leash`), and reads from its log why it ended (`server_log`).
May import: `bridge.checks` and what is below it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

Waiting = Callable[[str], contextlib.AbstractContextManager[Callable[[str], None]]]
"""Shows during a block what Bridge is waiting for; the yielded function updates a detail."""


@contextlib.contextmanager
def logged_wait(what: str) -> Iterator[Callable[[str], None]]:
    """Log what Bridge is waiting for, without details."""
    logger.info(f"{what} ...")
    yield lambda _: None
