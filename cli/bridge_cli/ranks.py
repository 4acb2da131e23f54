"""The ranks of `bridge run --gpus N --hosts H`: which GPUs each has, and what each does.

Each rank has a GPU. With `--tensor-parallel-size T` the ranks of T GPUs in a row share a server, which the first of
them starts; otherwise each starts its own. The first rank of a host prints, the others write to `ranks/` in the run
directory.

Not covered: how ranks are started and restarted (`launcher.py`), what they exchange (`bridge/ranks/world.py`).
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.config import ServeConfig, TrainConfig
from bridge.core import claim, mark
from bridge.errors import RankError, UsageError
from bridge.processes.leash import PR_SET_PDEATHSIG
from bridge.processes.server_command import ServerCommand, prepare
from bridge.processes.server_process import StartedServer, reachable
from bridge.processes.start_checks import free_port
from bridge.processes.vllm_flags import value
from bridge.run.run_directory import RunDirectory
from bridge.server import api_key
from bridge.types import Environment
from bridge_cli import console, ending, layout, signals
from bridge_cli.train import train_in

if TYPE_CHECKING:
    from bridge.ranks.world import Ranks
    from bridge.run.checkpoint import Found
    from bridge.run.metrics import Summary

MAIN = "from bridge_cli.ranks import main; main()"
OF_ELASTIC = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}  # fmt: skip
"""Variables that TorchElastic or the launcher sets: vLLM and other libraries would take them for their own."""
LOST = 1
"""Exit code of a rank that lost another one: TorchElastic restarts all."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process as a rank that the launcher started."""

    rank: int
    world_size: int
    local_rank: int
    tp_size: int
    device: str
    address: str
    port: int
    """Where the ranks meet; the first one listens."""
    scratch: Path
    """A folder of the launcher's, for reports."""

    @classmethod
    def of_elastic(cls, settings: dict[str, Any]) -> "Place":
        """Take the variables that TorchElastic set out of the environment."""
        names = [name for name in os.environ if name in OF_ELASTIC or name.startswith("TORCHELASTIC_")]
        variables = {name: os.environ.pop(name) for name in names}
        local_rank = int(variables["LOCAL_RANK"])
        gpus = settings["gpus"][local_rank]
        os.environ.update(settings["variables"] | ({} if gpus is None else {layout.VISIBLE: gpus}))
        return cls(
            rank=int(variables["RANK"]), world_size=int(variables["WORLD_SIZE"]), local_rank=local_rank,
            tp_size=settings["tp_size"], device=settings["device"], address=variables["MASTER_ADDR"],
            port=int(variables["MASTER_PORT"]), scratch=Path(settings["scratch"]),
        )  # fmt: skip

    @property
    def run_dir(self) -> Path:
        """A link to the run directory, for a restart."""
        return self.scratch / "run"

    def keep(self, run_dir: Path) -> None:
        """Let ranks that are restarted resume the run in `run_dir`."""
        if not self.run_dir.is_symlink():
            self.run_dir.symlink_to(run_dir.absolute())

    def join(self) -> "Ranks":
        import torch

        from bridge.ranks.world import Ranks

        device = torch.device(self.device)
        if self.device == "cuda":
            device = torch.device("cuda", self.rank % self.tp_size)
            torch.cuda.set_device(device)
        listener = socket.create_server((self.address, self.port)) if self.rank == 0 else None
        ranks = Ranks.join(
            self.rank, self.world_size, tp_size=self.tp_size, host=self.address, port=self.port, device=device,
            listener=listener,
        )  # fmt: skip
        (self.scratch / f"{self.local_rank}.joined").touch()
        return ranks

    def log_to(self, path: Path, *, moves: bool = False) -> None:
        """Write the output of this rank to `path`; `moves`: with that so far."""
        log = self.scratch / f"{self.local_rank}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        with path.open("ab") as output:
            if moves:
                with log.open("rb") as before:
                    shutil.copyfileobj(before, output)
                log.unlink()
                log.symlink_to(path.absolute())
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())

    def report(self, code: int, error: RankError | None = None) -> None:
        """Let the launcher know how this rank ended."""
        lost = {} if error is None else {"message": error.message, "remedy": error.remedy}
        (self.scratch / f"{self.local_rank}.json").write_text(json.dumps({"code": code, **lost}))


PLACE: ContextVar[Place | None] = ContextVar("PLACE", default=None)
"""None: this process was started by a person."""


