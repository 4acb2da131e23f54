"""The `bridge` command with one fault in one phase of one training step, and a record of what it publishes.

Each publication appends one line to the record before it is requested: the new version and the digest of every tensor.
Whatever the server later serves as that version must match.

Not covered: the state after a fault (`ground.py`).
"""

import json
import os
import resource
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import torch
from safetensors.torch import save_file

from bridge.checkpoints import optimizer_state
from bridge.optimizers import slabs
from bridge.optimizers.slabs import Piece
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.rollouts.sampler import Sampler
from bridge.rollouts.stream import EnvironmentStream
from bridge.server.client import BridgeClient
from bridge.server.protocol import Status
from bridge.types import Group
from bridge.weights import stored_tensors

ENGINE = "VLLM::EngineCor"
"""The name of the engine's process, as truncated by the kernel."""
STOPPED_S = 2
"""Seconds for which a process is stopped, or a trainer waits inside the fence."""
ROOM_BYTES = 100_000
"""Room left on a full disk: less than a checkpoint of the smallest model."""
PUBLISHED = "published"
"""The record of a disturbed trainer's publications."""
RESTART, TRAIN, VERIFY = REQUESTS = "restart_the_server", "train_beside", "verify_beside"
"""Files by which a trainer requests an action of the ground, which removes them when the action is done."""
PHASES = "rollouts", "pause pending", "writing", "publishing", "saving"
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
ERRORS: dict[str, type[Exception]] = {"an exception": ZeroDivisionError, "MemoryError": MemoryError}
LOST = "a lost answer"
FAULTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys([*SIGNALS, *ERRORS], PHASES),
    **dict.fromkeys(["SIGKILL of the server", "SIGKILL of the engine"], PHASES),
    **dict.fromkeys(["SIGSTOP of the server", "SIGSTOP of the engine"], PHASES),
    LOST: ("pause pending", "publishing"),
    **dict.fromkeys(["a second trainer", "verify"], ("rollouts", "writing", "saving")),
    **dict.fromkeys(["a full disk", "a restarted server", "foreign requests"], PHASES),
}
"""The phases in which each fault may occur."""
ENDS_THE_SERVER = "SIGKILL of the server", "SIGKILL of the engine", "a restarted server"
"""Faults after which a new server must be started."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One fault."""

    fault: str
    """A key of `FAULTS`."""
    phase: str
    """One of `PHASES`."""
    step: int
    """The training step, from 1."""
    delay_s: float = 0.01
    """Seconds from sending a request to the server until the fault strikes; 0: at once, before an answer is read."""
    num_pieces: int = 5
    """Parameters written before a fault strikes in the middle of a write."""


UNDISTURBED = Disturbance(fault="", phase="", step=0)


class Trainer:
    """The progress of the run, its server, and its pending fault."""

    def __init__(self, disturbance: Disturbance) -> None:
        self.disturbance = disturbance
        self.client: BridgeClient | None = None
        self.server_pid = self.num_streams = self.num_pauses = self.num_pieces = 0
        self.has_struck = False

    def strike(self) -> None:
        """Trigger the fault, once."""
        if not self.has_struck:
            self.has_struck = True
            strikes(self)[self.disturbance.fault]()

    def is_at_its_fence(self) -> bool:
        """Return whether its current or latest fence is that of the step to disturb."""
        return self.num_pauses == self.disturbance.step


