"""The manifest's checks: none, whole, cut short, stale, foreign, of another GPU, of other versions."""

import json
from pathlib import Path

import pytest

from bridge.checks import manifest as checks
from bridge.server import manifest as manifests
from tests.unit.checks_sample import UUID, cuda_handle, dead_server, manifest

VERSIONS: dict[str, str | None] = {"bridge": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


@pytest.fixture(autouse=True)
def only_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the search path be the current folder and one empty default folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", tmp_path / "default")
    return here


def written(folder: Path, **changes: object) -> Path:
    path = folder / manifests.MANIFEST_NAME
    manifests.write(manifest(**changes), path)
    return path


def statuses(examined: checks.Examined) -> list[str]:
    return [check.status for check in examined.checks]


def test_no_manifest_is_no_fault_before_a_server_starts() -> None:
    examined = checks.examine(None)
    assert statuses(examined) == ["SKIP"]
    assert "no server yet" in examined.checks[0].found
    assert examined.path is None


def test_a_given_manifest_that_is_missing_fails(only_this_folder: Path) -> None:
    written(only_this_folder)
    assert statuses(checks.examine(only_this_folder / "other.json")) == ["FAIL"]


def test_a_live_servers_manifest_passes(only_this_folder: Path) -> None:
    path = written(only_this_folder)
    examined = checks.examine(None)
    assert statuses(examined) == ["PASS", "PASS"]
    assert examined.path == path
    assert examined.live == manifest()


@pytest.mark.parametrize(
    "text", ['{"model": "ti', "[]", '{"ipc_handles": {}}', '{"schema_version": 9}', '{"model": "x"}']
)
def test_a_manifest_that_is_cut_short_or_edited_fails(text: str, only_this_folder: Path) -> None:
    (only_this_folder / manifests.MANIFEST_NAME).write_text(text)
    examined = checks.examine(None)
    assert statuses(examined) == ["FAIL"]
    assert examined.live is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": dead_server()}, "is gone"),
        ({"boot_id": "another", "host": "elsewhere"}, "written on host elsewhere"),
        ({"server": dead_server().model_copy(update={"pid_namespace": "pid:[1]"})}, "pid namespace"),
    ],
)
def test_a_manifest_of_no_live_server_here_fails(
    changes: dict[str, object], words: str, only_this_folder: Path
) -> None:
    written(only_this_folder, **changes)
    examined = checks.examine(None)
    assert statuses(examined) == ["PASS", "FAIL"]
    assert words in examined.checks[1].found
    assert examined.live is None


def test_a_manifest_that_may_not_be_read_fails_in_one_line(
    only_this_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    written(only_this_folder)
    monkeypatch.setattr(manifests, "read", refuse)
    examined = checks.examine(None)
    assert statuses(examined) == ["FAIL"]
    assert "Permission denied" in examined.checks[0].found


@pytest.mark.parametrize(("visible", "status"), [([UUID, "GPU-2"], "PASS"), (["GPU-2"], "FAIL"), ([], "FAIL")])
def test_the_servers_gpu_has_to_be_visible(visible: list[str], status: str) -> None:
    on_gpu = manifest(backend="cuda_ipc", gpu_uuid=UUID, ipc_handles={"w": cuda_handle()})
    check = checks.same_gpu(on_gpu, visible)
    assert check.status == status
    assert status == "PASS" or f"CUDA_VISIBLE_DEVICES={UUID}" in str(check.remedy)


def test_weights_in_main_memory_need_no_gpu() -> None:
    assert checks.same_gpu(manifest(), []).status == "PASS"


def test_another_torch_than_the_servers_is_warned_of() -> None:
    assert checks.same_versions(manifest(), VERSIONS).status == "PASS"
    check = checks.same_versions(manifest(), VERSIONS | {"torch": "2.11.0"})
    assert check.status == "WARN"
    assert "torch 2.11.0" in check.found


def test_a_stale_manifest_elsewhere_is_warned_of(tmp_path: Path, only_this_folder: Path) -> None:
    used = written(only_this_folder)
    assert checks.others(used) == []
    stale = written(tmp_path / "default", server=dead_server())
    (check,) = checks.others(used)
    assert check.status == "WARN"
    assert check.remedy == f"rm {stale}"


def test_a_second_live_server_is_warned_of(tmp_path: Path, only_this_folder: Path) -> None:
    used = written(only_this_folder)
    written(tmp_path / "default")
    (check,) = checks.others(used)
    assert check.status == "WARN"
    assert "another live server" in check.found


def test_a_foreign_file_elsewhere_is_warned_of(tmp_path: Path, only_this_folder: Path) -> None:
    used = written(only_this_folder)
    folder = tmp_path / "default"
    folder.mkdir()
    (folder / manifests.MANIFEST_NAME).write_text(json.dumps({"ipc_handles": {}}))
    assert [check.status for check in checks.others(used)] == ["WARN"]
