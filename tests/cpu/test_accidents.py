"""Failures during a run on the real vLLM, through the command line: each gives one clear line, and loses nothing.

Not covered: refusals before a run begins, and Ctrl-C on `bridge run` (`tests/cli/test_refusals.py`).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from bridge.checks.one_copy_proof import logprob_diffs
from bridge.errors import AttachError
from bridge.passes.prepared_model import PreparedModel
from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.weights.attach import attach
from tests import forked, scenarios
from tests.fenced import publish
from tests.forked import Command
from tests.models import tiny
from tests.scenarios import LiveServer

BATCH_SIZE = 8
TRAINER_LIMIT_S = 240.0
"""A trainer that hangs is killed after this time, and its test fails."""
ORPHANS_LIMIT_S = 60.0
KILLED_AFTER_S = 8
"""Longer than a step takes to reach its fence on a busy machine."""
CALL_LIMIT_S = 15
ENVIRONMENT = """
import math, os, signal, threading

class Accident:
    scored = 0

    def __iter__(self):
        yield from ({{"prompt": f"say {{number}}:"}} for number in range(40))

    def score(self, problem, completion):
        self.scored += 1
        if self.scored == {first_of_step_3}:
            return {accident}
        return sum(character in "aeiou" for character in completion) / max(1, len(completion))
"""


HUNG_UP_WHILE_IT_WRITES = f"""
import os, signal
from bridge.run.learner import Learner

write, written = Learner.write, 0

def write_half_and_hang_up(self):
    global written
    written += 1
    if written == 3:
        os.kill(os.getpid(), signal.SIGHUP)
    write(self)

Learner.write = write_half_and_hang_up
{forked.BRIDGE}
"""
PAUSES = """
import sys
from pathlib import Path
from bridge.server.client import BridgeClient
from bridge.server import manifest

with BridgeClient(manifest.load(Path(sys.argv[1])), timeout_s=600) as client:
    print("ready", flush=True)
    input()
    client.pause("wait")
    print("paused", flush=True)
"""
LONG = {"prompt": [5, 9, 2], "max_tokens": 1900, "n": 48, "ignore_eos": True, "stream": True}
"""A request that takes far longer than pausing the server or killing a process."""


@dataclass(frozen=True)
class Trainer:
    """A running `bridge train`."""

    process: Command
    folder: Path
    lines: Iterator[str]
    """The lines that it prints to stderr, each once."""

    def wait_for(self, line: str) -> None:
        """Read the trainer's stderr until a line begins with `line`."""
        if not any(text.startswith(line) for text in self.lines):
            raise AssertionError(self.process.stderr)

    def ended(self, expect: int) -> list[str]:
        """Wait for the trainer to end, and return the remaining nonempty lines of stderr."""
        code, stderr = self.process.wait(TRAINER_LIMIT_S), self.process.stderr
        assert code == expect, f"exit code {code}, expected {expect}\n{stderr}"
        assert "Traceback" not in stderr, stderr
        return [line for line in self.lines if line]

    def fault(self, expect: int) -> str:
        """Wait for the trainer to end with one error and one hint, and return the error."""
        lines = self.ended(expect)
        assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"], lines
        assert sum(line.startswith(("error:", "hint:")) for line in lines) == 2, lines
        return lines[-2]

    def steps(self) -> list[int]:
        """Return the steps in the run's metrics."""
        return [json.loads(line)["step"] for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def saved(self, step: int) -> PreTrainedModel:
        """Load the run's only checkpoint, which must be of `step`, with transformers."""
        assert [folder.name for folder in (self.folder / "saved").iterdir()] == [f"step_{step}"]
        return scenarios.loaded(self.folder / "saved" / f"step_{step}")


@contextmanager
def training(
    server: LiveServer, folder: Path, *flags: str, accident: str = "0.0", steps: int = 5, program: str = forked.BRIDGE
) -> Iterator[Trainer]:
    """Run `bridge train` in `folder`; `accident` is evaluated as the first score of step 3."""
    environment = ENVIRONMENT.format(first_of_step_3=1 + 2 * BATCH_SIZE, accident=accident)
    (folder / "accident.py").write_text(environment)
    arguments: list[str | Path] = [
        *("train", "--model-name", server.manifest.model, "--vllm-config-path", server.path),
        *("--environment", "accident.py:Accident", "--training-steps", str(steps), "--lr", "1e-3"),
        *("--batch-size", str(BATCH_SIZE), "--group-size", "4", "--max-new-tokens", "64"),
        *(
            "--reward-processes",
            "1",
            "--max-unscored-share",
            "0",
        ),  # a single process counts the scores, and the first failure ends the run
        *("--run-dir", "run", "--save-path", "saved", *flags),
    ]
    process = Command(arguments, folder, program=program)
    try:
        yield Trainer(process, folder, process.lines(TRAINER_LIMIT_S))
    finally:
        process.kill()
        process.wait()


def check_served(server: LiveServer, saved: PreTrainedModel, version: int) -> None:
    """Check that the server serves `version` with the weights `saved`, and still generates."""
    assert (server.status().state, server.status().version) == ("serving", version)
    served = attach(server.manifest).model
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, served.get_parameter(name)), name
    difference = logprob_diffs(PreparedModel(served), server.sample()).mean().item()
    assert difference < scenarios.PARITY_LIMIT


