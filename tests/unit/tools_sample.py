"""A class with tools for the tests' worker processes; some of its tools misbehave in every possible way."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GATE = "TOOLS_SAMPLE_GATE"
"""The variable with the path of the file that `_waits` waits for."""


class Bench:
    """Remembers what was added since its reset."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(6):
            yield {"prompt": f"Begin at {number}: ", "start": number}

    def held_out(self) -> list[dict[str, Any]]:
        return [{"prompt": "Begin at 50: ", "start": 50}]

    def reset(self, start: int, prompt: str) -> str:
        self._total = start
        self.prompt = prompt
        return "go on." if start != 5 else str(time.monotonic_ns())

    def add(self, text: str) -> int:
        """Add the length of a text, and return the total.

        Args:
            text: Any text.
        """
        self._total += len(text)
        return self._total

    def misbehave(self, how: str) -> Any:
        """Do something.

        Args:
            how: What to do.
        """
        return getattr(self, f"_{how}")()

    def score(self, problem: dict[str, Any], completion: str) -> float:
        return self._total + len(completion) / 1000 + 0 * len(problem)

    def _raises(self) -> None:
        raise ValueError("two\nlines")

    def _searches(self) -> str:
        return os.environ["SEARCH_API_KEY"]

    def _exits(self) -> None:
        sys.exit(3)

    def _prints(self) -> str:
        sys.stdout.write("noise " * 1000)
        os.write(1, b"more noise")
        return "printed"

    def _forks(self) -> str:
        return "parent" if os.fork() else "child"

    def _is_long(self) -> str:
        return "x" * 2**20

    def _waits(self) -> None:
        while not Path(os.environ[GATE]).exists():
            time.sleep(0.01)

    def _hangs(self) -> None:
        subprocess.Popen(["sleep", "1234.5"])
        time.sleep(1000)

    def _dies(self) -> None:
        os._exit(7)

    def _names_its_process(self) -> str:
        return f"process {os.getpid()}"


class Halves(Bench):
    """Answers with a lone surrogate, which JSON may contain."""

    def reset(self, start: int, prompt: str) -> str:
        return f"{super().reset(start, prompt)}\ud83d"

    def add(self, text: str) -> str:  # type: ignore[override]
        """Answer the text.

        Args:
            text: Any text.
        """
        return text


class Rewarded(Bench):
    """Has a reward method like TRL's classes."""

    async def slow(self, text: str) -> str:
        """Return a text.

        Args:
            text: Any text.
        """
        return text

    def get_reward(self) -> float:
        return -1.0 * self._total


class PerTurn(Bench):
    """Rewards each turn by what its call added, and the last one by 1."""

    def reset(self, start: int, prompt: str) -> str:
        self.rewards: list[float] = []
        return super().reset(start, prompt)

    def add(self, text: str) -> int:
        """Add the length of a text, and return the total.

        Args:
            text: Any text.
        """
        self.rewards.append(float(len(text)))
        return super().add(text)

    def get_reward(self) -> list[float]:
        return [*self.rewards, 1.0]
