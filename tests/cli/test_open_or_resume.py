"""`--resume`: which checkpoint and directory a run resumes from, what it logs, and what it never overwrites."""

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress, SavedCheckpoint
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.core import folder_mark
from bridge.errors import UsageError
from bridge_cli import console
from bridge_cli.open_or_resume import open_run
from tests.cli.test_run_directory import metrics, steps
from tests.unit.core.test_folder_claim import held


@dataclass(frozen=True)
class Opened:
    """What `open_run` returned and logged."""

    run: RunDirectory
    checkpoint: SavedCheckpoint | None
    lines: list[str]
    save_path: Path


@pytest.mark.parametrize(
    ("stop_at", "message", "hint"),
    [
        ("reward_mean", "found 'reward_mean', expected a metric, >= or <=, and a number", "eval_reward_mean>=0.9"),
        ("reward_mean>=1.2.3", "expected a metric, >= or <=, and a number", "in quotes"),
        ("reward_mean>=.", "expected a metric, >= or <=, and a number", "in quotes"),
        ("reward>=0.9", "there is no metric 'reward'", "did you mean reward_"),
        ("rollouts>=1", "there is no metric 'rollouts'", "did you mean "),
    ],
)
def test_invalid_stop_at_is_refused(stop_at: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        open_run(TrainConfig.of(model_name="m", stop_at=stop_at))
    assert hint in refused.value.hint


@dataclass(frozen=True)
class Workspace:
    """A folder with `runs/mine`, and its checkpoints in `saved`."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    @property
    def mine(self) -> Path:
        return self.folder / "runs" / "mine"

    def save(self, step: int) -> Path:
        progress = Progress(step=step, weight_version=step, problems_drawn=step, run_dir=self.mine)
        return checkpoint.save(self.saved / f"step_{step}", lambda folder: self.write(folder, step), progress)

    def write(self, folder: Path, step: int) -> None:
        (folder / "model.safetensors").write_bytes(bytes([step]) * 100)

    def open(self, **choices: Any) -> Opened:
        config = TrainConfig.model_validate({"model_name": "m", "save_path": self.saved, **choices})
        config, run, newest = open_run(config)
        out, err = self.capsys.readouterr()
        assert out == ""
        assert config.checkpoints.save_path is not None
        return Opened(run, newest, err.splitlines(), config.checkpoints.save_path)

    def content(self) -> dict[str, bytes | None]:
        paths = sorted(self.folder.rglob("*"))
        return {str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None for path in paths}

    def refused(self, match: str, **choices: Any) -> str:
        """Open a run that is refused, and return the hint; nothing may change."""
        before = self.content()
        with pytest.raises(UsageError, match=match) as caught:
            self.open(**choices)
        assert self.content() == before
        return caught.value.hint


@pytest.fixture
def workspace(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    made = Workspace(tmp_path, capsys)
    made.mine.mkdir(parents=True)
    run = RunDirectory(made.mine)  # created by another process
    for step in range(1, 6):
        run.append(metrics(step))
    return made


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def test_run_resumes_in_its_directory_from_the_newest(workspace: Workspace) -> None:
    workspace.save(2)
    newest = workspace.save(4)
    opened = workspace.open(resume=True)
    assert opened.checkpoint is not None
    assert (opened.checkpoint.folder, opened.checkpoint.progress.step) == (newest, 4)
    assert opened.run.path == workspace.mine
    assert opened.lines == [f"resuming after step 4 from {newest}"]
    assert (steps(opened.run.metrics), steps(opened.run.lost_metrics)) == ([1, 2, 3, 4], [5])
    opened.run.remove_if_unused()
    assert workspace.mine.exists()


def test_each_skipped_checkpoint_is_reported_in_one_line(workspace: Workspace) -> None:
    older = workspace.save(2)
    for step in (3, 4):
        cut(workspace.save(step))
    opened = workspace.open(resume=True)
    assert [line.partition(":")[0] for line in opened.lines[:2]] == ["skipped"] * 2
    for line, name in zip(opened.lines, ("step_4", "step_3"), strict=False):
        assert f"{workspace.saved}/{name} is incomplete or damaged: model.safetensors is truncated" in line
    assert opened.lines[2:] == [f"resuming after step 2 from {older}"]


@pytest.mark.parametrize("damaged", [True, False])
def test_run_without_a_complete_checkpoint_starts_over(workspace: Workspace, damaged: bool) -> None:
    if damaged:
        cut(workspace.save(3))
    opened = workspace.open(resume=True, run_dir=workspace.folder / "new")
    assert opened.checkpoint is None
    assert opened.run.path == workspace.folder / "new"
    assert opened.lines[-1] == f"no checkpoint to resume from in {workspace.saved}: starting at step 1"
    assert len(opened.lines) == 1 + damaged
    assert steps(RunDirectory(workspace.mine).metrics) == [1, 2, 3, 4, 5]


def test_resumed_run_may_name_its_own_directory(workspace: Workspace) -> None:
    workspace.save(4)
    assert workspace.open(resume=True, run_dir=Path("runs/mine")).run.path.samefile(workspace.mine)


@pytest.mark.parametrize("exists", [True, False])
def test_resume_into_an_empty_directory_starts_a_new_run(workspace: Workspace, exists: bool) -> None:
    workspace.save(4)
    other = workspace.folder / "other"
    if exists:
        other.mkdir()
    opened = workspace.open(resume=True, run_dir=other)
    assert opened.checkpoint is not None
    assert opened.run.path == other
    assert not opened.run.metrics.exists()
    assert steps(RunDirectory(workspace.mine).metrics) == [1, 2, 3, 4, 5]


def test_directory_of_a_different_run_is_refused(workspace: Workspace) -> None:
    workspace.save(4)
    RunDirectory.create(workspace.folder / "other", environment="arithmetic").append(metrics(1))
    workspace.refused("other already holds a run", resume=True, run_dir=workspace.folder / "other")


def test_lost_run_directory_is_created_again(workspace: Workspace) -> None:
    workspace.save(4)
    workspace.mine.rename(workspace.folder / "elsewhere")
    opened = workspace.open(resume=True)
    assert opened.checkpoint is not None
    assert opened.run.path.parent == Path("runs")
    assert opened.run.path.name.endswith("-arithmetic")


def test_checkpoints_of_another_run_are_never_overwritten(workspace: Workspace) -> None:
    for step in (2, 4, 6, 100):
        workspace.save(step)
    hint = workspace.refused("saved holds checkpoints of another run: step_4, step_6, step_100\n")
    assert "--resume" in hint
    assert "--save-path" in hint
    workspace.refused("holds checkpoints of another run", training_steps=1)
    assert workspace.open(save_path=workspace.folder / "fresh").checkpoint is None


@pytest.mark.parametrize("resume", [True, False])
def test_foreign_folder_at_a_checkpoints_path_is_refused(workspace: Workspace, resume: bool) -> None:
    (workspace.saved / "step_7").mkdir(parents=True)
    (workspace.saved / "step_7" / "thesis.txt").write_text("precious")
    if resume:
        workspace.save(4)
    hint = workspace.refused(r"saved/step_7 is not a Bridge checkpoint", resume=resume, training_steps=10)
    assert "--resume" not in hint
    (workspace.saved / "step_7" / "thesis.txt").unlink()
    assert workspace.open(resume=resume, training_steps=10).lines is not None


def test_folders_with_unrelated_names_are_ignored(workspace: Workspace) -> None:
    for name in ("step_7.bak", "adapter_3", "best"):
        (workspace.saved / name).mkdir(parents=True)
        (workspace.saved / name / "notes.txt").touch()
    assert workspace.open(run_dir=workspace.folder / "new").lines == []


@pytest.mark.parametrize("damaged", [True, False])
def test_run_without_a_checkpoint_restarts_in_its_directory(workspace: Workspace, damaged: bool) -> None:
    RunDirectory(workspace.mine).write_config(TrainConfig.of(model_name="m", save_path=Path("saved")).document())
    if damaged:
        cut(workspace.save(3))
    opened = workspace.open(resume=True, run_dir=workspace.mine)
    assert (opened.checkpoint, opened.run.path) == (None, workspace.mine)
    assert opened.lines[-1] == f"no checkpoint to resume from in {workspace.saved}: starting at step 1"
    assert (steps(opened.run.metrics), steps(opened.run.lost_metrics)) == ([], [1, 2, 3, 4, 5])
    opened.run.append(metrics(1))
    hint = workspace.refused("mine already holds a run", resume=True, run_dir=workspace.mine, save_path=Path("fresh"))
    assert hint == "name a new folder with --run-dir, or resume that run: --resume --save-path saved"


def test_moved_run_resumes_in_its_new_location(workspace: Workspace) -> None:
    workspace.save(4)
    other = workspace.open(resume=True, run_dir=Path("other"))
    assert other.lines[0] == f"other begins at step 5; the steps before it are in {workspace.mine}"
    other.run.write_config(TrainConfig.of(model_name="m", save_path=Path("saved")).document())
    other.run.append(metrics(5))
    reopened = workspace.open(resume=True, run_dir=Path("other"))
    assert reopened.run.path == Path("other")
    assert (steps(reopened.run.metrics), steps(reopened.run.lost_metrics)) == ([], [5])
    assert steps(RunDirectory(workspace.mine).metrics) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("resume", [True, False])
def test_two_runs_never_share_a_checkpoint_folder(workspace: Workspace, resume: bool) -> None:
    workspace.save(4)
    with held(workspace.saved) as (first, _):
        hint = workspace.refused(
            f"saved is in use by process {first.pid}", resume=resume, run_dir=workspace.folder / "new"
        )
    assert f"kill -INT {first.pid}" in hint
    assert workspace.open(resume=True).run.path == workspace.mine


def test_two_runs_never_share_a_run_directory(workspace: Workspace) -> None:
    workspace.save(4)
    with held(workspace.mine) as (first, _):
        workspace.refused(f"runs/mine is in use by process {first.pid}", resume=True)
    assert steps(RunDirectory(workspace.mine).metrics) == [1, 2, 3, 4, 5]
    with held(workspace.folder / "new") as (first, _):
        workspace.refused(f"new is in use by process {first.pid}", run_dir=Path("new"), save_path=Path("fresh"))


def test_file_in_place_of_the_checkpoint_folder_is_refused(workspace: Workspace) -> None:
    (workspace.folder / "file").touch()
    workspace.refused("cannot create the checkpoint folder file: File exists", save_path=Path("file"))


def test_only_an_unused_checkpoint_folder_is_removed(workspace: Workspace) -> None:
    before = workspace.content()
    workspace.open(save_path=Path("a/b"), run_dir=Path("a/run")).run.remove_if_unused()
    assert workspace.content() == before
    (workspace.folder / "empty").mkdir()
    workspace.open(save_path=Path("empty"), run_dir=Path("a/run")).run.remove_if_unused()
    assert set(workspace.content()) - set(before) == {"empty"}


@dataclass(frozen=True)
class Runs:
    """Runs in `runs/`, each with its checkpoints in its own directory."""

    workspace: Workspace

    def made(self, name: str, *, saved: int = 0, started: int = 0, **choices: Any) -> RunDirectory:
        """Create a run that was `started` at some time, with a checkpoint of step `saved`."""
        run = RunDirectory(self.workspace.folder / "runs" / name)
        run.path.mkdir(parents=True, exist_ok=True)
        folder_mark.put(run.path, "run")
        run.write_config(
            TrainConfig.model_validate({"model_name": "m", "save_path": run.checkpoints, **choices}).document()
        )
        os.utime(run.config, (started, started))
        for step in range(1, saved + 2):
            run.append(metrics(step))
        if saved:
            progress = Progress(step=saved, weight_version=saved, problems_drawn=saved, run_dir=run.path)
            folder = run.checkpoints / f"step_{saved}"
            checkpoint.save(folder, lambda scratch: self.workspace.write(scratch, saved), progress)
        return run

    def resumed(self, **choices: Any) -> Opened:
        return self.workspace.open(resume=True, save_path=None, **choices)


@pytest.fixture
def runs(workspace: Workspace) -> Runs:
    return Runs(workspace)


def test_checkpoints_are_in_the_run_directory_by_default(runs: Runs) -> None:
    for number in range(2):
        run = runs.made(f"{number}", saved=3)
        opened = runs.workspace.open(save_path=None)
        assert opened.save_path == opened.run.path / "checkpoints"
        assert opened.run.path != run.path
        opened.run.remove_if_unused()
        assert not opened.run.path.exists()


def test_resume_chooses_the_newest_run_of_the_same_task(runs: Runs) -> None:
    runs.made("old", saved=9, started=1)
    newest = runs.made("newer", saved=2, started=2)
    runs.made("another_model", saved=3, started=3, model_name="n")
    runs.made("another_task", saved=3, started=4, environment="gsm8k")
    runs.made("another_mode", saved=3, started=5, mode="lora_only")
    folder_mark.put(runs.made("a_demo", saved=3, started=6).path, "demo")
    (runs.workspace.folder / "runs" / "file").touch()
    opened = runs.resumed()
    assert opened.checkpoint is not None
    assert opened.checkpoint.progress.step == 2
    assert opened.run.path.samefile(newest.path)
    assert opened.save_path.samefile(newest.checkpoints)
    assert opened.lines == [f"resuming after step 2 from {newest.checkpoints / 'step_2'}"]
    assert (steps(newest.metrics), steps(newest.lost_metrics)) == ([1, 2], [3])


@pytest.mark.parametrize("named_by", ["run_dir", "save_path"])
@pytest.mark.parametrize("is_copy", [True, False])
def test_moved_or_copied_run_resumes_where_it_is(runs: Runs, is_copy: bool, named_by: str) -> None:
    original = runs.made("original", saved=3, save_path=None)
    before = {path: path.read_bytes() for path in original.path.rglob("*") if path.is_file()}
    there = RunDirectory(runs.workspace.folder / "backup" / "elsewhere")
    (shutil.copytree if is_copy else shutil.move)(original.path, there.path)
    place = {"run_dir": there.path} if named_by == "run_dir" else {"save_path": there.checkpoints}
    opened = runs.workspace.open(resume=True, **{"save_path": None, **place})
    assert opened.lines == [f"resuming after step 3 from {there.checkpoints / 'step_3'}"]
    assert (opened.run.path, opened.save_path) == (there.path, there.checkpoints)
    assert (steps(there.metrics), steps(there.lost_metrics)) == ([1, 2, 3], [4])
    if is_copy:
        assert {path: path.read_bytes() for path in original.path.rglob("*") if path.is_file()} == before
    else:
        assert not original.path.exists()


def test_newer_run_without_a_checkpoint_is_skipped(runs: Runs) -> None:
    older = runs.made("older", saved=2, started=1)
    runs.made("begun", started=2)
    cut(runs.made("damaged", saved=4, started=3).checkpoints / "step_4")
    live = runs.made("live", saved=5, started=4)
    with held(live.path) as (first, _):
        opened = runs.resumed()
    assert opened.run.path.samefile(older.path)
    assert opened.lines[0] == f"skipped: runs/live is in use by process {first.pid}"
    assert "damaged/checkpoints/step_4 is incomplete or damaged" in opened.lines[1]
    assert opened.lines[2:4] == [f"skipped: runs/{name} has no complete checkpoint" for name in ("damaged", "begun")]


def test_run_with_checkpoints_elsewhere_is_resumed(runs: Runs) -> None:
    RunDirectory(runs.workspace.mine).write_config(TrainConfig.of(model_name="m", save_path=Path("saved")).document())
    newest = runs.workspace.save(4)
    opened = runs.resumed()
    assert opened.checkpoint is not None
    assert opened.checkpoint.folder.samefile(newest)
    assert opened.run.path.samefile(runs.workspace.mine)


def test_resume_with_a_run_directory_considers_only_that_run(runs: Runs) -> None:
    runs.made("newest", saved=5, started=9)
    mine = runs.made("chosen", saved=2, started=1)
    assert runs.resumed(run_dir=mine.path).checkpoint.progress.step == 2  # type: ignore[union-attr]
    fresh = runs.resumed(run_dir=Path("elsewhere/new"))
    assert fresh.checkpoint is None
    assert fresh.lines == ["no checkpoint to resume from in elsewhere/new/checkpoints: starting at step 1"]
    fresh.run.remove_if_unused()
    assert not Path("elsewhere").exists()


def test_resume_without_any_run_starts_a_new_one(runs: Runs) -> None:
    runs.made("another", saved=3, model_name="n")
    opened = runs.resumed()
    assert (opened.checkpoint, opened.lines) == (None, ["no checkpoint to resume from in runs: starting at step 1"])


def test_checkpoints_in_a_named_directory_are_kept(runs: Runs) -> None:
    run = runs.made("mine_too", saved=3)
    run.metrics.unlink()
    hint = runs.workspace.refused(
        "checkpoints holds checkpoints of another run: step_3", save_path=None, run_dir=run.path
    )
    assert hint == "resume from the newest one with --resume, or choose a different folder with --run-dir"


def test_event_in_a_run_is_printed(workspace: Workspace) -> None:
    workspace.save(4)
    opened: list[Callable[[], Opened]] = [
        lambda: workspace.open(resume=True),
        lambda: workspace.open(save_path=workspace.folder / "fresh"),
    ]
    for reopen in opened:
        run = reopen().run
        with console.printing_logs(), run.recording():
            logging.getLogger("bridge.run").info("the server died")
        assert workspace.capsys.readouterr().err == "the server died\n"