@dataclass(frozen=True)
class Opened:
    """What the first rank found out for all."""

    train: TrainConfig
    """With what was derived."""
    run_dir: Path
    resume: "Found | None"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What each rank does."""

    serve: ServeConfig
    chosen: TrainConfig
    environment: Environment | None
    vllm_flags: Sequence[str] = field(default=())
    start_limit_s: float
    as_json: bool = False


@contextlib.contextmanager
def joined(train: TrainConfig, serve: ServeConfig) -> "Iterator[Ranks]":
    """Yield the ranks of the run; a process that a person started launches them if they are several, and exits.

    Raises:
        BridgeError: they cannot be started, or were lost.
    """
    from bridge.ranks.world import ALONE

    place = PLACE.get()
    if place is None:
        if train.hosts == 1 and train.rendezvous is not None:
            raise UsageError(f"--rendezvous {train.rendezvous} has no effect on one host", remedy="add --hosts H")
        found = layout.of(train, serve)
        if len(found.gpus) * train.hosts > 1:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
            from bridge_cli import launcher

            sys.exit(launcher.launch(train, found))
        yield ALONE
        return
    ranks = ALONE
    try:
        ranks = place.join()
        yield ranks
    except RankError as error:
        place.report(LOST, error)
        sys.exit(LOST)
    finally:
        ranks.close()


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
            commands.append(_command(ranks, job, opened.train, folder / run.manifest.name))
        return attached_to(opened.train, commands[0])

    train = ranks.run_on_all(lambda: ranks.tp_group.run_on_rank_zero(own_command))
    send_key(job.vllm_flags)
    with contextlib.ExitStack() as running:

        def start() -> StartedServer | None:
            if not ranks.is_tp_rank_zero:
                return None
            server = StartedServer(commands[0], log, limit_s=job.start_limit_s, output=console)
            return running.enter_context(server.running(ranks.check_abort))

        process = ranks.run_on_all(start)
        yield train_in(
            run, train, job.environment, as_json=job.as_json, process=process, resume=opened.resume,
            ranks=ranks,
        )  # fmt: skip


def _command(ranks: "Ranks", job: Job, train: TrainConfig, manifest: Path) -> ServerCommand:
    """Return the command of the server of another replica than the first."""
    manifest.parent.mkdir(parents=True, exist_ok=True)
    is_known = not train.rollouts.samples_here  # to environments, also after the run was resumed
    port = job.serve.port + ranks.dp_rank if is_known else free_port(job.serve.host)
    serve = job.serve.model_copy(update={"port": port, "vllm_config_path": manifest})
    return prepare(serve, [*job.vllm_flags], shares_weights=shares_weights(train), trainer=train)


def take_part(ranks: "Ranks", job: Job, opened: Opened) -> None:
    """Train as any rank but the first."""
    place = PLACE.get()
    assert place is not None, "the launcher started it"
    if place.local_rank == 0:
        run = ranks.run_on_all(lambda: join_run(opened.run_dir))
    else:
        ranks.barrier()
        run = RunDirectory.join(opened.run_dir)
        run.ranks.mkdir(exist_ok=True)
        place.log_to(run.ranks / f"{place.rank}.log", moves=True)
    with trained(ranks, job, opened, run, None):
        pass


def check_shared(ranks: "Ranks", folder: Path) -> None:
    """Check that every host sees `folder`, from which all resume.

    Raises:
        UsageError: one does not.
    """
    probe = folder.absolute() / f".seen-{ranks.broadcast_object(os.getpid())}"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()

    ranks.run_on_rank_zero(make)
    seen = ranks.all_gather_object((socket.gethostname(), probe.exists()))
    if ranks.is_rank_zero:
        probe.unlink()
    if lacking := [host for host, sees in seen if not sees]:
        raise UsageError(
            f"{lacking[0]} does not see {folder} of {seen[0][0]}: all hosts resume from the checkpoints there",
            remedy="--save-path in a folder that all hosts share, such as on NFS",
        )


def shares_weights(train: TrainConfig) -> bool:
    """Return whether the trainer needs the patched server; one that is only restarted can be the stock vLLM."""
    return train.mode != "none" or train.publishing.reload == "in-place"


def send_key(flags: Sequence[str]) -> None:
    """Let this process send the API key among vLLM's own `flags`, if there is one."""
    if key := value(flags, "--api-key"):
        os.environ[api_key.VARIABLE] = key
    api_key.headers()  # refuses a key that cannot be sent


def attached_to(train: TrainConfig, command: ServerCommand) -> TrainConfig:
    """Return `train` pointed at the server that `command` starts."""
    train = train.changed(vllm_port=command.port, vllm_host=reachable(command.host))
    return train.changed(vllm_config_path=command.manifest) if command.shares_weights else train


def main() -> None:
    """Run the command that the launcher was given, as one of its ranks, and exit."""
    from bridge_cli import main as command

    # SIGTERM at the launcher's death would be an interrupt, on which all ranks agree; this host is lost
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    place = Place.of_elastic(settings)
    if place.local_rank:
        place.log_to(place.scratch / f"{place.local_rank}.log")
    sys.excepthook = command.report_bug
    on_signal = signals.prepare()
    PLACE.set(place)
    if place.run_dir.exists():
        arguments = ending.changed(arguments, {"run_dir": str(place.run_dir.resolve())})
    place.report(on_signal.exit_code(command.answer(arguments)))


def join_run(path: Path) -> RunDirectory:
    """Return the run directory on another host than the first, or the first one's if both see it."""
    if not (path.is_dir() and claim.is_claimed(path)):
        claim.make(path, what="run directory", flag="--run-dir")
        mark.put(path, "run")
    return RunDirectory.join(path)
