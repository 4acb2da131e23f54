"""Short word problems that a small model can learn, `--environment word_problems`: three levels, without end.

A problem is a story with a name, a thing and numbers, all drawn from a fixed seed. Its story and its numbers alone
decide whether it is held out: no held-out problem comes back in training with another name or thing.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from bridge.types import Problem

INSTRUCTION = "Think in one short sentence, then end with the answer as a number."
HELD_OUT_SHARE, HELD_OUT_PER_LEVEL = 8, 64
"""One in so many problems is held out; an evaluation takes so many of each level."""
NAMES = ("Amara", "Ben", "Chloe", "Daniel", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stickers")
LEAST, MOST = 2, {"a": 20, "b": 20, "c": 20, "m": 9, "n": 9}
"""Of the numbers in a story, by their names."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
Numbers = Mapping[str, int]
Story = tuple[str, Callable[[Numbers], float]]
"""Text, and the answer from its numbers."""
LEVELS: Mapping[int, tuple[Story, ...]] = {
    1: (
        ("{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?", lambda n: n["a"] + n["b"]),
        ("{name} has {a} {thing} and gives {b} away. How many {thing} are left?", lambda n: n["a"] - n["b"]),
        ("{name} has {m} boxes with {n} {thing} in each. How many {thing} is that?", lambda n: n["m"] * n["n"]),
    ),
    2: (
        ("{name} has {a} {thing}, buys {b} more and then loses {c}. How many {thing} does {name} have now?",
         lambda n: n["a"] + n["b"] - n["c"]),
        ("{name} has {m} boxes with {n} {thing} in each, and {a} more {thing}. How many {thing} is that?",
         lambda n: n["m"] * n["n"] + n["a"]),
        ("{name} fills {m} boxes with {n} {thing} each and gives {a} {thing} away. How many {thing} are left?",
         lambda n: n["m"] * n["n"] - n["a"]),
        ("{name} has {a} {thing}, finds {b} more and shares all among {m} friends. How many {thing} does each get?",
         lambda n: (n["a"] + n["b"]) / n["m"]),
    ),
    3: (
        ("{name} has {m} boxes with {n} {thing} each and {a} more {thing}, and sells {b}. How many {thing} are left?",
         lambda n: n["m"] * n["n"] + n["a"] - n["b"]),
        ("{name} sells {m} {thing} on Monday and {a} more on Tuesday, for {n} dollars each. How many dollars is that?",
         lambda n: (n["m"] + n["a"]) * n["n"]),
        ("{name} has {a} {thing}, and Max has {b} more than {name}. Together they give {c} away. How many are left?",
         lambda n: 2 * n["a"] + n["b"] - n["c"]),
    ),
}  # fmt: skip


class WordProblems:
    """Stories of one, two and three steps, as chat messages; the last number of a completion is its answer."""

    def __iter__(self) -> Iterator[Problem]:
        return stories(LEVELS, is_held_out=False)

    def held_out(self) -> list[Problem]:
        return [problem for level in LEVELS for problem in islice(stories([level]), HELD_OUT_PER_LEVEL)]

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the last number of the completion is the problem's answer, otherwise 0.0."""
        numbers = NUMBER.findall(completion)
        return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(problem["answer"]))


def stories(levels: Iterable[int], *, is_held_out: bool = True) -> Iterator[Problem]:
    """Yield problems of these levels without end, with an answer that is a positive whole number."""
    draw = random.Random(0)  # noqa: S311  not a secret
    known = [(level, text, answer) for level in levels for text, answer in LEVELS[level]]
    while True:
        level, text, answer_of = draw.choice(known)
        numbers = {name: draw.randint(LEAST, most) for name, most in MOST.items() if f"{{{name}}}" in text}
        names = {"name": draw.choice(NAMES), "thing": draw.choice(THINGS)}
        answer = answer_of(numbers)
        kept = zlib.crc32(f"{text}{numbers}".encode()) % HELD_OUT_SHARE == 0
        if answer > 0 and answer == int(answer) and kept == is_held_out:
            story = f"{text.format(**names, **numbers)}\n{INSTRUCTION}"
            prompt = {"prompt": [{"role": "user", "content": story}], "plain_prompt": story}
            problem: Any = {**prompt, "answer": str(int(answer)), "level": level}
            yield problem
