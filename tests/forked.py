"""`bridge` commands in processes forked from one that has already imported everything.

A cold `bridge train` spends six seconds of CPU time on imports; a forked one starts immediately. Otherwise it acts like
the real command: it has its own pid, working directory, environment, output, signal handlers and exit code.

Not covered: trainers on a GPU, and the few tests of the command line itself, which start it cold (`scenarios.bridge`).
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import peft  # noqa: F401  what this module imports, no command has to
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

from bridge.run import trainer  # noqa: F401
from bridge_cli import doctor, main, restore, run, train, verify  # noqa: F401
from tests import disturbed  # noqa: F401

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload([__name__])
BRIDGE = "from bridge_cli.main import main; main()"
"""The code that the installed `bridge` script runs."""
POLL_S = 0.02
UNCAUGHT = 1
"""Python's exit code for an uncaught exception."""


class Command:
    """A `bridge` command, running or ended, with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        folder: Path,
        *,
        program: str = BRIDGE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `program` in `folder`, with `arguments` in `sys.argv`."""
        output = Path(tempfile.mkdtemp(prefix="bridge-output-"))
        weakref.finalize(self, shutil.rmtree, output)
        self._streams = [output / "stdout", output / "stderr"]
        for stream in self._streams:
            stream.touch()
        variables = {**os.environ, "NO_COLOR": "1", **(environment or {})}
        given = (program, [*map(str, arguments)], folder, variables, self._streams)
        self._process = START.Process(target=_become, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The command's exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        """The command's standard output so far."""
        return self._streams[0].read_text()

    @property
    def stderr(self) -> str:
        """The command's standard error so far."""
        return self._streams[1].read_text()

    def poll(self) -> int | None:
        """Return the command's exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("bridge", timeout or 0.0, self.stdout, self.stderr)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def lines(self, limit_s: float) -> Iterator[str]:
        """Yield the lines of the command's stderr as they arrive, until it ends."""
        deadline, taken = time.monotonic() + limit_s, 0
        while True:
            has_ended = self.poll() is not None
            whole = self.stderr.rpartition("\n")[0].splitlines()
            yield from whole[taken:]
            taken = len(whole)
            if has_ended:
                return
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("bridge", limit_s, self.stdout, self.stderr)
            time.sleep(POLL_S)


def ended(
    arguments: Sequence[str | Path],
    folder: Path,
    *,
    program: str = BRIDGE,
    environment: Mapping[str, str] | None = None,
    limit_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; kill it after `limit_s` seconds, as `subprocess.run` does."""
    command = Command(arguments, folder, program=program, environment=environment)
    try:
        code = command.wait(limit_s)
    finally:
        command.kill()
        command.wait()
    return subprocess.CompletedProcess(["bridge", *map(str, arguments)], code, command.stdout, command.stderr)


def _become(
    program: str, arguments: list[str], folder: Path, variables: Mapping[str, str], streams: list[Path]
) -> None:
    """Turn this process into the command, and exit with its exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for path, stream in zip(streams, (sys.stdout, sys.stderr), strict=True):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    sys.argv = ["bridge", *arguments]
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  multiprocessing would print it in its own way
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(UNCAUGHT)
