"""How a command ends when it gets a signal, and what happens when its terminal closes."""

import errno
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bridge.core.address import free_port
from bridge.core.interrupt import SIGNALS, acting_interrupt, deferred_interrupt
from bridge.errors import UsageError
from bridge_cli.signals import DisconnectableStream, InterruptHandler
from tests.cli.test_refusals import RUN_LIMIT_S, RUN_ON_A_TOY, TOY_VLLM
from tests.forked import Command
from tests.models import tiny

ROOT = Path(__file__).parents[2]
TAKE_THE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
OTHERS = [number for number in SIGNALS if number != signal.SIGINT]


def ends(ending: InterruptHandler, number: int) -> bool:
    try:
        ending(number, None)
    except KeyboardInterrupt:
        return True
    return False


VERIFY_IN_PARTS = """
from pathlib import Path
from bridge.checks import one_copy_proof
from bridge_cli import main
from bridge_cli.verify import discovery

HANGS = Path("import time; time.sleep(600)")
one_copy_proof.MODULE = "timeit"
one_copy_proof.verify = lambda path: iter(
    [one_copy_proof.logprobs(one_copy_proof.diffs_of_parts(path, 2, [], None, timeout_s=600))]
)
discovery.find = lambda given: HANGS
main.main()
"""


@pytest.mark.xdist_group("commands")
@pytest.mark.timeout(3 * RUN_LIMIT_S)
def test_ctrl_c_ends_the_processes_of_verify(tmp_path: Path) -> None:
    process = Command(["verify", "--vllm-config-path", "m.json"], tmp_path, program=VERIFY_IN_PARTS)
    try:
        deadline, parts = time.monotonic() + RUN_LIMIT_S, list[psutil.Process]()
        while len(parts) < 2 and time.monotonic() < deadline:
            parts = [child for child in psutil.Process(process.pid).children() if "timeit" in child.cmdline()]
        process.send_signal(signal.SIGINT)
        assert process.wait(RUN_LIMIT_S) == 130
    finally:
        process.kill()
        process.wait()
    assert process.stderr == "interrupted\n"
    assert len(parts) == 2
    assert not [part for part in parts if part.is_running()]


COMPILES_IN_C = """
import sys, time
from contextlib import ExitStack
from bridge.config import ComputeConfig, OptimizerConfig
from bridge.engine import compile_ahead
from bridge_cli import main
from bridge_cli.verify import discovery

def find(given):
    with ExitStack() as server:
        server.callback(print, "the server was stopped", flush=True)
        sections = ComputeConfig(), OptimizerConfig()
        with compile_ahead.compiling_ahead(lambda: time.sleep(600), *sections, lora=None, temperature=1.0):
            pass

discovery.find = find
main.main()
"""


@pytest.mark.xdist_group("commands")
@pytest.mark.timeout(3 * RUN_LIMIT_S)
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_ctrl_c_ends_a_command_that_compiles(tmp_path: Path, first: signal.Signals) -> None:
    """The compiling thread is inside one long C call, where nothing can interrupt it."""
    process = Command(["verify"], tmp_path, program=COMPILES_IN_C)
    try:
        deadline = time.monotonic() + RUN_LIMIT_S
        while psutil.Process(process.pid).num_threads() < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(first)
        with pytest.raises(subprocess.TimeoutExpired):  # the command waits, because torch may return soon
            process.wait(2.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(RUN_LIMIT_S) == 128 + first
    finally:
        process.kill()
        process.wait()
    assert process.stdout == "the server was stopped\n"
    assert process.stderr == "interrupted\n"


@pytest.mark.parametrize("number", OTHERS)
def test_only_ctrl_c_interrupts_a_command_that_is_ending(number: int) -> None:
    ending = InterruptHandler()
    assert [ends(ending, number) for number in (number, number, signal.SIGHUP)] == [True, False, False]
    assert [ends(ending, number) for number in (signal.SIGINT, signal.SIGINT)] == [True, True]
    after_ctrl_c = InterruptHandler()
    assert [ends(after_ctrl_c, number) for number in (signal.SIGINT, number)] == [True, False]


def test_second_hangup_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, InterruptHandler())
    try:
        with pytest.raises(KeyboardInterrupt), deferred_interrupt(), acting_interrupt():
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        with deferred_interrupt():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


