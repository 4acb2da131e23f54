"""What a run logs is printed for people and kept in its directory."""

from pathlib import Path

import pytest

from bridge.checkpoints.run_directory import RunDirectory
from bridge.ranks.world import ALONE
from bridge_cli import console
from bridge_cli.launch import ReplicaServer, train_on
from tests.unit.trainer_runs import Letters, runner


def test_log_lines_of_a_run_are_printed_and_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--stop-at weight_version>=4: reached after step 1"
    with runner(tmp_path, monkeypatch)() as fake, console.printing_logs():
        run = RunDirectory.create(tmp_path / "run", environment="letters")
        config = fake.config(stop_at="weight_version>=4")
        train_on(ReplicaServer({}, None), config, Letters(), run, resume=None, ranks=ALONE, as_json=False)
    out, err = capsys.readouterr()
    assert out == ""
    printed = err.splitlines()
    assert printed.count(line) == 1
    assert [shown.split(" ")[0] for shown in printed[-4:]] == ["run", "step", "--stop-at", "done:"]
    assert [event.partition(" ")[2] for event in run.events.read_text().splitlines()].count(line) == 1
