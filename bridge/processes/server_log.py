"""Read from a server's log what the server is doing while it starts, and why it ended.

Source: the lines of vLLM 0.26 to 0.33; a server that logs different lines is shown as importing until it answers.
"""

import os
import re
import time
from pathlib import Path

from bridge import errors
from bridge.errors import BridgeError

PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s+)?"  # (EngineCore pid=123)
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+[\d-]+\s[\d:.,]+\s+)?"  # ERROR 11-20 11:03:01
    r"(\[[^\]]+:\d+\]\s?)?"  # [core.py:1234]
)
ERROR = re.compile(
    r"^(?P<name>(\w+\.)*\w*(Error|Exception|Refused|Interrupt|Exit))(: (?P<message>.*))?$"
    r"|^[\w./ -]+: error: .*|^error: (?P<refusal>.*)"
)
"""The end of a traceback, argparse's error, or a refusal that `bridge_patches` prints."""
START = "=== bridge: vLLM is "
"""Start of the line before each server's output: a run has one log, and only the last server's part is read."""
LAST_BYTES = 1 << 18
"""Bytes read from the end of a log: enough for the last traceback, too few to reach an old one of a long run."""
PHASES = {
    "starting the engine": "Resolved architecture|Initializing a V1 LLM engine",
    "loading weights": "Starting to load model|Loading (weights|safetensors checkpoint)",
    "compiling": "Model loading took|Using cache directory|Dynamo bytecode|Compiling a graph|Warming up model",
    "sizing the KV cache": "torch.compile took|Initial profiling|Available KV cache memory|GPU KV cache size",
    "capturing graphs": "Capturing (CUDA|cuda)",
    "opening its port": "Graph capturing finished|init engine|Starting vLLM server|Application startup",
}
"""Phase of the start -> pattern of the log lines that begin it."""
FIRST_PHASE = "importing packages"
LEAST_S = 1.0
"""Phases that took less are left out of the summary."""


class StartPhases:
    """Phases of a starting server and their seconds, as of the latest `measure`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._seconds: dict[str, float] = {}
        self._elapsed_s = 0.0

    def measure(self, elapsed_s: float) -> str:
        """Return the phase in which the server is `elapsed_s` seconds after its start, and the seconds in it."""
        phase = current_phase(self._log)
        self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed_s - self._elapsed_s
        self._elapsed_s = elapsed_s
        return f"{phase} ({self._seconds[phase]:.0f} s)"

    def summary(self) -> str:
        """Return ": " and the seconds of each phase; empty if all were short."""
        long = [f"{phase} {seconds:.0f} s" for phase, seconds in self._seconds.items() if seconds >= LEAST_S]
        return f": {', '.join(long)}" if long else ""


def current_phase(log: Path) -> str:
    """Return the phase of the last line that begins one."""
    for line in reversed(_raw_lines(log)):
        for phase, beginning in PHASES.items():
            if re.search(beginning, line):
                return phase
    return FIRST_PHASE


def begin_log(log: Path, what: str) -> None:
    """Write the line before the output of a new server; only the owner can read the log, as vLLM prints API keys."""
    with open(log, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # an earlier server may have created it with a different umask
        file.write(f"{START}{what}, {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n")


def root_error(log: Path) -> str:
    """Return why the process ended: its first error, or its last line if it logged no error.

    An error without a message, such as a bare assertion, is followed by the last frame of its traceback, if any.
    """
    lines = _lines(log)
    ends = ("KeyboardInterrupt", "SystemExit", "asyncio.")
    index = next((i for i, line in enumerate(lines) if ERROR.match(line) and not line.startswith(ends)), None)
    if not lines:
        return "it printed nothing"
    if index is None:
        return f"no error in its log, which ends with: {lines[-1]}"
    if re.fullmatch(r"[\w.]+", lines[index]):
        frame = next((i for i in reversed(range(index)) if not lines[i].startswith("    ")), index)
        source = lines[frame:index] if lines[frame].startswith("  File ") else []
        return ", ".join(line.strip() for line in (lines[index], *source) if line.strip(" ^~"))
    parts = [lines[index]]
    if "validation error" in lines[index]:  # pydantic explains the error in the next lines
        parts += [line.strip() for line in lines[index + 1 : index + 3]]
    return " ".join(parts).partition(" [type=")[0]


def last_line(log: Path) -> str:
    return next(reversed(_lines(log)), "")


def own_error(log: Path) -> BridgeError | None:
    """Return the `BridgeError` that ended the process, such as a refused model; None if something else did."""
    lines = _lines(log)
    for index, line in enumerate(lines):
        if (match := ERROR.match(line)) is None:
            continue
        hints = (text.removeprefix("hint: ") for text in lines[index : index + 12] if text.startswith("hint: "))
        hint = next(hints, "")  # a compiler's error begins in the same way, but has no hint
        name = "AttachError" if match["refusal"] and hint else (match["name"] or "").rpartition(".")[2]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, BridgeError):
            message = match["refusal"] or match["message"] or name
            return kind(message, hint=hint or f"bridge doctor, or read {log}")
    return None


def _lines(log: Path) -> list[str]:
    """Return the last lines of the last server, without empty ones and without vLLM's prefix."""
    lines = (PREFIX.sub("", line, count=1).rstrip() for line in _raw_lines(log))
    return [line for line in lines if line.strip()]


def _raw_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    if START in text:
        text = text.rpartition(START)[2].partition("\n")[2]
    return text.replace("\r", "\n").splitlines()
