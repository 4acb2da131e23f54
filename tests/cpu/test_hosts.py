"""`bridge run --hosts 2` on the CPU: two launchers in separate folders of one machine, each with a real vLLM.

Not covered: a network between the hosts (`tests/cli/test_rank_launcher.py`), several ranks on one host
(`tests/cpu/test_gpus.py`).
"""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bridge.core.address import free_port
from tests import scenarios
from tests.cpu.test_gpus import LIMIT_S, command, everything, left, metrics, started, wait_for_steps
from tests.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write(tiny.llama(), tmp_path / "model", std=0.06)


class Hosts:
    """Two hosts: folders with the same command."""

    def __init__(self, model: Path, folder: Path, *more: str) -> None:
        self.rendezvous = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.first, self.other = folder / "first", folder / "other"
        self._model, self._more = model, more

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        given = "--hosts", "2", "--rendezvous", self.rendezvous, *self._more
        return started(command(self._model, folder, *given, gpus=1), folder / "out")

    def start_both(self) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
        first = self.start(self.first)
        deadline = time.monotonic() + LIMIT_S
        while "waiting for the 2 hosts" not in (self.first / "out").read_text():
            assert first.poll() is None, (self.first / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return first, self.start(self.other)


def output_of(folder: Path) -> str:
    return (folder / "out").read_text()


def test_restarted_host_resumes_the_run(model: Path, tmp_path: Path) -> None:
    saved = "--save-path", str(tmp_path / "saved"), "--save-interval", "1"
    hosts = Hosts(model, tmp_path, "--training-steps", "40", "--restarts", "1", *saved)
    first, other = hosts.start_both()
    wait_for_steps(hosts.first, first, 2)
    tree = everything(other)
    other.kill()
    assert not left(tree)
    restarted = hosts.start(hosts.other)
    assert first.wait(LIMIT_S) == 0, output_of(hosts.first)[-4000:]
    assert restarted.wait(LIMIT_S) == 0, output_of(hosts.other)[-4000:]
    rows = metrics(hosts.first)
    assert [row["step"] for row in rows] == [*range(1, 41)]
    assert [row["weight_version"] for row in rows] == [*range(1, 41)]
    measured = [row["logprob_diff_mean"] for row in rows if row["updates"]]
    assert measured
    assert all(float(str(measure)) < scenarios.PARITY_LIMIT for measure in measured)
    assert re.search(
        r"lost another rank.*; restarting from the newest checkpoint, 0 restarts left", output_of(hosts.first)
    )
    assert "resuming after step" in output_of(hosts.first)
    assert "Traceback" not in output_of(hosts.first) + output_of(hosts.other)
    assert not metrics(hosts.other)


def test_killed_host_ends_the_other_host_in_one_line(model: Path, tmp_path: Path) -> None:
    hosts = Hosts(model, tmp_path, "--training-steps", "500")
    first, other = hosts.start_both()
    wait_for_steps(hosts.first, first, 2)
    trees = everything(first), everything(other)
    first.send_signal(signal.SIGKILL)
    assert other.wait(LIMIT_S) == 1
    assert not [process for tree in trees for process in left(tree)]
    assert re.search(r"^error: rank 1 of 2 (lost another rank|stopped)", output_of(hosts.other), re.MULTILINE)
    assert "Traceback" not in output_of(hosts.other)
