"""Built-in and custom rewards, their weights, and a one-line error for every misuse."""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from bridge.errors import RewardError, UsageError
from bridge.scoring.score import FailedScore, Host
from bridge.types import Problem
from bridge_environments import rewards
from bridge_environments.rewards import Rewards

PROBLEM: Problem = {"prompt": "6*7?", "answer": " 42"}
MINE = "def brief(problem, completion):\n    return -len(completion) / 10\n"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(source: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(source)
        return path

    return write_file


def scores(spec: str, completion: str, problem: Problem = PROBLEM) -> tuple[float, dict[str, float]]:
    return Rewards(rewards.parse(spec)).scores(problem, completion)


def refusal(spec: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        rewards.parse(spec)
    assert "\n" not in str(caught.value.message) + caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("completion", "exact", "math", "marked"),
    [("42\n", 1, 1, 0), ("#### 42.0", 0, 1, 1), (r"\boxed{41}", 0, 0, 1), ("####", 0, 0, 0), ("", 0, 0, 0)],
)
def test_builtin_rewards_are_one_or_zero(completion: str, exact: int, math: int, marked: int) -> None:
    assert scores("exact,math,format", completion)[1] == {"exact": exact, "math": math, "format": marked}


def test_reward_is_weighted_but_its_parts_are_not(write: Write) -> None:
    spec = f"math, format=0.5, {write(MINE)}:brief=2"
    reward, parts = scores(spec, "#### 42")
    assert parts == {"math": 1.0, "format": 1.0, "brief": -0.7}
    assert reward == pytest.approx(1 + 0.5 - 1.4)
    assert Rewards(rewards.parse(spec)).score(PROBLEM, "#### 42") == reward


@pytest.mark.parametrize("folder", ["lr=1e-5", "a,b", "lr=1e-5,seed=0", "math,exact", "x:y=2", "run [1] *?", " a "])
def test_reward_file_may_be_in_any_folder(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "mine.py"
    path.parent.mkdir()
    path.write_text(MINE)
    for spec, weights in (
        (f"{path}:brief", {"brief": 1.0}),
        (f"exact,{path}:brief=0.5,math=2", {"exact": 1.0, "brief": 0.5, "math": 2.0}),
    ):
        assert {reward.name: reward.weight for reward in rewards.parse(spec)} == weights


def test_reward_file_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a,b" / "mine.py").write_text(MINE)
    assert [reward.name for reward in rewards.parse("~/a,b/mine.py:brief=2")] == ["brief"]


def test_missing_reward_file_is_named_as_written() -> None:
    assert "cannot read gone.py: there is no such file" in refusal("gone.py:f=2,math").message
    assert f"cannot read {'x' * 300}.py: there is no such file" in refusal(f"{'x' * 300}.py:f").message


def test_weight_may_be_negative_or_zero() -> None:
    assert scores("exact=-1.5e0,format=0", "42") == (-1.5, {"exact": 1.0, "format": 0.0})


def test_trl_reward_gets_lists_of_its_parameters(write: Write) -> None:
    path = write(
        "def ends(prompts, completions, answer):\n    return [float((*prompts, *completions, *answer) == W)]\n"
    )
    path.write_text(f"W = ('6*7?', 'so 42', ' 42')\n{path.read_text()}")
    assert scores(f"{path}:ends", "so 42")[0] == 1.0


def test_trl_style_reward_gets_messages_and_columns(write: Write) -> None:
    path = write(
        "def ends(completions, **columns):\n    assert sorted(columns) == ['answer', 'level', 'prompts']\n"
        "    return [m[0]['content'].endswith(a) for m, a in zip(completions, columns['answer'])]\n"
    )
    problem: dict[str, object] = {"prompt": [{"role": "user", "content": "hi"}], "answer": "42", "level": 3}
    assert scores(f"{path}:ends", "so 42", problem)[0] == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        (3.0, "3", 1), (3.0, "3.0", 1), (3.0, "4", 0), (3.5, "3.5", 1), (1e16, "10000000000000000", 1), ("3.0", "3", 0),
        (np.float32(3), "3", 1), (np.int64(3), "3", 1), (Decimal("3.00"), "3", 1), (Decimal("2.50"), "2.50", 1),
    ],
)  # fmt: skip
def test_exact_reads_whole_numbers_as_integers(answer: object, completion: str, expected: int) -> None:
    assert scores("exact", completion, {"prompt": "p", "answer": answer})[0] == expected


@pytest.mark.parametrize(
    ("kind", "expected"), [("code", (1.5, {"code": 1.0, "brief": 0.25})), ("math", (0.5, {"brief": 0.25}))]
)
def test_reward_that_returns_none_does_not_apply(write: Write, kind: str, expected: object) -> None:
    path = write(
        "def code(completions, kind, **columns):\n    return [1.0 if k == 'code' else None for k in kind]\n"
        "def brief(problem, completion):\n    return 0.25\n"
        "def nothing(problem, completion):\n    return None\n"
    )
    problem: dict[str, object] = {"prompt": "p", "kind": kind}
    assert scores(f"{path}:code,{path}:brief=2", "x", problem) == expected  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="reward nothing returned None, expected a finite number"):
        scores(f"{path}:nothing", "x", problem)  # type: ignore[arg-type]
    if kind == "math":
        with pytest.raises(RewardError, match="reward code returned None"):
            scores(f"{path}:code,{path}:nothing", "x", problem)  # type: ignore[arg-type]


