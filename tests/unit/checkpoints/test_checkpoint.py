"""Checkpoints are complete or absent, however the process ends; every byte is checked; the newest one is found."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import (
    MARKER_NAME,
    Progress,
    SavedCheckpoint,
    is_checkpoint,
    keep_last,
    newest,
    numbered,
    read,
)
from bridge.core import atomic_folder
from bridge.errors import CheckpointError, UsageError
from bridge.types import TrainedProblems
from tests.unit.checkpoints.killed_saver import KILLS
from tests.unit.core.test_atomic_folder import largest_file, names

WEIGHTS, CONFIG, OPTIMIZER = "model.safetensors", "config.json", "optimizer/optimizer-00001-of-00001.safetensors"
FILES = {WEIGHTS: b"w" * 4000, CONFIG: b"{}\n", OPTIMIZER: b"o" * 2000}


def progress(step: int, run: Path = Path("/runs/mine")) -> Progress:
    return Progress(step=step, weight_version=step + 3, problems_drawn=8 * step, run_dir=run)


def fill(folder: Path, files: dict[str, bytes] = FILES) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def save(path: Path, step: int = 3, write: Callable[[Path], None] = fill) -> Path:
    return checkpoint.save(path / f"step_{step}", write, progress(step))


def test_saved_progress_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert folder == tmp_path / "step_3"
    assert names(folder) == [MARKER_NAME, CONFIG, WEIGHTS, "optimizer"]
    assert is_checkpoint(folder)
    assert read(folder) == SavedCheckpoint(folder, progress(3))


def test_marker_is_written_last_and_lists_all_other_files(tmp_path: Path) -> None:
    def write(scratch: Path) -> None:
        fill(scratch)
        assert not (scratch / MARKER_NAME).exists()

    marker = json.loads((save(tmp_path, 3, write) / MARKER_NAME).read_text())
    assert marker["progress"] == {"step": 3, "weight_version": 6, "problems_drawn": 24, "run_dir": "/runs/mine"}
    assert {name: file["num_bytes"] for name, file in marker["files"].items()} == {
        name: len(content) for name, content in FILES.items()
    }


def test_problems_trained_ahead_are_recorded_if_any(tmp_path: Path) -> None:
    ahead = progress(3).model_copy(update={"problems_beyond": (26, 30)})
    folder = checkpoint.save(tmp_path / "step_3", fill, ahead)
    read_back = read(folder).progress
    assert read_back == ahead
    assert read_back.trained == TrainedProblems(below=24, beyond=frozenset({26, 30}))
    assert [number for number in range(20, 35) if number not in read_back.trained] == [
        24,
        25,
        27,
        28,
        29,
        31,
        32,
        33,
        34,
    ]
    assert read_back.trained.including([24, 25, 27]) == TrainedProblems(below=28, beyond=frozenset({30}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


DAMAGES = {
    cut: "is truncated: [0-9]+ bytes, expected [0-9]+",
    flip: "has changed: its checksum differs from when it was saved",
    Path.unlink: "is missing",
    grow: "has grown",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_named_and_older_checkpoint_used(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    older, newer = save(tmp_path, 3), save(tmp_path, 10)
    damage(newer / name)
    with pytest.raises(
        CheckpointError, match=rf"the checkpoint .*/step_10 is incomplete or damaged: {name} {DAMAGES[damage]}"
    ):
        read(newer)
    saved, (line,) = newest(tmp_path, "step_")
    assert saved == SavedCheckpoint(older, progress(3))
    assert f"{newer} is incomplete or damaged: {name} " in line


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, grow], ids=lambda damage: damage.__name__)
def test_damaged_marker_is_named_and_older_checkpoint_used(damage: Callable[[Path], None], tmp_path: Path) -> None:
    older, newer = save(tmp_path, 3), save(tmp_path, 10)
    damage(newer / MARKER_NAME)
    with pytest.raises(CheckpointError, match=rf"/step_10 is incomplete or damaged: {MARKER_NAME} "):
        read(newer)
    assert newest(tmp_path, "step_")[0] == SavedCheckpoint(older, progress(3))


def test_any_changed_byte_of_the_marker_is_detected(tmp_path: Path) -> None:
    folder = save(tmp_path)
    whole = (folder / MARKER_NAME).read_bytes()
    for index in range(len(whole)):
        flipped = whole[index] ^ 1 << index % 8
        (folder / MARKER_NAME).write_bytes(whole[:index] + bytes([flipped]) + whole[index + 1 :])
        with pytest.raises(CheckpointError):
            read(folder)
    (folder / MARKER_NAME).write_bytes(whole)
    assert read(folder).progress.step == 3


LOADED = [
    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "optimizer/x.pt", "pytorch_model.bin",
    "modeling_own.py", "chat_template.jinja", "tokenizer.model", "generation_config.json", "adapter_config.json",
    "preprocessor_config.json", "tekken.json", "qwen.tiktoken", "additional_chat_templates/tools.jinja",
]  # fmt: skip
"""What transformers or vLLM reads if it lies in the folder of a model."""


@pytest.mark.parametrize("name", LOADED)
def test_added_files_that_loaders_read_are_refused(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    for other in ("notes.txt", "README.md", "results.json", "samples.jsonl"):
        (folder / other).write_text("mine")
    assert read(folder).progress.step == 3
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    with pytest.raises(CheckpointError, match=f"{name} was added after saving"):
        read(folder)


def test_missing_file_is_reported_before_a_checksum(tmp_path: Path) -> None:
    folder = save(tmp_path)
    flip(folder / CONFIG)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} is missing"):
        read(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"step": 3, "weight_version": 3}'])
def test_marker_from_a_different_version_is_refused(text: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / MARKER_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="is not a valid marker for this version of Bridge"):
        read(folder)


def test_invalid_checkpoint_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"{MARKER_NAME} cannot be read"):
            read(folder)


def test_newest_checkpoint_has_the_highest_step_and_prefix(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent", "step_") == (None, ())
    assert newest(tmp_path, "step_") == (None, ())
    folders = [save(tmp_path, step) for step in (9, 10, 100)]
    shutil.copytree(folders[2], tmp_path / "step_100.bak")
    shutil.copytree(folders[2], tmp_path / "step_0200")
    checkpoint.save(tmp_path / "adapter_300", fill, progress(300))
    assert newest(tmp_path, "step_") == (SavedCheckpoint(folders[2], progress(100)), ())
    assert sorted(numbered(tmp_path, "step_")) == [9, 10, 100]
    saved, passed_over = newest(tmp_path, "adapter_")
    assert (saved, passed_over) == (SavedCheckpoint(tmp_path / "adapter_300", progress(300)), ())


def test_every_skipped_newer_checkpoint_is_reported(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    cut(tmp_path / "step_3" / WEIGHTS)
    flip(tmp_path / "step_2" / CONFIG)
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_4")
    saved, lines = newest(tmp_path, "step_")
    assert saved == SavedCheckpoint(tmp_path / "step_1", progress(1))
    assert len(lines) == 3
    for part, line in zip(("step 4, its marker step 1", WEIGHTS, CONFIG), lines, strict=True):
        assert part in line
    (tmp_path / "step_1" / MARKER_NAME).unlink()
    assert newest(tmp_path, "step_")[0] is None


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folders = [save(tmp_path, step) for step in (1, 2, 3)]
    assert keep_last(folders, 0) == folders
    assert keep_last(folders, 3) == folders
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]
    assert keep_last(folders, 2) == folders[1:]
    assert names(tmp_path) == ["step_2", "step_3"]
    assert keep_last(folders, 1) == folders[2:]
    assert names(tmp_path) == ["step_3"]


def test_folder_without_a_marker_is_not_removed(tmp_path: Path) -> None:
    folders = [save(tmp_path, step) for step in (1, 2)]
    (folders[0] / MARKER_NAME).unlink()
    assert keep_last(folders, 1) == folders[1:]
    assert (folders[0] / WEIGHTS).exists()


def test_checkpoint_that_cannot_be_removed_stays_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [save(tmp_path, step) for step in (1, 2)]

    def refuse(_folder: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(atomic_folder, "remove", refuse)
    assert keep_last(folders, 1) == folders
    assert read(folders[0]).progress.step == 1


def test_checkpoint_is_removed_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [save(tmp_path, step) for step in (1, 2)]
    states = []

    def watch(path: Path, **_: Any) -> None:
        states.append((path.name.startswith("."), folders[0].exists(), names(path)))

    monkeypatch.setattr(shutil, "rmtree", watch)
    keep_last(folders, 1)
    assert states == [(True, False, [MARKER_NAME, CONFIG, WEIGHTS, "optimizer"])]


def test_older_checkpoint_is_replaced_even_if_damaged(tmp_path: Path) -> None:
    folder = save(tmp_path)
    cut(folder / WEIGHTS)
    (folder / "model-00009-of-00009.safetensors").write_text("stale")
    save(tmp_path)
    assert read(folder).progress.step == 3
    assert names(tmp_path) == ["step_3"]


def test_foreign_folder_is_refused_and_empty_one_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="step_3 exists, and Bridge did not write it"):
        save(tmp_path)
    assert names(folder) == ["thesis.txt"]
    (folder / "thesis.txt").unlink()
    assert is_checkpoint(save(tmp_path))


@pytest.mark.parametrize("limit_bytes", [3000, 100])  # in the middle of the weights; in the marker
@pytest.mark.parametrize("older", [True, False])
def test_full_disk_is_a_one_line_error_without_leftovers(limit_bytes: int, older: bool, tmp_path: Path) -> None:
    if older:
        save(tmp_path)

    def write(scratch: Path) -> None:
        fill(scratch, FILES if limit_bytes == 3000 else {CONFIG: b"{}"})

    with pytest.raises(UsageError) as caught, largest_file(limit_bytes):
        save(tmp_path, 3, write)
    assert caught.value.message.startswith(f"cannot write {tmp_path}/step_3: ")
    assert "File too large" in caught.value.message
    assert "\n" not in caught.value.message
    assert names(tmp_path) == (["step_3"] if older else [])
    assert newest(tmp_path, "step_")[0] == (SavedCheckpoint(tmp_path / "step_3", progress(3)) if older else None)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_while_saving_leaves_only_complete_checkpoints(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.checkpoints.killed_saver", str(tmp_path), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env={**os.environ})
    *after_kills, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(after_kills) == KILLS
    for report in [*after_kills, last]:
        assert report["whole"]
        assert report["faults"] == []
    steps = [report["step"] for report in after_kills]
    assert steps == sorted(steps)
    assert steps[-1] >= 3, "every kill came too early to show anything"
    assert any(report["hidden"] for report in after_kills), "no kill came during a write"
    assert (last["step"], last["hidden"]) == (steps[-1] + 1, [])
