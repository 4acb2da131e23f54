"""One rank of a run, as the launcher starts it: a process with the user's command line.

The first rank of a host prints, the others write to `ranks/` in the run directory.

Not covered: how ranks are started and restarted (`rank_launcher.py`), what a rank does (`launch.py`), and what ranks
exchange (`bridge/ranks/world.py`).
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.checkpoints.run_directory import RunDirectory
from bridge.core import atomic_file, folder_claim, folder_mark
from bridge.errors import RankError
from bridge.processes.leash import PR_SET_PDEATHSIG
from bridge_cli import command_line, signals
from bridge_cli.rank_gpus import VISIBLE

if TYPE_CHECKING:
    from bridge.ranks.world import Ranks

MAIN = "from bridge_cli.rank_process import main; main()"
OF_ELASTIC = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}  # fmt: skip
"""Variables that TorchElastic or the launcher sets, and that vLLM and other libraries would misread as theirs."""
LOST = 1
"""Exit code of a rank that lost another rank, after which TorchElastic restarts all ranks."""


@dataclass(frozen=True, kw_only=True)
class OwnRank:
    """This process as a rank that the launcher started."""

    rank: int
    world_size: int
    local_rank: int
    tp_size: int
    cp_size: int = 1
    device: str
    address: str
    port: int
    """Port at `address` where the ranks meet; the first rank listens there."""
    scratch: Path
    """The launcher's scratch folder, for reports."""

    @classmethod
    def of_elastic(cls, settings: dict[str, Any]) -> "OwnRank":
        """Read the variables that TorchElastic set, and remove them from the environment."""
        names = [name for name in os.environ if name in OF_ELASTIC or name.startswith("TORCHELASTIC_")]
        variables = {name: os.environ.pop(name) for name in names}
        local_rank = int(variables["LOCAL_RANK"])
        gpus = settings["gpus"][local_rank]
        os.environ.update(settings["variables"])
        if gpus is not None:
            os.environ[VISIBLE] = gpus
        return cls(
            rank=int(variables["RANK"]), world_size=int(variables["WORLD_SIZE"]), local_rank=local_rank,
            tp_size=settings["tp_size"], cp_size=settings["cp_size"], device=settings["device"],
            address=variables["MASTER_ADDR"], port=int(variables["MASTER_PORT"]), scratch=Path(settings["scratch"]),
        )  # fmt: skip

    @property
    def run_dir(self) -> Path:
        """A link to the run directory, which restarted ranks resume from."""
        return self.scratch / "run"

    def keep(self, run_dir: Path) -> None:
        """Remember `run_dir`, so that restarted ranks resume the run there."""
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
            self.rank, self.world_size, tp_size=self.tp_size, cp_size=self.cp_size, host=self.address, port=self.port,
            device=device, listener=listener,
        )  # fmt: skip
        (self.scratch / f"{self.local_rank}.joined").touch()
        return ranks

    def log_to(self, path: Path, *, moves: bool = False) -> None:
        """Redirect the output of this rank to `path`; with `moves`, also move its earlier output there."""
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
        """Report to the launcher how this rank ended; raises UsageError if the disk is full."""
        lost = {} if error is None else {"message": error.message, "hint": error.hint}
        atomic_file.replace(self.scratch / f"{self.local_rank}.json", json.dumps({"code": code, **lost}).encode())


OWN_RANK: ContextVar[OwnRank | None] = ContextVar("OWN_RANK", default=None)
"""This process as a rank; None: the user started this process."""


@contextlib.contextmanager
def joined() -> "Iterator[Ranks]":
    """Yield the ranks of the run; if the user started this process, it is the only rank.

    A rank that lost another rank reports this to the launcher and exits.
    """
    from bridge.ranks.world import ALONE

    own = OWN_RANK.get()
    if own is None:
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


def join_run_directory(ranks: "Ranks", path: Path) -> RunDirectory:
    """Join the run directory on any rank but the first, and write this rank's output there."""
    own = OWN_RANK.get()
    assert own is not None, "the launcher started it"
    if own.local_rank == 0:
        return ranks.run_on_all(lambda: _run_directory_of_host(path))
    ranks.barrier()
    run = RunDirectory.join(path)
    run.ranks.mkdir(exist_ok=True)
    own.log_to(run.ranks / f"{own.rank}.log", moves=True)
    return run


def _run_directory_of_host(path: Path) -> RunDirectory:
    """Return this host's run directory, which is the first host's if both hosts see it; not called on the first."""
    if not (path.is_dir() and folder_claim.is_claimed(path)):
        folder_claim.make(path, what="run directory", flag="--run-dir")
        folder_mark.put(path, "run")
    return RunDirectory.join(path)


def main() -> None:
    """Run the launcher's command as one of its ranks, and exit."""
    from bridge_cli import main as command

    # If the launcher dies, this host is lost; SIGTERM would count as an interrupt, which all ranks have to agree on.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = json.loads(sys.argv[1])
    arguments = sys.argv[2:]
    sys.argv = ["bridge", *arguments]  # the user's command, which the run records
    rank = OwnRank.of_elastic(settings)
    if rank.local_rank:
        rank.log_to(rank.scratch / f"{rank.local_rank}.log")
    sys.excepthook = command.report_bug
    on_signal = signals.prepare()
    OWN_RANK.set(rank)
    if rank.run_dir.exists():
        arguments = command_line.with_choices(arguments, {"run_dir": str(rank.run_dir.resolve())})
    rank.report(on_signal.finish(command.answer(arguments)))
    signals.leave(0)