class Broken(io.StringIO):
    """A stream that cannot be written to, although its descriptor is a writable file."""

    def __init__(self, number: int, descriptor: int) -> None:
        super().__init__()
        self.broken: OSError | None = OSError(number, "broken")
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        if self.broken:
            raise self.broken
        return super().write(text)

    def flush(self) -> None:
        if self.broken:
            raise self.broken

    def fileno(self) -> int:
        return self._descriptor


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
@pytest.mark.parametrize("use", [lambda stream: stream.write("lost"), lambda stream: stream.flush()])
def test_stream_that_lost_its_reader_discards_its_output(
    tmp_path: Path, number: int, use: Callable[[DisconnectableStream], object]
) -> None:
    with (tmp_path / "file").open("w") as file:
        stream = Broken(number, file.fileno())
        use(DisconnectableStream(stream))
        os.write(file.fileno(), b"what other libraries print")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_reported_only_for_data(number: int) -> None:
    notes = Broken(number, -1)
    DisconnectableStream(notes, holds_notes=True).write("lost")
    notes.broken = None
    DisconnectableStream(notes, holds_notes=True).write("there is room again")
    assert notes.getvalue() == "there is room again"
    with pytest.raises(UsageError, match="cannot write the output: broken"):
        DisconnectableStream(Broken(number, -1)).write("lost")


@pytest.mark.parametrize("arguments", ["--version", "run --help"])
def test_output_to_a_full_disk_is_one_error_line(arguments: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "bridge", *arguments.split()], stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "error: cannot write the output: No space left on device", "",
        "hint: make room on the disk that stdout is redirected to",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", ["1", "2"])
def test_command_tolerates_a_closed_standard_stream(stream: str) -> None:
    command = f'exec "{sys.executable}" -m bridge --version {stream}>&-'
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("bridge") is (stream == "2")


def test_notes_to_a_full_disk_are_dropped() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "bridge", "--no-such-flag"]
        assert subprocess.run(command, stderr=full, check=False).returncode == 2


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ends", "nohup"])
def test_closed_terminal_ends_a_run_except_under_nohup(tmp_path: Path, stays: bool) -> None:
    toy = tmp_path / "toy.py"
    toy.write_text(TOY_VLLM)
    plain = {name: value for name, value in os.environ.items() if name not in {"CI", "NO_COLOR", "TTY_INTERACTIVE"}}
    model = tiny.write(tiny.llama(), tmp_path / "model")
    ours, theirs = pty.openpty()
    program = f"{TAKE_THE_TERMINAL}\n{NOHUP if stays else ''}\n{RUN_ON_A_TOY}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", program, "run", "--model", str(model), "--vllm-config-path", "manifest.json"),
            *("--port", str(free_port("127.0.0.1")), "--training-steps", "5" if stays else "500"),
            *("--batch-size", "8", "--group-size", "4", "--max-new-tokens", "8"),
            *("--run-dir", "run", "--save-path", "saved"),
        ],
        cwd=tmp_path,
        env=plain
        | {
            "TERM": "xterm",
            "PYTHONIOENCODING": "utf-8",
            "TOY": str(toy),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    limit = threading.Timer(RUN_LIMIT_S, process.kill)
    limit.start()
    try:
        os.close(theirs)
        until_it_says(r"step +2/", ours)
        tree = psutil.Process(process.pid).children(recursive=True)
        os.close(ours)
        assert process.wait(RUN_LIMIT_S) == (0 if stays else 128 + signal.SIGHUP)
    finally:
        limit.cancel()
        process.kill()
        process.wait()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == 5 if stays else len(steps) >= 2
    assert [folder.name for folder in (tmp_path / "saved").iterdir()] == [f"step_{len(steps)}"]
    assert len(tree) >= 2
    assert not [member for member in tree if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


def until_it_says(pattern: str, terminal: int) -> None:
    """Read from `terminal` until its output matches `pattern`."""
    output = ""
    while not re.search(pattern, output):
        assert select.select([terminal], [], [], RUN_LIMIT_S)[0], output
        try:
            output += os.read(terminal, 65536).decode(errors="replace")
        except OSError as error:  # the program has ended
            raise AssertionError(output) from error
