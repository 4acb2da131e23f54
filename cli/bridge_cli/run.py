"""`bridge run`: start a server, wait for it, train on it in this process, and stop it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.checkpoints.run_directory import RunDirectory, write_json
from bridge.config import LoraConfig, ServeConfig, TrainConfig, combinations
from bridge.errors import UsageError
from bridge.processes import start_checks
from bridge.processes.accelerator import check_host
from bridge.processes.server_command import ServerCommand, prepare
from bridge.processes.server_process import START_LIMIT_S
from bridge.processes.vllm_flags import names, slot_rank, value
from bridge_cli import consistency, console, ending, layout, rank, rank_run
from bridge_cli.options import Json, from_config
from bridge_cli.rank_run import Job, Opened, send_key, trained
from bridge_cli.resume import open_run
from bridge_cli.serve import VllmFlags
from bridge_cli.training import check_files, load_environment

if TYPE_CHECKING:
    from bridge.checkpoints.checkpoint import SavedCheckpoint
    from bridge.ranks.world import Ranks

SHARDED = "--fully-sharded-loras"
MAX_RANK = "--max-lora-rank"
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

    Such as: bridge run --model MODEL --environment gsm8k --training-steps 100 -- --enforce-eager
    """
    if train.publishing.start_command is not None:
        raise UsageError("--start-command: bridge run starts vLLM itself", hint="bridge train --start-command ...")
    if train.server.servers:
        raise UsageError("--servers: bridge run starts its own", hint="bridge train --servers ...")
    if rank.OWN_RANK.get() is None:  # the user's process; what it starts would ask again, beside servers that run
        _check_first(serve, train)
    if on_ray:
        from bridge_cli import on_ray as cluster

        combinations.refuse(train, ray=on_ray)
        layout.check_divides(serve.model, serve.tensor_parallel_size, train.context_parallel_size)
        num_gpus = train.dp_size(train.tp_size(serve.tensor_parallel_size)) * serve.tensor_parallel_size
        raise typer.Exit(cluster.run(train.hosts, train.restarts, num_gpus, serve.device))
    check_host(train)
    flags = vllm_flags or []
    own = rank.OWN_RANK.get() or layout.of(train, serve)
    with rank_run.preloaded(own) as preloaded, rank_run.joined(own) as world:
        if train.hosts > 1:
            consistency.check(world, (train, serve), flags)
        environment = world.run_on_all(lambda: load_environment(train.task, train.rollouts, train.evaluation))
        if train.mode == "lora_only":
            experts, in_memory = train.lora.has_experts, train.trains_in_server
            serve = for_adapters(serve, train.lora.r, flags, in_memory=in_memory, experts=experts)
        job = Job(
            serve=serve, chosen=train, environment=environment, vllm_flags=flags, start_limit_s=start_limit_s,
            as_json=as_json, preloaded=preloaded,
        )  # fmt: skip
        first = FirstRank(job)
        try:
            _train(world, first)
        finally:
            if first.directory is not None:
                first.directory.remove_if_unused()


def _check_first(serve: ServeConfig, train: TrainConfig) -> None:
    """Check what takes no time, before torch and transformers are imported, which takes seconds."""
    start_checks.check_folder(serve.model)
    check_files(train.task, train.rollouts)
    if train.hosts == 1:  # of several hosts, only the first rank's has its server on this port
        start_checks.check_port(serve.host, serve.port)


