"""Environments of verifiers and Reasoning Gym, with a program and a module that stand in for the real ones.

Not covered: the real ones (`tests/cpu/test_packages.py`).
"""

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from bridge.config import TaskConfig
from bridge.errors import RewardError, UsageError
from bridge.scoring.score import FailedScore, Score
from bridge_environments import packages, registry, verifiers_program
from bridge_environments.packages import FailedRequestError, Verifiers
from tests.unit.environments import verifiers_stand_in

DOCUMENT = Path(__file__).parents[3] / "docs" / "environments.md"
PYTHON, REAL_PROGRAM = Path(sys.executable), packages.PROGRAM


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PROGRAM", Path(verifiers_stand_in.__file__))
    monkeypatch.setattr(packages, "PYTHON", PYTHON)


@pytest.fixture
def environment() -> Iterator[Verifiers]:
    task = Verifiers("calm", {})
    yield task
    end(task)


def end(environment: Verifiers) -> None:
    assert environment._process is not None
    environment._process.end()


def pid_of(environment: Verifiers) -> int:
    return int(environment.run(verifiers_stand_in.listed(0), "http://here/v1")["pid"])


def test_tasks_become_problems_and_each_pass_relists_them(environment: Verifiers) -> None:
    both = zip(environment, environment, strict=True)
    assert [one["task"]["idx"] for one, other in both if one == other] == list(range(verifiers_stand_in.NUM_TASKS))  # type: ignore[typeddict-item]


def test_printed_text_does_not_disturb_rewards(capfd: pytest.CaptureFixture[str]) -> None:
    environment = Verifiers("calm", {})
    assert environment.run(verifiers_stand_in.listed(1), "http://here/v1")["place"] == 1
    assert capfd.readouterr() == ("", "http://here/v1\nnoise\n")
    end(environment)


def test_failed_run_does_not_affect_others(environment: Verifiers) -> None:
    first = pid_of(environment)
    with pytest.raises(FailedRequestError, match="ProviderError: no model"):
        environment.run(verifiers_stand_in.listed(2), "")
    assert pid_of(environment) == first


def test_exited_verifiers_process_is_replaced() -> None:
    environment = Verifiers("crashing", {})
    first = pid_of(environment)
    with pytest.raises(FailedRequestError, match=r"its process ended \(exit status 3\)"):
        environment.run(verifiers_stand_in.listed(1), "")
    assert pid_of(environment) != first
    end(environment)


def test_verifiers_process_exits_with_the_environment(environment: Verifiers) -> None:
    process = psutil.Process(pid_of(environment))
    end(environment)
    assert not process.is_running()


