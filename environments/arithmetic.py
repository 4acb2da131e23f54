"""Small sums: every `a+b=` with both numbers below 20, scored exactly.

Not covered: other operations, larger numbers, answers wrapped in words, partial credit.
"""

import random
from collections.abc import Iterator

from bridge.types import Problem

NUMBERS = range(20)
"""What both summands are taken from."""
NUM_HELD_OUT = 80
"""A fifth of the sums."""


class Arithmetic:
    """400 sums, of which a fixed draw of 80 is held out; the other 320 are for training.

    The draw is the same in every process and on every machine. It is by ordered pairs: `4+3=` may be a training
    problem where `3+4=` is held out.
    """

    def __init__(self) -> None:
        sums = [_problem(a, b) for a in NUMBERS for b in NUMBERS]
        # A draw and not a rule such as every fifth sum, which would keep whole pairs of last digits from training.
        random.Random(0).shuffle(sums)  # noqa: S311  no secret is made of it
        self._held_out, self._training = sums[:NUM_HELD_OUT], sums[NUM_HELD_OUT:]

    def __iter__(self) -> Iterator[Problem]:
        """Yield every training problem."""
        return iter(self._training)

    def held_out(self) -> list[Problem]:
        """Return the problems that training never sees."""
        return list(self._held_out)

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1.0 for the answer's digits and nothing else, 0.0 otherwise; white space around them is forgiven."""
        return float(completion.strip() == problem["answer"])


def _problem(a: int, b: int) -> Problem:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}
