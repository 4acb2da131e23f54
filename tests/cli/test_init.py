"""The files that `bridge init` writes load, explain every choice, and replace nothing."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from bridge.config import ServeConfig, TrainConfig
from bridge.rollouts import problems
from bridge_cli.init import CHOICES, FILES, Task, commented
from bridge_cli.main import answer
from bridge_environments import registry

BOTH = (TrainConfig, ServeConfig)
TASKS = get_args(Task)


def written(folder: Path, task: str) -> TrainConfig:
    """Run `bridge init` in the current folder, and return the choices of a run there."""
    assert answer(["init", "--task", task, "--model", "mine"]) == 0
    ServeConfig.resolve({}, folder / CHOICES, beside=BOTH)
    return TrainConfig.resolve({}, folder / CHOICES, beside=BOTH)


@pytest.mark.parametrize("task", TASKS)
def test_written_files_load_and_score(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = written(tmp_path, task)
    assert (config.model_name, config.training_steps) == ("mine", 100)
    environment = registry.load(config.task)
    problem = next(iter(environment))
    scorer = registry.scorer(config.task)
    right = str(problem["answer"])
    assert (scorer.score(problem, right), scorer.score(problem, "none")) == (1.0, 0.0)
    if config.evaluation.samples:
        assert problems.held_out(environment)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == sorted([CHOICES, *FILES[task]])  # type: ignore[index]


@pytest.mark.parametrize("task", TASKS)
def test_existing_file_prevents_writing_any_file(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (CHOICES, *FILES[task]):  # type: ignore[index]
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        assert answer(["init", str(folder), "--task", task]) == 2
        assert f"error: {folder / name} already exists" in capsys.readouterr().err
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]


def test_all_existing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["init", str(tmp_path)]) == 0
    capsys.readouterr()
    assert answer(["init", str(tmp_path)]) == 2
    error = f"error: {tmp_path / CHOICES} and {tmp_path / 'my_task.py'} already exist"
    assert capsys.readouterr().err.splitlines()[0] == error


def test_training_command_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["init", str(tmp_path / "a b")]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"to train: cd '{tmp_path}/a b' && bridge run --config {CHOICES}"


def test_every_choice_is_written_with_its_docstring(tmp_path: Path) -> None:
    text, path = commented(BOTH, {"model_name": "m"}), tmp_path / CHOICES
    tables = tomllib.loads(text)
    assert tables.pop("model_name") == "m"
    assert not any(tables.values())
    path.write_text(re.sub(r"^#(\w+ = (?!\.\.\.$))", r"\1", text, flags=re.MULTILINE))
    assert len(re.findall(r"^\w+ = ", path.read_text(), re.MULTILINE)) > 50
    for cls in BOTH:
        assert cls.resolve({}, path, beside=BOTH) == cls.resolve({"model_name": "m"}, beside=BOTH)
    explained = text.replace("\n# ", " ")
    for key, choice in TrainConfig.choices().items():
        assert " ".join((choice.info.description or "").split()) in explained, key
        assert re.search(rf"^#?{choice.path[-1]} = ", text, re.MULTILINE), key
    once = [name for name in ServeConfig.choices() if TrainConfig.field_of(name) is None]
    top = text.partition("\n[")[0]
    assert [name for name in once if len(re.findall(rf"^#{name} = ", top, re.MULTILINE)) != 1] == []
