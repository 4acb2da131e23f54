"""A checkpoint reaches the hosts that do not have it, whole or not at all. A host is a folder here."""

import os
from pathlib import Path

import pytest

from bridge.errors import CheckpointError, UsageError
from bridge.ranks.world import Ranks
from bridge.run import checkpoint, delivery
from bridge.run.checkpoint import Found, Progress
from tests.unit.several_ranks import on_ranks

NAME = Path("saved/step_3")
CONTENT = {"model.safetensors": bytes(range(256)) * 40, "optimizer/state.json": b"{}", "empty": b""}


def saved(host: Path, content: dict[str, bytes] = CONTENT) -> Path:
    def fill(folder: Path) -> None:
        for name, data in content.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

    progress = Progress(step=3, weight_version=3, problems_drawn=4, run_dir=Path("/runs/a"))
    return checkpoint.save(host / NAME, fill, progress)


def delivered(ranks: Ranks, folder: Path, hosts: list[str], path: Path = NAME) -> Found:
    """Have the checkpoint delivered to this rank's host, and return what it reads there."""
    host = folder / hosts[ranks.rank]
    host.mkdir(exist_ok=True)
    os.chdir(host)
    delivery.CHUNK_BYTES = 1000
    delivery.deliver(path, ranks)
    return checkpoint.read(path)


def test_a_host_without_the_checkpoint_gets_it_and_one_with_it_is_left_alone(tmp_path: Path) -> None:
    first, other = saved(tmp_path / "a"), saved(tmp_path / "c")
    before = other.stat().st_ino
    for found in on_ranks(4, delivered, tmp_path, ["a", "b", "c", "b"]):
        assert (found.folder, found.progress.step) == (NAME, 3)
    assert other.stat().st_ino == before
    for name, data in CONTENT.items():
        assert (tmp_path / "b" / NAME / name).read_bytes() == data
    assert checkpoint.marker(tmp_path / "b" / NAME) == checkpoint.marker(first)
    assert [path.name for path in (tmp_path / "b" / "saved").iterdir()] == [NAME.name]


def test_another_checkpoint_in_its_place_is_refused_on_all(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    other = saved(tmp_path / "b", {"model.safetensors": b"other"})
    before = checkpoint.marker(other)
    for error in on_ranks(2, delivered, tmp_path, ["a", "b"]):
        assert isinstance(error, CheckpointError)
        assert "on the host of rank 1 is another checkpoint" in str(error)
    assert checkpoint.marker(other) == before


def test_a_disk_that_refuses_ends_all_ranks_in_the_same_line(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "saved").write_text("a file in the way")
    first, *others = on_ranks(3, delivered, tmp_path, ["a", "b", "c"])
    assert isinstance(first, UsageError)
    assert all(str(error) == str(first) for error in others)


def test_a_file_that_cannot_be_read_is_delivered_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "a")
    sizes = checkpoint.file_sizes(folder)
    monkeypatch.setattr(checkpoint, "file_sizes", lambda _: {"model.safetensors": 5000, "gone": 10, **sizes})
    for error in on_ranks(2, delivered, tmp_path, ["a", "b"]):
        assert isinstance(error, CheckpointError)
    assert not (tmp_path / "b" / NAME).exists()


def test_one_rank_delivers_nothing(tmp_path: Path) -> None:
    delivery.deliver(tmp_path / "nowhere", Ranks())
