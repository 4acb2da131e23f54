r"""What a completion gives as its answer, and whether that answer is right.

An answer is *marked* by `####` in front of it, up to the end of the line, or by `\boxed{...}` around it; the last mark
counts. What is equal is for math-verify to say: it reads numbers, fractions and LaTeX, and passes over units.

Not covered: time limits: a formula such as `10^10^10` is worked out (`bridge/scoring` ends what takes too long).
"""

import logging
import re
from functools import lru_cache
from typing import Any

from bridge.core.foreign_code import shortened
from bridge.errors import RewardError

MARK = re.compile(r"####(?=(?P<line>[^\n]*))|\\boxed\s*\{")
MARKUP = re.compile(r"\*+|\\[,!;]|\\\$|\$|\\\(|\\\)|\{,\}")
"""What only decorates a number: bold, thin spaces, dollars, the signs of formulae; `{,}` is LaTeX's thousands comma."""
WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
PROSE = re.compile(r"[^\d\\]*[^\W\d_]{3}[^\d\\]*")
"""Words without a number, which math-verify would take for a product of letters."""
MAX_ANSWER_CHARACTERS = 400
"""A marked answer that is longer is none."""
END_CHARACTERS = 1000
"""An answer that is not marked is looked for in so much of a completion's end: in more, it is looked for in vain."""


def marked(completion: str) -> str | None:
    r"""Return what the last `####` or `\boxed{}` marks, empty where nothing follows or it was cut off; None if none."""
    marks = list(MARK.finditer(completion))
    if not marks:
        return None
    last = marks[-1]
    found = _boxed(completion[last.end() :]) if last["line"] is None else last["line"]
    return found.strip() if len(found) <= MAX_ANSWER_CHARACTERS else ""


def is_right(answer: object, completion: str) -> bool:
    """Tell whether `completion` gives an answer that equals `answer`, a number or formula, marked itself or not.

    The marked answer of the completion counts; where nothing is marked, what follows "the answer is", or else the last
    number does.

    Raises:
        RewardError: `answer` is neither.
    """
    from math_verify import verify

    given = marked(completion)
    readings = _unmarked(completion) if given is None else _readings(given)
    return bool(readings) and verify(list(_gold(str(answer))), readings, timeout_seconds=None)


def prepare() -> None:
    """Import math-verify, which takes seconds that no completion's time limit should pay for."""
    import math_verify

    assert math_verify


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    given = marked(answer)
    plain = _plain(answer if given is None else given)
    found = [] if PROSE.fullmatch(plain) else _parse(f"${plain}$")
    if all(isinstance(reading, str) for reading in found):  # what it cannot read it gives back as it is
        raise RewardError(
            f"the answer {shortened(repr(answer))} is no number or formula",
            remedy="give answers that the reward math can compare with, or choose another --reward",
        )
    return tuple(found)


def _readings(given: str) -> list[Any]:
    """Return what a marked answer may mean: a formula, or a number in words such as `42 eggs`."""
    plain = _plain(given)
    if not plain:
        return []
    return _parse(f"${plain}$") + ([] if "\\" in plain else _parse(plain))


def _unmarked(completion: str) -> list[Any]:
    end = completion[-END_CHARACTERS:]
    return _parse(end if end == completion else end.partition(" ")[2])


def _plain(given: str) -> str:
    return MARKUP.sub("", WORDS.sub(r" \1 ", given)).strip()


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # or it warns that it has no time limit: ours is outside
    # Its own limit is an alarm signal, which only the main thread of a process may set.
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _boxed(text: str) -> str:
    """Return `text` up to the brace that closes the box; nothing where none does: the answer was cut off."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:index]
    return ""
