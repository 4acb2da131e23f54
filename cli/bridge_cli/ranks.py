"""The ranks of `bridge run --gpus N`: this process is the first of its host, and the others are its children.

Each has a GPU. With `--tensor-parallel-size T` the ranks of T GPUs in a row share a server, which the first of them
starts; otherwise each has one of its own. The others write their output to `ranks/` in the run directory, and end with
this process, however that ends. Host h has the ranks [h * N, (h + 1) * N).

Not covered: what ranks tell each other (`bridge/ranks/world.py`), and how hosts find each other (`rendezvous.py`).
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.checks import model
from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import HOSTS_KNOW
from bridge.core import claim, mark, private
from bridge.errors import BridgeError, RankError, UsageError
from bridge.run.run_directory import RunDirectory
from bridge.server import api_key
from bridge.types import Environment
from bridge_cli import accelerator, children, console, signals
from bridge_cli.children import Child
from bridge_cli.rendezvous import Met
from bridge_cli.serve import free_port, prepare
from bridge_cli.server_command import ServerCommand
from bridge_cli.server_process import StartedServer, reachable
from bridge_cli.train import load_environment, train_in
from bridge_cli.vllm_flags import value

if TYPE_CHECKING:
    from bridge.ranks.world import Ranks
    from bridge.run.checkpoint import Found
    from bridge.run.metrics import Summary

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEATH_LIMIT_S = 1.0
"""Time for a rank to be seen to have ended."""
END_LIMIT_S = 30.0
"""Longest wait for the other ranks to stop their servers, before they are stopped."""
MAIN = "from bridge_cli.ranks import main; main()"
MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the first rank tells the others to do."""

    serve: ServeConfig
    train: TrainConfig
    chosen: TrainConfig
    vllm_flags: Sequence[str]
    start_limit_s: float
    run_dir: Path
    resume: "Found | None"


@dataclass(frozen=True)
class Place:
    """Where one rank is."""

    rank: int
    size: int
    tp_size: int
    """Ranks that share a server."""
    device: str
    gpus: str | None
    """What CUDA_VISIBLE_DEVICES is for it and its server: a GPU for each part; None on a CPU."""

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.gpus is None else {VISIBLE: self.gpus}

    def join(self, met: Met, others: Sequence[Child] = ()) -> "Ranks":
        """Meet the other ranks of the run; this process started `others`."""
        import torch

        from bridge.ranks.world import Ranks

        device = torch.device(self.device)
        if self.device == "cuda":
            device = torch.device("cuda", self.rank % self.tp_size)
            torch.cuda.set_device(device)
        return Ranks.join(
            self.rank, self.size, tp_size=self.tp_size, host=met.address, port=met.port, key=met.key, device=device,
            listener=met.listener,
            can_come=lambda: met.lost() is None and all(child.is_alive() for child in others),
        )  # fmt: skip


def tp_size(train: TrainConfig, serve: ServeConfig) -> int:
    """Return the number of ranks that train on one server: as many as it has GPUs, if its memory is trained.

    Raises:
        UsageError: what is trained, or the model, cannot be cut into parts.
    """
    if (parts := serve.tensor_parallel_size) == 1:
        return 1
    flag = f"--tensor-parallel-size {parts}"
    described = model.read(serve.model)
    if undivided := model.undivided(described, parts):
        fitting = max(number for number in range(1, parts) if not model.undivided(described, number))
        raise UsageError(
            f"{flag} does not divide the {undivided} of {serve.model}", remedy=f"--tensor-parallel-size {fitting}"
        )
    if train.trains_in_server:
        if alone := [name for name, chosen in train.on_one_gpu().items() if chosen]:
            raise UsageError(f"{alone[0]} trains on one GPU, found {flag}", remedy=f"leave out {alone[0]} or {flag}")
        if train.optimizer.gradient_release:
            raise UsageError(
                f"--gradient-release trains on servers of one GPU each, found {flag}",
                remedy=f"leave out --gradient-release or {flag}",
            )
        return parts
    if train.replicas > 1:
        raise UsageError(
            f"--mode {train.mode}: each of several servers has one GPU, found {flag}", remedy="leave it out"
        )
    return 1


