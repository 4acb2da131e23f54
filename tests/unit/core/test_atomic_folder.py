"""Folders appear completely or not at all, and leftovers of killed writers are removed."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bridge.core import atomic_folder
from bridge.errors import ServerUnreachableError, UsageError

HALF_WRITTEN = """
import os, signal, sys
from pathlib import Path
from bridge.core import atomic_folder

with atomic_folder.write(Path(sys.argv[1]), replaceable=lambda _: True) as scratch:
    (scratch / "half").write_text("half")
    print(scratch, flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    input()
"""


def ours(folder: Path) -> bool:
    return (folder / "name").is_file()


def filled(folder: Path, fill: Callable[[Path], None], *, durable: bool = True) -> None:
    with atomic_folder.write(folder, replaceable=ours, durable=durable) as scratch:
        fill(scratch)


def write(folder: Path, text: str, *, durable: bool = True) -> None:
    def fill(scratch: Path) -> None:
        (scratch / "name").write_text(text)
        (scratch / "inner").mkdir()
        (scratch / "inner" / "deep").write_text(text)

    filled(folder, fill, durable=durable)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_only_when_complete(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with atomic_folder.write(folder, replaceable=ours) as scratch:
        assert scratch.parent == folder.parent
        assert scratch.name.startswith(".b.")
        (scratch / "name").write_text("new")
        assert not folder.exists()
    assert names(folder.parent) == ["b"]
    assert (folder / "name").read_text() == "new"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replaceable_folder_is_replaced_entirely(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", lambda _one, _other: False)
    folder = tmp_path / "folder"
    write(folder, "old")
    (folder / "stale").touch()
    with atomic_folder.write(folder, replaceable=ours) as scratch:
        (scratch / "name").write_text("new")
        assert (folder / "name").read_text() == "old"
    assert names(folder) == ["name"]
    assert (folder / "name").read_text() == "new"
    assert names(tmp_path) == ["folder"]


def test_interrupt_between_two_renames_loses_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "target", Path.rename
    target.mkdir()
    (target / "old").touch()

    def pressed(path: Path, to: Path) -> Path:
        renamed = rename(path, to)
        if path == target:
            signal.raise_signal(signal.SIGINT)
        return renamed

    monkeypatch.setattr(atomic_folder, "_exchange", lambda _one, _other: False)
    monkeypatch.setattr(Path, "rename", pressed)
    with pytest.raises(KeyboardInterrupt), atomic_folder.write(target, replaceable=lambda _: True) as scratch:
        (scratch / "new").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert [path.name for path in target.iterdir()] == ["new"]


def test_protected_folder_is_refused_before_writing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("folder", "file"):
        with pytest.raises(UsageError, match=f"{name} exists, and Bridge did not write it"):
            write(tmp_path / name, "new")
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == ["thesis.txt"]


def test_folder_created_while_writing_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def come(scratch: Path) -> None:
        (scratch / "name").touch()
        folder.mkdir()
        (folder / "thesis.txt").touch()

    with pytest.raises(UsageError, match="Bridge did not write it"):
        filled(folder, come)
    assert names(tmp_path) == ["folder"]
    assert names(folder) == ["thesis.txt"]


def test_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", "new")
    assert (tmp_path / "folder" / "name").read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError(), ServerUnreachableError("x", hint="y")])
def test_error_leaves_the_folder_unchanged_and_propagates(tmp_path: Path, error: BaseException) -> None:
    write(tmp_path / "folder", "old")

    def fail(scratch: Path) -> None:
        (scratch / "name").write_text("new")
        raise error

    with pytest.raises(type(error)) as caught:
        filled(tmp_path / "folder", fail)
    assert caught.value is error
    assert (tmp_path / "folder" / "name").read_text() == "old"
    assert names(tmp_path) == ["folder"]


def test_content_is_on_disk_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, synced, real_fsync = tmp_path / "folder", [], atomic_folder._fsync

    def fsync(path: Path) -> None:
        synced.append((path.name, folder.exists()))
        real_fsync(path)

    monkeypatch.setattr(atomic_folder, "_fsync", fsync)
    write(folder, "new")
    *files, scratch, parent = synced
    assert sorted(files) == [("deep", False), ("inner", False), ("name", False)]
    assert scratch[0].startswith(".folder.")
    assert not scratch[1]
    assert parent == (tmp_path.name, True)
    synced.clear()
    write(tmp_path / "fleeting", "new", durable=False)
    assert synced == []


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_every_file_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    def fill(scratch: Path) -> None:
        (scratch / "name").write_text("text")
        (scratch / "inner").mkdir(mode=0o700)
        save_file({"weight": torch.ones(2)}, scratch / "inner" / "weights.safetensors")
        save_file({"weight": torch.ones(2)}, scratch / "weights.safetensors")

    before = os.umask(umask)
    try:
        filled(tmp_path / "saved", fill)
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_text("text")
    finally:
        os.umask(before)
    for path in (tmp_path / "saved", *(tmp_path / "saved").rglob("*")):
        assert path.stat().st_mode == (tmp_path / ("folder" if path.is_dir() else "file")).stat().st_mode, path


def test_folders_are_swapped_in_one_system_call(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    if not atomic_folder._exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot exchange two names")
    assert (tmp_path / "one" / "name").read_text() == "other"
    assert (tmp_path / "other" / "name").read_text() == "one"
    with pytest.raises(FileNotFoundError):
        atomic_folder._exchange(tmp_path / "one", tmp_path / "absent")


def test_folder_is_removed_completely_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path / "folder", "old")
    atomic_folder.remove(tmp_path / "folder")
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        atomic_folder.remove(tmp_path / "folder")


def started(folder: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HALF_WRITTEN, str(folder), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def printed_path(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_next_writer_removes_only_a_killed_writers_files(tmp_path: Path) -> None:
    with started(tmp_path / "two", "wait") as live:
        writing = printed_path(live)  # this writer has already checked for leftovers
        with started(tmp_path / "one", "die") as killed:
            left = printed_path(killed)
        assert (left / "half").exists()
        write(tmp_path / "three", "new")
        assert not left.exists()
        assert (writing / "half").exists()
        live.communicate("\n", timeout=30)
    assert names(tmp_path) == ["three", "two"]
    assert (tmp_path / "two" / "half").exists()


@pytest.mark.parametrize(
    ("edit", "removed"),
    [
        (lambda w: w, False),  # this same process
        (lambda w: w | {"start_ticks": "1"}, True),  # a reused pid
        (lambda w: w | {"start_ticks": "1", "namespace": "1"}, False),  # a different container
        (lambda w: w | {"start_ticks": "1", "host": "elsewhere"[:8]}, False),  # a different host
        (lambda w: w | {"boot": "earlier0"}, True),  # before this host's last boot
        (lambda w: w | {"boot": "earlier0", "host": "elsewhere"[:8]}, False),
    ],
)
def test_leftovers_are_kept_unless_their_writer_has_ended(tmp_path: Path, edit: object, removed: bool) -> None:
    assert callable(edit)
    match = atomic_folder._SCRATCH_NAME.fullmatch(atomic_folder._scratch_path(tmp_path / "folder").name)
    assert match is not None
    writer = edit(match.groupdict())
    left = tmp_path / ".folder.{pid}-{start_ticks}-{namespace}-{boot}-{host}-00000000.scratch".format(**writer)
    left.mkdir()
    (left / "half").touch()
    write(tmp_path / "folder", "new")
    assert left.exists() != removed


def test_unrelated_hidden_folders_are_kept(tmp_path: Path) -> None:
    strangers = [".git", ".folder.scratch", ".folder.1-2-3.scratch", ".folder.abcd1234"]
    for name in strangers:
        (tmp_path / name).mkdir()
    write(tmp_path / "folder", "new")
    assert names(tmp_path) == sorted([*strangers, "folder"])


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_error_is_one_line_with_path_and_sizes(tmp_path: Path) -> None:
    write(tmp_path / "folder", "old")

    def fill(scratch: Path) -> None:
        (scratch / "name").write_bytes(bytes(4000))
        (scratch / "large").write_bytes(bytes(5000))

    with pytest.raises(UsageError) as caught, largest_file(4096):
        filled(tmp_path / "folder", fill)
    assert re.fullmatch(
        rf"cannot write {tmp_path}/folder: .*File too large.* \(after 8096 bytes, with \d+ bytes free\)",
        caught.value.message,
    )
    assert (tmp_path / "folder" / "name").read_text() == "old"
    assert names(tmp_path) == ["folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_missing_permission_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UsageError, match=r"cannot write .*Permission denied"):
        write(tmp_path / "locked" / "folder", "new")


def test_file_as_parent_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*Not a directory"):
        write(tmp_path / "file" / "folder", "new")
