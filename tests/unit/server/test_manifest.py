"""The manifest: where it is searched for, that bad ones are refused in one line, and that it is written atomically."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.core.process import ProcessIdentity
from bridge.errors import ManifestError
from bridge.server import manifest as manifests
from bridge.server.manifest import (
    MANIFEST_NAME,
    Manifest,
    Shard,
    View,
    find,
    load,
    read,
    remove_own,
    resolve_path,
    write,
)
from tests.unit.checks_sample import cuda_handle, dead_server, manifest

DOCUMENTED = {
    "model", "tp_degree", "dp_shard_degree", "param_names", "param_mappings", "ipc_handles", "shared_weights_enabled",
    "single_copy_enabled", "num_params",
}  # fmt: skip
DOCUMENTED_PER_HANDLE = {
    "device_index", "ipc_handle_b64", "storage_size", "storage_offset", "ref_counter_handle_b64", "ref_counter_offset",
    "event_handle_b64", "event_sync_required", "shape", "dtype",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a valid manifest whose server is this process."""
    write(manifest(), tmp_path / MANIFEST_NAME)
    return tmp_path / MANIFEST_NAME


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ...]:
    """Redirect every folder of the search path to the test's folder."""
    folders = tuple(tmp_path / name for name in ("logdir", "here", "default"))
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("LOGDIR", str(folders[0]))
    monkeypatch.chdir(folders[1])
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", folders[2])
    return tuple(folder / MANIFEST_NAME for folder in folders)


def refusal(action: Callable[[], object]) -> str:
    """Run `action`, which must raise a one-line ManifestError, and return its text."""
    with pytest.raises(ManifestError) as caught:
        action()
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.hint
    return caught.value.message


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_written_manifest_reads_back_equal(path: Path) -> None:
    assert load(path) == manifest()


def test_documented_fields_are_present(tmp_path: Path) -> None:
    write(manifest(ipc_handles={"w": cuda_handle()}), tmp_path / "m")
    document = json.loads((tmp_path / "m").read_text())
    assert document.keys() >= DOCUMENTED
    assert document["ipc_handles"]["w"].keys() >= DOCUMENTED_PER_HANDLE


def test_token_is_not_printed() -> None:
    assert "secret" not in repr(manifest()) + str(manifest())


def test_first_manifest_on_the_search_path_wins(paths: tuple[Path, ...]) -> None:
    for path in reversed(paths):
        write(manifest(), path)
        assert find() == path