@dataclass
class FirstRank:
    """What only the first rank has: the run directory and the command of its server."""

    job: Job
    directory: RunDirectory | None = None
    command: ServerCommand | None = None

    def open(self) -> "tuple[TrainConfig, Path, SavedCheckpoint | None]":
        """Open the run, and check all that can be known before vLLM starts."""
        from bridge.agents import stream
        from bridge.checks import model as model_checks
        from bridge.rollouts.sampler import fit_completions
        from bridge.weights import model_files

        job = self.job
        if job.serve.vllm_config_path is not None and not job.chosen.needs_patched_server:
            raise UsageError(
                f"--vllm-config-path {job.serve.vllm_config_path}: --mode none --reload {job.chosen.publishing.reload}"
                " starts the stock vLLM, which writes no manifest",
                hint="leave it out",
            )
        train, self.directory, checkpoint = open_run(job.chosen, job.environment)
        longest = job.serve.max_model_len or model_checks.longest_sequence(model_checks.read(job.serve.model))
        train = fit_completions(train, longest)
        if train.mode == "lora_only":
            _check_adapter(train.model_name, train.lora)
        if train.needs_patched_server:
            start_checks.check_trained_dtype(job.serve)
        self.command = prepare(job.serve, job.vllm_flags, shares_weights=train.needs_patched_server, trainer=train)
        model_files.source_files(train.model_name)  # every checkpoint holds them
        send_key(job.vllm_flags)
        if job.environment is not None:
            stream.rehearse(
                train.model_name, train.task, train.sampling, job.environment, max_model_len=longest,
                pass_size=job.serve.tensor_parallel_size * train.context_parallel_size,
            )  # fmt: skip
        write_json(self.directory.server_config, job.serve.document(job.serve))
        url = train.changed(**self.command.server_choices).server.url()
        console.note(f"mode {train.mode}, vLLM at {url}, checkpoints in {train.checkpoints.save_path}")
        return train, self.directory.path, checkpoint


def _train(world: "Ranks", first: FirstRank) -> None:
    from bridge.checkpoints import checkpoint

    job = first.job
    opened = Opened(*world.run_on_rank_zero(first.open))
    folder = opened.train.checkpoints.save_path
    assert folder is not None, "derived from the run directory"
    if job.chosen.hosts > 1 and job.chosen.restarts:
        rank_run.check_shared(world, folder)
    if opened.resume is not None:
        checkpoint.check_on_all_hosts(opened.resume.folder, world)
    if not world.is_rank_zero:
        rank_run.train_as_other_rank(world, job, opened)
        return
    assert first.directory is not None, "it was opened"
    world.barrier()  # other hosts make the run directory
    with (
        ending.print_at_end(first.directory, opened.train.checkpoints),
        trained(world, job, opened, first.directory, first.command),
    ):
        pass


def _check_adapter(model: str, lora: LoraConfig) -> None:
    """Check that the model has the layers that get an adapter."""
    import torch

    from bridge.weights import adapter, skeleton

    if lora.target_modules != adapter.ALL_LINEAR:
        adapter.check_targets(skeleton.build(model, torch.bfloat16), lora)


def for_adapters(
    serve: ServeConfig, rank: int, flags: Sequence[str] = (), *, in_memory: bool, experts: bool = False
) -> ServeConfig:
    """Return `serve` with room for the adapter of this rank that is trained; `flags` are vLLM's own.

    `experts` gives room for routed experts, too.

    Raises:
        UsageError: the user asked for too little room, for slots that are cut in another way, or, if it is trained
            `in_memory`, for slots of another rank.
    """
    if in_memory and serve.tensor_parallel_size > 1 and SHARDED in names(flags):
        raise UsageError(
            f"{SHARDED} cuts an adapter in another way than its weights, so it cannot be trained in vLLM's memory",
            hint="leave it out, or --lora-handover disk",
        )
    if experts:
        serve = serve.model_copy(update={"lora_experts": True})
    to_vllm = value(flags, MAX_RANK)
    given = int(to_vllm) if to_vllm.isdecimal() else serve.max_lora_rank
    if given is not None and given < rank:
        raise UsageError(
            f"{MAX_RANK} {given} is less than --lora-r {rank}", hint=f"leave {MAX_RANK} out: it is derived"
        )
    slot = slot_rank(rank if given is None else given)
    if in_memory and slot is not None and slot != rank:
        instead = f"leave {MAX_RANK} out" if slot_rank(rank) == rank else f"--lora-r {slot}"
        raise UsageError(
            f"--lora-r {rank}: with --lora-handover memory the adapter is trained in a slot of vLLM, which has rank"
            f" {slot}",
            hint=f"{instead}, or --lora-handover disk",
        )
    if serve.max_lora_rank is None:
        console.note(f"{MAX_RANK} {rank}: the rank of --lora-r", style="dim")
        return serve.model_copy(update={"max_lora_rank": rank})
    return serve
