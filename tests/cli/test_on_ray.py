"""`bridge run --ray` on a cluster of two nodes on this machine: what runs on which node, with which command.

Skipped without Ray, which is an optional extra. Not covered: GPUs, and whole runs.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import RankError, UsageError
from bridge_cli import command_line, main, on_ray

HOST = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
me = {"argv": sys.argv[2:], "cwd": os.getcwd(), "actor": os.getppid()}
number = len(list(folder.glob("*.*")))
(folder / f"{os.getpid()}.json").write_text(json.dumps(me))
while len(list(folder.glob("*.*"))) < 2:
    time.sleep(0.05)
"""
ENDS = "sys.exit(0)"
FAILS = "sys.exit(2)"
IS_LOST = """
if "--resume" not in sys.argv and number == 0:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
for old in folder.glob("*.json"):
    if "--resume" not in json.loads(old.read_text())["argv"]:
        old.rename(old.with_suffix(".before"))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is an optional extra, and is not installed")
    started = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    started.add_node(num_cpus=2)
    yield started
    started.shutdown()


@pytest.fixture
def near(cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def placed(folder: Path, then: str, *, restarts: int = 0) -> int:
    given = ("--restarts", str(restarts)) if restarts else ()
    command_line.ARGUMENTS.set(("run", "--ray", "--hosts", "2", "--model", "m", *given, "--", "--enforce-eager"))
    return on_ray.run(2, restarts, 1, "cpu", program=[sys.executable, "-c", HOST + then, str(folder)])


def hosts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def test_each_node_gets_the_same_command_with_a_rendezvous(near: Path) -> None:
    assert placed(near, ENDS) == 0
    one, other = hosts(near)
    assert one["argv"] == other["argv"]
    *own, rendezvous = one["argv"][:-2]
    assert own == ["run", "--hosts", "2", "--model", "m", "--restarts", "0", "--rendezvous"]
    assert int(rendezvous.rpartition(":")[2]) > 0
    assert one["argv"][-2:] == ["--", "--enforce-eager"]
    assert one["cwd"] == other["cwd"] == str(near)
    assert one["actor"] != other["actor"]


def test_exit_code_comes_from_the_hosts(near: Path) -> None:
    assert placed(near, FAILS) == 2


def test_lost_node_restarts_from_the_newest_checkpoint(near: Path) -> None:
    assert placed(near, IS_LOST, restarts=1) == 0
    assert all("--resume" in host["argv"] for host in hosts(near))


def test_lost_node_ends_a_run_without_restarts_in_one_line(near: Path) -> None:
    with pytest.raises(RankError, match="a host was lost"):
        placed(near, IS_LOST)


def test_too_few_nodes_are_reported_in_one_line(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "LIMIT_S", 2.0)
    with pytest.raises(UsageError, match=r"did not free 3 nodes with .* within 2 s"):
        on_ray.run(3, 0, 1, "cpu")


def test_rendezvous_with_ray_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.answer(["run", "--model", "m", "--hosts", "2", "--rendezvous", "a:1", "--ray"]) != 0
    assert "--ray chooses the hosts" in capsys.readouterr().err


def test_missing_ray_hint_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="--ray: Ray is not installed here"):
        on_ray.run(2, 0, 1, "cpu")
