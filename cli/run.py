"""`bridge run`: start a server, wait for it, train on it, and stop it, in one command.

Not covered: the trainer's process, which is this one.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bridge.config import ServeConfig, TrainConfig
from bridge.errors import BridgeError, ManifestError, ServerUnreachableError
from bridge.run_directory import RunDirectory, write_json
from bridge.weights import manifest
from cli import children, console, server_log
from cli.children import Child
from cli.options import Json, from_config
from cli.serve import VllmFlags, prepare
from cli.server_command import ServerCommand
from cli.train import load_environment, train_in
from cli.watchdog import Watchdog, health

LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  where a server that listens everywhere answers

STOP_GRACE_S = 15.0
START_GRACE_S = 2.0
"""A server that is still starting has nothing to lose, and vLLM 0.32 heeds no SIGTERM while its engine starts."""

StartLimit = Annotated[
    float,
    typer.Option(
        "--start-limit-s",
        metavar="NUMBER",
        min=1,
        show_default=False,
        help=r"Seconds until a server that is not ready is given up. \[default: 1800]",
        rich_help_panel="Server",
    ),
]


@from_config(ServeConfig, TrainConfig, hide=("vllm_host",))
def run(
    serve: ServeConfig,
    train: TrainConfig,
    *,
    start_limit_s: StartLimit = 1800.0,
    as_json: Json = False,
    vllm_flags: VllmFlags = None,
) -> None:
    """Serve a model, train it in place, and stop the server."""
    environment = load_environment(train)
    command = prepare(serve, vllm_flags or [])
    directory = RunDirectory.create(train.run_dir, environment=train.environment)
    write_json(directory.server_config, serve.model_dump(mode="json"))
    train = attached_to(train, serve, command)
    with serving(serve, command, directory.server_log, limit_s=start_limit_s):
        train_in(directory, train, environment, as_json=as_json)


def attached_to(train: TrainConfig, serve: ServeConfig, command: ServerCommand) -> TrainConfig:
    """Return `train` pointed at the server that `command` starts."""
    place = {"vllm_config_path": command.manifest, "vllm_port": serve.port, "vllm_host": _reachable(serve.host)}
    return train.model_copy(update=place)


@contextlib.contextmanager
def serving(config: ServeConfig, command: ServerCommand, log: Path, *, limit_s: float) -> Iterator[Child]:
    """Serve for as long as the context lasts; the server is ready when it begins and gone when it ends.

    Raises:
        ServerUnreachableError: it was not ready within `limit_s` seconds, or died, then or later.
        BridgeError: whatever the patches refused inside it.
    """
    child = children.start(command.argv, command.environment, log)
    watchdog = Watchdog(child, _reachable(config.host), config.port)
    grace_s = START_GRACE_S
    try:
        _wait(child, config, command, limit_s)
        grace_s = STOP_GRACE_S
        with watchdog.watching():
            yield child
    except ServerUnreachableError as error:
        if child.is_alive():
            raise
        raise _died(child, watchdog) from error
    finally:
        children.stop(child, grace_s=grace_s)
        manifest.remove_own(command.manifest, child.identity)


def _wait(child: Child, config: ServeConfig, command: ServerCommand, limit_s: float) -> None:
    with console.waiting(f"starting vLLM (pid {child.process.pid}, log {child.log})") as detail:
        began = time.monotonic()
        ready = children.wait_until(
            child,
            lambda: _is_ready(child, config, command.manifest),
            limit_s=limit_s,
            tell=lambda elapsed: detail(f"{elapsed:.0f} s  {server_log.last_line(child.log)}"),
        )
    if ready:
        console.note(f"vLLM is ready after {time.monotonic() - began:.0f} s")
    elif child.is_alive():
        raise ServerUnreachableError(
            f"vLLM was not ready within {limit_s:.0f} s; its log says: {server_log.last_line(child.log)}",
            remedy=f"read {child.log}, or give it more time with --start-limit-s",
        )
    else:
        raise _died(child)


def _died(child: Child, watchdog: Watchdog | None = None) -> BridgeError:
    """Return what a person has to know of a server that ended by itself."""
    refused = server_log.own_error(child.log)
    if refused is not None:
        return refused
    how = "lost its engine" if watchdog and watchdog.bit else f"ended with {_in_words(child.exit_code())}"
    return ServerUnreachableError(
        f"vLLM (pid {child.process.pid}) {how}: {server_log.root_error(child.log)}", remedy=f"read {child.log}"
    )


def _in_words(exit_code: int | None) -> str:
    assert exit_code is not None, "it has ended"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def _is_ready(child: Child, config: ServeConfig, path: Path) -> bool:
    """Tell whether the manifest of this very child is there, and the child answers."""
    try:
        if manifest.read(path).server != child.identity:
            return False
    except (FileNotFoundError, ManifestError):
        return False
    return health(_reachable(config.host), config.port) == "well"


def _reachable(host: str) -> str:
    return LOOPBACKS.get(host, host)