def test_listing_tasks_times_out_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Verifiers("slow", {})
    monkeypatch.setattr(packages, "LOAD_LIMIT_S", 0.2)
    monkeypatch.setattr(packages, "GRACE_S", 0.1)
    with pytest.raises(RewardError, match=r"environment verifiers:slow: .*took longer than 0.2 s"):
        next(iter(environment))


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("unknown", "^--environment verifiers:unknown: taskset 'unknown' not found", "install the environment ("),
        ("two seats", "^--environment verifiers:two seats: 2 of its agents", "change --env-args, the table [env]"),
        ("unlisted", "^environment verifiers:unlisted: listing its tasks failed: no data", "fix the environment"),
    ],
)
def test_unloadable_environment_is_refused(name: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        registry.load(TaskConfig(environment=f"verifiers:{name}"))
    assert caught.value.hint.startswith(hint)


def test_hint_for_several_agents_works_in_verifiers() -> None:
    endpoint = json.loads(verifiers_program.ENDPOINT)
    assert endpoint.keys() == {"client", "model"}
    assert endpoint["client"].keys() == {"type", "base_url"}
    assert f'{{"player1": {verifiers_program.ENDPOINT}}}' in DOCUMENT.read_text()


def test_arguments_in_an_unsupported_form_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^--env-args: taskset is 'b', expected a JSON object"):
        registry.load(TaskConfig(environment="verifiers:calm", env_args={"taskset": "b"}))


def test_missing_verifiers_python_hint_names_make_verifiers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*/python") as caught:
        registry.load(TaskConfig(environment="verifiers:any", verifiers_python=tmp_path / "python"))
    assert caught.value.hint.startswith("make verifiers, or")


def test_verifiers_episode_is_an_agents_trajectory() -> None:
    agent: Any = registry.scorer(TaskConfig(environment="verifiers:calm"))
    score = agent.run(verifiers_stand_in.listed(1), "http://here/v1")
    assert isinstance(score, Score)
    assert score.parts["place"] == 1
    failure = agent.run(verifiers_stand_in.listed(2), "http://here/v1")
    assert isinstance(failure, FailedScore)
    assert re.match(
        r"Verifiers.run raised FailedRequestError: ProviderError: no model \(packages.py line \d+\), on", failure.line
    )


def test_held_out_tasks_use_their_own_arguments() -> None:
    environment = registry.load(TaskConfig(environment="verifiers:calm", eval_env_args={"num": 3}))
    assert len(environment.held_out()) == 3
    assert len(list(environment)) == verifiers_stand_in.NUM_TASKS


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"environment": "gsm8k", "env_args": {"a": 1}}, "--env-args"),
        ({"environment": "arithmetic", "eval_env_args": {}}, "--eval-env-args"),
        ({"environment": "verifiers:calm", "system_prompt": ""}, "--system-prompt"),
        ({"environment": "verifiers:calm", "data": "rows.jsonl"}, "--data"),
    ],
)
def test_choice_that_a_package_would_ignore_is_refused(choices: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} has no effect with --environment {choices['environment']}"):
        registry.load(TaskConfig(**choices))


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ("raise SystemExit('stop')", "SystemExit: stop"),
        ("print('noise'); raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("import time; time.sleep(60)", r"its process took longer than 3 s \(exit status 0\)"),
    ],
)
def test_verifiers_program_exits_with_its_connection(
    loaders: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "verifiers" / "v1" / "utils"
    package.mkdir(parents=True)
    (package / "loaders.py").write_text(loaders)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(packages, "PROGRAM", REAL_PROGRAM)
    monkeypatch.setattr(packages, "LOAD_LIMIT_S", 3 if "sleep" in loaders else 60)
    monkeypatch.setattr(packages, "GRACE_S", 20)
    with pytest.raises(UsageError, match=f"^--environment verifiers:any: {message}"):
        Verifiers("any", {})


class Entries:
    """A task of Reasoning Gym."""

    def __init__(self, seed: int, size: int = 5) -> None:
        self._seed, self._size = seed, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = 100 * self._seed + index
        return {"question": f"{number}?", "answer": None if index == 1 else str(number), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(answer is not None and answer == (entry["answer"] or "many"))


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("reasoning_gym")
    library.factory = SimpleNamespace(DATASETS={"counting": Entries})
    library.create_dataset = lambda name, **arguments: library.factory.DATASETS[name](**arguments)
    library.utils = SimpleNamespace(
        SYSTEM_PROMPTS={"default": "Answer.\n"},
        extract_answer=lambda text: text.removeprefix("<answer>").removesuffix("</answer>") if "<" in text else None,
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)


@pytest.mark.usefixtures("gym")
def test_reasoning_gym_entries_are_scored_by_their_task() -> None:
    task = registry.load(TaskConfig(environment="reasoning_gym:counting", env_args={"size": 3}))
    first, second, _ = list(task)
    assert first["plain_prompt"] == "Answer.\n\n0?"
    assert first["prompt"] == [{"role": "system", "content": "Answer."}, {"role": "user", "content": "0?"}]
    assert [task.score(first, text) for text in ("<answer>0</answer>", "0", "")] == [1, 0, 0]
    assert "answer" not in second
    assert task.score(second, "<answer>many</answer>") == 1


@pytest.mark.usefixtures("gym")
def test_held_out_entries_have_a_different_seed() -> None:
    task = registry.load(TaskConfig(environment="reasoning_gym:counting", eval_env_args={"size": 2}))
    assert [entry["answer"] for entry in islice(task, 1)] == ["0"]
    assert [entry["plain_prompt"] for entry in task.held_out()] == ["Answer.\n\n100?", "Answer.\n\n101?"]


@pytest.mark.usefixtures("gym")
def test_system_prompt_replaces_reasoning_gyms() -> None:
    task = registry.load(TaskConfig(environment="reasoning_gym:counting", system_prompt="Say it."))
    assert next(iter(task)).get("plain_prompt") == "Say it.\n\n0?"


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("name", "arguments", "message", "hint"),
    [
        ("cuonting", {}, "Reasoning Gym has no task 'cuonting'", "--environment reasoning_gym:counting"),
        ("counting", {"sise": 1}, "cannot be created with .*unexpected keyword argument 'sise'", "--env-args"),
    ],
)
def test_reasoning_gym_task_that_fails_to_load_is_refused(
    name: str, arguments: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        registry.load(TaskConfig(environment=f"reasoning_gym:{name}", env_args=arguments))
    assert hint in caught.value.hint


def test_missing_reasoning_gym_hint_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match="needs the library reasoning-gym") as caught:
        registry.load(TaskConfig(environment="reasoning_gym:counting"))
    assert caught.value.hint == "pip install reasoning-gym"
