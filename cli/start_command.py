"""`--start-command`: a server of any kind that we start, restart and stop for `--mode none`.

Not covered: servers that somebody else started; none of them is ever touched.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bridge.config import TrainConfig
from bridge.errors import UsageError
from cli.serve import check_port
from cli.server_command import Startable
from cli.server_process import StartedServer

MODEL = "{model}"
EXAMPLE = "--start-command 'vllm serve {model} --port 8000' --vllm-port 8000"
VARIABLE = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, kw_only=True)
class StartCommand(Startable):
    """A command with `{model}` in the place of the model's folder; variables may come before its program."""

    routes: tuple[str, ...] = ("/health", "/v1/models")
    """The first one is vLLM's; any server has the second."""

    @classmethod
    def of(cls, config: TrainConfig, outer: Mapping[str, str] = os.environ) -> "StartCommand":
        """Take the command of `config` apart, without a shell.

        Raises:
            UsageError: it cannot be parsed, has no place for the model or no such program, or the port is taken.
        """
        given = config.publishing.start_command
        assert given is not None
        address = urlsplit(config.server.url())
        host, port = address.hostname or "", address.port or 0
        variables, parts = _split(given)
        if not any(MODEL in part for part in parts):
            raise UsageError(f"--start-command {given!r} has no {MODEL} in it", remedy=EXAMPLE)
        named = re.search(r"--port[ =](\d+)", " ".join(parts))
        if named and int(named[1]) != port:
            raise UsageError(
                f"--start-command listens on port {named[1]}, but the trainer would use port {port}",
                remedy=f"--vllm-port {named[1]}",
            )
        environment = {**outer, **variables}
        program = _program(parts[0], environment)
        check_port(host, port, flag="--vllm-port")
        return cls(argv=(program, *parts[1:]), environment=environment, model=config.model_name, host=host, port=port)

    def argv_for(self, model: str | Path | None) -> tuple[str, ...]:
        """Return the arguments with `model`, or else the first model, in its place."""
        return tuple(part.replace(MODEL, str(model or self.model)) for part in self.argv)


@contextmanager
def started(command: StartCommand | None, log: Path) -> Iterator[StartedServer | None]:
    """Run the server of `command`, if there is one, for as long as the context lasts."""
    if command is None:
        yield None
        return
    with StartedServer(command, log).running() as server:
        yield server


def _split(command: str) -> tuple[dict[str, str], Sequence[str]]:
    """Return the variables in front of the program, and the rest."""
    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--start-command {command!r}: {error}", remedy=EXAMPLE) from error
    count = next((place for place, part in enumerate(parts) if not VARIABLE.match(part)), len(parts))
    return dict(part.split("=", 1) for part in parts[:count]), parts[count:]


def _program(name: str, environment: Mapping[str, str]) -> str:
    """Return the full path of the program `name`, which may lie beside this Python."""
    places = os.pathsep.join((environment.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    found = shutil.which(name, path=places)
    if found is None:
        raise UsageError(f"--start-command: there is no program {name}", remedy="give its full path, or fix PATH")
    return str(Path(found).absolute())
