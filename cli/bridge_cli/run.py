"""`bridge run`: start a server, wait for it, train on it in this process, and stop it."""

from typing import Annotated

import typer

from bridge.config import ServeConfig, TrainConfig, combinations
from bridge.errors import UsageError
from bridge.processes import start_checks
from bridge.processes.accelerator import check_host
from bridge.processes.server_process import START_LIMIT_S
from bridge_cli import rank_gpus
from bridge_cli.launch import Launch
from bridge_cli.options import Json, from_config
from bridge_cli.rank_process import OWN_RANK
from bridge_cli.serve_vllm import VllmFlags
from bridge_cli.started_servers import StartedServers
from bridge_cli.task_environment import check_files

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
OnRay = Annotated[
    bool,
    typer.Option(
        "--ray",
        metavar="",
        help="Let a running Ray cluster choose the hosts, and start this command on each.",
        rich_help_panel="Several GPUs and hosts",
    ),
]


@from_config(ServeConfig, TrainConfig, hide=("vllm_host", "start_command", "servers"))
def run(
    serve: ServeConfig,
    train: TrainConfig,
    *,
    start_limit_s: StartLimit = START_LIMIT_S,
    on_ray: OnRay = False,
    as_json: Json = False,
    vllm_flags: VllmFlags = None,
) -> None:
    """Serve a model, train it and stop the server; restart it if it dies or hangs.

    For example: bridge run --model MODEL --environment gsm8k --training-steps 100 -- --enforce-eager
    """
    start(serve, train, start_limit_s=start_limit_s, on_ray=on_ray, as_json=as_json, vllm_flags=vllm_flags or [])


def start(
    serve: ServeConfig, train: TrainConfig, *, start_limit_s: float, on_ray: bool, as_json: bool, vllm_flags: list[str]
) -> None:
    """Check the choices of a run, start its servers and its ranks, and train."""
    is_rank = OWN_RANK.get() is not None  # the user's process runs the checks before it starts ranks
    if train.publishing.start_command is not None:
        raise UsageError("--start-command: bridge run starts vLLM itself", hint="bridge train --start-command ...")
    if train.server.servers:
        raise UsageError("--servers: bridge run starts its own", hint="bridge train --servers ...")
    if not is_rank:
        # cheap checks come first: importing torch and transformers takes seconds
        start_checks.check_folder(serve.model)
        check_files(train)
        if train.hosts == 1:  # with several hosts, only the first rank's server uses this port
            start_checks.check_port(serve.host, serve.port)
    if on_ray:
        from bridge_cli import on_ray as cluster

        combinations.refuse(train, ray=on_ray)
        rank_gpus.check_divides(serve.model, serve.tensor_parallel_size, train.context_parallel_size)
        num_servers = train.dp_size(train.tp_size(serve.tensor_parallel_size))
        num_gpus = num_servers * serve.tensor_parallel_size
        raise typer.Exit(cluster.run(train.hosts, train.restarts, num_gpus, serve.device))
    check_host(train.model_name, train.optimizer, train.mode, train.lora, hosts=train.hosts)
    servers = StartedServers(serve, train, vllm_flags, start_limit_s=start_limit_s)
    layout = None
    if not is_rank:
        tp_size = train.tp_size(serve.tensor_parallel_size)
        layout = rank_gpus.of_started(
            serve, tp_size, train.dp_size(tp_size),
            gpus=train.gpus, cp_size=train.context_parallel_size, hosts=train.hosts, rendezvous=train.rendezvous,
            restarts=train.restarts, samples_here=train.rollouts.samples_here,
        )  # fmt: skip
    Launch(config=train, servers=servers, layout=layout, as_json=as_json).start()
