"""Run a Bridge module in a separate Python process with a time limit, so that it can crash or hang without harm.

Not covered: servers and other processes that live as long as a run (`bridge/processes/children.py`).
"""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bridge.core.interrupt import acting_interrupt, deferred_interrupt, wait_until
from bridge.errors import BridgeError, first_line

Began = Callable[[subprocess.Popen[str]], object]
"""Callback that receives a process once it has started."""
POLL_S = 0.1
ERROR = "error: "
"""Prefix of the line on stderr with which a child program reports why it failed."""
_ROOT = str(Path(__file__).parents[2])
_START = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of a child process."""

    returncode: int | None
    """Exit status, negative for a signal; None: killed at the time limit."""
    stdout: str = ""
    last_error_line: str = ""
    """Text of its `error: ...` line, otherwise the last line on stderr; empty if there is none."""

    def trouble(self) -> str | None:
        """Return briefly why the child failed; None if it succeeded."""
        if self.returncode == 0:
            return None
        if self.returncode is None:
            return "no answer within the time limit"
        if self.returncode < 0:
            return f"Python was killed by {signal.Signals(-self.returncode).name}"
        return self.last_error_line or f"exit status {self.returncode}"


def run_child(
    module: str,
    *arguments: str,
    timeout_s: float,
    stdin: str = "",
    own_group: bool = True,
    began: Began | None = None,
) -> Ended:
    """Run `python -m module` without the current folder on the path, and wait until it exits.

    A child that is started by a child must stay in its parent's process group (`own_group=False`), so that killing the
    group kills both.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _START, _ROOT, module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
    )
    returncode = None
    try:
        if began is not None:
            began(process)
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        returncode = process.returncode
    except BaseException as error:
        if own_group:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the child leads its own group, which contains no other process
        else:
            process.kill()
        stdout, stderr = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # Not always the last line: libraries may print warnings when the interpreter exits.
    own = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return Ended(returncode=returncode, stdout=stdout, last_error_line=(own or lines or [""])[-1])


def run_children(run: Callable[[int, Began], str], count: int) -> list[str]:
    """Return `run(index, began)` for each index, run concurrently; on an error or Ctrl-C, kill all processes."""
    processes: list[subprocess.Popen[str]] = []

    def have_ended(seconds: float) -> bool:
        ended, running = wait(results, timeout=seconds, return_when=FIRST_EXCEPTION)
        for result in ended:
            result.result()
        return not running

    with deferred_interrupt(), ThreadPoolExecutor(count) as pool:
        results = [pool.submit(run, index, processes.append) for index in range(count)]
        try:
            with acting_interrupt():
                wait_until(have_ended)
        finally:  # kill the remaining children: after one fails, the others would wait for it
            while wait(results, timeout=POLL_S).not_done:
                for process in processes:
                    process.kill()
    return [result.result() for result in results]


def exit_code(program: Callable[..., None], *arguments: str) -> int:
    """Run the program of a child process and return its exit code; on failure, the last line on stderr says why."""
    try:
        program(*arguments)
    except (BridgeError, OSError, RuntimeError, ValueError) as error:
        traceback.print_exc()
        sys.stderr.write(f"{ERROR}{first_line(error)}\n")
        return getattr(error, "exit_code", 1)
    return 0
