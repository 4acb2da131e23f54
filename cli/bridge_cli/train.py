"""`bridge train`: train on servers that are already running, and report each step.

Not covered: which servers (`running_servers.py`), what `--resume` finds (`open_or_resume.py`).
"""

from bridge.config import TrainConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge.processes.accelerator import check_host
from bridge.processes.server_command import StartCommand
from bridge.processes.start_checks import check_folder
from bridge_cli import rank_gpus, running_servers
from bridge_cli.launch import Launch
from bridge_cli.options import Json, from_config
from bridge_cli.rank_process import OWN_RANK
from bridge_cli.running_servers import RunningServers
from bridge_cli.task_environment import check_files


@from_config(TrainConfig, hide=("gpus", "hosts", "rendezvous"))
def train(config: TrainConfig, *, as_json: Json = False) -> None:
    """Train a model on a server that is already running, or on several.

    For example: bridge train --model MODEL --environment gsm8k --training-steps 100
    """
    for name in ("gpus", "hosts", "rendezvous"):
        if config.get(name) != config.default(name):
            raise UsageError(
                f"{flag(name)} {config.get(name)}: bridge train trains on servers that already run on this host",
                hint="name them with --servers, or use bridge run, which starts a server on each GPU",
            )
    check_host(config.model_name, config.optimizer, config.mode, config.lora, hosts=config.hosts)
    check_folder(config.model_name, needs_config=False)  # the tokenizer is enough
    check_files(config)
    given = config.publishing.start_command
    command = StartCommand.parse(given, config.server.url(), config.model_name) if given else None
    replicas = running_servers.find(config.server, attaches=config.needs_patched_server)
    cp_size = config.context_parallel_size
    rank_gpus.check_cuts(config.model_name, cp_size)
    manifests = [server.manifest for server in replicas]
    layout = rank_gpus.of_running(manifests, config.tp_size, cp_size=cp_size, restarts=config.restarts)
    if config.restarts and layout.world_size == 1:
        raise UsageError(
            f"--restarts {config.restarts} has no effect: there is only one training process",
            hint="leave it out; a run that ended resumes with --resume",
        )
    if len(replicas) > 1:
        config = config.changed(gpus=layout.world_size)
    config.dp_size(layout.tp_size)  # refuses a batch that cannot be divided
    is_rank = OWN_RANK.get() is not None
    if not is_rank and layout.world_size > 1:  # before ranks start; a single process checks this itself
        running_servers.check_free(replicas, config.sampling.request_timeout_s, resumes=config.resume)
    servers = RunningServers(replicas, command, server=config.server, model_name=config.model_name)
    Launch(config=config, servers=servers, layout=None if is_rank else layout, as_json=as_json).start()
