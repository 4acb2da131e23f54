"""`--restarts`: start this command again, from the newest checkpoint, after a rank or a host was lost.

The process becomes the new command: its number stays the same, and nothing of the old run is left in it. A process that
was killed is started again by whoever started it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bridge.config import TrainConfig
from bridge.config.choices import HOSTS_KNOW
from bridge.errors import RankError
from bridge_cli import console, ending
from bridge_cli.rendezvous import Rendezvous


@dataclass
class Resumed:
    """What is resumed."""

    run_dir: Path | None = None
    """The run directory; None on any host but the first, which is told."""


@contextmanager
def after_a_loss(train: TrainConfig, place: Rendezvous | None) -> Iterator[Resumed]:
    """Start the command again if the block loses a rank, as long as a restart is left."""
    resumed = Resumed()
    try:
        yield resumed
    except RankError as error:
        if not train.restarts:
            raise
        console.note(f"{error.message}; starting again from the newest checkpoint, {train.restarts - 1} restarts left")
        choices = {"restarts": str(train.restarts - 1)}
        if resumed.run_dir is not None:
            choices["run_dir"] = str(resumed.run_dir)
        secret = {} if place is None else {HOSTS_KNOW: place.secret.decode()}
        if place is not None:
            place.close()
        os.execve(sys.executable, _argv(choices), os.environ | secret)  # noqa: S606


def _argv(choices: dict[str, str]) -> list[str]:
    given = ending.GIVEN.get()
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(given)]
    return [sys.executable, *program, *ending.changed(given, choices)]
