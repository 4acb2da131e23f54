"""Start, number, watch and restart the ranks of a run on this host, with TorchElastic.

Each rank is a process with this process's command line (`rank_process.main`). It exits with 0 unless a restart could
help. TorchElastic thus sees a failure only when a rank or a host was lost, and then restarts all ranks from the newest
checkpoint.

On one host the rendezvous is a file, which no other user can reach. Several hosts meet at --rendezvous, torch's own
store, which trusts every client that can reach it.

Source: "Elastic Agent" and "Rendezvous" in PyTorch's documentation; setsid(2).
"""

import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from bridge.core.interrupt import SIGNALS
from bridge.errors import BridgeError, RankError, UsageError
from bridge.processes import children
from bridge.ranks.process_groups import tcp_keepalive
from bridge.ranks.world import INTERFACES, LOOPBACK
from bridge_cli import command_line, console
from bridge_cli.rank_gpus import RankLayout
from bridge_cli.rank_process import MAIN, OF_ELASTIC

RUN_ID = "bridge"
LIMIT_S = 600
"""Longest wait for all hosts."""
END_LIMIT_S = 3600
"""Longest wait for ranks to save their state and exit; a second Ctrl-C reaches them, too."""
EXIT_LIMIT_S = 30.0
"""Longest wait for the other hosts after the last rank of this host has exited."""
POLL_S = 0.1
EXAMPLE = "such as --rendezvous 10.0.0.1:29400"


class Agent(LocalElasticAgent):
    """TorchElastic's agent for the ranks of this host; once a rank has failed, it lets the others exit by themselves.

    They notice the lost rank, and the first rank saves the weights of the last step.
    """

    def __init__(self, spec: WorkerSpec, scratch: Path, hosts: int) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), exit_barrier_timeout=EXIT_LIMIT_S)
        self._scratch = scratch
        self._hosts = hosts
        self._killed: dict[int, int] = {}
        """Local rank -> the signal that killed it."""

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Return the process of every rank, in rank order."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handlers[number].proc for number in sorted(handlers)]

    def has_finished(self) -> bool:
        """Return whether all ranks have exited and none was lost."""
        codes = [process.poll() for process in self.processes()]
        return bool(codes) and not any(code is None or code for code in codes)

    def loss(self) -> RankError:
        """Return an error that says why a rank was lost, and where its output is."""
        workers = self.get_worker_group().workers
        for local_rank, number in self._killed.items():
            worker = workers[local_rank]
            log = (self._scratch / f"{local_rank}.log").resolve()
            where = f"its output is in {log}" if local_rank else "its output is above"
            return RankError(
                f"rank {worker.global_rank} of {worker.world_size} was killed by {signal.Signals(number).name}",
                hint=f"continue with --resume; {where}",
            )
        for report in sorted(self._scratch.glob("*.json")):
            if message := (document := json.loads(report.read_text())).get("message"):
                return RankError(message, hint=document["hint"])
        logs = ", ".join(str(log.resolve()) for log in sorted(self._scratch.glob("*.log")))
        return RankError("a rank failed", hint=f"its traceback is above, or in its log: {logs}")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._killed.clear()
        for report in [*self._scratch.glob("*.json"), *self._scratch.glob("*.joined")]:
            report.unlink()
        if self._hosts == 1:
            super()._rendezvous(worker_group)
            return
        with console.waiting(f"waiting for the {self._hosts} hosts of the run"):
            super()._rendezvous(worker_group)
        number: Any = worker_group.group_rank
        if number:
            console.note(f"host {number + 1} of {self._hosts}; the first host prints the progress")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {local_rank: process.poll() for local_rank, process in enumerate(self.processes())}
        if any(codes.values()):
            self._killed = {local_rank: -code for local_rank, code in codes.items() if code and code < 0}
            self._wait_for_exit()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        left = f"{self._remaining_restarts} restarts left"
        console.note(f"{self.loss().message}; restarting from the newest checkpoint, {left}")
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals | None = None, *_: object, **__: object) -> None:
        """End the ranks by sending them the signal `death_sig`; without one, wait for them to exit by themselves."""
        if self._pcontext is None:
            return
        try:
            if death_sig is None:
                self._wait_for_exit()
            self._pcontext.close(death_sig or signal.SIGTERM, END_LIMIT_S)
        except SignalException as another:
            self._shutdown(another.sigval)
            if death_sig is None:
                raise

    def _wait_for_exit(self) -> None:
        """Wait for all ranks to exit, unless one has not joined the others yet: no rank has anything to save then."""
        deadline = time.monotonic() + END_LIMIT_S
        while time.monotonic() < deadline:
            running = [number for number, process in enumerate(self.processes()) if process.poll() is None]
            if not running or not all((self._scratch / f"{number}.joined").exists() for number in running):
                return
            time.sleep(POLL_S)


def launch(layout: RankLayout) -> int:
    """Run the ranks of this host, and return the exit code of the run.

    Raises:
        UsageError: the rendezvous failed.
        RankError: a rank or a host was lost more often than --restarts.
    """
    scratch = Path(tempfile.mkdtemp(prefix="bridge-"))
    began = time.monotonic()
    handler = None
    try:
        with tcp_keepalive():
            handler = get_rendezvous_handler(_rendezvous(layout, scratch))
        agent = Agent(_spec(layout, handler, scratch), scratch, layout.hosts)
        _prepare_elastic()
        try:
            result = agent.run()
        except RendezvousError:
            if not agent.processes():
                raise
            result = None
        if (result is None or result.is_failed()) and not agent.has_finished():
            raise agent.loss()
        return int(json.loads((scratch / "0.json").read_text())["code"])
    except SignalException as error:
        handler = None  # do not shut down the rendezvous: other hosts may continue without this one, as in torchrun
        _note_interrupt(scratch)
        return 128 + error.sigval
    except RendezvousError as error:
        raise _not_met(layout, error, time.monotonic() - began) from error
    finally:
        if handler is not None:
            handler.shutdown()
        if all(log.is_symlink() or not log.stat().st_size for log in scratch.glob("*.log")):
            shutil.rmtree(scratch)