@pytest.mark.parametrize(
    ("accident", "message"),
    [
        ("math.nan", "Accident.score returned nan, expected a finite number"),
        ("1 / 0", "Accident.score raised ZeroDivisionError: division by zero (accident.py line 13)"),
    ],
    ids=["NaN", "exception"],
)
def test_invalid_score_loses_no_published_step(llama: LiveServer, tmp_path: Path, accident: str, message: str) -> None:
    before = llama.status().version
    with training(llama, tmp_path, accident=accident) as trainer:
        assert message in trainer.fault(expect=2)
    assert trainer.steps() == [1, 2]
    check_served(llama, trainer.saved(2), before + 2)


def test_ctrl_c_loses_no_published_step(llama: LiveServer, tmp_path: Path) -> None:
    before = llama.status().version
    with training(llama, tmp_path, steps=500) as trainer:
        trainer.wait_for("step   2/500")
        trainer.process.send_signal(signal.SIGINT)
        assert trainer.ended(expect=130)[-1] == "interrupted"
    last = trainer.steps()[-1]
    assert trainer.steps() == list(range(1, last + 1))
    assert 2 <= last < 500
    check_served(llama, trainer.saved(last), before + last)


def test_second_writer_is_refused_and_verify_waits(llama: LiveServer, tmp_path: Path) -> None:
    before, second = llama.status().version, tmp_path / "second"
    second.mkdir()
    with training(llama, tmp_path, steps=500) as trainer:
        trainer.wait_for("step   2/500")
        first = f"another trainer (pid {trainer.process.pid}, run {tmp_path / 'run'}) is updating this server"
        with training(llama, second) as late:
            assert late.fault(expect=4) == f"error: {first}"
        here = ("--vllm-config-path", llama.path)
        restored = scenarios.bridge("restore", llama.manifest.model, *here, folder=tmp_path, expect=4)
        assert first in restored.stderr
        verified = scenarios.bridge("verify", *here, "--json", folder=tmp_path)
        statuses = {row["name"]: row["status"] for row in map(json.loads, verified.stdout.splitlines())}
        assert (statuses["values"], statuses["checksums"], statuses["marks"]) == ("PASS", "PASS", "SKIP")
        last = trainer.steps()[-1]
        trainer.wait_for(f"step {last + 2:3}/500")
        trainer.process.send_signal(signal.SIGTERM)
        trainer.ended(expect=143)
    assert [path.name for path in second.iterdir()] == ["accident.py"]
    assert trainer.steps() == list(range(1, trainer.steps()[-1] + 1))
    check_served(llama, trainer.saved(trainer.steps()[-1]), before + trainer.steps()[-1])
    assert llama.status().lease is None


def test_closed_terminal_during_a_write_loses_no_version(llama: LiveServer, tmp_path: Path) -> None:
    before = llama.status().version
    with training(llama, tmp_path, program=HUNG_UP_WHILE_IT_WRITES) as trainer:
        assert trainer.ended(expect=129)[-1] == "interrupted"
    assert trainer.steps() == [1, 2, 3]
    check_served(llama, trainer.saved(3), before + 3)