VERL_ROWS: tuple[dict[str, object], ...] = (
    {"prompt": "p", "data_source": "gsm8k", "reward_model": {"ground_truth": "42"}, "extra_info": {"index": 3}},
    {"prompt": "p", "data_source": "gsm8k", "answer": "42", "extra_info": {"index": 3}},
)


@pytest.mark.parametrize("problem", VERL_ROWS)
@pytest.mark.parametrize("value", ["float(right)", "{'score': float(right), 'acc': right}"])
@pytest.mark.parametrize("head", ["data_source, solution_str, ground_truth, extra_info=None", "solution_str, **rest"])
def test_verl_reward_gets_verls_arguments(write: Write, head: str, value: str, problem: dict[str, object]) -> None:
    given = "rest['data_source'], rest['ground_truth'], rest['extra_info']"
    given = given if "rest" in head else "data_source, ground_truth, extra_info"
    path = write(
        f"def compute_score({head}):\n    source, truth, extra = {given}\n"
        f"    right = (source, truth, extra['index'], solution_str) == ('gsm8k', '42', 3, 'so 42')\n"
        f"    return {value}\n"
    )
    assert scores(f"{path}:compute_score", "so 42", problem)[0] == 1.0  # type: ignore[arg-type]


def test_verl_style_reward_without_ground_truth_is_named(write: Write) -> None:
    path = write("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    with pytest.raises(RewardError, match="has no ground_truth, expected a column answer"):
        scores(f"{path}:compute_score", "x", {"prompt": "p"})


@pytest.mark.parametrize(
    ("head", "message", "hint"),
    [
        (
            "completions, trainer_state, **kwargs",
            "takes trainer_state, which Bridge does not have",
            "trainer_state=None",
        ),
        ("prompts, completions, completion_ids", "takes completion_ids, which", "completion_ids=None"),
        ("completions, log_extra, log_metric", "takes log_extra, log_metric, which", "log_extra=None"),
        (
            "queries, prompts, labels, **kwargs",
            "has OpenRLHF's form, (queries, prompts, labels, kwargs)",
            "problem['answer']",
        ),
        ("data_sources, solution_strs, ground_truths, extra_infos", "has verl's batched form", "solution_str"),
        (
            "data_source, solution_str, ground_truth, judge",
            "takes judge, expected data_source, solution_str",
            "judge=None",
        ),
        ("completion, answer", "has verifiers' form, (completion, answer)", "problem['answer']"),
        ("completion, state", "has a verifiers rubric's form", "verifiers:ID"),
        ("args, sample, **kwargs", "has slime's form", "sample.response"),
        (
            "completion, problem",
            "takes (completion, problem), but is called with (problem, completion), in",
            "def mine(",
        ),
        ("predict_str, ground_truth", "takes (predict_str, ground_truth), but is called with (problem", "def mine("),
        ("question, target", "takes (question, target), but is called with", "def mine("),
    ],
)
def test_reward_of_an_unsupported_system_is_refused_by_name(write: Write, head: str, message: str, hint: str) -> None:
    error = refusal(f"{write(f'def mine({head}): return 1.0')}:mine")
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize("second", ["answer", "solution", "state", "response"])
def test_second_parameter_may_have_any_name(write: Write, second: str) -> None:
    path = write(f"def mine(problem, {second}): return float({second} == problem['prompt'] + '42')")
    assert scores(f"{path}:mine", "p42", {"prompt": "p", "answer": "1"})[0] == 1.0


@pytest.mark.parametrize(
    "head",
    ["completions, trainer_state=None", "completions, log_metric=None, **kwargs", "prompts, completions, **kwargs"],
)
def test_trl_style_reward_with_defaults_is_accepted(write: Write, head: str) -> None:
    assert scores(f"{write(f'def mine({head}): return [1.0]')}:mine", "x")[0] == 1.0


@pytest.mark.parametrize(
    "head", ["problem, completion, answer=None", "p, c", "prompt, completion", "row, text, *, k=2"]
)
def test_plain_reward_function_may_use_any_parameter_names(write: Write, head: str) -> None:
    assert scores(f"{write(f'def mine({head}): return 1.0')}:mine", "x")[0] == 1.0


def test_reward_may_be_a_callable_object(write: Write) -> None:
    path = write(
        "import functools, operator\nclass F:\n    def __call__(self, problem, completion): return 3\nf = F()\n"
    )
    assert scores(f"{path}:f", "x") == (3.0, {"f": 3.0})


@pytest.mark.parametrize("value", ["'1.0'", "None", "[1.0]", "float('nan')", "float('inf')"])
def test_non_number_reward_names_the_function_and_its_line(write: Write, value: str) -> None:
    path = write(f"\ndef mine(problem, completion):\n    return {value}\n")
    with pytest.raises(RewardError, match=r"reward mine returned .*, expected a finite number \(mine.py line 2\)"):
        scores(f"{path}:mine", "x")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("problem['key']", r"reward mine raised KeyError: 'key' \(mine.py line 2\)"),
        ("exit(3)", r"reward mine raised SystemExit: 3 \(mine.py line 2\)"),
        (
            "1e31",
            r"reward mine returned 1e\+31, .* number of at most 1e\+30 in absolute value \(mine.py line 1\)",
        ),
    ],
)
def test_failed_reward_is_named_as_in_the_flag(write: Write, body: str, message: str) -> None:
    path = write(f"def mine(problem, completion):\n    return {body}\n")
    host = Host(Rewards(rewards.parse(f"format,{path}:mine")))
    answer = host.score({"prompt": "p"}, "x")
    assert isinstance(answer, FailedScore)
    assert re.match(message + ", on prompt", answer.line)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def mine(completions): return [1, 2]", r"returned \[1, 2\], expected a list .* [(]mine.py line 1[)]"),
        ("def mine(completions): return 1.0", "returned 1.0, expected a list .* [(]mine.py line 1[)]"),
        ("def mine(completions): return {1: 0.5}", "returned {1: 0.5}, expected a list .* [(]mine.py line 1[)]"),
        ("def mine(completions): return b'1'", "returned b'1', expected a list .* [(]mine.py line 1[)]"),
        ("from operator import truediv as mine", "raised TypeError: unsupported .* [(]mine.py[)]"),
        ("\nmine = lambda problem, completion: None", "returned None, .* [(]mine.py line 2[)]"),
        ("from theirs import add as mine", "returned None, .* [(]theirs.py line 1[)]"),
        ("from theirs import twice\n\n@twice\ndef mine(p, c): pass", "returned None, .* [(]mine.py line 3[)]"),
    ],
)
def test_any_kind_of_reward_is_named_as_in_the_flag(write: Write, source: str, message: str) -> None:
    path = write(source)
    (path.parent / "theirs.py").write_text(
        "def add(problem, completion): pass\n\nimport functools\ndef twice(function):\n"
        "    @functools.wraps(function)\n    def both(*given): return function(*given)\n    return both\n"
    )
    with pytest.raises(RewardError, match=f"^reward mine {message}"):
        scores(f"{path}:mine", "x")


