"""The commands of several hosts: what they share, and how one that lost another starts again.

Not covered: how they meet (`test_rendezvous.py`), and whole runs (`tests/cpu/test_hosts.py`).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from bridge.checks import passed
from bridge.checks import verify as verified
from bridge.config import TrainConfig
from bridge.config.choices import HOSTS_KNOW
from bridge.core import claim, mark
from bridge.core.process import ProcessIdentity
from bridge.errors import RankError, UsageError
from bridge.server import discovery
from bridge.server.manifest import Manifest
from bridge.server.protocol import Holder, Lease, Status
from bridge_cli import again, ending, ranks, verify
from bridge_cli.rendezvous import LOOPBACK, Rendezvous
from bridge_cli.serve import free_port
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import as_json, serving

GIVEN = ("run", "--hosts", "2", "--rendezvous", "a:1", "--restarts=2", "--run-dir", "old", "--", "--enforce-eager")


class BecameError(Exception):
    """In place of a process that becomes another program."""


def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    seen = []

    def become(_: str, argv: list[str], environment: dict[str, str]) -> None:
        seen.append((argv, environment))
        raise BecameError

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "main()", *GIVEN])
    ending.GIVEN.set(GIVEN)
    return seen


def lose(restarts: int, place: Rendezvous | None, run_dir: Path, error: BaseException) -> None:
    with again.after_a_loss(TrainConfig.of(model_name="m", restarts=restarts), place) as resumed:
        resumed.run_dir = run_dir
        raise error


def test_a_lost_rank_starts_the_command_again_with_one_restart_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = became(monkeypatch)
    place = Rendezvous(2, LOOPBACK, free_port(LOOPBACK), b"known to the hosts")
    with pytest.raises(BecameError):
        lose(2, place, Path("runs/a"), RankError("host b ended", remedy=""))
    ((argv, environment),) = seen
    assert argv[:3] == [sys.executable, "-c", "main()"]
    more = ["--resume", "--restarts", "1", "--run-dir", "runs/a", "--", "--enforce-eager"]
    assert argv[3:] == ["run", "--hosts", "2", "--rendezvous", "a:1", *more]
    assert environment[HOSTS_KNOW] == "known to the hosts"
    assert "host b ended; starting again from the newest checkpoint, 1 restarts left" in capsys.readouterr().err
    Rendezvous(2, LOOPBACK, place._port, b"").close()  # the place is free again


@pytest.mark.parametrize(
    ("restarts", "error"),
    [(0, RankError("lost", remedy="")), (3, UsageError("wrong", remedy="")), (3, KeyboardInterrupt())],
)
def test_any_other_error_and_the_last_loss_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restarts: int, error: BaseException
) -> None:
    seen = became(monkeypatch)
    with pytest.raises(type(error)):
        lose(restarts, None, tmp_path, error)
    assert not seen


def test_another_host_has_a_run_directory_of_its_own_unless_it_sees_the_first_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "a"
    assert not ranks.join_run(folder).is_writer
    assert claim.is_claimed(folder)
    assert mark.kind_of(folder) == "run"
    monkeypatch.setattr(claim, "make", None)  # it is claimed
    assert ranks.join_run(folder).path == folder


@contextmanager
def trained_by(folder: Path, run: Path | None) -> Iterator[Manifest]:
    """Yield the manifest of a server that a run trains."""
    lease = None if run is None else Lease(holder=Holder.current(), run=str(run), since=0.0)
    status = Status(model="m", version=0, state="serving", server=ProcessIdentity.current(), lease=lease)
    with serving(lambda _: as_json(status.model_dump())) as server:
        yield toy_server.serve(tiny.llama(), folder).edited(url=server.url)


def test_the_servers_of_a_run_are_found_among_all_and_checked(
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
