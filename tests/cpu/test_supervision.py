"""`bridge run` survives the death of its server on the real vLLM, loses no step, and never leaves a process behind.

Not covered: servers that `bridge run` did not start (`test_accidents.py`), and stand-ins
(`tests/unit/processes/test_server_process.py`).
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from bridge.core.address import free_port
from bridge.processes.leash import GRACE_S
from tests import scenarios
from tests.models import tiny
from tests.scenarios import IN_THE_ENGINE

pytestmark = pytest.mark.slow
STEPS = 5
BATCH_SIZE = 8
RUN_LIMIT_S = 800.0
"""A run that hangs is killed after this time, and its test fails."""
LEFT_LIMIT_S = GRACE_S + 7
HANG_LIMIT_S = 8.0
INTO_THE_NEXT_BATCH_S = 0.3
"""The time after a step's report in which the next batch is being sampled, for a second or more."""
COMMAND = "from bridge_cli.main import main; main()"
LOW_LIMIT = f"""
import functools
from bridge_cli import main, started_servers
class StartedServer(started_servers.StartedServer):
    __init__ = functools.partialmethod(started_servers.StartedServer.__init__, hang_limit_s={HANG_LIMIT_S})
started_servers.StartedServer = StartedServer
main.main()
"""
"""Runs the same command with shorter time limits."""
ENVIRONMENT = """
import os, pathlib, re, signal, psutil

def end_engine():
    mine = psutil.Process().children(recursive=True)
    (victim,) = [process for process in mine if {engine!r} in process.name()]
    victim.kill()

def end_server(number):
    os.kill(int(re.findall({server!r}, pathlib.Path("said").read_text())[-1]), number)

class Accident:
    scored = 0

    def __iter__(self):
        yield from ({{"prompt": f"say {{number}}:"}} for number in range(40))

    def score(self, problem, completion):
        self.scored += 1
        if self.scored == {first_of_step_3}:
            {accident}
        return sum(character in "aeiou" for character in completion) / max(1, len(completion))
"""
ENGINE = "VLLM::EngineCor"
SERVER = r"vLLM \(pid (\d+), log"
"""The part of a run's log that names the API server's process."""


