"""A trainer killed with -9 during its write, on the real vLLM: the server reports torn, is restored, and trains on.

Not covered: a live writer, failing writes and other models, which need no vLLM (`tests/cli/test_restore.py`).
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.checks.one_copy_proof import logprob_diffs
from bridge.passes.prepared_model import PreparedModel
from bridge.server.protocol import Status
from bridge.types import Group
from tests import disturbed, scenarios
from tests.disturbed import Disturbance
from tests.forked import Command
from tests.ground import UNEVEN
from tests.scenarios import LiveServer, different, loaded

KILLED_IN_STEP = 3
LIMIT_S = 240
STILL_S = 3
"""Far longer than the server takes for the request sent in the meantime."""


@dataclass(frozen=True)
class Torn:
    """A server whose trainer was killed after writing half of the parameters."""

    server: LiveServer
    folder: Path
    trainer_pid: int
    version: int
    """The version that the server last served."""

    @property
    def last(self) -> Path:
        """The last complete checkpoint."""
        return self.folder / "saved" / f"step_{KILLED_IN_STEP - 1}"

    def bridge(self, command: str, *arguments: str | Path, expect: int) -> subprocess.CompletedProcess[str]:
        manifest = ("--vllm-config-path", self.server.path)
        return scenarios.bridge(command, *arguments, *manifest, folder=self.folder, expect=expect)

    def train(self, *flags: str, steps: int, expect: int) -> subprocess.CompletedProcess[str]:
        return self.bridge("train", *training(self.server, self.folder, steps), *flags, expect=expect)

    def restore(self, checkpoint: Path, *, expect: int) -> subprocess.CompletedProcess[str]:
        return self.bridge("restore", checkpoint, "--json", expect=expect)

    def status(self) -> Status:
        return self.server.status()


def training(server: LiveServer, folder: Path, steps: int) -> list[str]:
    """Return the flags of a run that saves every step."""
    return [
        *("--model-name", server.manifest.model, "--save-path", str(folder / "saved"), "--save-interval", "1"),
        *("--environment", "uneven.py:Uneven", "--batch-size", "8", "--group-size", "4"),
        *("--lr", "3e-3", "--max-new-tokens", "16", "--training-steps", str(steps)),
    ]


@pytest.fixture
def torn(llama: LiveServer, tmp_path: Path) -> Torn:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    version = llama.status().version + KILLED_IN_STEP - 1
    num_parameters = sum(1 for _ in loaded(Path(llama.manifest.model)).parameters())
    killed = Disturbance(fault="SIGKILL", phase="writing", step=KILLED_IN_STEP, num_pieces=num_parameters // 2)
    run_flags = ("--vllm-config-path", llama.path, "--run-dir", tmp_path / "run")
    arguments: list[str | Path] = ["train", *training(llama, tmp_path, 5), *run_flags]
    trainer = Command(arguments, tmp_path, program=disturbed.program(killed))
    try:
        assert trainer.wait(LIMIT_S) == -signal.SIGKILL, trainer.stderr
    finally:
        trainer.kill()
    return Torn(llama, tmp_path, trainer.pid, version)


def check_served(torn: Torn, checkpoint: Path, version: int) -> None:
    """Check that the server serves `checkpoint` as `version`, in its weights and in its answers."""
    assert (torn.status().state, torn.status().version) == ("serving", version)
    assert different(torn.server, checkpoint) == []
    assert mean_difference(checkpoint, torn.server.sample()) < scenarios.PARITY_LIMIT


def mean_difference(checkpoint: Path, answers: list[Group]) -> float:
    """Return the mean log-prob difference between transformers and the server's answers, in nats."""
    return logprob_diffs(PreparedModel(loaded(checkpoint)), answers).mean().item()


def check_named(torn: Torn) -> None:
    """Check that doctor and an ordinary trainer both report which process died, and the fix."""
    done = torn.bridge("doctor", "--json", expect=3)
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert (rows["Fence"]["status"], rows["Fence"]["hint"]) == ("FAIL", f"bridge restore {torn.last}")
    assert f"process {torn.trainer_pid} died inside the fence" in rows["Fence"]["found"]
    assert "the server generates nothing" in rows["Fence"]["found"]
    refused = torn.train("--save-path", "elsewhere", steps=1, expect=4)
    error, gap, hint = refused.stderr.splitlines()[-3:]
    died = f"process {torn.trainer_pid} died inside the fence after version {torn.version}"
    assert error.startswith(f"error: the weights may be half-written: {died}")
    assert (gap, hint) == ("", f"hint: bridge restore {torn.last}")


def check_damaged_is_refused(torn: Torn) -> None:
    """Check that a truncated checkpoint changes nothing."""
    before = torn.status()
    short = torn.folder / "short"
    shutil.copytree(torn.last, short)
    os.truncate(short / "model.safetensors", 1000)
    error, gap, hint = torn.restore(short, expect=2).stderr.splitlines()[-3:]
    assert error.startswith(f"error: the checkpoint {short} is incomplete or damaged: model.safetensors is truncated")
    assert (gap, hint[:6]) == ("", "hint: ")
    assert torn.status() == before


@contextmanager
def held(torn: Torn) -> Iterator[Future[list[Group]]]:
    """Request completions from the torn server, and check that they arrive only once the block has repaired it."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(torn.server.sample)
        try:
            with pytest.raises(StillWaiting):
                answer.result(timeout=STILL_S)
            yield answer
        except BaseException:
            torn.server.child.process.kill()  # otherwise the executor would wait for the request
            raise
        answer.result(timeout=LIMIT_S)


def test_torn_server_is_reported_restored_and_trained_on(torn: Torn) -> None:
    assert (torn.status().state, torn.status().last_checkpoint) == ("torn", str(torn.last))
    num_parameters = sum(1 for _ in loaded(torn.last).parameters())
    assert 0 < len(different(torn.server, torn.last)) <= num_parameters // 2
    check_named(torn)
    check_damaged_is_refused(torn)
    with held(torn) as answer:
        document = json.loads(torn.restore(torn.last, expect=0).stdout)
    assert (document["checkpoint"], document["step"]) == (str(torn.last), KILLED_IN_STEP - 1)
    assert document["version"] == torn.version + 1
    check_served(torn, torn.last, torn.version + 1)
    assert mean_difference(torn.last, answer.result()) < scenarios.PARITY_LIMIT
    torn.train("--resume", steps=5, expect=0)
    assert torn.status().version > torn.version + 1
    check_served(torn, torn.folder / "saved" / "step_5", torn.status().version)


def test_resume_restores_a_torn_server(torn: Torn) -> None:
    torn.train("--resume", steps=4, expect=0)
    check_served(torn, torn.folder / "saved" / "step_4", torn.status().version)


def test_server_restores_older_and_initial_weights(torn: Torn) -> None:
    checkpoints = torn.last, torn.folder / "saved" / "step_1", Path(torn.server.manifest.model)
    for number, checkpoint in enumerate(checkpoints, start=1):
        torn.restore(checkpoint, expect=0)
        check_served(torn, checkpoint, torn.version + number)
    assert mean_difference(torn.last, torn.server.sample()) > scenarios.PARITY_LIMIT
