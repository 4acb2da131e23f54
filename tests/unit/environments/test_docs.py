"""docs/environments.md is correct: each command loads its problems, and each table row scores as stated."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from bridge.config import ServeConfig, TrainConfig
from bridge.scoring.score import Score, Scores
from bridge.types import Problem
from bridge_environments import registry, rewards
from bridge_environments.dataset import GSM8K

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if "--model MODEL" in line]
ROWS = [row for row in re.findall(r"^\| (.*?) \| (right|wrong)", TEXT, re.MULTILINE) if "`" in row[0]]


@pytest.fixture
def example_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write every file that the document names, and change to their folder."""
    monkeypatch.chdir(tmp_path)
    assert GSM8K.bundled is not None
    for folder in ("openai/gsm8k", "copies/gsm8k"):
        shutil.copytree(GSM8K.bundled, folder)
    for name in ("mine.jsonl", "held_out.jsonl"):
        shutil.copy(GSM8K.bundled / "test.jsonl", name)
    for kind, block in BLOCKS:
        if kind == "json":
            Path("problems.jsonl").write_text(block)
        elif kind == "python":
            Path(block.splitlines()[0].removeprefix("# ")).write_text(block)


def test_smallest_tool_task_has_at_most_15_lines() -> None:
    kind, block = BLOCKS[0]
    assert kind == "python"
    assert len([line for line in block.splitlines()[1:] if line.strip()]) <= 15


@pytest.mark.usefixtures("example_files")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_loads_its_problems_and_scores(command: str) -> None:
    bridge, run, *words = shlex.split(command, comments=True)
    assert (bridge, run) == ("bridge", "run")
    flags = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    recipe = flags.pop("config", None)
    config = TrainConfig.resolve(
        {name.replace("-", "_"): value for name, value in flags.items() if name != "model"} | {"model_name": "-"},
        ROOT / recipe if recipe else None,
        beside=(ServeConfig,),
    ).task
    environment = registry.load(config)
    problem = next(iter(environment))
    if environment.interaction == "agent":
        return  # test_agent_runs.py runs it
    right = reward(registry.scorer(config), problem, str(problem["answer"]))
    assert right >= 1.0 == reward(environment, problem, str(problem["answer"])) // 1
    assert right > reward(registry.scorer(config), problem, "")
    if environment.interaction == "tools":
        assert [schema["function"]["name"] for schema in environment.schemas] == ["add"]


def reward(scores: Scores, problem: Problem, completion: str) -> float:
    score: Any = scores.score(problem, completion)
    return float(score.reward if isinstance(score, Score) else score)


def test_docs_have_the_expected_number_of_examples() -> None:
    assert len(COMMANDS) == 15
    assert [verdict for _, verdict in ROWS] == ["right"] * 7 + ["wrong"] * 4


@pytest.mark.parametrize(("cell", "verdict"), ROWS)
def test_every_row_of_the_math_table_scores_as_stated(cell: str, verdict: str) -> None:
    examples = re.findall(r"`(.*?)`", cell)
    for example in ["\n".join(examples)] if "next line" in cell else examples:
        assert rewards.is_right("1234", example) == (verdict == "right"), example
