"""`--environment word_problems`: an endless stream of short word problems on three levels that a small model can learn.

A problem is a story with a name, an object and numbers, all drawn with a fixed seed. Only the story and the numbers
decide whether a problem is held out, so no held-out problem appears in training with a different name or object.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from bridge.types import Problem

INSTRUCTION = "Think in one short sentence, then end with the answer as a number."
HELD_OUT_SHARE = 8
"""One in this many problems is held out."""
HELD_OUT_PER_LEVEL = 64
"""Number of held-out problems per level in an evaluation."""
NAMES = ("Amara", "Ben", "Chloe", "Daniel", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stickers")
NUMBER = re.compile(r"((?<![\w)])[-\u2212\u2013](?:\\?[$€£])?)?(\d[\d,]*(?:\.\d+)?|\.\d+)")
"""Matches the sign and the digits of a number; a minus between two numbers, as in `3-5`, is not a sign."""
Numbers = Mapping[str, int]
Story = tuple[str, Callable[[Numbers], int]]
"""A text template, and a function that computes the answer from the numbers in it."""
ONE_STEP: tuple[Story, ...] = (
    ("{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?", lambda n: n["a"] + n["b"]),
    ("{name} has {a} {thing} and gives {b} away. How many {thing} are left?", lambda n: n["a"] - n["b"]),
    ("{name} has {m} boxes with {n} {thing} in each. How many {thing} is that?", lambda n: n["m"] * n["n"]),
)
TWO_STEPS: tuple[Story, ...] = (
    ("{name} has {a} {thing}, buys {b} more and then loses {c}. How many {thing} does {name} have now?",
     lambda n: n["a"] + n["b"] - n["c"]),
    ("{name} has {m} boxes with {n} {thing} in each, and {a} more {thing}. How many {thing} is that?",
     lambda n: n["m"] * n["n"] + n["a"]),
    ("{name} fills {m} boxes with {n} {thing} each and gives {a} {thing} away. How many {thing} are left?",
     lambda n: n["m"] * n["n"] - n["a"]),
    ("{name} sells {m} {thing} on Monday and {a} more on Tuesday, for {n} dollars each. How many dollars is that?",
     lambda n: (n["m"] + n["a"]) * n["n"]),
)  # fmt: skip
LEVELS: Mapping[int, tuple[int, tuple[Story, ...]]] = {1: (9, ONE_STEP), 2: (20, ONE_STEP), 3: (9, TWO_STEPS)}
"""Level -> the largest number in its problems, and its stories."""
LEAST = 2
MOST_OF_A_PRODUCT = 9


class WordProblems:
    """One-step and two-step stories as chat messages; the last number of a completion counts as its answer."""

    def __iter__(self) -> Iterator[Problem]:
        return stories(LEVELS, is_held_out=False)

    def held_out(self) -> list[Problem]:
        return [problem for level in LEVELS for problem in islice(stories([level]), HELD_OUT_PER_LEVEL)]

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the last number of the completion is the problem's answer, otherwise 0.0."""
        numbers = NUMBER.findall(completion)
        if not numbers:
            return 0.0
        sign, digits = numbers[-1]
        number = float(digits.replace(",", ""))
        return float((-number if sign else number) == float(problem["answer"]))


def stories(levels: Iterable[int], *, is_held_out: bool = True) -> Iterator[Problem]:
    """Yield an endless stream of problems of these levels; all answers are positive."""
    draw = random.Random(0)  # noqa: S311  not a secret
    kinds = [(largest, *story) for largest, texts in map(LEVELS.__getitem__, levels) for story in texts]
    while True:
        largest, text, answer_of = draw.choice(kinds)
        most = dict.fromkeys("abc", largest) | dict.fromkeys("mn", MOST_OF_A_PRODUCT)
        numbers = {key: draw.randint(LEAST, most[key]) for key in most if f"{{{key}}}" in text}
        words = {"name": draw.choice(NAMES), "thing": draw.choice(THINGS)}
        answer = answer_of(numbers)
        if answer > 0 and is_held_out == (zlib.crc32(f"{text}{numbers}".encode()) % HELD_OUT_SHARE == 0):
            prompt = f"{text.format(**words, **numbers)}\n{INSTRUCTION}"
            yield {"prompt": [{"role": "user", "content": prompt}], "plain_prompt": prompt, "answer": str(answer)}
