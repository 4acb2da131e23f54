"""The ranks of `bridge run --gpus N --hosts H`: which GPUs each has, and what each does.

Each rank has a GPU. With `--tensor-parallel-size T` the ranks of T GPUs in a row share a server, which the first of
them starts; otherwise each starts its own. The first rank of a host prints, the others write to `ranks/` in the run
directory.

Not covered: how ranks are started (`launcher.py`, `rank.py`), what they exchange (`bridge/ranks/world.py`).
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import ServeConfig, TrainConfig
from bridge.core import claim, mark
from bridge.core.address import free_port
from bridge.errors import RankError, UsageError
from bridge.processes import accelerator
from bridge.processes.preload import Preloaded, preloading
from bridge.processes.server_command import ServerCommand, prepare
from bridge.processes.server_process import StartedServer
from bridge.processes.vllm_flags import value
from bridge.server import api_key
from bridge.types import Environment
from bridge_cli import console
from bridge_cli.layout import Layout
from bridge_cli.rank import LOST, OWN_RANK, OwnRank
from bridge_cli.training import train_in

if TYPE_CHECKING:
    from bridge.checkpoints.checkpoint import SavedCheckpoint
    from bridge.checkpoints.metrics import Summary
    from bridge.ranks.world import Ranks


@dataclass(frozen=True)
class Opened:
    """What rank 0 opened for all ranks."""

    train: TrainConfig
    """With derived values."""
    run_dir: Path
    resume: "SavedCheckpoint | None"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What each rank does."""

    serve: ServeConfig
    chosen: TrainConfig
    environment: Environment | None
    vllm_flags: Sequence[str] = field(default=())
    start_limit_s: float
    as_json: bool = False
    preloaded: Preloaded | None = None


@contextlib.contextmanager
def joined(own: Layout | OwnRank) -> "Iterator[Ranks]":
    """Yield the ranks of the run. A process that the user started has a layout: it launches several ranks, and exits.

    Raises:
        BridgeError: they cannot be started, or were lost.
    """
    from bridge.ranks.world import ALONE

    if isinstance(own, Layout):
        if own.world_size > 1:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
            from bridge_cli import launcher

            sys.exit(launcher.launch(own))
        yield ALONE
        return
    ranks = ALONE
    try:
        ranks = own.join()
        yield ranks
    except RankError as error:
        own.report(LOST, error)
        sys.exit(LOST)
    finally:
        ranks.close()


def preloaded(own: Layout | OwnRank) -> contextlib.AbstractContextManager[Preloaded | None]:
    """Begin to import vLLM if this process will start a server; `own` as for `joined`."""
    starts_server = own.world_size == 1 if isinstance(own, Layout) else own.rank % own.tp_size == 0
    return preloading() if starts_server else contextlib.nullcontext()


@contextlib.contextmanager
def trained(
    ranks: "Ranks", job: Job, opened: Opened, run: RunDirectory, command: ServerCommand | None
) -> "Iterator[Summary]":
    """Start this replica's server and train on it, together with the other ranks; stop it at the end of the block.

    `command` is the first rank's, which starts its server as the flags say.
    """
    folder = run.path if ranks.is_rank_zero else run.ranks / str(ranks.rank)
    log = folder / run.server_log.name
    commands = [command] if command is not None else []

    def own_command() -> TrainConfig:
        if not commands:
            commands.append(_command(ranks, job, opened, folder / run.manifest.name))
        return opened.train.changed(**commands[0].server_choices)

    train = ranks.run_on_all(lambda: ranks.tp_group.run_on_rank_zero(own_command))
    send_key(job.vllm_flags)
    with contextlib.ExitStack() as running:

        def start() -> StartedServer | None:
            if not ranks.is_tp_rank_zero:
                return None
            server = StartedServer(
                commands[0], log, limit_s=job.start_limit_s, waiting=console.waiting, preloaded=job.preloaded
            )
            return running.enter_context(server.running(ranks.check_abort))

        with _compiling_ahead(ranks, job.serve, opened, commands):
            process = ranks.run_on_all(start)
        yield train_in(
            run, train, job.environment, as_json=job.as_json, process=process, resume=opened.resume,
            ranks=ranks,
        )  # fmt: skip


