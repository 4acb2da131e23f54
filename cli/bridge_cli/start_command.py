"""`--start-command`: a server of any kind that we start, restart and stop for `--mode none`."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge_cli.serve import check_port
from bridge_cli.server_command import ServerCommand

MODEL = "{model}"
EXAMPLE = "--start-command 'vllm serve {model} --port 8000' --vllm-port 8000"


@dataclass(frozen=True, kw_only=True)
class StartCommand(ServerCommand):
    """A command with `{model}` in place of the model's folder; `NAME=value` variables may come first."""

    manifest: Path = Path(os.devnull)
    shares_weights: bool = False
    routes: tuple[str, ...] = ("/health", "/v1/models")
    """The first one is vLLM's; any server has the second."""

    @classmethod
    def parse(cls, config: TrainConfig, outer: Mapping[str, str] = os.environ) -> "StartCommand":
        """Parse the command of `config`, without a shell.

        Raises:
            UsageError: it cannot be parsed, has no place for the model or no such program, or the port is taken.
        """
        given = config.publishing.start_command
        assert given is not None
        try:
            parts = shlex.split(given)
        except ValueError as error:
            raise UsageError(f"--start-command {given!r}: {error}", remedy=EXAMPLE) from error
        environment = dict(outer)
        while parts and re.match(r"[A-Za-z_]\w*=", parts[0]):
            name, _, value = parts.pop(0).partition("=")
            environment[name] = value
        if not any(MODEL in part for part in parts):
            raise UsageError(f"--start-command {given!r} has no {MODEL} in it", remedy=EXAMPLE)
        address = urlsplit(config.server.url())
        host, port = address.hostname or "", address.port or 0
        named = re.search(r"--port[ =](\d+)", " ".join(parts))
        if named and int(named[1]) != port:
            raise UsageError(
                f"--start-command listens on port {named[1]}, but the trainer would use port {port}",
                remedy=f"--vllm-port {named[1]}",
            )
        beside_this_python = str(Path(sys.executable).parent)
        program = shutil.which(parts[0], path=f"{environment.get('PATH', os.defpath)}{os.pathsep}{beside_this_python}")
        if program is None:
            raise UsageError(f"--start-command: no program {parts[0]}", remedy="give its full path, or fix PATH")
        check_port(host, port, flag="--vllm-port")
        argv = (str(Path(program).absolute()), *parts[1:])
        return cls(argv=argv, environment=environment, model=config.model_name, host=host, port=port)

    def argv_for(self, model: str | Path | None) -> tuple[str, ...]:
        """Return the arguments with `model`, or else the first model, in its place."""
        return tuple(part.replace(MODEL, str(model or self.model)) for part in self.argv)
