"""How the launcher starts, restarts and ends ranks, with small programs in place of trainers.

Not covered: whole runs (`tests/cpu/test_gpus.py`, `tests/cpu/test_hosts.py`), NCCL.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bridge.errors import UsageError
from bridge_cli import rank_launcher
from bridge_cli.rank_gpus import RankLayout
from bridge_cli.rank_process import OwnRank
from tests.forked import Command

pytestmark = pytest.mark.xdist_group("commands")  # one worker forks them from a process that has imported everything
LIMIT_S = 120.0
LAUNCHER = """
import json, sys
from bridge.errors import BridgeError
from bridge_cli import command_line, console, rank_launcher, signals
from bridge_cli.rank_gpus import RankLayout

rank_launcher.MAIN, choices, count, folder = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
command_line.ARGUMENTS.set(("run", "--note", folder))
signals.prepare()
try:
    sys.exit(rank_launcher.launch(RankLayout(1, "cpu", [None] * count, **choices)))
except BridgeError as error:
    console.error(error.message, error.hint)
    sys.exit(error.exit_code)
"""
RANK = """
import os, signal, socket, sys, time
from pathlib import Path
from bridge.errors import BridgeError, RankError, UsageError
from bridge_cli import console, main, rank_process

def answer(arguments):
    own_rank = rank_process.OWN_RANK.get()
    folder = Path(arguments[arguments.index("--note") + 1])
    resumes = "--resume" in arguments
    try:
        with rank_process.joined() as world:
            world.run_on_rank_zero(lambda: own_rank.keep(folder))
            act(world, folder, resumes, arguments)
    except BridgeError as error:
        console.error(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        console.note("interrupted")
        return 130
    return 0

def hang(world, folder):
    (folder / f"{world.rank}.waits").touch()
    while True:
        time.sleep(0.05)
        world.check_abort()

def act(world, folder, resumes, arguments):
BODY
main.answer = answer
rank_process.main()
"""


def rank(body: str) -> str:
    """Return the program of a rank that runs `body`."""
    return RANK.replace("BODY", "\n".join(f"    {line}" for line in body.strip().splitlines()))


WRITES = """
variables = [name for name in os.environ if "RANK" in name or "ELASTIC" in name or "MASTER" in name]
gathered = world.all_gather_object((world.rank, socket.gethostname()))
(folder / f"{world.rank}.out").write_text(repr([gathered, variables, resumes]))
print(f"rank {world.rank} was here", flush=True)
"""
DISAGREES = """
def fail():
    if world.rank == 1:
        raise UsageError("no room", hint="make some")
world.run_on_all(fail)
"""
IS_KILLED = """
if world.rank == 1 and not resumes:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    world.barrier()
    world.barrier()
except RankError:
    time.sleep(1)
    (folder / "saved").touch()
    raise
(folder / f"{world.rank}.resumed").write_text(" ".join(arguments))
"""
WAITS = """
world.run_on_all(lambda: hang(world, folder))
"""
WAITS_ALONE = """
if world.rank == 1:
    (folder / "1.waits").touch()
    time.sleep(1000)
world.run_on_all(lambda: hang(world, folder))
"""
SAVES = """
def wait():
    (folder / f"{world.rank}.waits").touch()
    time.sleep(1000)  # for its own signal, so that none comes later, while it saves

try:
    world.run_on_all(wait)
except KeyboardInterrupt:
    (folder / f"{world.rank}.saving").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (folder / f"{world.rank}.stopped").touch()
    raise
"""


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    """Kill the launchers of a failed test; their ranks end with them."""
    yield
    while RUNNING:
        process = RUNNING.pop()
        process.kill()
        process.wait()


RUNNING: list[Command | subprocess.Popen[bytes]] = []


class Launched:
    """A launcher in a separate process: a fork, or a new one for a command that starts it `inside` a namespace."""

    def __init__(self, folder: Path, body: str, *, count: int = 2, inside: Sequence[str] = (), **choices: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        arguments = [rank(body), json.dumps(choices), str(count), str(folder)]
        self.process: Command | subprocess.Popen[bytes]
        if inside:
            argv = [*inside, sys.executable, "-c", LAUNCHER, *arguments]
            with (folder / "launcher.out").open("ab") as output:
                self.process = subprocess.Popen(argv, stdout=output, stderr=output, env=dict(os.environ), cwd=folder)
        else:
            self.process = Command(arguments, folder, program=LAUNCHER)
        RUNNING.append(self.process)

    @property
    def output(self) -> str:
        if isinstance(self.process, Command):
            return self.process.stdout + self.process.stderr
        return (self.folder / "launcher.out").read_text()

    def code(self) -> int:
        return self.process.wait(LIMIT_S)

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names) or self.process.poll() is not None)
        assert self.process.poll() is None, self.output

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_run_the_command_without_torchs_variables(tmp_path: Path) -> None:
    launched = Launched(tmp_path, WRITES)
    assert launched.code() == 0, launched.output
    expected = [(number, socket.gethostname()) for number in range(2)]
    assert [(tmp_path / f"{number}.out").read_text() for number in range(2)] == [repr([expected, [], False])] * 2
    assert "rank 0 was here" in launched.output
    assert "rank 1 was here" not in launched.output


def test_error_of_one_rank_ends_the_run_without_a_restart(tmp_path: Path) -> None:
    launched = Launched(tmp_path, DISAGREES, restarts=2)
    assert launched.code() == UsageError.exit_code
    assert launched.output.count("error: no room") == 1
    assert "restarting" not in launched.output
    assert "Traceback" not in launched.output


def test_rank_that_cannot_report_leaves_no_partial_report(tmp_path: Path) -> None:
    """The launcher would read the broken report after Ctrl-C."""
    own_rank = OwnRank(
        rank=0, world_size=1, local_rank=0, tp_size=1, cp_size=1, device="cpu", address="", port=0, scratch=tmp_path
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"cannot write .*0\.json"):
            own_rank.report(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []
    own_rank.report(3)
    assert json.loads((tmp_path / "0.json").read_text()) == {"code": 3}


def test_killed_rank_is_named_after_the_others_have_saved(tmp_path: Path) -> None:
    launched = Launched(tmp_path, IS_KILLED)
    assert launched.code() == 1
    assert (tmp_path / "saved").exists()
    assert launched.output.count("error: ") == 1
    assert "error: rank 1 of 2 was killed by SIGKILL" in launched.output
    assert "Traceback" not in launched.output


def test_killed_rank_restarts_all_from_newest_checkpoint(tmp_path: Path) -> None:
    launched = Launched(tmp_path, IS_KILLED, restarts=1)
    assert launched.code() == 0, launched.output
    lost = "rank 1 of 2 was killed by SIGKILL"
    assert f"{lost}; restarting from the newest checkpoint, 0 restarts left" in launched.output
    for number in range(2):
        resumed = (tmp_path / f"{number}.resumed").read_text().split()
        assert resumed == ["run", "--note", str(tmp_path), "--resume", "--run-dir", str(tmp_path)]


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launched = Launched(tmp_path, WAITS)
    launched.wait_for("0.waits", "1.waits")
    tree = launched.tree()
    launched.process.kill()
    launched.process.wait()
    assert not psutil.wait_procs(tree, timeout=30)[1]


# A rank that waits alone exits immediately, and the other one notices its loss.
@pytest.mark.parametrize(
    ("body", "number"), [(WAITS, signal.SIGTERM), (WAITS_ALONE, signal.SIGINT)], ids=["all", "one"]
)
def test_signal_is_reported_once_by_all_ranks(tmp_path: Path, body: str, number: signal.Signals) -> None:
    launched = Launched(tmp_path, body, restarts=1)
    launched.wait_for("0.waits", "1.waits")
    launched.process.send_signal(number)
    assert launched.code() == 128 + number, launched.output
    assert launched.output.count("interrupted") == 1, launched.output
    assert "Traceback" not in launched.output


def test_second_interrupt_reaches_ranks_that_are_saving(tmp_path: Path) -> None:
    launched = Launched(tmp_path, SAVES)
    launched.wait_for("0.waits", "1.waits")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for("0.saving", "1.saving")
    launched.process.send_signal(signal.SIGINT)
    assert launched.code() == 128 + signal.SIGINT
    assert {path.name for path in tmp_path.glob("*.stopped")} == {"0.stopped", "1.stopped"}


Networks = tuple[tuple[str, ...], tuple[str, ...]]


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Connect two network namespaces, and yield the command prefixes that run a command inside each."""
    names = [f"bridge-{os.getpid()}-{number}" for number in range(2)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    first, second = (("ip", "netns", "exec", name) for name in names)
    yield first, second
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


RENDEZVOUS = "10.77.0.2:29400"
"""In the second network, whose address sorts after that of the first one."""


@pytest.mark.parametrize("restarts", [0, 1])
def test_lost_host_ends_the_run_unless_restarts_are_allowed(networks: Networks, tmp_path: Path, restarts: int) -> None:
    """The host with the rendezvous has rank 0, so the other host's output and loss are those of rank 1."""

    def start(number: int) -> Launched:
        body = "if world.run_on_rank_zero(lambda: resumes):\n    return\n" + WAITS
        return Launched(
            tmp_path / str(number),
            body,
            count=1,
            inside=networks[number],
            hosts=2,
            rendezvous=RENDEZVOUS,
            restarts=restarts,
        )

    hosts = [start(number) for number in (0, 1)]
    hosts[1].wait_for("0.waits")
    hosts[0].wait_for("1.waits")
    assert "host 2 of 2; the first host prints the progress" in hosts[0].output
    hosts[0].process.kill()
    if restarts:
        other = start(0)
        assert hosts[1].code() == 0, hosts[1].output
        assert other.code() == 0, other.output
        assert "restarting from the newest checkpoint, 0 restarts left" in hosts[1].output
    else:
        assert hosts[1].code() == 1
        assert "error: rank 0 of 2 lost another rank" in hosts[1].output or "stopped" in hosts[1].output
    assert "Traceback" not in hosts[1].output


@pytest.mark.parametrize("given", [None, "gpu-1", "gpu-1:", ":29400", "gpu-1:0", "gpu-1:99999", "gpu-1:http"])
def test_rendezvous_without_host_or_port_is_refused(given: str | None) -> None:
    with pytest.raises(UsageError, match="--hosts 2 needs --rendezvous HOST:PORT"):
        rank_launcher.address(RankLayout(1, "cpu", [None], hosts=2, rendezvous=given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0.0.0.0:29400", "resolves to 0.0.0.0 on this host"),
        ("no-such-host.invalid:29400", "cannot resolve the host no-such-host.invalid"),
    ],
)
def test_rendezvous_that_other_hosts_cannot_reach_is_refused(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_launcher.address(RankLayout(1, "cpu", [None], hosts=2, rendezvous=given))


def test_host_name_of_the_loopback_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(UsageError, match=r"gpu-1:29400 resolves to 127\.0\.1\.1 on this host, which no other"):
        rank_launcher.address(RankLayout(1, "cpu", [None], hosts=2, rendezvous="gpu-1:29400"))