def strikes(trainer: Trainer) -> dict[str, Callable[[], None]]:
    """Return the action of each fault, except for `a lost answer`, which `while_pending` handles."""

    def signalling(number: int) -> Callable[[], None]:
        return lambda: os.kill(os.getpid(), number)

    def raising(kind: type[Exception]) -> Callable[[], None]:
        def strike() -> None:
            raise kind("disturbed")

        return strike

    def killed_before_the_answer() -> None:
        stop(server_of(trainer), until=f"! kill -0 {os.getpid()}")  # a slow exit outlasts the server's pause
        os.kill(os.getpid(), signal.SIGKILL)

    is_pending = trainer.disturbance.phase == "pause pending"
    return {
        **{name: signalling(number) for name, number in SIGNALS.items()},
        **({"SIGKILL": killed_before_the_answer} if is_pending else {}),
        **{name: raising(kind) for name, kind in ERRORS.items()},
        "SIGKILL of the server": lambda: server_of(trainer).kill(),
        "SIGKILL of the engine": lambda: engine_of(trainer).kill(),
        "SIGSTOP of the server": lambda: stop(server_of(trainer)),
        "SIGSTOP of the engine": lambda: stop(engine_of(trainer)),
        "a full disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, resource.RLIM_INFINITY)),
        "a second trainer": lambda: ask(TRAIN),
        "verify": lambda: ask(VERIFY, limit_s=STOPPED_S if trainer.disturbance.phase == "writing" else None),
        "a restarted server": lambda: ask(RESTART),
        "foreign requests": lambda: foreign(trainer),
    }


def server_of(trainer: Trainer) -> psutil.Process:
    return psutil.Process(trainer.server_pid)


def engine_of(trainer: Trainer) -> psutil.Process:
    """Return the engine's process; a server without one is its own engine."""
    server = server_of(trainer)
    engines = [child for child in server.children(recursive=True) if child.name().startswith(ENGINE)]
    return engines[0] if engines else server


def stop(process: psutil.Process, *, until: str | None = None) -> None:
    """Suspend a process for a while, or until a shell condition holds; it continues even if this process exits."""
    wait = f"sleep {STOPPED_S}" if until is None else f"until {until}; do sleep 0.05; done"
    process.suspend()
    command = ["sh", "-c", f"{wait}; kill -CONT {process.pid}"]
    subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def ask(request: str, *, limit_s: float | None = None) -> None:
    """Request an action of the ground, and wait until it is done or the limit is over."""
    Path(request).touch()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while Path(request).exists() and (deadline is None or time.monotonic() < deadline):
        time.sleep(0.02)


def foreign(trainer: Trainer) -> None:
    """Send requests as an outsider who knows the routes but not the token."""
    assert trainer.client is not None
    for route in ("lease", "pause", "publish", "resume", "tensors/write", "adapter"):
        request = urllib.request.Request(f"{trainer.client.url}/bridge/{route}", data=b"{}", method="POST")
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30)
            raise AssertionError(f"a stranger may {route}")


def while_it_samples(trainer: Trainer) -> None:
    """Strike when the first completions of the step have arrived, and others have not."""
    take, one = EnvironmentStream.take, Sampler.one

    def counted(self: EnvironmentStream, count: int, *, step: int) -> list[Group]:
        trainer.num_streams += 1
        return take(self, count, step=step)

    async def disturbed(self: Sampler, *request: Any, **choices: Any) -> Any:
        arrived = await one(self, *request, **choices)
        if trainer.num_streams == trainer.disturbance.step:
            trainer.strike()
        return arrived

    EnvironmentStream.take, Sampler.one = counted, disturbed  # type: ignore[method-assign]


def while_pending(trainer: Trainer, name: str) -> None:
    """Strike while the server handles `pause` or `publish`; exceptions are raised after its answer."""
    call, fault = getattr(BridgeClient, name), trainer.disturbance.fault

    def disturbed(self: BridgeClient, *given: Any, **choices: Any) -> Status:
        if not trainer.is_at_its_fence() or trainer.has_struck:
            answer: Status = call(self, *given, **choices)
            return answer
        if fault == LOST:
            trainer.has_struck = True
            _lose(self._http)
        elif fault not in ERRORS:
            delay_s = trainer.disturbance.delay_s
            _once_sent(self._http, threading.Timer(delay_s, trainer.strike).start if delay_s else trainer.strike)
        answer = call(self, *given, **choices)
        if fault in ERRORS:
            trainer.strike()
        return answer

    setattr(BridgeClient, name, disturbed)