def dp_size(train: TrainConfig, parts: int) -> int:
    """Return the number of replicas on each host, of `parts` GPUs each.

    Raises:
        UsageError: their GPUs are not those of `--gpus`, or a batch cannot be dealt out to the replicas of all hosts.
    """
    if train.gpus % parts and train.gpus > 1:
        raise UsageError(
            f"--gpus {train.gpus} is not a multiple of --tensor-parallel-size {parts}",
            remedy=f"--gpus {max(1, train.gpus // parts) * parts}",
        )
    count = max(1, train.gpus // parts)  # --gpus 1 is the default
    group_size, size = train.sampling.group_size, count * train.hosts
    num_groups = train.rollouts.batch_size // group_size
    if train.rollouts.source == "environment" and num_groups % size:
        least = math.lcm(size, train.optimizer.updates_per_batch)
        raise UsageError(
            f"{size} replicas do not divide the {num_groups} groups of a batch",
            remedy=f"--batch-size {group_size * least * -(-num_groups // least)}",
        )
    return count


def num_gpus(train: TrainConfig, serve: ServeConfig) -> int:
    """Return the number of GPUs of each host that a run takes; UsageError as `tp_size` and `dp_size`."""
    return dp_size(train, tp_size(train, serve)) * serve.tensor_parallel_size


def places(train: TrainConfig, serve: ServeConfig) -> list[Place]:
    """Return the place of each rank of this host; this process and its server now see the GPUs of their replica alone.

    Raises:
        UsageError: there are fewer GPUs, or no whole number of servers has them.
    """
    parts = tp_size(train, serve)
    count = parts * dp_size(train, parts)
    if count * train.hosts == 1:
        return []
    most = MOST_PORT + 1 - count // parts * train.hosts
    if train.rollouts.source == "atropos" and serve.port > most:  # each server has the port after the one before
        raise UsageError(
            f"--port {serve.port}: the servers of all replicas have ports in a row, up to {MOST_PORT}",
            remedy=f"--port {most} or lower",
        )
    device, _ = accelerator.choose(serve.device)
    gpus: list[str | None] = [None] * count
    if device == "cuda" and count > 1:
        shown = len(accelerator.gpu_memory_bytes())
        if count > shown:
            wanted = f"--gpus {count}" if train.gpus > 1 else f"--tensor-parallel-size {parts}"
            fitting = [f"--gpus {max(shown // parts * parts, min(parts, shown))}"] if train.gpus > 1 else []
            fitting += [f"--tensor-parallel-size {shown}"] if parts > shown else []
            raise UsageError(f"{wanted}: this host shows {shown}", remedy=" ".join(fitting))
        visible = os.environ.get(VISIBLE)
        each = [*(visible.split(",") if visible else map(str, range(shown)))]
        of_replicas = [",".join(each[start : start + parts]) for start in range(0, count, parts)]
        gpus = [of_replicas[rank // parts] for rank in range(count)]
    found = [Place(rank, count, parts, device, gpus[rank]) for rank in range(count)]
    os.environ.update(found[0].environment)
    return found


@contextlib.contextmanager
def started(each: Sequence[Place], run: RunDirectory, met: Met | None = None) -> Iterator["Ranks"]:
    """Start the other ranks of this host and meet all; they have ended when the block ends.

    Raises:
        RankError: one did not start, or ended; the hint names its log.
    """
    from bridge.ranks.world import ALONE, INTERFACES

    if not each:
        yield ALONE
        return
    met = met or Met.alone()
    size = met.num_hosts * len(each)
    each = [replace(place, rank=met.host * len(each) + place.rank, size=size) for place in each]
    os.environ.update({name: os.environ.get(name, met.interface) for name in INTERFACES if met.interface})
    others: list[Child] = []
    try:
        for place in each[1:]:
            run.ranks.mkdir(exist_ok=True)
            argv = [
                sys.executable,
                "-P",
                "-c",
                MAIN,
                met.address,
                str(met.port),
                str(run.path),
                json.dumps(asdict(place)),
            ]
            environment = os.environ | place.environment | {HOSTS_KNOW: met.key.hex()}
            others.append(children.start(argv, environment, run.ranks / f"{place.rank}.log"))
        ranks = ALONE
        try:
            ranks = each[0].join(met, others)
            ranks.on_interrupt = lambda: _interrupt(others)
            yield ranks
        except RankError as error:
            raise _explained(error, each, others, met) from error
        finally:
            ranks.close()
            end = time.monotonic() + END_LIMIT_S
            for child in others:
                if ranks is ALONE:  # they have not met: no rank has a server, and torch may wait without an end
                    children.kill(child)
                children.wait_until(child, lambda: False, limit_s=end - time.monotonic(), progress=lambda _: None)
    finally:
        children.stop(*others)


@contextlib.contextmanager
def trained(
    ranks: "Ranks",
    part: Part,
    own_command: Callable[[], ServerCommand],
    run: RunDirectory,
    environment: Environment | None,
    *,
    log: Path,
    as_json: bool = False,
) -> "Iterator[Summary]":
    """Start this replica's server and train on it, together with the other ranks; stop it at the end of the block."""
    if part.resume is not None:
        from bridge.run import delivery

        delivery.deliver(part.resume.folder, ranks)
    command = ranks.run_on_all(lambda: ranks.tp_group.run_on_rank_zero(own_command))
    send_key(part.vllm_flags)
    server = StartedServer(command, log, limit_s=part.start_limit_s)
    with contextlib.ExitStack() as running:
        process = ranks.run_on_all(
            lambda: running.enter_context(server.running(ranks.check_abort)) if ranks.is_tp_rank_zero else None
        )
        yield train_in(
            run, attached_to(part.train, command), environment,
            as_json=as_json, process=process, resume=part.resume, chosen=part.chosen, ranks=ranks,
        )  # fmt: skip


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
    """Take part in the run of the process that started this one, and exit."""
    on_signal = signals.prepare()
    try:
        address, port, run_dir, place = sys.argv[1:]
        key = bytes.fromhex(os.environ.pop(HOSTS_KNOW))
        private.hide_environment()
        ranks = Place(**json.loads(place)).join(Met(0, address, int(port), key, None))
        try:
            take_part(ranks, RunDirectory.join(Path(run_dir)))
        finally:
            ranks.close()
    except BridgeError as error:
        console.fault(error.message, error.remedy)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.note("interrupted")
        sys.exit(on_signal.exit_code(signals.INTERRUPTED))


def join_run(path: Path) -> RunDirectory:
    """Return the run directory on another host than the first, or the first one's if both see it."""
    if not (path.is_dir() and claim.is_claimed(path)):
        claim.make(path, what="run directory", flag="--run-dir")
        mark.put(path, "run")
    return RunDirectory.join(path)


def take_part(ranks: "Ranks", run: RunDirectory) -> None:
    """Train as the first rank says."""
    part: object = ranks.all_gather_object(None)[0]
    assert isinstance(part, Part), part
    folder = run.ranks / str(ranks.rank)

    def own_command() -> ServerCommand:
        folder.mkdir(parents=True, exist_ok=True)
        is_known = part.train.rollouts.source == "atropos"  # to environments, after the run was resumed, too
        port = part.serve.port + ranks.dp_rank if is_known else free_port(part.serve.host)
        serve = part.serve.model_copy(update={"port": port, "vllm_config_path": folder / run.manifest.name})
        return prepare(serve, [*part.vllm_flags], shares_weights=shares_weights(part.train), trainer=part.train)

    environment, log = load_environment(part.train), folder / run.server_log.name
    with trained(ranks, part, own_command, run, environment, log=log):
        pass


def _explained(error: RankError, each: Sequence[Place], others: Sequence[Child], met: Met) -> RankError:
    """Return `error` with the rank or the host that ended by itself, if there is one, and where its output is."""
    for place, child in zip(each[1:], others, strict=False):
        children.wait_until(child, lambda: False, limit_s=DEATH_LIMIT_S, progress=lambda _: None)
        if (code := child.exit_code()) is not None and code < 0:
            return RankError(
                f"rank {place.rank} of {place.size} was ended by {signal.Signals(-code).name}",
                remedy=f"continue with --resume; its output is in {child.log}",
            )
    if host := met.lost():
        return RankError(f"{host} ended: {error.message}", remedy="continue with --resume; its output says why")
    if not others:
        return error
    logs = ", ".join(str(child.log) for child in others)
    return RankError(error.message, remedy=f"{error.remedy}; the other ranks' output: {logs}")


def _interrupt(others: Sequence[Child]) -> None:
    """Pass on Ctrl-C: each rank heads a session of its own, which a terminal does not reach."""
    for child in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, signal.SIGINT)
