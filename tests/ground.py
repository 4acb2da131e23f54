"""A server whose trainers are disturbed, and a check after each fault that it serves only published weights.

A server passes if its weights equal, tensor by tensor, those recorded before its version was published, or if it
generates nothing and `bridge restore` restores a complete checkpoint.

Not covered: the faults themselves (`disturbed.py`).
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import torch
from transformers import AutoModelForCausalLM

from bridge.checkpoints import checkpoint
from bridge.core.address import free_port
from bridge.errors import BridgeError
from bridge.processes import children
from bridge.server.client import BridgeClient
from bridge.server.protocol import COMPLETIONS, Status
from bridge.weights.attach import attach
from tests import disturbed
from tests.disturbed import UNDISTURBED, Disturbance
from tests.forked import Command
from tests.scenarios import LiveServer

LIMIT_S = 240.0
"""A trainer that hangs is killed after this time, and its fault counts as failed."""
STEPS, GROUPS = 3, 2
"""Seconds for a full run, and for each step."""
BESIDE = "beside"
STILL_S = 2.0
"""Far longer than the server takes for the request sent in the meantime."""
SETTLED_S = 30.0
"""How long to wait for a server that resumes by itself after its trainer was lost in a publication."""
RECORDING = disturbed.program(UNDISTURBED, records=True)
UNEVEN = """
class Uneven:
    def __iter__(self):
        yield from ({"prompt": f"say {number}:"} for number in range(40))

    def score(self, problem, completion):
        return sum(map(ord, completion)) % 10 / 10