def test_unnamed_functions_are_named_as_in_the_flag(write: Write) -> None:
    path = write(
        "import functools\ndef power(n, problem, completion): return n\n"
        "one, two = functools.partial(power, 1), lambda problem, completion: 2\nthree = lambda p, c: 3\n"
    )
    spec = ",".join(f"{path}:{name}" for name in ("one", "two", "three"))
    assert scores(spec, "x") == (6.0, {"one": 1.0, "two": 2.0, "three": 3.0})


def test_unknown_reward_error_lists_names_and_suggests_one() -> None:
    error = refusal("maths")
    assert "no reward 'maths', expected math, exact, format, none or path/to/file.py:function" in error.message
    assert error.hint.startswith("--reward math,")
    assert "no reward ''" in refusal("math,").message
    assert refusal("exakt").hint.startswith("--reward exact, or ")


@pytest.mark.parametrize("weight", ["", "two", "nan", "inf", "1=2"])
def test_weight_must_be_a_finite_number(weight: str) -> None:
    error = refusal(f"math={weight}")
    assert f"--reward math={weight}: the weight {weight!r} is not a finite number" in error.message
    assert error.hint == "--reward math=0.5"


def test_duplicate_or_weightless_rewards_are_refused(write: Write) -> None:
    assert "two rewards have the name math" in refusal("math,math=2").message
    path = write("def math(problem, completion):\n    return 0\n")
    assert "two rewards have the name math" in refusal(f"math,{path}:math").message
    assert "every weight is 0" in refusal("math=0").message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def mine(completion): ...", "cannot be called with (problem, completion): too many positional"),
        ("def mine(a, b, c): ...", "missing a required argument: 'c'"),
        ("async def mine(problem, completion): ...", "is an async function"),
        (
            "class Async:\n    async def __call__(self, problem, completion): ...\nmine = Async()",
            "is an async function",
        ),
        ("class Async:\n    async def __call__(self, completions, **_): ...\nmine = Async()", "is an async function"),
        (
            "async def inner(a, problem, completion): ...\nimport functools\nmine = functools.partial(inner, 1)",
            "is an async",
        ),
        ("class mine: ...", "mine in"),
        ("def other(problem, completion): ...", "it defines other"),
        ("mine = 3", "is not a function"),
        ("1 / 0", "raised ZeroDivisionError: division by zero (mine.py line 1)"),
    ],
)
def test_object_that_is_not_a_reward_is_refused(write: Write, source: str, message: str) -> None:
    assert message in refusal(f"{write(source)}:mine").message


def test_reward_file_without_a_function_is_refused(tmp_path: Path) -> None:
    assert refusal("mine.py").hint == "--reward mine.py:function"
    assert "there is no such file" in refusal(f"{tmp_path / 'gone.py'}:mine").message