def _once_sent(http: httpx.Client, act: Callable[[], None]) -> None:
    """Act once the next request has been sent: from then on, it counts even if its sender dies."""
    request, actions = http.request, [act]

    def note(event: str, _: Any) -> None:
        if event == "http11.send_request_body.complete" and actions:
            actions.pop()()

    def noting(*given: Any, **choices: Any) -> httpx.Response:
        return request(*given, extensions={"trace": note}, **choices)

    http.request = noting  # type: ignore[method-assign]


def _lose(http: httpx.Client) -> None:
    request, lost = http.request, list[httpx.Response]()

    def losing(*given: Any, **choices: Any) -> httpx.Response:
        answer = request(*given, **choices)
        if lost:
            return answer
        lost.append(answer)
        raise httpx.ReadError("disturbed")

    http.request = losing  # type: ignore[method-assign]


def while_it_writes(trainer: Trainer) -> None:
    """Strike when some of the step's parameters are written."""
    slabs.SMALL_ELEMENTS["cpu"] = 0  # otherwise all parameters of a small model are written together
    write = SplitMasterAdamW._step_piece

    def disturbed(self: SplitMasterAdamW, piece: Piece, *given: Any) -> None:
        write(self, piece, *given)
        trainer.num_pieces += piece.step == trainer.disturbance.step
        if trainer.num_pieces == trainer.disturbance.num_pieces:
            trainer.strike()

    SplitMasterAdamW._step_piece = disturbed  # type: ignore[method-assign,assignment]


def while_it_saves(trainer: Trainer) -> None:
    """Strike when half of the optimizer's state is in its file; a trainer that survives finishes saving."""

    def disturbed(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        is_due = f".step_{trainer.disturbance.step}." in str(path) and path.parent.name == optimizer_state.FOLDER
        if is_due and not trainer.has_struck:
            save_file(tensors, path, metadata)
            os.truncate(path, path.stat().st_size // 2)
            trainer.strike()
        save_file(tensors, path, metadata)

    mock.patch.object(stored_tensors, "save_file", disturbed).start()


HOOKS: Mapping[str, Callable[[Trainer], None]] = {
    "rollouts": while_it_samples,
    "pause pending": lambda trainer: while_pending(trainer, "pause"),
    "writing": while_it_writes,
    "publishing": lambda trainer: while_pending(trainer, "publish"),
    "saving": while_it_saves,
}


def watch(trainer: Trainer) -> None:
    """Record its server, and count its fences."""
    connect, pause = BridgeClient.__init__, BridgeClient.pause

    def connected(self: BridgeClient, *given: Any, **choices: Any) -> None:
        connect(self, *given, **choices)
        trainer.client, trainer.server_pid = self, given[0].server.pid

    def counted(self: BridgeClient, *given: Any, **choices: Any) -> Status:
        trainer.num_pauses += 1
        return pause(self, *given, **choices)

    BridgeClient.__init__ = connected  # type: ignore[method-assign]
    BridgeClient.pause = counted  # type: ignore[method-assign]


def record(path: str) -> None:
    """Record every version in a file before it is published."""
    publish = BridgeClient.publish

    def recorded(self: BridgeClient, version: int | None = None) -> Status:
        status = self.status()
        following = max(status.version + 1, version or 0)
        line = {"server": status.server.pid, "version": following, "digests": self.digests()}
        with Path(path).open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        return publish(self, version)

    BridgeClient.publish = recorded  # type: ignore[method-assign]


def arm(disturbance: Disturbance) -> Trainer:
    """Install a fault in this process."""
    trainer = Trainer(disturbance)
    if disturbance != UNDISTURBED:
        HOOKS[disturbance.phase](trainer)
    watch(trainer)  # wrap outside the fault's hook, so that a step is counted before it is disturbed
    return trainer


def program(disturbance: Disturbance, *, records: bool = False) -> str:
    """Return a program that runs the command with one fault, and optionally records what it publishes."""
    record_it = f"disturbed.record({PUBLISHED!r}); " if records else ""
    return (
        "from bridge_cli.main import main; from tests import disturbed; from tests.disturbed import Disturbance; "
        f"disturbed.arm({disturbance!r}); {record_it}main()"
    )
