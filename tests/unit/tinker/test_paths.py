"""Paths of Tinker's as folders: no name leaves the folder of checkpoints."""

from pathlib import Path

import pytest

from bridge.errors import UsageError
from bridge.tinker.paths import Checkpoints, SavedPath

RUN = "0b8f3a52-52a2-4d19-8f43-9a6d6b1c2f11:train:0"


def test_a_path_is_a_folder_below_its_run(tmp_path: Path) -> None:
    saved = SavedPath.parse(f"tinker://{RUN}/weights/step-3")
    assert str(saved) == f"tinker://{RUN}/weights/step-3"
    assert Checkpoints(tmp_path).place(saved) == tmp_path / RUN.replace(":", "_") / "weights" / "step-3"


@pytest.mark.parametrize(
    "path",
    [
        f"tinker://{RUN}/weights/..", f"tinker://{RUN}/weights/../../x", f"tinker://{RUN}/weights/a/b",
        "tinker://../weights/a", f"tinker://{RUN}/other/a", f"tinker://{RUN}/weights/", f"{RUN}/weights/a",
        f"tinker://{RUN}/weights/a\0b", f"tinker://{RUN}x/weights/a", f"tinker://{RUN}/weights/.hidden", "",
        f"tinker://{RUN}/weights/" + "a" * 200,
    ],
)  # fmt: skip
def test_any_other_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="no path of a checkpoint"):
        SavedPath.parse(path)


def test_a_name_is_written_once_unless_it_may_be_replaced(tmp_path: Path) -> None:
    known, saved = Checkpoints(tmp_path), SavedPath(RUN, "weights", "a")
    with pytest.raises(UsageError, match="does not exist"):
        known.found(saved)
    folder = known.to_write(saved, overwrite=False)
    folder.mkdir()
    (folder / "file").write_text("x")
    assert known.found(saved) == folder
    with pytest.raises(UsageError, match="exists already"):
        known.to_write(saved, overwrite=False)
    assert not known.to_write(saved, overwrite=True).exists()


def test_runs_and_checkpoints_are_listed_and_deleted(tmp_path: Path) -> None:
    known = Checkpoints(tmp_path)
    assert known.runs() == []
    known.describe(RUN, {"rank": 8, "base_model": "m", "user_metadata": {}})
    known.to_write(SavedPath(RUN, "sampler_weights", "b"), overwrite=False).mkdir()
    known.to_write(SavedPath(RUN, "weights", "a"), overwrite=False).mkdir()
    (tmp_path / "other").mkdir()
    assert known.runs() == [RUN]
    assert known.about(RUN)["rank"] == 8
    listed = [*known.of_run(RUN)]
    assert [one["tinker_path"] for one in listed] == [
        f"tinker://{RUN}/weights/a", f"tinker://{RUN}/sampler_weights/b",
    ]  # fmt: skip
    assert [one["checkpoint_type"] for one in listed] == ["training", "sampler"]
    known.delete(SavedPath(RUN, "weights", "a"))
    assert len([*known.of_run(RUN)]) == 1
    with pytest.raises(UsageError, match="no training run"):
        known.about("../etc")
