"""`bridge run`: start a server, wait for it, train on it in this process, and stop it."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from bridge.run.run_directory import write_json
from bridge.server import api_key
from cli import console, ending
from cli.options import Json, from_config
from cli.resume import open_run
from cli.serve import VllmFlags, prepare
from cli.server_command import ServerCommand
from cli.server_process import START_LIMIT_S, StartedServer, reachable
from cli.train import load_environment, rehearse, train_in
from cli.vllm_flags import value

StartLimit = Annotated[
    float,
    typer.Option(
        "--start-limit-s",
        metavar="NUMBER",
        min=1,
        show_default=False,
        help=rf"Give up on a server that is not ready after this many seconds. \[default: {START_LIMIT_S:.0f}]",
        rich_help_panel="Server",
    ),
]


@from_config(ServeConfig, TrainConfig, hide=("vllm_host", "start_command"))
def run(
    serve: ServeConfig,
    train: TrainConfig,
    *,
    start_limit_s: StartLimit = START_LIMIT_S,
    as_json: Json = False,
    vllm_flags: VllmFlags = None,
) -> None:
    """Serve a model, train it and stop the server; restart it if it dies or hangs."""
    from bridge.rollouts.sampler import fit_completions

    if train.publishing.start_command is not None:
        raise UsageError("--start-command: bridge run starts vLLM itself", remedy="bridge train --start-command ...")
    environment = load_environment(train)
    serves = for_adapters(serve, train)
    settled, directory, found = open_run(train)
    try:
        settled = fit_completions(settled, serve.max_model_len, console.note)
        command = prepare(serves, vllm_flags or [], shares_weights=shares_weights(train), trainer=settled)
        settled = attached_to(settled, command)
        send_key(vllm_flags or [])
        rehearse(settled, environment)
        write_json(directory.server_config, serve.document(serves))
        console.note(
            f"mode {train.mode}, vLLM at {settled.server.url()}, checkpoints in {settled.checkpoints.save_path}"
        )
        server = StartedServer(command, directory.server_log, limit_s=start_limit_s)
        with server.running() as process, ending.printed(directory, settled):
            train_in(directory, settled, environment, as_json=as_json, process=process, resume=found, chosen=train)
    finally:
        directory.remove_if_unused()


def shares_weights(train: TrainConfig) -> bool:
    """Return whether the trainer needs the patched server; one that is only restarted can be the stock vLLM."""
    return train.mode != "none" or train.publishing.reload == "in-place"


def for_adapters(serve: ServeConfig, train: TrainConfig) -> ServeConfig:
    """Return `serve` with room for the adapter that is trained, if one is.

    Raises:
        UsageError: the user asked for too little room.
    """
    rank = train.lora.r
    if train.mode != "lora_only":
        return serve
    if serve.max_lora_rank is None:
        console.note(f"--max-lora-rank {rank}: the rank of --lora-r", style="dim")
        return serve.model_copy(update={"max_lora_rank": rank})
    if serve.max_lora_rank < rank:
        raise UsageError(
            f"--max-lora-rank {serve.max_lora_rank} is less than --lora-r {rank}",
            remedy="leave --max-lora-rank out: it is derived",
        )
    return serve


def send_key(flags: Sequence[str]) -> None:
    """Let this process send the API key among vLLM's own `flags`, if there is one."""
    if key := value(flags, "--api-key"):
        os.environ[api_key.VARIABLE] = key
    api_key.headers()  # refuses a key that cannot be sent


def attached_to(train: TrainConfig, command: ServerCommand) -> TrainConfig:
    """Return `train` pointed at the server that `command` starts."""
    train = train.changed(vllm_port=command.port, vllm_host=reachable(command.host))
    return train.changed(vllm_config_path=command.manifest) if command.shares_weights else train
