"""Run one of Bridge's own modules in a fresh Python, with a time limit, so that a crash or a hang there stays there.

Not covered: long-lived children such as the server (`cli/children.py`).
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import bridge

_ROOT = str(Path(bridge.__file__).parents[1])
_START = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"

ERROR = "error: "
"""How a program of ours begins the line on stderr that says why it failed."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended."""

    returncode: int | None
    """Its exit status, negative for a signal; None: it was stopped at the time limit."""
    stdout: str
    """Everything that it printed."""
    last_error_line: str
    """Its line `error: ...`, else the last line on stderr; empty if there is none."""

    def trouble(self) -> str | None:
        """Return in a few words what went wrong, if anything."""
        if self.returncode == 0:
            return None
        if self.returncode is None:
            return "no answer within the time limit"
        if self.returncode < 0:
            return f"Python was killed by {signal.Signals(-self.returncode).name}"
        return self.last_error_line or f"exit status {self.returncode}"


def run_module(module: str, *arguments: str, timeout_s: float, stdin: str = "", own_group: bool = True) -> Ended:
    """Run `python -m module`, without the current folder on the path, and wait for its end.

    A child of a child keeps its parent's group (`own_group=False`): whoever stops that group stops both.
    """
    command = [sys.executable, "-P", "-c", _START, _ROOT, module, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=own_group)
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        returncode: int | None = process.returncode
    except subprocess.TimeoutExpired:
        _stop(process, own_group=own_group)
        stdout, stderr = process.communicate()
        returncode = None
    except BaseException:
        _stop(process, own_group=own_group)
        process.wait()
        raise
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]  # libraries may warn after it
    return Ended(returncode=returncode, stdout=stdout, last_error_line=(own or lines or [""])[-1])


def refuse(message: str, exit_code: int = 1) -> int:
    """Print why this program failed, as `run_module` reads it, and return its exit code."""
    sys.stderr.write(f"{ERROR}{message}\n")
    return exit_code


def _stop(process: subprocess.Popen[str], *, own_group: bool) -> None:
    if not own_group:
        process.kill()
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the child leads its own group: nobody else is in it
    except ProcessLookupError:
        return
