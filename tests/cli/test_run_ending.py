"""The last lines of a run: its checkpoint, and commands that can be pasted."""

import shlex
from pathlib import Path

import pytest

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import CheckpointConfig, TrainConfig
from bridge_cli import command_line
from bridge_cli.run_ending import print_ending
from tests.cli.test_run_directory import metrics

RESUME = "--resume --run-dir 'runs/a b'"
COMMAND = ("run", "--model", "my model", "--training_steps=9", "--resume", "--run-dir", "old", "--lr", "1e-5")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    command_line.ARGUMENTS.set((*COMMAND, "--", "--max-num-seqs", "4"))
    return RunDirectory.create(Path("runs/a b"), environment="arithmetic")


def save(run: RunDirectory, step: int) -> None:
    run.append(metrics(step))
    progress = Progress(step=step, weight_version=step, problems_drawn=step, run_dir=run.path)
    checkpoint.save(run.checkpoints / f"step_{step}", lambda folder: (folder / "w").touch(), progress)


def ending_lines(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> list[str]:
    config = TrainConfig.of(model_name="m")
    print_ending(run, CheckpointConfig(), config.way, 9)
    return capsys.readouterr().err.splitlines()


def test_ending_prints_the_checkpoint_and_two_commands(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (3, 4):
        save(run, step)
    assert ending_lines(run, capsys) == [
        "checkpoint: runs/a b/checkpoints/step_4",
        f"resume:     bridge run --model 'my model' --training_steps=9 --lr 1e-5 {RESUME} -- --max-num-seqs 4",
        "report:     bridge report 'runs/a b'",
    ]


def test_finished_run_can_be_resumed_with_more_steps(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 9)
    label, *command = shlex.split(ending_lines(run, capsys)[1])
    assert label == "longer:"
    assert not [word for word in command if word.startswith("--training_steps")]
    assert command[command.index("--training-steps") + 1] == "18"


def test_run_without_a_checkpoint_prints_only_the_report(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending_lines(run, capsys) == []
    run.append(metrics(1))
    (run.checkpoints / "step_1").mkdir(parents=True)
    assert ending_lines(run, capsys) == ["report:     bridge report 'runs/a b'"]


def test_resume_command_contains_no_secrets() -> None:
    given = ["train", "--start-command", "KEY=hidden vllm serve {model}", "--", "--api-key", "hidden"]
    assert "hidden" not in command_line.resume_command(given, Path("r"))