def _note_interrupt(scratch: Path) -> None:
    """Print that a signal ended the run, unless this host's first rank did (it does not after losing another rank)."""
    report = scratch / "0.json"
    document = json.loads(report.read_text()) if report.exists() else {}
    if not document.get("code") or "message" in document:
        console.note("interrupted")


def _spec(layout: RankLayout, handler: Any, scratch: Path) -> WorkerSpec:
    variables = {name: os.environ[name] for name in OF_ELASTIC if name in os.environ}
    if interface := _interface(layout):
        variables |= {name: os.environ.get(name, interface) for name in INTERFACES}
    settings = {
        "tp_size": layout.tp_size, "cp_size": layout.cp_size, "device": layout.device, "gpus": layout.gpus,
        "scratch": str(scratch), "variables": variables,
    }  # fmt: skip
    leash = "-I", "-S", str(children.LEASH), str(os.getpid())  # ends the rank when this process ends
    python = sys.executable, "-P", "-c", MAIN
    return WorkerSpec(
        role="rank",
        local_world_size=len(layout.gpus),
        entrypoint=sys.executable,
        args=(*leash, *python, json.dumps(settings), *command_line.ARGUMENTS.get()),
        rdzv_handler=handler,
        max_restarts=layout.restarts,
        monitor_interval=POLL_S,
    )


def _prepare_elastic() -> None:
    """Make TorchElastic act on the signals that end a run, and silence its log."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    acting = [number for number in SIGNALS if number != signal.SIGQUIT and signal.getsignal(number) != signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in acting)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a restart must not reuse the store of lost ranks


def _rendezvous(layout: RankLayout, scratch: Path) -> RendezvousParameters:
    """Return how the hosts meet: the first host has --rendezvous, and its address sorts before the others' names."""
    options: dict[str, Any] = {"join_timeout": LIMIT_S, "read_timeout": LIMIT_S}
    if layout.hosts == 1:
        options |= {"store_type": "file", "local_addr": LOOPBACK}
        return RendezvousParameters("c10d", str(scratch / "rendezvous"), RUN_ID, 1, 1, **options)
    host, port = address(layout)
    is_host = _can_listen(host, port)
    options |= {"is_host": is_host, "local_addr": host if is_host else f"~{socket.gethostname()}"}
    return RendezvousParameters("c10d", f"{host}:{port}", RUN_ID, layout.hosts, layout.hosts, **options)


def address(layout: RankLayout) -> tuple[str, int]:
    """Return the host and the port of --rendezvous.

    Raises:
        UsageError: --rendezvous is missing or malformed, or other hosts cannot reach it.
    """
    given = layout.rendezvous or ""
    host, colon, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        shown = f"found {given}" if given else "none was given"
        raise UsageError(
            f"--hosts {layout.hosts} needs --rendezvous HOST:PORT, {shown}",
            hint=f"give an address of one of the hosts and a free port there, {EXAMPLE}",
        )
    try:
        resolved = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror as error:
        raise UsageError(
            f"--rendezvous {given}: cannot resolve the host {host}: {error.strerror}",
            hint=f"give the address of one of the hosts, {EXAMPLE}",
        ) from error
    ip = ipaddress.ip_address(str(resolved).partition("%")[0])
    if ip.is_unspecified or (ip.is_loopback and host not in (str(ip), "localhost")):
        raise UsageError(
            f"--rendezvous {given} resolves to {ip} on this host, which no other host can reach",
            hint=f"give the address of one of the hosts, {EXAMPLE}",
        )
    return host, int(port)


def _can_listen(host: str, port: int) -> bool:
    """Return whether `host` is an address of this host, and `port` is free.

    Raises:
        UsageError: the port is reserved for root.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        socket.create_server(address[:2], family=family).close()
    except PermissionError as error:
        raise UsageError(f"port {port} is reserved for root", hint="choose 1024 or higher") from error
    except OSError:
        return False
    return True


def _interface(layout: RankLayout) -> str | None:
    """Return the network interface on which this host's ranks reach the others; None if it cannot be determined."""
    if layout.hosts == 1:
        return "lo"
    family, *_, remote = socket.getaddrinfo(*address(layout), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(remote)  # sends nothing: connecting UDP only picks a route
        own = str(probe.getsockname()[0])
    named = (
        name for name, addresses in psutil.net_if_addrs().items() if any(entry.address == own for entry in addresses)
    )
    return next(named, None)


def _not_met(layout: RankLayout, error: RendezvousError, seconds: float) -> BridgeError:
    reason = f"not all {layout.hosts} hosts joined within {seconds:.0f} s"
    if not isinstance(error, RendezvousTimeoutError):
        reason = f"no host of the run is listening there: {error.__cause__ or error}".splitlines()[0]
    return UsageError(
        f"--rendezvous {layout.rendezvous}: {reason}",
        hint="start the same command on each host, and check that they can reach this address and port",
    )
