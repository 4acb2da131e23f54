"""Small sums: every `a+b=` with both numbers below 20, scored exactly."""

import random
from collections.abc import Iterator

from bridge.types import Problem

NUMBERS = range(20)
NUM_HELD_OUT = 80
"""A fifth of the sums."""


class Arithmetic:
    """400 sums: a fixed random draw of 80 is held out, the other 320 are for training.

    The draw is the same in every process and on every machine. Pairs are ordered: `4+3=` may be a training problem
    while `3+4=` is held out.
    """

    def __init__(self) -> None:
        sums: list[Problem] = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in NUMBERS for b in NUMBERS]
        # A draw, because a rule such as every fifth sum would keep whole pairs of last digits from training.
        random.Random(0).shuffle(sums)  # noqa: S311  not a secret
        self._held_out, self._training = sums[:NUM_HELD_OUT], sums[NUM_HELD_OUT:]

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._training)

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1.0 for the answer's digits and nothing else except white space around them, otherwise 0.0."""
        return float(completion.strip() == problem["answer"])