def test_trainer_killed_during_a_pause_leaves_a_live_server(llama: LiveServer) -> None:
    before, request = llama.status(), {**LONG, "model": llama.manifest.model}
    url = f"{llama.manifest.url}/v1/completions"
    child = subprocess.Popen(
        [sys.executable, "-c", PAUSES, llama.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    begun = threading.Event()

    def answered() -> bool:
        with httpx.stream("POST", url, json=request, timeout=TRAINER_LIMIT_S, trust_env=False) as answer:
            for _ in answer.iter_raw():  # not parsed, since that would delay the kill
                begun.set()
        return answer.is_success

    with ThreadPoolExecutor() as pool:
        long = pool.submit(answered)
        assert begun.wait(TRAINER_LIMIT_S)
        assert child.stdin is not None
        logged = len(llama.child.log.read_text())
        child.stdin.write("pause\n")
        child.stdin.flush()
        until(lambda: "setting pause state to PAUSED_NEW" in llama.child.log.read_text()[logged:])
        child.kill()
        assert child.communicate()[0] == "", "its pause was granted before it was killed"
        assert not long.done(), "its pause was not pending"
        assert llama.status() == before
        assert llama.sample()
        assert long.result()
    assert llama.status() == before


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TRAINER_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_vllm_without_sleep_mode_refuses_and_never_pauses(llama: LiveServer) -> None:
    before = llama.status()
    assert not before.can_sleep
    with (
        BridgeClient(llama.manifest, timeout_s=60) as client,
        pytest.raises(AttachError, match="cannot free its KV cache") as refused,
    ):
        client.pause("keep", sleep=True)
    assert "\n" not in refused.value.message
    assert llama.status() == before


def test_failure_in_the_fence_before_a_write_loses_no_version(llama: LiveServer) -> None:
    before, samples = llama.status(), llama.sample()

    def prepare() -> None:
        assert llama.status().state == "paused"
        raise ZeroDivisionError

    with BridgeClient(llama.manifest, timeout_s=60) as client, pytest.raises(ZeroDivisionError):
        publish(fence.publish(client, Update()), lambda: pytest.fail("it wrote"), prepare=prepare)
    assert llama.status() == before
    assert scenarios.same_samples(llama.sample(), samples)


def test_trainer_of_another_model_changes_nothing(llama: LiveServer, tmp_path: Path) -> None:
    before = llama.status()
    other = tiny.write(tiny.qwen2(), tmp_path / "other")
    with training(llama, tmp_path, "--model-name", str(other)) as trainer:
        fault = trainer.fault(expect=4)
    assert llama.manifest.model in fault
    assert str(other) in fault
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accident.py", "other"]
    assert llama.status() == before


@pytest.mark.kills_the_server
def test_server_killed_during_a_run_loses_no_published_step(llama: LiveServer, tmp_path: Path) -> None:
    family = psutil.Process(llama.child.process.pid).children(recursive=True)
    assert engines(family)
    with training(llama, tmp_path, steps=500) as trainer:
        trainer.wait_for("step   2/500")
        os.kill(llama.child.process.pid, signal.SIGKILL)
        assert psutil.wait_procs(family, timeout=ORPHANS_LIMIT_S)[1] == []
        assert llama.manifest.url in trainer.fault(expect=5)
    last = trainer.steps()[-1]
    assert trainer.steps() == list(range(1, last + 1))
    assert all(parameter.isfinite().all() for parameter in trainer.saved(last).parameters())
    (tmp_path / "after").mkdir()
    with training(llama, tmp_path / "after") as late:
        assert f"is stale: its server, pid {llama.manifest.server.pid}, has exited" in late.fault(expect=4)
    assert [path.name for path in late.folder.iterdir()] == ["accident.py"]


@pytest.mark.kills_the_server
def test_engine_killed_in_the_fence_ends_the_trainer_quickly(lora_llama: LiveServer, tmp_path: Path) -> None:
    (engine,) = engines(psutil.Process(lora_llama.child.process.pid).children(recursive=True))
    # Stopped now and killed later, the engine dies during the pause request, which vLLM then never answers.
    later = f"threading.Timer({KILLED_AFTER_S}, os.kill, ({engine.pid}, signal.SIGKILL)).start()"
    accident = f"{later} or os.kill({engine.pid}, signal.SIGSTOP) or 0.0"
    with training(lora_llama, tmp_path, "--request-timeout-s", str(CALL_LIMIT_S), accident=accident) as trainer:
        trainer.wait_for("step 2/5")
        assert lora_llama.manifest.url in trainer.fault(expect=5)
    assert trainer.steps() == [1, 2]
    assert all(parameter.isfinite().all() for parameter in trainer.saved(2).parameters())


def engines(family: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in family if process.name().startswith("VLLM::EngineCor")]
