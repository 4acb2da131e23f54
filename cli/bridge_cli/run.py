"""`bridge run`: start a server, wait for it, train on it in this process, and stop it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from bridge.run.run_directory import write_json
from bridge_cli import again, alike, console, ending, ranks, rendezvous
from bridge_cli.memory_share import check_host
from bridge_cli.options import Json, from_config
from bridge_cli.ranks import Part, attached_to, send_key, shares_weights, trained
from bridge_cli.resume import open_run
from bridge_cli.serve import VllmFlags, check_model, prepare
from bridge_cli.server_process import START_LIMIT_S
from bridge_cli.train import load_environment, rehearse
from bridge_cli.vllm_flags import names

SHARDED = "--fully-sharded-loras"
"""A flag of vLLM's."""
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


@from_config(ServeConfig, TrainConfig, hide=("vllm_host", "start_command"))
def run(
    serve: ServeConfig,
    train: TrainConfig,
    *,
    start_limit_s: StartLimit = START_LIMIT_S,
    on_ray: OnRay = False,
    as_json: Json = False,
    vllm_flags: VllmFlags = None,
) -> None:
    """Serve a model, train it and stop the server; restart it if it dies or hangs."""
    from bridge.rollouts.sampler import fit_completions

    if train.publishing.start_command is not None:
        raise UsageError("--start-command: bridge run starts vLLM itself", remedy="bridge train --start-command ...")
    if on_ray:
        from bridge_cli import on_ray as cluster

        raise typer.Exit(cluster.run(train, serve))
    check_host(train)
    environment = load_environment(train)
    flags = vllm_flags or []
    serves, places = for_adapters(serve, train, flags), ranks.places(train, serve)
    with rendezvous.opened(train) as place, again.after_a_loss(train, place) as resumed:
        if place is not None and not place.is_first:
            check_model(serves.model, shares_weights=shares_weights(train))
            met, run_dir = place.attend(alike.facts(train, serves, flags))
            directory = ranks.join_run(Path(run_dir))
            console.note(f"host {met.host + 1} of {train.hosts}; the first one, at {place.name}, reports")
            with ranks.started(places, directory, met) as world:
                ranks.take_part(world, directory)
            return
        settled, directory, found = open_run(train)
        resumed.run_dir = directory.path
        try:
            settled = fit_completions(settled, serve.max_model_len, console.note)
            command = prepare(serves, flags, shares_weights=shares_weights(train), trainer=settled)
            send_key(flags)
            rehearse(settled, environment)
            write_json(directory.server_config, serve.document(serves))
            url = attached_to(settled, command).server.url()
            console.note(f"mode {train.mode}, vLLM at {url}, checkpoints in {settled.checkpoints.save_path}")
            part = Part(
                serve=serves, train=settled, chosen=train, vllm_flags=flags, start_limit_s=start_limit_s,
                run_dir=directory.path, resume=found,
            )  # fmt: skip
            facts = alike.facts(train, serves, flags)
            all_met = None if place is None else place.gather(facts, str(directory.path))
            with ranks.started(places, directory, all_met) as world, ending.printed(directory, settled):
                world.all_gather_object(part)
                log = directory.server_log
                with trained(world, part, lambda: command, directory, environment, log=log, as_json=as_json):
                    pass
        finally:
            directory.remove_if_unused()


def for_adapters(serve: ServeConfig, train: TrainConfig, flags: Sequence[str] = ()) -> ServeConfig:
    """Return `serve` with room for the adapter that is trained, if one is; `flags` are vLLM's own.

    Raises:
        UsageError: the user asked for too little room, or for slots that are cut in another way.
    """
    rank = train.lora.r
    if train.mode != "lora_only":
        return serve
    if train.trains_in_server and serve.tensor_parallel_size > 1 and SHARDED in names(flags):
        raise UsageError(
            f"{SHARDED} cuts an adapter in another way than its weights, so it cannot be trained in vLLM's memory",
            remedy="leave it out, or --lora-handover disk",
        )
    if serve.max_lora_rank is None:
        console.note(f"--max-lora-rank {rank}: the rank of --lora-r", style="dim")
        return serve.model_copy(update={"max_lora_rank": rank})
    if serve.max_lora_rank < rank:
        raise UsageError(
            f"--max-lora-rank {serve.max_lora_rank} is less than --lora-r {rank}",
            remedy="leave --max-lora-rank out: it is derived",
        )
    return serve
