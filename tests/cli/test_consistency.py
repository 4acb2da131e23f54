"""What several hosts must agree on and share, and `bridge verify` of a run's servers.

Not covered: how they meet (`test_rank_launcher.py`), and whole runs (`tests/cpu/test_hosts.py`).
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints import checkpoint
from bridge.checks import one_copy_proof as verified
from bridge.checks import passed
from bridge.config import ServeConfig, TrainConfig
from bridge.core import folder_claim, folder_mark
from bridge.core.process import ProcessIdentity
from bridge.errors import UsageError
from bridge.ranks.world import Ranks
from bridge.rollouts.training_rows import Tokens, TrainingRow
from bridge.server import discovery
from bridge.server.manifest import Manifest
from bridge.server.protocol import Holder, Lease, Status
from bridge_cli import consistency, rank_process, verify
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import as_json, serving
from tests.unit.several_ranks import on_ranks


def facts(folder: Path, **choices: Any) -> consistency.Facts:
    serve = ServeConfig(model=str(folder), port=choices.pop("port", 9001))
    flags = choices.pop("flags", [])
    return consistency.facts((TrainConfig.of(model_name=str(folder), **choices), serve), flags)


def test_first_difference_between_hosts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "task.py").write_text("class A: ...")
    task = {"environment": f"{tmp_path / 'task.py'}:A"}
    files = {"reward": f"math, {tmp_path / 'mine.py'}:brief=0.5", "eval_data": str(tmp_path / "held_out.jsonl")}
    files["loss"] = f"{tmp_path / 'own_loss.py'}:clipped"
    files |= {"warm_up_data": str(tmp_path / "rows.jsonl"), "warm_up_steps": "2"}
    for name in ("mine.py", "held_out.jsonl", "own_loss.py", "rows.jsonl"):
        (tmp_path / name).write_text("one")
        before = facts(tmp_path, **task, **files)
        (tmp_path / name).write_text("other")
        assert f"the file {tmp_path / name}" in str(consistency.difference(before, facts(tmp_path, **task, **files)))
    ours = facts(tmp_path, **task)
    own = {"run_dir": Path("x"), "resume": True, "restarts": 2, "port": 9002}
    assert consistency.difference(ours, facts(tmp_path, **own, **task)) is None
    assert "differ in --lr: None on" in str(consistency.difference(ours, facts(tmp_path, lr=1e-5, **task)))
    assert "vLLM's flags" in str(consistency.difference(ours, facts(tmp_path, flags=["--enforce-eager"], **task)))
    assert "secret" not in str(facts(tmp_path, flags=["--api-key", "secret"], **task))
    (tmp_path / "task.py").write_text("class A: pass")
    assert f"the file {tmp_path / 'task.py'}" in str(consistency.difference(ours, facts(tmp_path, **task)))
    (tmp_path / "model.safetensors").write_text("other weights")
    assert f"the files of {tmp_path}" in str(consistency.difference(ours, facts(tmp_path, **task)))
    reference = tmp_path / "reference"
    reference.mkdir()
    frozen = {"reference_model": str(reference), "kl_coef": 0.1, **task}
    ours = facts(tmp_path, **frozen)
    (reference / "model.safetensors").write_text("frozen weights")
    assert f"the files of {reference}" in str(consistency.difference(ours, facts(tmp_path, **frozen)))
    monkeypatch.setattr("bridge.__version__", "0.0.1")
    assert "the version of Bridge" in str(consistency.difference(ours, facts(tmp_path, **task)))


def refused_rows(ranks: Ranks, rows: list[list[TrainingRow]]) -> str:
    try:
        consistency.check_rows(ranks, rows[ranks.rank])
    except UsageError as error:
        return error.message
    return ""


def test_ranks_with_different_rows_are_refused() -> None:
    one, other = (TrainingRow.of(Tokens([1, token], [False, True])) for token in (2, 3))
    assert on_ranks(2, refused_rows, [[one, other], [one, other]]) == ["", ""]
    for message in on_ranks(2, refused_rows, [[one, other], [other, one]]):
        assert message.startswith("the rows to train on differ: 2:")


def differing(ranks: Ranks, shared: Path) -> list[str]:
    """Compare hosts with different choices and different disks; return the errors."""
    errors = []
    with pytest.MonkeyPatch.context() as patched:
        own = {consistency.HOST: f"host {ranks.rank}", "--gpus": str(ranks.rank)}
        patched.setattr(consistency, "facts", lambda *_: own)
        patched.setattr(socket, "gethostname", lambda: f"host {ranks.rank}")
        folder = shared / str(ranks.rank)
        acts: list[Callable[[], None]] = [
            lambda: consistency.check(ranks, (), ()),
            lambda: consistency.check_shared(ranks, folder),
            lambda: checkpoint.check_on_all_hosts(folder, ranks),
        ]
        for act in acts:
            with pytest.raises(UsageError) as caught:
                act()
            errors.append(caught.value.message)
        consistency.check_shared(ranks, shared)
        checkpoint.check_on_all_hosts(shared, ranks)
    return errors


def test_differing_hosts_report_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for folder in (tmp_path, tmp_path / "0"):
        (folder / checkpoint.MARKER_NAME).write_text("{}")
    for choice, folder, saved in on_ranks(2, differing, tmp_path):
        assert choice == "the hosts differ in --gpus: 0 on host 0, 1 on host 1"
        assert folder.startswith("host 1 does not see ")
        assert saved.startswith("host 1 has no checkpoint in ")
    assert not [*tmp_path.rglob(".seen-*")]


def test_other_host_creates_a_run_directory_unless_it_is_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "a"
    assert not rank_process._run_directory_of_host(folder).is_writer
    assert folder_claim.is_claimed(folder)
    assert folder_mark.kind_of(folder) == "run"
    monkeypatch.setattr(folder_claim, "make", None)  # the folder is already claimed
    assert rank_process._run_directory_of_host(folder).path == folder


@contextmanager
def trained_by(folder: Path, run: Path | None) -> Iterator[Manifest]:
    """Yield the manifest of a server that a run trains."""
    lease = None if run is None else Lease(holder=Holder.current(), run=str(run))
    status = Status(model="m", version=0, state="serving", server=ProcessIdentity.current(), lease=lease)
    with serving(lambda _: as_json(status.model_dump())) as server:
        yield toy_server.serve(tiny.llama(), folder).edited(url=server.url)


def test_verify_finds_and_checks_the_servers_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with (
        trained_by(tmp_path / "a", run) as one,
        trained_by(tmp_path / "b", tmp_path / "another") as foreign,
        trained_by(tmp_path / "c", run) as other,
        trained_by(tmp_path / "d", None) as free,
    ):
        running = dict(zip(map(Path, "abcd"), (one, foreign, other, free), strict=True))
        monkeypatch.setattr(discovery, "running", lambda: running)
        assert verify.servers_of(run) == [Path("a"), Path("c")]
        with pytest.raises(UsageError, match="no server on this host is trained by a run"):
            verify.servers_of(tmp_path)
    equal = verified.Served(1, {"a": "1"})
    monkeypatch.setattr(verified, "replicas", partial(verified.replicas, look=lambda _: equal))
    monkeypatch.setattr(verify, "proof", lambda path, *, as_json: [passed(str(path), "", "")])
    assert [check.name for check in verify.all_proofs([Path("a"), Path("c")], as_json=False)] == ["a", "c", "replicas"]
    assert "2 servers have equal checksums of 1 tensors, version 1" in capsys.readouterr().err
    assert [check.name for check in verify.all_proofs([Path("a")], as_json=False)] == ["a"]