@dataclass(frozen=True)
class Run:
    """A running `bridge run`."""

    process: subprocess.Popen[str]
    folder: Path
    port: int

    def wait_for(self, step: int) -> None:
        """Wait until it has logged `step`."""
        metrics = self.folder / "run" / "metrics.jsonl"
        self.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true, while the process runs."""
        while not condition():
            assert self.process.poll() is None, self.stderr_text()
            time.sleep(0.01)

    def processes(self) -> list[psutil.Process]:
        """Return every process of the run and of its servers, each of which leads a session."""
        sessions = {int(pid) for pid in re.findall(SERVER, self.stderr_text())}
        processes = [process for process in psutil.process_iter() if _session(process) in sessions]
        return [process for process in processes if _is_alive(process)]

    def server(self) -> psutil.Process:
        """Return the API server's process."""
        return psutil.Process(int(re.findall(SERVER, self.stderr_text())[-1]))

    def stderr_text(self) -> str:
        """Return its stderr so far."""
        return (self.folder / "said").read_text()

    def finishes(self) -> None:
        """Wait for success, and check that every step exists once, the checkpoint loads, and no process is left."""
        code = self.process.wait(timeout=RUN_LIMIT_S)
        assert code == 0, self.stderr_text()
        assert "Traceback" not in self.stderr_text(), self.stderr_text()
        text = (self.folder / "run" / "metrics.jsonl").read_text()
        steps = [json.loads(line) for line in text.splitlines()]
        assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), text
        assert all(step["logprob_diff_mean"] < scenarios.PARITY_LIMIT for step in steps), text
        versions = [step["weight_version"] for step in steps]
        assert versions == sorted(set(versions)), text
        saved = AutoModelForCausalLM.from_pretrained(self.folder / "saved" / f"step_{STEPS}", dtype=torch.bfloat16)
        assert all(parameter.isfinite().all() for parameter in saved.parameters())
        assert self.left_after(LEFT_LIMIT_S) == []

    def left_after(self, limit_s: float) -> list[psutil.Process]:
        """Return the processes that are still alive after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _engines(run: Run) -> bool:
    """Return whether an engine process is alive."""
    return any(process.name().startswith(ENGINE) for process in run.processes())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("supervised") / "model")


@contextmanager
def running(
    model: Path,
    folder: Path,
    *more: str,
    accident: str = "pass",
    program: str = COMMAND,
    environment: Mapping[str, str] = IN_THE_ENGINE,
) -> Iterator[Run]:
    """Run `bridge run` in `folder`; `accident` is executed before the first score of step 3."""
    text = ENVIRONMENT.format(first_of_step_3=1 + 2 * BATCH_SIZE, accident=accident, engine=ENGINE, server=SERVER)
    (folder / "accident.py").write_text(text)
    port = free_port("127.0.0.1")
    flags = ["--model", str(model), "--port", str(port), "--max-model-len", "2048", "--training-steps", str(STEPS)]
    flags += ["--environment", "accident.py:Accident", "--batch-size", str(BATCH_SIZE), "--group-size", "4"]
    flags += ["--lr", "1e-3", "--max-new-tokens", "240", "--run-dir", "run", "--save-path", "saved"]
    flags += ["--reward-processes", "0"]  # the accident looks for the children of its own process
    eager = () if torch.cuda.is_available() else ("--", *scenarios.EAGER)
    with (folder / "said").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", program, "run", *flags, *more, "--vllm-config-path", "run", *eager],
            cwd=folder,
            env={**os.environ, "NO_COLOR": "1", **environment},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
        )
    limit = threading.Timer(RUN_LIMIT_S, process.kill)
    limit.start()
    run = Run(process, folder, port)
    try:
        yield run
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        for other in run.left_after(LEFT_LIMIT_S):
            other.kill()


def test_server_killed_while_generating_loses_no_step(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as run:
        run.wait_for(2)
        server = run.server()
        time.sleep(INTO_THE_NEXT_BATCH_S)
        server.kill()
        run.finishes()
    assert "restarting vLLM" in run.stderr_text()


def test_adapter_in_a_lora_slot_survives_a_server_loss(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "--mode", "lora_only", "--lora-r", "8") as run:
        run.wait_for(2)
        server = run.server()
        time.sleep(INTO_THE_NEXT_BATCH_S)
        server.kill()
        assert run.process.wait(timeout=RUN_LIMIT_S) == 0, run.stderr_text()
        assert run.left_after(LEFT_LIMIT_S) == []
    assert "restarting vLLM" in run.stderr_text()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["logprob_diff_mean"] < scenarios.PARITY_LIMIT for step in steps), steps


@pytest.mark.core
def test_engine_killed_between_two_steps_loses_no_step(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, accident="end_engine()") as run:
        run.finishes()
    assert "restarting vLLM" in run.stderr_text()


def test_hanging_server_loses_no_step(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, accident="end_server(signal.SIGSTOP)", program=LOW_LIMIT) as run:
        run.finishes()
    assert f"gave no answer for {HANG_LIMIT_S:g} s: it was stopped" in run.stderr_text()
    assert "restarting vLLM" in run.stderr_text()


@pytest.mark.core
def test_killed_run_leaves_no_process(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, environment={}) as run:
        run.wait_for(2)
        assert _engines(run)
        run.process.kill()
        run.process.wait()
        assert run.left_after(LEFT_LIMIT_S) == []


def test_run_killed_while_its_server_starts_leaves_no_process(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, environment={}) as run:
        run.until(lambda: _engines(run))
        run.process.kill()
        run.process.wait()
        assert run.left_after(LEFT_LIMIT_S) == []


def test_ctrl_c_ends_a_server_restart_immediately(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, accident="end_server(signal.SIGKILL)") as run:
        run.until(lambda: "restarting vLLM" in run.stderr_text())
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(timeout=RUN_LIMIT_S) == 130, run.stderr_text()
        assert run.left_after(LEFT_LIMIT_S) == []
    assert run.stderr_text().count("vLLM is ready") == 1, "it waited for the restarted server"
    assert "Traceback" not in run.stderr_text()
    assert [folder.name for folder in (tmp_path / "saved").iterdir()] == ["step_2"]
