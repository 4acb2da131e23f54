r"""Which answer a completion gives, and whether it is right.

An answer is *marked* by `####` in front of it, up to the end of the line, or by `\boxed{...}` around it; the last mark
counts. math-verify decides what is equal: it reads numbers, fractions and LaTeX, and ignores units. It has no time
limit here, and evaluates a formula such as `10^10^10`: `bridge/scoring` ends what takes too long.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from bridge.core.foreign_code import shortened
from bridge.errors import RewardError

MARK = re.compile(r"####(?=(?P<line>[^\n]*))|\\boxed\s*\{")
MARKUP = re.compile(r"\*+|\\[,!;]|\\\$|\$|\\\(|\\\)|\{,\}")
"""Decoration of a number: bold, thin spaces, dollars, formula delimiters; `{,}` is LaTeX's thousands comma."""
WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
PROSE = re.compile(r"[^\d\\]*[^\W\d_]{3}[^\d\\]*")
"""Words without a number, which math-verify would read as a product of letters."""
MAX_ANSWER_CHARACTERS = 400
"""A longer marked answer does not count."""
END_CHARACTERS = 1000
"""Length of a completion's end in which an answer without a mark is looked for."""


def marked(completion: str) -> str | None:
    r"""Return what the last `####` or `\boxed{}` marks, empty if nothing or incomplete; None without a mark."""
    marks = list(MARK.finditer(completion))
    if not marks:
        return None
    last = marks[-1]
    found = _boxed(completion[last.end() :]) if last["line"] is None else last["line"]
    return found.strip() if len(found) <= MAX_ANSWER_CHARACTERS else ""


def is_right(answer: object, completion: str) -> bool:
    """Return whether `completion` gives an answer that equals `answer`, a number or formula, marked or not.

    The completion's marked answer counts; without a mark, what follows "the answer is", or else the last number.

    Raises:
        RewardError: `answer` is neither.
    """
    from math_verify import verify

    given = marked(completion)
    if given is None:
        end = completion[-END_CHARACTERS:]
        readings = _parse(end if end == completion else end.partition(" ")[2])
    else:  # a formula, or a number in words such as `42 eggs`
        plain = _plain(given)
        readings = _parse(f"${plain}$") if plain else []
        readings += _parse(plain) if plain and "\\" not in plain else []
    return bool(readings) and verify(list(_gold(str(answer))), readings, timeout_seconds=None)


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    given = marked(answer)
    plain = _plain(answer if given is None else given)
    found = [] if PROSE.fullmatch(plain) else _parse(f"${plain}$")
    if all(isinstance(reading, str) for reading in found):  # math-verify returns what it cannot read
        raise RewardError(
            f"the answer {shortened(repr(answer))} is not a number or formula",
            remedy="give answers that the reward math can compare with, or choose another --reward",
        )
    return tuple(found)


def _plain(given: str) -> str:
    return MARKUP.sub("", WORDS.sub(r" \1 ", given)).strip()


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # or it warns that it has no time limit
    # Its own limit is an alarm signal, which only the main thread may set.
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _boxed(text: str) -> str:
    """Return `text` up to the brace that closes the box; empty if none does."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:index]
    return ""
