r"""Rewards that are chosen by name, `--reward math,format=0.2,my.py:brief`, and summed by their weights.

An answer is *marked* by `####` in front of it, up to the end of the line, or by `\boxed{...}` around it; the last mark
counts. math-verify decides what is equal: it reads numbers, fractions and LaTeX, and ignores units. It has no time
limit here, and evaluates a formula such as `10^10^10`: `bridge/scoring` ends what takes too long.
"""

import difflib
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bridge.core import paths
from bridge.core.foreign_code import FORMS, described, find_object, foreign_code, shortened
from bridge.errors import RewardError, UsageError
from bridge.scoring.score import as_reward, limit_note
from bridge.types import Problem

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
Score = Callable[[Problem, str], Any]


def exact(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion is the problem's answer, apart from white space around both."""
    return float(completion.strip() == str(problem["answer"]).strip())


def equal(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion's answer equals the problem's as a number or formula."""
    return float(is_right(problem["answer"], completion))


def is_marked(_: Problem, completion: str) -> float:
    r"""Return 1.0 if the completion marks an answer, by `####` or in `\\boxed{}`, right or wrong."""
    return float(bool(marked(completion)))


NAMED: Mapping[str, tuple[Score, bool]] = {"math": (equal, True), "exact": (exact, True), "format": (is_marked, False)}
"""Name -> the reward, and whether it needs the problem's answer."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward and its weight in the sum."""

    name: str
    """Its name in the metrics."""
    weight: float
    score: Score
    """Returns the number before its weight."""
    needs_answer: bool = False
    """Whether it reads the problem's `answer`."""
    location: str = ""
    """File and line of a user's function."""

    def __call__(self, problem: Problem, completion: str) -> float:
        """Return the number before its weight."""
        with foreign_code(f"reward {self.name}", self.location or self.name):
            value = self.score(problem, completion)
        number = as_reward(value)
        if number is None:
            raise RewardError(
                f"reward {self.name} returned {described(value)}, expected a finite number{limit_note(value)}"
                f" ({self.location or self.name})",
                remedy=f"return a finite number from {self.name}",
            )
        return number


class Rewards:
    """Several rewards as one."""

    def __init__(self, rewards: tuple[Reward, ...]) -> None:
        if any(reward.score is equal for reward in rewards):
            import math_verify  # takes seconds, which no completion's time limit should pay for

            assert math_verify
        self._rewards = rewards

    def score(self, problem: Problem, completion: str) -> float:
        return self.scores(problem, completion)[0]

    def scores(self, problem: Problem, completion: str) -> tuple[float, dict[str, float]]:
        """Return the weighted sum, and each reward before its weight."""
        parts = {reward.name: reward(problem, completion) for reward in self._rewards}
        return sum(reward.weight * parts[reward.name] for reward in self._rewards), parts


def parse(text: str) -> tuple[Reward, ...]:
    """Return the rewards of a list such as `math,format=0.2,my.py:brief`; a weight follows `=`."""
    rewards = tuple(_reward(name, weight) for name, weight in split(text))
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(
            f"--reward {text}: two rewards are called {' and '.join(sorted(twice))}",
            remedy="give each reward once, and functions different names",
        )
    if not any(reward.weight for reward in rewards):
        raise UsageError(f"--reward {text}: every weight is 0", remedy="leave =0 out of one of them")
    return rewards


def split(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each name, or `path/to/file.py:function`, of a list of rewards, and its weight as written, if it has one.

    A path may have commas and equals signs: a weight follows the function's name, and a comma inside the path of a file
    that is there separates nothing.
    """
    pieces = text.split(",")
    while pieces:
        items = (",".join(pieces[:count]).strip() for count in range(1, len(pieces) + 1))
        item = next(filter(_is_known, items), pieces[0].strip())
        del pieces[: item.count(",") + 1]
        yield _name_and_weight(item)


def _is_known(item: str) -> bool:
    name, _ = _name_and_weight(item)
    path = name.rpartition(":")[0]
    return name in NAMED or (path != "" and paths.is_file(paths.expanded(path)))


def _name_and_weight(item: str) -> tuple[str, str | None]:
    path, colon, last = item.rpartition(":")
    name, sign, weight = last.partition("=")
    return f"{path}{colon}{name}", weight if sign else None


def _reward(name: str, written: str | None) -> Reward:
    try:
        weight = 1.0 if written is None else float(written)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UsageError(
            f"--reward {name}={written}: the weight {written!r} is not a finite number", remedy=f"--reward {name}=0.5"
        )
    if ":" in name or name.endswith(".py"):
        return _own(name, weight)
    if name in NAMED:
        score, needs_answer = NAMED[name]
        return Reward(name=name, weight=weight, score=score, needs_answer=needs_answer)
    (close,) = difflib.get_close_matches(name, NAMED, n=1) or ["math"]
    form = FORMS["reward"]
    raise UsageError(
        f"no reward {name!r}, expected {', '.join(NAMED)} or {form}",
        remedy=f"--reward {close}, or --reward {form} for your own",
    )


def _own(name: str, weight: float) -> Reward:
    score = find_object("reward", name)
    path, _, title = name.rpartition(":")
    remedy = f"write it as: def {title}(problem: dict, completion: str) -> float"
    if inspect.iscoroutinefunction(score):
        raise UsageError(f"reward {name} is an async function, expected a plain one", remedy=remedy)
    try:
        signature, code = inspect.signature(score), getattr(inspect.unwrap(score), "__code__", None)
        if "completions" in signature.parameters:
            score = _of_lists(score, signature.parameters)
        else:
            signature.bind({}, "")
    except (TypeError, ValueError) as error:  # a ValueError: it is written in C and has no signature
        raise UsageError(
            f"reward {name} cannot be called with (problem, completion): {error}", remedy=remedy
        ) from error
    location = f"{Path(code.co_filename).name} line {code.co_firstlineno}" if code else Path(path).name
    return Reward(name=title, weight=weight, score=score, location=location)


def _of_lists(function: Any, parameters: Mapping[str, inspect.Parameter]) -> Score:
    """Wrap a function in TRL's form, which takes lists of prompts and completions, and a list per column."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def score(problem: Problem, completion: str) -> Any:
        is_chat = not isinstance(problem["prompt"], str)
        given: dict[str, Any] = {**problem, "prompts": problem["prompt"]}
        given["completions"] = [{"role": "assistant", "content": completion}] if is_chat else completion
        wanted = given.keys() - {"prompt"} if takes_all else given.keys() & parameters.keys()
        (value,) = function(**{key: [given[key]] for key in wanted})
        return value

    return score


# Answers


def marked(completion: str) -> str | None:
    r"""Return what the last `####` or `\boxed{}` marks, empty if nothing or incomplete; None without a mark."""
    marks = list(MARK.finditer(completion))
    if not marks:
        return None
    last = marks[-1]
    answer = _boxed(completion[last.end() :]) if last["line"] is None else last["line"]
    return answer.strip() if len(answer) <= MAX_ANSWER_CHARACTERS else ""


def is_right(answer: object, completion: str) -> bool:
    """Return whether `completion` gives an answer that equals `answer`, a number or formula, marked or not.

    The completion's marked answer counts; without a mark, what follows "the answer is", or else the last number.
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
    readings = [] if PROSE.fullmatch(plain) else _parse(f"${plain}$")
    if all(isinstance(reading, str) for reading in readings):  # math-verify returns what it cannot read
        raise RewardError(
            f"the answer {shortened(repr(answer))} is not a number or formula",
            remedy="give answers that the reward math can compare with, or choose another --reward",
        )
    return tuple(readings)


def _plain(given: str) -> str:
    return MARKUP.sub("", WORDS.sub(r" \1 ", given)).strip()


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # or it warns that it has no time limit
    # Its own limit is an alarm signal, which only the main thread may set.
    return parse(text, parsing_timeout=None)  # type: ignore[no-any-return]


def _boxed(text: str) -> str:
    """Return `text` up to the brace that closes the box; empty if none does."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:index]
    return ""
