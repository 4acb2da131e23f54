"""What it takes to start one server: all that the two ways of naming one have in common.

Not covered: the two (`server_command.py`, `start_command.py`), and starting (`engine.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Startable(Protocol):
    """A server that can be started, with whichever weights."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The whole environment of its process."""
        ...

    @property
    def host(self) -> str:
        """Where it listens."""
        ...

    @property
    def port(self) -> int:
        """Where it listens."""
        ...

    @property
    def routes(self) -> Sequence[str]:
        """What to ask it for; one that answers 200 means that it serves."""
        ...

    @property
    def awaited_manifest(self) -> Path | None:
        """What it writes when it can be attached to; None: it writes none."""
        ...

    def argv_for(self, model: str | Path | None) -> Sequence[str]:
        """Return its arguments, a full path first; None: with the weights that it was made for."""
        ...
