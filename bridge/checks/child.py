"""Run one of Bridge's own modules in a fresh Python with a time limit, so that a crash or a hang there is harmless."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import bridge

_ROOT = str(Path(bridge.__file__).parents[1])
_START = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"

ERROR = "error: "
"""Start of the line on stderr that says why a program of ours failed."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended."""

    returncode: int | None
    """Its exit status, negative for a signal; None: it was killed at the time limit."""
    stdout: str = ""
    """Everything that it printed."""
    last_error_line: str = ""
    """Its line `error: ...`, else the last line on stderr; empty if there is none."""

    def trouble(self) -> str | None:
        """Return in a few words why it failed; None if it did not."""
        if self.returncode == 0:
            return None
        if self.returncode is None:
            return "no answer within the time limit"
        if self.returncode < 0:
            return f"Python was killed by {signal.Signals(-self.returncode).name}"
        return self.last_error_line or f"exit status {self.returncode}"


def run_module(module: str, *arguments: str, timeout_s: float, stdin: str = "", own_group: bool = True) -> Ended:
    """Run `python -m module`, without the current folder on the path, and wait until it ends.

    A child of a child stays in its parent's process group (`own_group=False`), so that killing the group kills both.
    """
    command = [sys.executable, "-P", "-c", _START, _ROOT, module, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=own_group)
    timed_out = False
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
    except BaseException as error:
        if own_group:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the child leads its own group: nobody else is in it
        else:
            process.kill()
        stdout, stderr = process.communicate()
        timed_out = isinstance(error, subprocess.TimeoutExpired)
        if not timed_out:
            raise
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]  # libraries may warn after it
    returncode = None if timed_out else process.returncode
    return Ended(returncode=returncode, stdout=stdout, last_error_line=(own or lines or [""])[-1])


def refuse(message: str, exit_code: int = 1) -> int:
    """Print why this program failed, in the form that `run_module` reads, and return its exit code."""
    sys.stderr.write(f"{ERROR}{message}\n")
    return exit_code
