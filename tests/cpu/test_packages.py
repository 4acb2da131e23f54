"""Environments from the packages verifiers, OpenEnv and Reasoning Gym on the real vLLM on the CPU.

The model's weights are random: it learns nothing in two steps, but some answers are right by chance.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridge.core.address import free_port
from bridge.processes import children
from bridge_environments import packages
from tests import scenarios
from tests.models import answering
from tests.scenarios import LiveServer

PYTHON = Path(os.environ.get("BRIDGE_VERIFIERS_PYTHON", packages.PYTHON))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LR = 1e-4
"""A learning rate so small that the model barely changes for the tests that share a server."""
needs_verifiers = pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: make test-verifiers")
needs_reasoning_gym = pytest.mark.skipif(not find_spec("reasoning_gym"), reason="no reasoning-gym: make test-verifiers")
SUMS = '''
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: int


class SumsToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def near(self, trace) -> float:
        answer = trace.last_reply.rpartition("<answer>")[2].partition("</answer>")[0]
        return 1 - abs(int(answer or -20) - self.data.answer) / 40

    @vf.reward(weight=0.5)
    async def called(self, trace) -> float:
        return float(any(message.tool_calls for message in trace.assistant_messages))


class SumsConfig(vf.TasksetConfig):
    first: int = 0
    tools: vf.SharedToolsetConfig | None = None


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config):
        return [SumsToolset(config.tools)] if config.tools else []

    def load(self):
        print("this line is no answer")
        for a in range(self.config.first, self.config.first + 9):
            yield SumsTask(SumsData(prompt=f"{a}+4=", answer=a + 4), self.config.task)


if __name__ == "__main__":
    SumsToolset.run()
'''
"""A task set in a module of its own, with a tool that is shared by its tasks."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("answering")
    with scenarios.served(answering.write(folder / "model"), folder / "server") as server:
        yield server


def trained(server: LiveServer, folder: Path, environment: str, *flags: str) -> list[dict[str, Any]]:
    """Train for two steps of eight completions, and return their metrics."""
    scenarios.trained(
        server,
        folder,
        *("--environment", environment, "--batch-size", "8", "--group-size", "4", "--max-new-tokens", "64"),
        *("--lr", str(LR)),
        *("--tool-timeout-s", "300", "--reward-processes", "2", *flags),
        steps=2,
    )
    scenarios.check_metrics(folder / "run", steps=2)
    return scenarios.metrics(folder / "run")


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@needs_verifiers
@pytest.mark.usefixtures("sums")
def test_verifiers_task_set_with_one_turn_is_trained_on(server: LiveServer, tmp_path: Path) -> None:
    held_out = ("--eval-env-args", '{"first": 20}', "--eval-samples", "1")
    steps = trained(server, tmp_path, "verifiers:sums", "--verifiers-python", str(PYTHON), *held_out)
    assert all(step["reward_parts"].keys() == {"near", "called"} for step in steps)
    assert all(step["turns_mean"] == 1 for step in steps)


@needs_verifiers
@pytest.mark.usefixtures("sums")
def test_verifiers_task_set_with_tools_is_trained_on(server: LiveServer, tmp_path: Path) -> None:
    arguments = '{"taskset": {"tools": {}}, "agent": {"max_turns": 3}}'
    steps = trained(server, tmp_path, "verifiers:sums", "--verifiers-python", str(PYTHON), "--env-args", arguments)
    assert max(step["turns_mean"] for step in steps) > 1
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    turns = [turn for row in rows for completion in row["completions"] for turn in completion["turns"]]
    assert any((turn["role"], turn["text"]) == ("tool", "7") for turn in turns)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """Serve the environment that `openenv init` writes, and yield its URL."""
    subprocess.run([PYTHON.with_name("openenv"), "init", "echo_env"], cwd=tmp_path, check=True, capture_output=True)
    port, log = free_port("127.0.0.1"), tmp_path / "echo.log"
    url = f"http://127.0.0.1:{port}"

    def is_healthy() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", trust_env=False).is_success
        return False

    serve = (str(PYTHON), "-m", "uvicorn", "server.app:app", "--app-dir", str(tmp_path / "echo_env"))
    child = children.start((*serve, "--port", str(port)), os.environ, log)
    try:
        assert children.wait_until(child, is_healthy, limit_s=120, progress=lambda _: None), log.read_text()
        yield url
    finally:
        children.stop(child)


@needs_verifiers
def test_openenv_environment_is_trained_on(server: LiveServer, tmp_path: Path, echo: str) -> None:
    arguments = f'{{"taskset": {{"base_url": "{echo}"}}, "player": {{"max_turns": 2}}}}'
    given = ("--verifiers-python", str(PYTHON), "--env-args", arguments, "--reward-processes", "1")  # one connection
    steps = trained(server, tmp_path, "verifiers:openenv", *given)
    assert all(1 < step["turns_mean"] <= 2 for step in steps), steps
    assert all(step["reward_parts"].keys() == {"openenv_reward"} for step in steps)


@needs_reasoning_gym
def test_reasoning_gym_task_is_trained_on(server: LiveServer, tmp_path: Path) -> None:
    arguments = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}'
    scenarios.trained(
        server,
        tmp_path,
        *("--environment", "reasoning_gym:basic_arithmetic", "--env-args", arguments, "--max-new-tokens", "4"),
        *("--eval-env-args", '{"size": 10}', "--eval-samples", "1", "--batch-size", "256"),
        *("--lr", str(LR)),
        steps=2,
    )
    scenarios.check_metrics(tmp_path / "run", steps=2)
    assert all(0 < step["reward_mean"] < 1 for step in scenarios.metrics(tmp_path / "run"))