def _compiling_ahead(
    ranks: "Ranks", serve: ServeConfig, opened: Opened, commands: Sequence[ServerCommand]
) -> contextlib.AbstractContextManager[None]:
    """Compile the training step while vLLM starts, if this process trains a whole model in the server's memory."""
    train, (device_type, _) = opened.train, accelerator.choose(serve.device)
    is_whole = train.trains_in_server and ranks.tp_size == ranks.cp_size == 1
    if not (is_whole and train.compute.compiles_on(device_type)):
        return contextlib.nullcontext()
    import torch

    from bridge.engine.compile_ahead import compiling_ahead
    from bridge.weights.attach import leave_core_to_server, stand_in

    device = leave_core_to_server() if device_type == "cpu" else torch.device("cuda", 0)
    dtype = torch.bfloat16 if serve.dtype == "auto" else getattr(torch, serve.dtype)
    share = float(value(commands[0].argv, "--gpu-memory-utilization") or 1)  # unknown: nothing is left beside vLLM
    model = partial(stand_in, train.model_name, dtype, device, share=share)
    return compiling_ahead(model, train, ranks)


def _command(ranks: "Ranks", job: Job, opened: Opened, manifest: Path) -> ServerCommand:
    """Return the command of the server of another replica than the first."""
    train = opened.train
    manifest.parent.mkdir(parents=True, exist_ok=True)
    is_known = not train.rollouts.samples_here  # to environments, also after the run was resumed
    port = job.serve.port + ranks.dp_rank if is_known else free_port(job.serve.host)
    serve = job.serve.model_copy(update={"port": port, "vllm_config_path": manifest})
    return prepare(serve, job.vllm_flags, shares_weights=train.needs_patched_server, trainer=train)


def train_as_other_rank(ranks: "Ranks", job: Job, opened: Opened) -> None:
    """Train as any rank but the first."""
    with trained(ranks, job, opened, join_run_directory(ranks, opened), None):
        pass


def join_run_directory(ranks: "Ranks", opened: Opened) -> RunDirectory:
    """Return the run directory as any rank but the first, and write this rank's output there."""
    own = OWN_RANK.get()
    assert own is not None, "the launcher started it"
    if own.local_rank == 0:
        return ranks.run_on_all(lambda: join_run(opened.run_dir))
    ranks.barrier()
    run = RunDirectory.join(opened.run_dir)
    run.ranks.mkdir(exist_ok=True)
    own.log_to(run.ranks / f"{own.rank}.log", moves=True)
    return run


def check_shared(ranks: "Ranks", folder: Path) -> None:
    """Check that every host sees `folder`, from which all resume.

    Raises:
        UsageError: one does not.
    """
    probe = folder.absolute() / f".seen-{ranks.run_on_rank_zero(os.getpid)}"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()

    ranks.run_on_rank_zero(make)
    probes = ranks.all_gather_object((socket.gethostname(), probe.exists()))
    if ranks.is_rank_zero:
        probe.unlink()
    if lacking := [host for host, sees in probes if not sees]:
        raise UsageError(
            f"{lacking[0]} does not see {folder} of {probes[0][0]}: all hosts resume from the checkpoints there",
            hint="--save-path in a folder that all hosts share, such as on NFS",
        )


def send_key(flags: Sequence[str]) -> None:
    """Let this process send the API key among vLLM's own `flags`, if there is one."""
    if key := value(flags, "--api-key"):
        os.environ[api_key.VARIABLE] = key
    api_key.headers()  # refuses a key that cannot be sent


def join_run(path: Path) -> RunDirectory:
    """Return the run directory on another host than the first, or the first one's if both see it."""
    if not (path.is_dir() and claim.is_claimed(path)):
        claim.make(path, what="run directory", flag="--run-dir")
        mark.put(path, "run")
    return RunDirectory.join(path)
