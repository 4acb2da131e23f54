"""Scores for the tests' worker processes: each completion names what to do. Imports as little as possible."""

import contextlib
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MOST_DESCRIPTORS = 4096
"""More than a test process has open, even after many tests."""


class Sample:
    """Scores by length, unless the completion's first word is the name of a method here."""

    def __init__(self, log: Path) -> None:
        """Log each score and its process to the file `log`."""
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

    def reads(self, name: str) -> float:
        return float(len(os.environ[name]))

    def misses(self, name: str) -> float:
        raise ValueError(f"the client needs {name}, or a key")

    def exits(self) -> None:
        sys.exit("enough")

    def is_nan(self) -> float:
        return float("nan")

    def is_text(self) -> str:
        return "1.0"

    def spins(self) -> None:
        all(True for _ in itertools.repeat(0))

    def matches(self) -> None:
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds the GIL for hours

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
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        return 1.0

    def process(self) -> float:
        return float(os.getpid())

    def knows(self, module: str) -> float:
        return float(module in sys.modules)

    def meets(self, number: str) -> float:
        """Wait until this many completions are being scored concurrently."""
        while len(self._log.read_text().splitlines()) < int(number):
            time.sleep(0.01)
        return 1.0

    def forks(self) -> float:
        """Return twice: here and in the child."""
        return float(os.fork() >= 0)

    def forks_in_c(self) -> float:
        """Return twice, with a fork that Python does not know about."""
        import ctypes

        return float(ctypes.CDLL(None).fork() >= 0)

    def forks_and_exits(self) -> float:
        if not os.fork():
            sys.exit("the child")
        os.wait()
        return 1.0

    def leaves_a_daemon(self) -> float:
        """Leave a daemon in another session, detached from this process except for its descriptors."""
        if not os.fork():
            os.setsid()
            if not os.fork():
                self._note(f"{os.getpid()} started")
                time.sleep(1000)
            os._exit(0)
        os.wait()
        while "started" not in self._log.read_text():
            time.sleep(0.01)
        return 1.0

    def leaves_a_daemon_and_dies(self) -> None:
        self.leaves_a_daemon()
        os._exit(3)

    def leaves_a_daemon_and_hangs(self) -> None:
        self.leaves_a_daemon()
        self.spins()

    def hangs_in_a_child_of_c(self) -> float:
        """Leave a process that holds every descriptor of this one, including the connection."""
        import ctypes

        if not ctypes.CDLL(None).fork():
            os.setsid()
            self._note(f"{os.getpid()} started")
            time.sleep(1000)
        while "started" not in self._log.read_text():
            time.sleep(0.01)
        os._exit(3)

    def scribbles(self, text: str = "words of the score") -> float:
        """Write to every open descriptor."""
        return self._writes(text.encode())

    def claims_too_much(self) -> None:
        """Write a line that is one byte too long, and does not end."""
        self._writes(b"a" * (2**20 + 1))
        self.spins()

    def scribbles_and_hangs(self) -> None:
        """Write the beginning of a line."""
        self._writes(b"abc")
        self.spins()

    def answers_by_itself(self, number: str) -> float:
        """Write a complete answer to every open descriptor."""
        return self._writes(f'[{number}, "Score", {{"reward": 99.0, "parts": {{}}, "turns": []}}]\n'.encode())

    def writes_a_pickle(self) -> float:
        """Write a pickle that creates a file when unpickled."""
        pickled = pickle.dumps(_Touches(str(self._log.with_suffix(".unpickled"))))
        return self._writes(pickled + b"\n")

    def _writes(self, content: bytes) -> float:
        for descriptor in range(3, MOST_DESCRIPTORS):
            with contextlib.suppress(OSError):
                os.write(descriptor, content)
        return 1.0

    def closes_everything(self) -> float:
        os.closerange(0, MOST_DESCRIPTORS)
        return 1.0

    def will_not_stop(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    def stops(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def stops_its_parent(self) -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)

    def kills_its_parent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    def ends_by_a_nameless_signal(self) -> None:
        os.kill(os.getpid(), signal.SIGRTMIN + 5)

    def waits(self) -> float:
        """Wait for a file, and log that it appeared."""
        while not self._log.with_suffix(".go").exists():
            time.sleep(0.01)
        self._note(f"{os.getpid()} done")
        return 1.0


class Hanging(Sample):
    """Never finishes a score."""

    def score(self, problem: Any, completion: str) -> Any:
        self.spins()


class _Touches:
    """Creates a file when unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


class Several:
    """Scores by `scores`, with parts."""

    def score(self, problem: Any, completion: str) -> float:
        raise AssertionError("never called")

    def scores(self, problem: Any, completion: str) -> Any:
        return {"odd": (1.0,), "nan": (1.0, {"a": float("nan")}), "text": ("1", {})}.get(
            completion, (len(completion), {"length": len(completion), "format": 0.5})
        )


class Judge:
    """Needs a key to score."""

    def score(self, _: Any, __: str) -> float:
        if not os.getenv("JUDGE_KEY"):
            raise PermissionError("401")
        return 1.0


def keyed() -> Any:
    """Build a score that needs a key."""
    os.environ["JUDGE_KEY"]


def broken() -> Sample:
    raise ValueError("no luck")


def ends() -> Sample:
    os._exit(3)
