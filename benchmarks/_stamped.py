"""Run a process that prints one JSON object per step, and time its lines from outside."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.core.process import ProcessIdentity
from bridge.processes import children
from bridge.processes.children import Child

POLL_S = 0.02


@dataclass(kw_only=True)
class Run:
    """The outcome of one process."""

    stamps: list[float] = field(default_factory=list)
    """Time of each line, in seconds on a monotonic clock."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The parsed lines."""
    peak_bytes: int = 0
    """Maximum of `used_bytes` while the process ran; 0 if unknown."""
    begun: float = 0.0
    """Start time, on the clock of `stamps`."""
    seconds: float = 0.0
    """Duration in seconds."""
    failure: str | None = None
    """Why the process ended before its last line; None if it printed all lines."""
    baseline_bytes: int = 0
    """`used_bytes` before the process started."""
    kv_cache_gib: float | None = None
    """Size of vLLM's KV cache; None if unknown."""

    @property
    def peak_gib(self) -> float | None:
        """Return the peak GPU memory of the process; None if unknown."""
        return (self.peak_bytes - self.baseline_bytes) / 2**30 if self.peak_bytes else None


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    num_lines: int,
    limit_s: float,
    used_bytes: Callable[[], int] | None = None,
    cwd: Path | None = None,
) -> Run:
    """Run `argv` until it has printed `num_lines` lines, ends or times out; then stop its whole process group."""
    baseline_bytes = used_bytes() if used_bytes else 0
    result, begun = Run(baseline_bytes=baseline_bytes, begun=time.perf_counter()), time.monotonic()
    child = start(argv, environment, log, cwd)
    reader = threading.Thread(target=read, args=(child.process, result), daemon=True)
    reader.start()
    try:
        while child.is_alive() and len(result.lines) < num_lines and time.monotonic() - begun < limit_s:
            result.peak_bytes = max(result.peak_bytes, used_bytes() if used_bytes else 0)
            time.sleep(POLL_S)
        alive = child.is_alive()
        if alive:
            children.kill(child)  # do not wait for a final checkpoint
    finally:
        children.stop(child)
    reader.join(timeout=10)
    del result.stamps[num_lines:], result.lines[num_lines:]  # drop the summary of a run that ended by itself
    result.seconds = time.monotonic() - begun
    if len(result.lines) < num_lines:
        result.failure = f"not done after {limit_s:.0f} s" if alive else reason(log)
    return result


def reason(log: Path) -> str:
    """Return the log line that best explains why the process ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    out_of_memory = [line for line in lines if "out of memory" in line.lower()]
    faults = [line for line in lines if line.startswith("error: ") or "Error: " in line]
    return next(
        (lines_of_kind[-1][:300] for lines_of_kind in (out_of_memory, faults, lines) if lines_of_kind),
        "it printed nothing",
    )


def start(argv: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path | None = None) -> Child:
    """Start `argv` in a session that ends with this process; stderr goes to the log."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(children.LEASH), str(os.getpid()), *argv],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
    return Child(process, ProcessIdentity.of(process.pid), log)


def read(process: "subprocess.Popen[bytes]", result: Run) -> None:
    """Append each line of the process to `result` with its time, until stdout closes."""
    assert process.stdout is not None
    for line in process.stdout:
        now, document = time.perf_counter(), json.loads(line)
        result.stamps.append(now)
        result.lines.append(document)
