"""`bridge serve-vllm`: check everything that can be checked, then become stock vLLM with Bridge's patches."""

import os
from functools import partial
from typing import Annotated

import typer

from bridge.config import ServeConfig, combinations
from bridge.processes import accelerator
from bridge.processes.server_command import prepare
from bridge.processes.start_checks import taking
from bridge_cli.options import from_config

VllmFlags = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- VLLM_FLAGS", help="vLLM's own flags, passed on unchanged.", show_default=False),
]


@from_config(ServeConfig)
def serve(config: ServeConfig, *, vllm_flags: VllmFlags = None) -> None:
    """Start vLLM so that a trainer can share its weights.

    This process becomes vllm serve: Ctrl-C and the exit code are vLLM's own.
    """
    trainer = accelerator.expected(config)
    combinations.refuse(config, trainer)
    command = prepare(config, vllm_flags or [], share_of=partial(accelerator.derive, trainer=trainer))
    with taking(config.host, config.port, command.awaited_manifest, inherits=True):
        os.execve(command.argv[0], command.argv, command.environment)  # noqa: S606
