"""Start the stock vLLM with our plugins, watch it, restart it, and stop it with everything that it started.

`start_checks` refuses what cannot work, `server_command` derives the command line (`vllm_flags`, `accelerator`),
`server_process` runs it (`children`, `leash`), and reads from its log why it ended (`server_log`).
May import: `bridge.checks` and what is below it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from bridge.core.redaction import escaped


class Output(Protocol):
    """Prints notes for the user; the module `bridge_cli.console` implements it."""

    def note(self, text: str, *, style: str = "") -> None:
        """Show one line."""

    def waiting(self, what: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Show for the duration of the block what is being waited for; the yielded function updates a detail."""


class Plain:
    """Writes lines to stderr, without styles and details."""

    def note(self, text: str, *, style: str = "") -> None:  # noqa: ARG002
        sys.stderr.write(escaped(text) + "\n")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        self.note(f"{what} ...")
        yield lambda _: None


PLAIN = Plain()
