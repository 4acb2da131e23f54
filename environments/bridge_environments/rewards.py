r"""Weighted sums of rewards chosen by name, such as `--reward math,format=0.2,my.py:brief`.

An answer is *marked* by `####` in front of it, up to the end of the line, or by `\boxed{...}` around it; the last mark
counts, and marks inside `<think>...</think>` do not. A heading such as `#### Answer` above other text is not a mark.
math-verify decides what is equal, by its defaults, except for small numbers (`_is_equal`), percentages (`_read`),
emphasis, words after a number, mixed numbers, thousands separators, scientific notation, and text before or after an
answer (`_normalized`). It has no time limit here, and evaluates formulas such as `10^10^10`: `bridge/scoring` ends
scores that take too long.
"""

import difflib
import inspect
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from bridge.core import paths
from bridge.core.foreign_code import FORMS, described, find_object, foreign_code, is_async, shortened
from bridge.errors import RewardError, UsageError
from bridge.scoring.score import as_reward, limit_note
from bridge.types import Problem

HEADING = r"[^\d\\\n]{0,100}+\n\s*\S"
"""Matches the text after `####` in a Markdown heading: a short line without a number, and text below it."""
MARK = re.compile(rf"####(?!{HEADING})(?=(?P<line>[^\n]*))|\\(?:boxed|fbox)\s*\{{")
TAG = re.compile(r"<(?P<closes>/?)answer>", re.IGNORECASE)
"""The tags around an answer; math-verify reads no number that touches them."""
EMPHASIS = re.compile(r"(?<![\w})\\*_`])(([*_`])\2{0,2})(?!\2|\s)(.+?)(?<!\s)\1(?![\w{*_`])")
"""Matches Markdown's `**bold**`, `_italic_` and code, but neither a product such as `2*3*4` nor an index like `a_1`."""
MARKUP = re.compile(r"^\*+|\*+$|\\\$|\$|\\\(|\\\)|\\\[|\\\]")
"""Matches unpaired asterisks, dollar signs, and the delimiters of a formula."""
DOLLARS = re.compile(r"\\\$|(?<=(?<![\w$])-)\$(?=\d)")
r"""Matches dollar signs that hide a number or its sign: `\$5`, `-$5`."""
SPACE = r"(?:\\[,;:! ]|[ \u00a0\u2009\u202f])"
"""A space inside a number."""
THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{SPACE}\d{{3}})+(?!\d)")
r"""A number with spaces as thousands separators, which LaTeX would read as a product: `1\,234`, `1 234`."""
MIXED = re.compile(
    rf"(?<![\w.,/^}}])(\d{{1,3}}(?:,\d{{3}})+|\d{{1,15}}){SPACE}+(\d{{1,9}})/(\d{{1,9}})(?![\w/^!]|[.,]\d)"
)
"""A mixed number such as `1 1/4`, which math-verify reads as 2/4."""
SMALL_FRACTION = re.compile(r"(?:(\d)[ \u2009\u202f]?)?([¼-¾⅐-⅞])")
"""A fraction written as one character, after the last digit of a whole number or by itself."""
SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:(?:\d+\.\d*|\.\d+)[eE][+-]?\d{1,3}|\d+[eE](?:\+?\d{1,3}|-\d{2,3}))(?!\w|\.\d)")
"""A number such as 1.5e3 or 2E-05, which LaTeX would read as a product with Euler's number."""
EITHER = re.compile(r"\d+[eE]-\d")
"""A number only as the full answer; `3e-1` is a difference in formulas, or if the right answer has Euler's number."""
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|mathit|textrm)\s*\{([^{}]*)\}")
COMMAS = re.compile(r"(?<![\w.,{(\[])(?<![{(\[][-+])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
"""A number with commas as thousands separators, which math-verify reads as a list unless it stands on its own."""
PERCENT = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?\s*\\?%")
EQUALS = re.compile(r"(?:=|≈|\\approx(?![a-zA-Z])|~)\s*")
"""A relation sign in front of an answer; math-verify would read `= 1/2` as `1`."""
END = re.compile(r"(?:\s|[.,;]|\\[,;:!>]|\\q?quad(?![a-zA-Z])|~|\\)++$")
"""Punctuation, LaTeX spaces and line breaks after an answer."""
FUNCTIONS = (
    "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|lg|log|exp|sqrt|abs|min|max|gcd|lcm|mod|det|inf|pi"
)
NO_WORD = rf"(?<![\\\w{{])(?!(?:{FUNCTIONS}|infinity|and|or)\b)"
WORD = rf"{NO_WORD}[^\W\d_]{{3,}}(?![\w(])"
"""A word outside of LaTeX, which math-verify would read as a product of letters."""
SHORT_WORD = rf"{NO_WORD}[^\W\d_]{{2,}}(?![\w(])|(?<=\d)\s+[^\W\d_](?:\^\d|/[^\W\d_])"
"""The same for two letters, or a unit such as `m^2`; used if the right answer is a number."""
WORDS_BEHIND = re.compile(rf"(?<=[\d)}}%])\s+\(?{WORD}[^\d\\]*$")
"""Words after a number: `eggs a day` in `42 eggs a day`."""
PROSE = re.compile(r"[^\d\\]*[^\W\d_]{3}[^\d\\]*")
"""Words without a number."""
MAX_ANSWER_CHARACTERS = 400
"""Maximum length of a marked answer; longer ones do not count."""
SMALL_ZEROS = 4
"""Decimal place of the first digit of numbers below 0.001: six decimals would keep fewer than four of their digits."""
MAX_ZEROS = 400
"""Numbers with more leading zeros are equal only if they are the same formula."""
END_CHARACTERS = 1000
"""Number of characters at a completion's end that are searched for an answer without a mark."""
Score = Callable[[Problem, str], Any]
TRL_ONLY = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer passes to rewards in addition to prompts, completions and columns."""
VERL: Mapping[str, None] = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
"""Arguments that verl passes to a reward, in its order."""
OTHER_FORMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "OpenRLHF's": (("queries", "labels"), "labels are problem['answer'], and a query is the prompt and the completion"),
    "verl's batched": (("solution_strs", "ground_truths"), "verl's form for one completion works: solution_str, ..."),
    "slime's": (("args", "sample"), "sample.response is the completion, sample.label is problem['answer']"),
    "trlX's": (("samples", "outputs"), "outputs are completions"),
    "verifiers'": (("completion", "answer"), "answer is problem['answer']; or run the environment: verifiers:ID"),
    "a verifiers rubric's": (("completion", "state"), "or run the whole environment: --environment verifiers:ID"),
}
"""Name of a system -> parameter names that identify its reward functions, and advice for a hint."""
COMPLETIONS = (
    "completion", "response", "output", "generation", "predict_str", "prediction", "model_output", "model_response",
)  # fmt: skip
"""Names of a first parameter that cannot be meant as the problem."""
PROBLEMS = ("problem", "answer", "ground_truth", "label", "solution", "target", "reference", "info", "state")
"""Names of a second parameter that cannot be meant as the completion."""


def exact(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion is the problem's answer, apart from surrounding whitespace.

    3.0 counts as 3, because a column of numbers with gaps is stored as floats.
    """
    answer = problem["answer"]
    given = completion.strip()
    is_whole = not isinstance(answer, str) and answer == int(answer)
    return float(given == str(answer).strip() or (is_whole and given == str(int(answer))))


def equal(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion's answer equals the problem's answer as a number or formula."""
    return float(is_right(problem["answer"], completion))


def is_marked(_: Problem, completion: str) -> float:
    r"""Return 1.0 if the completion marks an answer with `####` or `\\boxed{}`, whether right or wrong."""
    return float(bool(marked(completion)))


def nothing(_: Problem, completion: str) -> float:  # noqa: ARG001  a reward's parameters
    """Return 0: for a loss that reads no reward, and problems without an answer."""
    return 0.0


NAMED: Mapping[str, tuple[Score, bool]] = {
    "math": (equal, True),
    "exact": (exact, True),
    "format": (is_marked, False),
    "none": (nothing, False),
}
"""Name -> the reward function, and whether it needs the problem's answer."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward and its weight in the sum."""

    name: str
    """The reward's name in the metrics."""
    weight: float
    score: Score
    """Returns the unweighted reward."""
    needs_answer: bool = False
    """Whether the function reads the problem's `answer`."""
    location: str = ""
    """File and line of a user's function."""

    def __call__(self, problem: Problem, completion: str) -> float | None:
        """Return the unweighted reward; None if it does not apply to this problem."""
        with foreign_code(f"reward {self.name}", self.location or self.name):
            value = self.score(problem, completion)
        number = as_reward(value)
        if number is None and value is not None:
            raise self.fault(value)
        return number

    def fault(self, value: object) -> RewardError:
        """Return the error for an invalid return value."""
        return RewardError(
            f"reward {self.name} returned {described(value)}, expected a finite number{limit_note(value)}"
            f" ({self.location or self.name})",
            hint=f"return a finite number from {self.name}",
        )


class Rewards:
    """Combines several rewards into a weighted sum."""

    def __init__(self, rewards: tuple[Reward, ...]) -> None:
        if any(reward.score is equal for reward in rewards):
            import math_verify  # takes seconds, which must not count toward a completion's time limit

            assert math_verify
        self._rewards = rewards

    def score(self, problem: Problem, completion: str) -> float:
        return self.scores(problem, completion)[0]

    def scores(self, problem: Problem, completion: str) -> tuple[float, dict[str, float]]:
        """Return the weighted sum of the rewards that apply, and each unweighted reward by name.

        As in TRL, a reward does not apply where it returns None.
        """
        numbers = [(reward, reward(problem, completion)) for reward in self._rewards]
        applied = [(reward, number) for reward, number in numbers if number is not None]
        if not applied:
            raise self._rewards[0].fault(None)
        return sum(reward.weight * number for reward, number in applied), {
            reward.name: number for reward, number in applied
        }


def parse(text: str) -> tuple[Reward, ...]:
    """Return the rewards of a list such as `math,format=0.2,my.py:brief`; a weight follows `=`."""
    rewards = tuple(_reward(name, weight) for name, weight in split(text))
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(
            f"--reward {text}: two rewards have the name {' and '.join(sorted(twice))}",
            hint="list each reward only once, and give functions different names",
        )
    if not any(reward.weight for reward in rewards):
        raise UsageError(f"--reward {text}: every weight is 0", hint="remove =0 from at least one reward")
    return rewards


def split(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each name or `path/to/file.py:function` in a list of rewards, with its weight as written, if it has one.

    A path may contain commas and equals signs: a weight follows the function's name, and commas inside the path of an
    existing file do not separate names.
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
            f"--reward {name}={written}: the weight {written!r} is not a finite number", hint=f"--reward {name}=0.5"
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
        hint=f"--reward {close}, or --reward {form} for your own",
    )


def _own(name: str, weight: float) -> Reward:
    score = find_object("reward", name)
    path, _, title = name.rpartition(":")
    hint = f"write it as: def {title}(problem: dict, completion: str) -> float, where problem has the row's columns"
    if is_async(score):
        raise UsageError(f"reward {name} is an async function, expected a plain one", hint=hint)
    try:
        parameters = inspect.signature(score).parameters
        code = getattr(inspect.unwrap(score), "__code__", None)
        if not parameters.keys() & {"completions", "solution_str"}:
            _check_order(name, list(parameters), hint)
            inspect.signature(score).bind({}, "")
    except UsageError:
        raise
    except (TypeError, ValueError) as error:  # ValueError: a function written in C without a signature
        raise UsageError(f"reward {name} cannot be called with (problem, completion): {error}", hint=hint) from error
    location = f"{Path(code.co_filename).name} line {code.co_firstlineno}" if code else Path(path).name
    if "completions" in parameters:
        _check_given(name, parameters)
        score = _of_lists(f"reward {title}", location, score, parameters)
    elif "solution_str" in parameters:
        _check_verl(name, parameters)
        score = _of_verl(score, parameters)
    return Reward(name=title, weight=weight, score=score, location=location)


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the parameters without a default."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in parameters.items() if one.default is one.empty and one.kind not in several]


def _check_given(name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse a function in TRL's form that requires arguments which only TRL's trainer has."""
    if missing := [key for key in _required(parameters) if key in TRL_ONLY]:
        raise UsageError(
            f"reward {name} takes {', '.join(missing)}, which Bridge does not have, expected prompts, completions and"
            " columns of the data",
            hint=f"give it a default, {missing[0]}=None: a reward runs in a separate process, for one completion",
        )


def _check_verl(name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse a function in verl's form that requires arguments which verl does not pass to every reward."""
    if unknown := [key for key in _required(parameters) if key not in VERL]:
        raise UsageError(
            f"reward {name} takes {', '.join(unknown)}, expected {', '.join(VERL)}, as verl calls it",
            hint=f"give it a default, {unknown[0]}=None",
        )


def _check_order(name: str, parameters: list[str], hint: str) -> None:
    """Refuse functions in the form of unsupported systems, which would be called with the wrong arguments."""
    for form, (names, given) in OTHER_FORMS.items():
        if {*names} <= {*parameters} and "problem" not in parameters:
            raise UsageError(
                f"reward {name} has {form} form, ({', '.join(parameters)}), expected (problem, completion)",
                hint=f"{given}; {hint}",
            )
    is_named = parameters[:1] == ["problem"]  # the second parameter may mean the model's answer or solution
    if len(parameters) > 1 and not is_named and (parameters[0] in COMPLETIONS or parameters[1] in PROBLEMS):
        raise UsageError(
            f"reward {name} takes ({', '.join(parameters)}), but is called with (problem, completion), in this order",
            hint=hint,
        )


def _of_verl(function: Any, parameters: Mapping[str, inspect.Parameter]) -> Score:
    """Wrap a function in verl's form, which returns a number, or a dict with the number as `score`."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def score(problem: Problem, completion: str) -> Any:
        row: Mapping[str, Any] = problem
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else row.get("answer")
        if truth is None:
            raise RewardError(
                "the problem has no ground_truth, expected a column answer, or reward_model with ground_truth",
                hint="name its column: --answer-column COLUMN",
            )
        given = {
            "data_source": row.get("data_source"),
            "solution_str": completion,
            "ground_truth": truth,
            "extra_info": row.get("extra_info"),
        }
        value = function(**{key: given[key] for key in (VERL if takes_all else VERL.keys() & parameters.keys())})
        return value["score"] if isinstance(value, Mapping) and "score" in value else value

    return score


def _of_lists(name: str, location: str, function: Any, parameters: Mapping[str, inspect.Parameter]) -> Score:
    """Wrap a function in TRL's form, which takes lists of prompts and completions, and a list per column."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def score(problem: Problem, completion: str) -> Any:
        is_chat = not isinstance(problem["prompt"], str)
        given: dict[str, Any] = {**problem, "prompts": problem["prompt"]}
        given["completions"] = [{"role": "assistant", "content": completion}] if is_chat else completion
        wanted = given.keys() - {"prompt"} if takes_all else given.keys() & parameters.keys()
        rewards = function(**{key: [given[key]] for key in wanted})
        is_list = isinstance(rewards, Sequence) and not isinstance(rewards, str | bytes)
        if not (is_list or getattr(rewards, "ndim", 0) == 1) or len(rewards) != 1:
            raise RewardError(
                f"{name} returned {described(rewards)}, expected a list with one reward, since it got one completion"
                f" ({location})",
                hint="return a list with one number for each completion, as for TRL",
            )
        return rewards[0]

    return score


# Answers


def marked(completion: str) -> str | None:
    r"""Return the text marked by the last `####` or `\boxed{}`, empty if incomplete, or else by the last `<answer>`.

    None without a mark.
    """
    said = _without_thoughts(completion)
    last = _last_mark(said)
    if last is None:
        return _tagged(said)
    answer = _boxed(said[last.end() :]) if last["line"] is None else last["line"]
    return answer.strip() if len(answer) <= MAX_ANSWER_CHARACTERS else ""


def _without_thoughts(completion: str) -> str:
    """Return the text after the last thought; an unfinished thought hides the rest of the completion."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def _tagged(said: str) -> str | None:
    """Return the text in the last `<answer>...</answer>` that is not empty; None without such tags around an answer."""
    texts = [
        said[begin.end() : end.start()].strip()
        for begin, end in pairwise(TAG.finditer(said))
        if not begin["closes"] and end["closes"]
    ]
    answer = next((text for text in reversed(texts) if text), "")
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARACTERS else None


def is_right(answer: object, completion: str) -> bool:
    """Return whether `completion` gives an answer that equals `answer`, a number or formula, marked or not.

    The completion's marked answer counts; without a mark, the text after "the answer is", or else the last number. Text
    inside `<think>...</think>` is not an answer.
    """
    import sympy

    said = _without_thoughts(completion)
    gold = _gold(str(answer))
    given = marked(said)
    if given is None:
        end = said[-END_CHARACTERS:]
        readings = _parse(_joined(end if end == said else end.partition(" ")[2]))
    else:
        formulas = [reading for reading in gold if isinstance(reading, sympy.Basic)]
        has_euler = any(reading.has(sympy.E) for reading in formulas)
        word = SHORT_WORD if all(reading.is_number for reading in formulas) else WORD
        last = _last_mark(said)
        is_boxed = last is not None and last["line"] is None
        readings = _read(given, word="" if is_boxed else word, has_euler=has_euler)
    return _is_equal(gold, readings)


def _last_mark(text: str) -> Any:
    """Return the match of the last mark; None if there is no mark."""
    marks = list(MARK.finditer(text))
    return marks[-1] if marks else None


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    given = marked(answer)
    tidy = _normalized(answer if given is None else given)
    readings = [] if PROSE.fullmatch(tidy) else _formula(tidy)
    if all(isinstance(reading, str) for reading in readings):  # math-verify returns text that it cannot parse
        raise RewardError(
            f"the answer {shortened(repr(answer))} is not a number or formula",
            hint="give answers that are numbers or formulas, or choose a different --reward",
        )
    return readings


def _read(given: str, *, word: str, has_euler: bool) -> list[Any]:
    """Parse a marked answer with math-verify: a formula, or the number in a line of words.

    A line after `####` may be prose, in which math-verify finds a number; the content of a box is a formula. `word`
    matches what makes a line prose; empty for a box.
    """
    tidy = _normalized(given, has_euler=has_euler)
    if not tidy:
        return []
    if PERCENT.fullmatch(tidy):  # math-verify reads `-5%` in a box as a product of three numbers, equal to neither
        return _parse(tidy.replace("\\%", "%"))
    if word and re.search(word, TEXT.sub("", tidy)):
        return _parse(_joined(given))
    readings = _formula(tidy)
    is_unread = all(isinstance(reading, str) for reading in readings)
    return _parse(tidy) if word and is_unread else readings


def _normalized(given: str, *, has_euler: bool = False) -> str:
    """Return a marked answer without its decoration, in a form that math-verify parses correctly."""
    tidy = END.sub("", MARKUP.sub("", EMPHASIS.sub(r"\3", given.strip())).strip())
    tidy = EQUALS.sub("", tidy, count=1) if EQUALS.match(tidy) else tidy
    whole = TEXT.fullmatch(tidy)
    if whole and any(map(str.isdigit, whole[1])):  # a number in text would be the name of a symbol
        tidy = whole[1].strip()
    tidy = WORDS_BEHIND.sub("", _joined(tidy))
    return _in_digits(tidy) if EITHER.fullmatch(tidy) and not has_euler else tidy


def _joined(text: str) -> str:
    r"""Return `text` with its numbers in a form that math-verify parses in any context.

    Emphasis is removed, since math-verify reads 3 in `**3/4**`. Mixed numbers become fractions, and numbers with
    thousands separators or an exponent after `e` become plain digits. Minus signs become ASCII, and dollar signs that
    math-verify does not recognize are dropped.
    """
    text = EMPHASIS.sub(r"\3", text)
    text = DOLLARS.sub("", text.replace("\u2212", "-"))
    text = SMALL_FRACTION.sub(_plain_fraction, text)
    text = MIXED.sub(_as_improper_fraction, text)
    for thousands in (THOUSANDS, COMMAS):
        text = thousands.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    return SCIENTIFIC.sub(lambda match: _in_digits(match[0]), text)


def _plain_fraction(match: re.Match[str]) -> str:
    digit, fraction = match.groups()
    plain = unicodedata.normalize("NFKC", fraction).replace("\u2044", "/")
    return f"{digit} {plain}" if digit else plain


def _as_improper_fraction(match: re.Match[str]) -> str:
    """Return a mixed number as a fraction, 5/4 for `1 1/4`; other matches, such as `3 12/5`, stay unchanged."""
    whole, part, of = (int(number.replace(",", "")) for number in match.groups())
    return f"{whole * of + part}/{of}" if part < of else match[0]


def _in_digits(number: str) -> str:
    return format(Decimal(number), "f")


def _formula(text: str) -> list[Any]:
    return _parse(rf"\boxed{{{text}}}")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides the warning about the missing time limit
    # math-verify's own time limit uses an alarm signal, which only the main thread may set.
    return parse(text, parsing_timeout=None)  # type: ignore[no-any-return]


def _is_equal(gold: list[Any], given: list[Any]) -> bool:
    """Return math-verify's verdict; numbers below 0.001 are compared by six significant digits.

    math-verify rounds every number to six decimals: 0.0 would equal 1.6e-19.
    """
    from math_verify import verify

    if not verify(gold, given, timeout_seconds=None):
        return False
    shift = max(map(_leading_zeros, [*gold, *given]), default=0)
    if shift < SMALL_ZEROS:
        return True
    if shift > MAX_ZEROS:
        return any(one == other for one in gold for other in given)
    return verify(  # type: ignore[no-any-return]
        gold, given, float_rounding=5 + shift, numeric_precision=9 + shift, timeout_seconds=None
    )


def _leading_zeros(value: Any) -> int:
    """Return the decimal place of the first digit of the smallest number in a formula: 19 for 1.6e-19."""
    import sympy

    if getattr(value, "is_number", False):
        try:
            size = abs(value).evalf(5)
            is_size = size.is_Float and size.is_finite and size != 0
            return math.ceil(-sympy.log(size, 10).evalf(5)) if is_size else 0
        except Exception:  # noqa: BLE001  sympy may raise anything; math-verify, whose verdict is known, continues too
            return 0
    parts = value.flat() if isinstance(value, sympy.MatrixBase) else getattr(value, "args", ())
    return max(map(_leading_zeros, parts), default=0)


def _boxed(text: str) -> str:
    """Return `text` up to the brace that closes the box; empty if the box is not closed."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:index]
    return ""