def test_empty_logdir_is_ignored(paths: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGDIR", "")
    assert manifests.search_path() == paths[1:]


def test_missing_manifest_error_lists_all_searched_folders(paths: tuple[Path, ...]) -> None:
    message = refusal(load)
    assert all(str(path.parent) in message for path in paths)


def test_missing_manifest_at_a_given_path_is_an_error(paths: tuple[Path, ...]) -> None:
    for path in paths:
        write(manifest(), path)
    assert "/nowhere/m.json" in refusal(lambda: load(Path("/nowhere/m.json")))


def test_folder_path_resolves_to_the_manifest_in_it(path: Path, tmp_path: Path) -> None:
    assert find(tmp_path) == path
    assert resolve_path(tmp_path) == path
    path.unlink()
    assert str(path) in refusal(lambda: load(tmp_path))


def test_default_manifest_path_is_searched_first(paths: tuple[Path, ...]) -> None:
    assert resolve_path(None) == paths[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(path: Path) -> None:
    os.chown(path, 12345, 12345)
    message = refusal(lambda: load(path))
    assert "12345" in message
    assert str(os.getuid()) in message


SWAPPER = """
import os, sys
new, path, *files = sys.argv[1:]
while True:
    for file in files:
        os.link(file, new)
        os.rename(new, path)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_manifest_cannot_be_swapped_after_its_check(path: Path) -> None:
    """Another user repeatedly swaps our manifest with theirs while we read it."""
    ours, theirs, new = (path.with_name(name) for name in ("ours", "theirs", "new"))
    ours.write_bytes(path.read_bytes())
    theirs.write_text(path.read_text().replace('"model": "tiny"', '"model": "evil"'))
    for file in (ours, theirs):
        file.chmod(0o600)
    os.chown(theirs, 12345, 12345)
    swapper = subprocess.Popen([sys.executable, "-c", SWAPPER, new, path, ours, theirs])
    read_models, num_refused = set(), 0
    try:
        while num_refused < 500:
            try:
                read_models.add(read(path).model)
            except ManifestError as error:
                assert "12345" in error.message  # noqa: PT017 - either error may occur
                num_refused += 1
    finally:
        swapper.kill()
        swapper.wait()
    assert read_models == {"tiny"}


def test_symbolic_link_is_refused_with_its_target(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    with pytest.raises(ManifestError, match="is a symbolic link") as refused:
        load(link)
    assert refused.value.hint == f"--vllm-config-path {path}"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_file_writable_by_others_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert f"mode {mode:04o}" in refusal(lambda: load(path))


def test_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "not a regular file" in refusal(lambda: read(tmp_path / "pipe"))


@pytest.mark.parametrize("text", ["# My thesis", '{"model_type": "llama"}'])
def test_server_never_overwrites_other_files(path: Path, text: str) -> None:
    path.write_text(text)
    assert "is not a Bridge manifest" in refusal(lambda: write(manifest(), path))
    assert path.read_text() == text


def test_inaccessible_folder_is_refused(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300)
    assert "too long" in refusal(lambda: load(too_long))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_manifest_of_another_user_on_the_path_is_refused(paths: tuple[Path, ...]) -> None:
    paths[0].parent.chmod(0o700)
    os.seteuid(12345)
    try:
        message = refusal(load)
    finally:
        os.seteuid(0)
    assert str(paths[0]) in message
    assert "denied" in message


@pytest.mark.parametrize("compact", [False, True])
def test_truncated_manifest_is_refused(path: Path, compact: bool) -> None:
    whole = path.read_text()
    whole = json.dumps(json.loads(whole)) if compact else whole
    lengths = [*range(0, len(whole) - 1, 50), len(whole) - 1]
    assert len(lengths) > 15
    for length in lengths:
        path.write_text(whole[:length])
        assert str(path) in refusal(lambda: load(path))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "3", "{}", "[" * 100_000, '{"rank": ' + "9" * 5000 + "}", '{"model": "\\ud800"}', "\x00"],
)
def test_invalid_manifest_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    refusal(lambda: load(path))


def test_binary_content_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00{")
    refusal(lambda: load(path))


VIEW = {"parameter": "w", "offset": 0, "shape": [4], "stride": [1]}
HANDLE = {
    "kind": "shared_memory", "path": "/nowhere", "storage_size": 16, "storage_offset": 0, "tensor_offset": 0,
    "shape": [4], "stride": [1], "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"extra": 1}, "extra"),
        ({"tp_degree": "two"}, "tp_degree"),
        ({"tp_degree": 0}, "tp_degree"),
        ({"model": None}, "model"),
        ({"server": {"pid": 1}}, "server.start_ticks"),
        ({"backend": "carrier_pigeon"}, "backend"),
        ({"dtype": "float31"}, "dtype"),
        ({"dtype": "int32"}, "dtype"),
        ({"dtype": "nn"}, "dtype"),
        ({"ipc_handles": {"w": {**HANDLE, "dtype": "nn"}}}, "ipc_handles.w.shared_memory.dtype"),
        ({"param_mappings": {"w": {**VIEW, "offset": -1}}}, "param_mappings.w.offset"),
        ({"param_mappings": {"w": {**VIEW, "shape": "4"}}}, "param_mappings.w.shape"),
        ({"padding": {"w": -1}}, "padding.w"),
        ({"ipc_handles": {"w": {**HANDLE, "tensor_offset": -1}}}, "ipc_handles.w"),
        ({"ipc_handles": {"w": {**HANDLE, "storage_size": 0}}}, "ipc_handles.w"),
        ({"ipc_handles": {"w": {**HANDLE, "kind": "tuple"}}}, "ipc_handles.w"),
        ({"ipc_handles": {"w": {**HANDLE, "path": "/no\x00path"}}}, "ipc_handles.w"),
        ({"ipc_handles": {}}, "ipc_handles"),
        ({"schema_version": 1}, "schema version 1, expected 2"),
        ({"schema_version": "one"}, "schema version one"),
        ({"url": "127.0.0.1:9001"}, "url"),
        ({"url": "http://127.0.0.1:port"}, "url"),
        ({"url": "http://a..b:9001"}, "url"),
        ({"url": f"http://{'x' * 64}:9001"}, "url"),
        ({"url": "http://127.0.0.1:99999"}, "url"),
        ({"url": "http://[::1:9001"}, "url"),
        ({"token": "two\nlines"}, "token"),
        ({"token": "schl\u00fcssel"}, "token"),
    ],
)
def test_edited_manifest_is_refused_with_the_field_name(path: Path, changes: dict[str, Any], named: str) -> None:
    edit(path, **changes)
    assert named in refusal(lambda: load(path))


def test_missing_field_is_named(path: Path) -> None:
    document = json.loads(path.read_text())
    for field in document:
        if field in {"schema_version", "lora_slots", "model_class", "max_model_len", "quantized"}:
            continue
        path.write_text(json.dumps({key: value for key, value in document.items() if key != field}))
        assert field in refusal(lambda: load(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boot_id": "another", "host": "elsewhere"}, "written on host elsewhere"),
        ({"boot_id": "another", "host": socket.gethostname()}, "before this host's last boot"),
        (
            {"server": ProcessIdentity.current().model_copy(update={"pid_namespace": "pid:[1]"}).model_dump()},
            "a different PID namespace",
        ),
        ({"server": ProcessIdentity.current().model_copy(update={"pid": 2**22 + 1}).model_dump()}, "has exited"),
        ({"server": dead_server().model_dump()}, "has exited"),
    ],
)
def test_manifest_of_a_server_not_alive_on_this_host_is_refused(
    path: Path, changes: dict[str, Any], words: str
) -> None:
    edit(path, **changes)
    assert read(path).model == "tiny"
    message = refusal(lambda: load(path))
    assert words in message
    assert str(path) in message


def test_manifest_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        write(manifest(), tmp_path / "new" / "m.json")
    finally:
        os.umask(previous)
    assert (tmp_path / "new" / "m.json").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["m.json"]


def test_failed_manifest_write_keeps_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(_temporary: Path, _target: Path) -> None:
        assert path.read_bytes() == before
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left" in refusal(lambda: write(manifest(model="other"), path))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_manifest_is_written_atomically(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[str] = []
    original = Path.replace

    def look(self: Path, target: Path) -> Path:
        models.append(load(path).model)
        return original(self, target)

    monkeypatch.setattr(Path, "replace", look)
    write(manifest(model="second"), path)
    assert models == ["tiny"]
    assert load(path).model == "second"


def test_uncreatable_folder_is_refused_in_one_line(path: Path) -> None:
    refusal(lambda: write(manifest(), path / "inside a file" / "m.json"))


def test_server_removes_its_own_manifest(path: Path) -> None:
    remove_own(path, ProcessIdentity.current())
    assert not path.exists()
    remove_own(path, ProcessIdentity.current())


@pytest.mark.parametrize("text", [None, "{", ""])
def test_server_never_removes_other_manifests(path: Path, text: str | None) -> None:
    if text is not None:
        path.write_text(text)
    before = path.read_bytes()
    remove_own(path, dead_server())
    assert path.read_bytes() == before


def two_ranks() -> Manifest:
    """A server with two ranks on two GPUs that hold different parameters."""
    view = View(parameter="v", offset=0, shape=(4,), stride=(1,))
    second = Shard(rank=1, gpu_uuid="GPU-2", ipc_handles={"v": cuda_handle()}, param_mappings={"v": view}, padding={})
    return manifest().model_copy(update={"gpu_uuid": "GPU-1", "other_shards": (second,), "tp_degree": 2})


def test_shards_of_several_ranks_read_back_equal(tmp_path: Path) -> None:
    write(two_ranks(), tmp_path / "m")
    document = json.loads((tmp_path / "m").read_text())
    (other,) = document["other_shards"]
    assert (document["gpu_uuid"], other["gpu_uuid"]) == ("GPU-1", "GPU-2")
    assert document.keys() == Manifest.model_fields.keys()
    assert other.keys() == Shard.model_fields.keys()
    loaded = read(tmp_path / "m")
    assert loaded == two_ranks()
    assert [loaded.shards[rank].rank for rank in range(2)] == [0, 1]


def test_fault_in_a_later_shard_is_reported(tmp_path: Path) -> None:
    write(two_ranks(), tmp_path / "m")
    document = json.loads((tmp_path / "m").read_text())
    document["other_shards"][0]["rank"] = "second"
    edit(tmp_path / "m", other_shards=document["other_shards"])
    assert "other_shards.0.rank" in refusal(lambda: read(tmp_path / "m"))