"""
"""Groups always have a gradient: without one there is nothing to write."""


class NotWholeError(AssertionError):
    """The server serves weights that were never published, or cannot be restored."""


Serve = Callable[..., AbstractContextManager[LiveServer]]
"""`served(model, folder, port=...)`."""


@dataclass
class Ground:
    """A server address, the servers that run there over time, and the weights of each of their versions."""

    folder: Path
    model: Path
    serve: Serve
    port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    versions: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    """Digests of all tensors, by the server's pid and version."""
    num_rounds: int = 0
    num_servers: int = 0
    _beside: list[Command] = field(default_factory=list)
    """Commands that run concurrently with a trainer."""

    def __enter__(self) -> "Ground":
        """Start the first server."""
        self._stack = ExitStack()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the last server."""
        self._stack.close()

    def disturb(self, disturbance: Disturbance, *flags: str) -> "Round":
        """Train for `STEPS` steps with one fault, and return the outcome."""
        self.num_rounds += 1
        folder = self.folder / f"round_{self.num_rounds}"
        trainer = self._begin(folder, (*self._train(), *flags), disturbance)
        try:
            self._until_it_ends(trainer, folder)
        finally:
            beside, self._beside = self._beside, []
            for process in (trainer, *beside):
                process.kill()
                process.wait()
        return Round(folder, trainer, beside[0] if beside else None)

    def resume(self, round_: "Round", *flags: str) -> "Round":
        """Resume a trainer that was disturbed, and return how it ended."""
        trainer = Command([*self._train(), *flags, "--resume"], round_.folder, program=RECORDING)
        try:
            self._until_it_ends(trainer, round_.folder)
        finally:
            trainer.kill()
            trainer.wait()
        return Round(round_.folder, trainer, None)

    def prove(self) -> "Proof":
        """Return how the fault left the server, and make it serve a published version again.

        Raises:
            NotWholeError: it does not serve a published version.
        """
        try:
            if self._answers():
                return self._proof(self._settled())
        except (BridgeError, httpx.HTTPError) as error:
            if self._answers():
                raise NotWholeError(f"the server is alive but fails: {error}") from error
        self.start_again()
        return Proof("gone", f"gone; started again with {self._check_whole(self._status())}")

    def start_again(self) -> None:
        """Replace the server with a new one at the same address."""
        self._stack.close()
        self._start()

    def _train(self) -> list[str]:
        return [
            *("train", "--model-name", str(self.model), "--vllm-config-path", str(self.server.path)),
            *("--environment", "uneven.py:Uneven", "--batch-size", "8", "--group-size", "4", "--lr", "3e-3"),
            *("--max-new-tokens", "16", "--training-steps", str(STEPS), "--save-interval", "1", "--run-dir", "run"),
            *("--save-path", "saved", "--reward-processes", "0", "--mismatch-alarm", "99"),
            *("--request-timeout-s", "60", "--max-retries", "2"),
        ]

    def _begin(self, folder: Path, command: Sequence[str], disturbance: Disturbance = UNDISTURBED) -> Command:
        folder.mkdir()
        (folder / "uneven.py").write_text(UNEVEN)
        return Command(command, folder, program=disturbed.program(disturbance, records=True))

    def _until_it_ends(self, trainer: Command, folder: Path) -> None:
        deadline = time.monotonic() + LIMIT_S
        while trainer.poll() is None or self._is_busy():
            if time.monotonic() > deadline:
                raise NotWholeError(f"the trainer or a command beside it still runs after {LIMIT_S:g} s")
            for request in disturbed.REQUESTS:
                if (folder / request).exists():
                    self._do(request, folder)
            time.sleep(0.02)
        for record in folder.rglob(disturbed.PUBLISHED):
            self._take_over(record)

    def _is_busy(self) -> bool:
        return any(process.poll() is None for process in self._beside)

    def _do(self, request: str, folder: Path) -> None:
        """Run the action that a trainer requested; remove the request when it is done."""
        if request == disturbed.RESTART:
            children.kill(self.server.child)
            self.start_again()
        elif not self._beside:
            verify = ("verify", "--vllm-config-path", str(self.server.path))
            command = verify if request == disturbed.VERIFY else self._train()
            self._beside.append(self._begin(folder / BESIDE, command))
        if not self._is_busy():
            (folder / request).unlink()

    def _take_over(self, record: Path) -> None:
        for line in record.read_text().splitlines():
            entry = json.loads(line)
            self.versions[entry["server"], entry["version"]] = entry["digests"]

    def _proof(self, status: Status) -> "Proof":
        if status.state != "torn":
            return Proof("whole", self._check_whole(status))
        self._check_still()
        return Proof("torn", f"torn; {self._restored(status)}")

    def _start(self) -> None:
        self.num_servers += 1  # a separate folder per server, without an earlier server's manifest
        folder = self.folder / f"server_{self.num_servers}"
        self.server = self._stack.enter_context(self.serve(self.model, folder, port=self.port))
        self._check_equals(self.model)
        self._note()

    def _note(self) -> None:
        """Record the weights served now, which were just compared with a checkpoint."""
        with self._client() as client:
            status = client.status()
            self.versions[status.server.pid, status.version] = client.digests()

    def _check_whole(self, status: Status) -> str:
        if status.state != "serving":
            raise NotWholeError(f"the server is {status.state} although no trainer runs")
        with self._client() as client:
            digests = client.digests()
        expected = self.versions.get((status.server.pid, status.version))
        if digests != expected:
            names = [name for name in digests if digests[name] != (expected or {}).get(name)]
            raise NotWholeError(
                f"version {status.version} was never published: {len(names)} of {len(digests)} tensors differ"
            )
        self._generate()
        return f"version {status.version}, whole"

    def _check_equals(self, folder: Path) -> None:
        served = attach(self.server.manifest).model
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        names = [name for name, held in whole.named_parameters() if not torch.equal(held, served.get_parameter(name))]
        if names:
            raise NotWholeError(f"{folder} differs from what is served: {', '.join(names)}")

    def _check_still(self) -> None:
        """Check that a torn server generates nothing."""
        with suppress(httpx.TimeoutException):
            self._generate(STILL_S)
            raise NotWholeError("the weights are torn, but the server generates")

    def _restored(self, status: Status) -> str:
        whole = Path(status.last_checkpoint or self.model)
        folder = self.folder / f"restore_{self.num_rounds}"
        restore = self._begin(folder, ("restore", str(whole), "--vllm-config-path", str(self.server.path)))
        if restore.wait(LIMIT_S) != 0:
            raise NotWholeError(f"bridge restore {whole} failed: {restore.stderr}")
        self._check_equals(whole)
        self._note()
        return f"{whole.name} restored as {self._check_whole(self._status())}"

    def _settled(self) -> Status:
        """Return the status, after waiting for a paused server that may be about to resume by itself."""
        deadline = time.monotonic() + SETTLED_S
        while (status := self._status()).state == "paused" and time.monotonic() < deadline:
            time.sleep(0.05)
        return status

    def _status(self) -> Status:
        with self._client() as client:
            return client.status()

    def _answers(self) -> bool:
        try:
            health = httpx.get(f"{self.server.manifest.url}/health", timeout=60, trust_env=False)
            return health.is_success and self.server.child.is_alive()
        except httpx.TransportError:
            return False

    def _generate(self, timeout_s: float = 60) -> None:
        body = {"model": str(self.model), "prompt": [5, 6, 7], "n": 2, "max_tokens": 4, "temperature": 1.0}
        url = f"{self.server.manifest.url}{COMPLETIONS}"
        httpx.post(url, json=body, timeout=timeout_s, trust_env=False).raise_for_status()

    def _client(self) -> BridgeClient:
        return BridgeClient(self.server.manifest, timeout_s=60)


@dataclass(frozen=True)
class Proof:
    """The findings about a server that passes."""

    outcome: Literal["whole", "torn", "gone"]
    """How the fault left the server; `whole`: it serves."""
    text: str
    """The outcome in words, and how the server was brought back."""


@dataclass(frozen=True)
class Round:
    """The outcome of a disturbed trainer."""

    folder: Path
    trainer: Command
    beside: Command | None
    """The command that ran concurrently, if any."""

    @property
    def exit_code(self) -> int | None:
        """The trainer's exit code, negative for a signal."""
        return self.trainer.returncode

    def numbers(self) -> list[int]:
        """Return the numbers of the problems that were trained on."""
        lines = (self.folder / "run" / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line)["number"] for line in lines]

    def check_checkpoints(self) -> list[int]:
        """Check that each of the trainer's checkpoints is complete, and return their steps."""
        checkpoints = sorted(checkpoint.numbered(self.folder / "saved", "step_").items())
        return [checkpoint.read(path).progress.step for _, path in checkpoints]
