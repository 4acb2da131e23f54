"""What scores in the processes that tests start: each completion says what is done. Imports as little as it can."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Sample:
    """Scores the length of a completion, unless its first word is the name of a method here."""

    def __init__(self, log: Path) -> None:
        """Note in the file `log` who scores what."""
        self._log = log

    def score(self, problem: Any, completion: str) -> Any:
        self._note(f"{os.getpid()} {completion}")
        name, *rest = completion.split()
        return getattr(self, name)(*rest) if hasattr(self, name) else float(len(completion))

    def _note(self, line: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{line}\n")

    def raises(self, word: str = "seven") -> float:
        return float(word)

    def exits(self) -> None:
        sys.exit("enough")

    def is_nan(self) -> float:
        return float("nan")

    def is_text(self) -> str:
        return "1.0"

    def spins(self) -> None:
        all(True for _ in itertools.repeat(0))

    def matches(self) -> None:
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter's lock, for hours

    def dies(self) -> None:
        os._exit(3)

    def crashes(self) -> None:
        import ctypes
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)

    def runs_out_of_memory(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does

    def starts_another(self) -> None:
        process = subprocess.Popen(["sleep", "1000"])
        self._note(f"{process.pid} started")
        process.wait()

    def prints(self) -> float:
        print("a word of the score")  # noqa: T201
        return 1.0

    def interrupts_itself(self) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    def process(self) -> float:
        return float(os.getpid())

    def knows(self, module: str) -> float:
        return float(module in sys.modules)

    def meets(self, number: str) -> float:
        """Wait until so many completions are being scored at once."""
        while len(self._log.read_text().splitlines()) < int(number):
            time.sleep(0.01)
        return 1.0

    def waits(self) -> float:
        """Wait for a file, and say that it was there."""
        while not self._log.with_suffix(".go").exists():
            time.sleep(0.01)
        self._note(f"{os.getpid()} done")
        return 1.0


class Several:
    """Scores by `scores`, with parts."""

    def score(self, problem: Any, completion: str) -> float:
        raise AssertionError("nobody calls it")

    def scores(self, problem: Any, completion: str) -> Any:
        return {"odd": (1.0,), "nan": (1.0, {"a": float("nan")}), "text": ("1", {})}.get(
            completion, (len(completion), {"length": len(completion), "format": 0.5})
        )


def broken() -> Sample:
    raise ValueError("no luck")


def ends() -> Sample:
    os._exit(3)
