"""What a score method may return or do, and what happens to failed scores."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.core.foreign_code import foreign_code
from bridge.errors import RewardError
from bridge.scoring.inside_worker import Answer, BadAnswerError, CannotScore, read, written
from bridge.scoring.score import FailedScore, FailedScores, Host, Origin, Score
from bridge.types import Problem
from tests.unit.scores_sample import Several

PROBLEM: Problem = {"prompt": "3+4="}
TASK = "import json\nclass Task:\n    def score(self, problem, completion):\n        return "


def scored(scores: Any, completion: str = "7", problem: Problem = PROBLEM) -> Score | FailedScore:
    return Host(scores).score(problem, completion)


def fault(scores: Any, completion: str = "7", problem: Problem = PROBLEM) -> FailedScore:
    score = scored(scores, completion, problem)
    assert isinstance(score, FailedScore)
    assert "\n" not in score.line
    return score


def scoring(value: Any) -> Any:
    class Task:
        def score(self, problem: Problem, completion: str) -> Any:
            if isinstance(value, BaseException):
                raise value
            return value

    return Task()


def of_file(path: Path, source: str) -> Any:
    """Return a `Task` whose class is in a file, without a module of its own."""
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "task"}
    exec(compile(source, str(path), "exec"), names)
    return names["Task"]()


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), Decimal(1), np.array(1.0)])
def test_every_kind_of_number_becomes_a_float(value: Any) -> None:
    score = scored(scoring(value))
    assert isinstance(score, Score)
    assert type(score.reward) is float
    assert score == Score(reward=1.0)


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), -float("inf"), np.float32("nan"), None, "1.0", {1.0}, np.ones(2), 1j),
        *((1.0, {}), np.str_("1.0"), np.bytes_(b"1.0"), np.complex64(1 + 2j), np.complex128(1)),
    ],
)
def test_anything_but_a_finite_number_is_a_failed_score(value: Any) -> None:
    failed = fault(scoring(value))
    assert failed.kind == "Task.score returned something other than a finite number"
    assert failed.line.startswith("Task.score returned ")
    assert "expected a finite number (test_score.py line" in failed.line
    assert failed.line.endswith("on prompt '3+4=' and completion '7'")


def test_error_in_a_score_names_the_line(tmp_path: Path) -> None:
    task = of_file(tmp_path / "task.py", TASK + "int(completion)\n")
    problem: Problem = {"prompt": "why\n" * 100}
    failed = fault(task, "long\n" * 100, problem)
    assert "Task.score raised ValueError: invalid literal" in failed.line
    assert "(task.py line 4)" in failed.line
    assert len(failed.line) < 450
    assert failed.kind == fault(task, "other", problem).kind == "Task.score raised ValueError (task.py line 4)"


def test_error_raised_in_a_library_names_the_users_line(tmp_path: Path) -> None:
    task = of_file(tmp_path / "task.py", TASK + "json.loads('{')\n")
    assert fault(task).kind == "Task.score raised JSONDecodeError (task.py line 4)"


def test_syntax_error_names_the_line_that_ran_the_code(tmp_path: Path) -> None:
    task = of_file(tmp_path / "task.py", TASK + "eval(completion)\n")
    assert fault(task, "2 +").kind == "Task.score raised SyntaxError (task.py line 4)"
    task = of_file(tmp_path / "task.py", TASK + "compile('x = 1\\n2 +', 'helper.py', 'exec')\n")
    assert fault(task).kind == "Task.score raised SyntaxError (helper.py line 2)"


def test_bridge_error_in_a_score_keeps_its_message_and_cause(tmp_path: Path) -> None:
    def score(completion: str) -> float:
        return int(completion)

    class Task:
        def score(self, problem: Problem, completion: str) -> float:
            with foreign_code("reward brief", __file__):
                return score(completion)

    failed = fault(Task(), "b")
    assert failed.line.startswith(
        "reward brief raised ValueError: invalid literal for int() with base 10: 'b' (test_sc"
    )
    assert failed.kind == fault(Task(), "c").kind


def test_unprintable_exception_is_a_failed_score() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert fault(scoring(MuteError())).line.startswith("Task.score raised MuteError (test_score.py line")
    assert fault(scoring(SystemExit(3))).line.startswith("Task.score raised SystemExit: 3 (")


def test_interrupt_is_not_a_failed_score() -> None:
    with pytest.raises(KeyboardInterrupt):
        scored(scoring(KeyboardInterrupt()))


def test_each_part_of_a_reward_is_a_finite_number() -> None:
    assert scored(Several(), "four") == Score(reward=4.0, parts={"length": 4.0, "format": 0.5})
    for completion in ("odd", "nan", "text"):
        assert "expected a finite number and a dict of finite numbers (" in fault(Several(), completion).line


class Unprintable(list[int]):
    def __repr__(self) -> str:
        raise ZeroDivisionError


class Number:
    def __float__(self) -> float:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1e308, "returned 1e+308, expected a finite number of at most 1e+30 in absolute value (test_"),
        (-1e31, "returned -1e+31, expected a finite number of at most 1e+30 in absolute value (test_"),
        (10**40, "of type int, expected a finite number of at most 1e+30 in absolute value (test_"),
        ([10**5000], "returned a list that cannot be printed of type list, expected one finite number per turn of at"),
        ([1e308, 1e308], "expected one finite number per turn of at most 1e+30 in absolute value (test_score.py line"),
        ([1e30, 1e30], "expected one finite number per turn (test_score.py line"),
        (Unprintable(), "returned a Unprintable that cannot be printed of type Unprintable, expected one finite"),
        (Number(), "raised ZeroDivisionError (test_score.py line"),
    ],
)
def test_huge_or_unprintable_rewards_are_failed_scores(value: Any, expected: str) -> None:
    line = fault(scoring(value)).line
    assert line.startswith("Task.score ")
    assert expected in line


def test_failed_score_is_one_line_without_control_characters() -> None:
    class Task:
        def score(self, problem: Problem, completion: str) -> float:
            raise type("E\x1b[2J", (ValueError,), {})("half \ud800 \x07 rtl \u202e\nend")

    line = fault(Task()).line
    assert line.startswith(r"Task.score raised E\x1b[2J: half \ud800 \x07 rtl \u202e end (test_score.py line")


def test_list_of_rewards_is_one_finite_reward_per_turn() -> None:
    assert scored(scoring([1, np.float32(0.5)])) == Score(reward=1.5, turns=[1.0, 0.5])
    for value in ([], [1.0, float("nan")], [[1.0]], ["1.0"]):
        assert "expected one finite number per turn (test_score.py line" in fault(scoring(value)).line


@pytest.mark.parametrize(
    "answer",
    [
        Origin(name="Task.score", file="task.py", location="task.py line 3"),
        Score(reward=0.1 + 0.2, parts={"a": -1e-300, "\ud800": 1e29}),
        Score(reward=3.5, turns=[1.0, 2.5]),
        FailedScore(kind="k", line="l"),
        CannotScore(message="m", hint="r"),
    ],
)
def test_worker_answer_is_read_as_it_was_sent(answer: Answer) -> None:
    assert read(written(3, answer)) == (3, answer)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "null", '[1, "Score"]', '[1, "Other", {}]', '[1, ["Score"], {}]', "[" * 100_000),
        *('[1, "Score", []]', '[1, "Score", {}]', '[1, "Score", {"reward": 1.0}]', '[1.0, "Score", {"reward": 1.0}]'),
        '[true, "Score", {"reward": 1.0, "parts": {}}]',
        '[1, "Score", {"reward": NaN, "parts": {}}]',
        '[1, "Score", {"reward": 1e999, "parts": {}}]',
        '[1, "Score", {"reward": "1.0", "parts": {}}]',
        '[1, "Score", {"reward": 1.0, "parts": {"a": "1"}}]',
        '[1, "Score", {"reward": 1.0, "parts": {"a": -1e999}}]',
        '[1, "Score", {"reward": 1.0, "parts": {}, "more": 1}]',
        '[1, "Score", {"reward": 1e31, "parts": {}, "turns": []}]',
        '[1, "Score", {"reward": 1.0, "parts": {"a": -1e300}, "turns": []}]',
        '[1, "FailedScore", {"kind": "k", "line": 3, "is_raised": false}]',
    ],
)
def test_invalid_answer_from_a_worker_is_refused(text: str) -> None:
    with pytest.raises(BadAnswerError):
        read(text.encode())


def test_each_kind_of_failure_is_logged_once_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    known: set[str] = set()
    batch = FailedScores("step 1", num_completions=8, max_share=1)
    batch.add([FailedScore(kind="a", line="a, on 1"), Score(reward=1.0), FailedScore(kind="b", line="b, on 2")])
    batch.add([FailedScore(kind="a", line="a, on 3")])
    batch.log(known)
    assert [line.partition(" (")[0] for line in caplog.messages] == [
        "step 1: 2 completions without a reward left out: a, on 1",
        "step 1: 1 completion without a reward left out: b, on 2",
    ]
    later = FailedScores("step 2", num_completions=8, max_share=1)
    later.add([FailedScore(kind="b", line="b, on 4"), FailedScore(kind="c", line="c, on 5")])
    later.log(known)
    assert [line.partition(" (")[0] for line in caplog.messages[2:]] == [
        "step 2: 1 completion without a reward left out: c, on 5"
    ]


def test_too_many_failed_scores_end_the_run_with_the_cause() -> None:
    batch = FailedScores("step 1", num_completions=8, max_share=0.25)
    batch.add([Score(reward=1.0)] * 4)
    batch.add([FailedScore(kind="b", line="b, on 1"), FailedScore(kind="a", line="a, on 2")])
    with pytest.raises(RewardError) as caught:
        batch.add([FailedScore(kind="a", line="a, on 3")])
    assert caught.value.message == (
        "step 1: at least 3 of 8 completions have no reward, more than the allowed fraction of 0.25; 2 of them: a, on 2"
    )
    assert "--max-unscored-share" in caught.value.hint


@pytest.mark.parametrize(
    ("share", "num_scored", "num_allowed"),
    [(0.0, 0, 0), (0.5, 0, 4), (0.25, 36, 9)],
    ids=["none", "half of a batch", "a quarter of all scored completions"],
)
def test_failures_above_the_allowed_share_end_the_run(share: float, num_scored: int, num_allowed: int) -> None:
    batch = FailedScores("step 1", num_completions=8, max_share=share)
    batch.add([Score(reward=1.0, parts={})] * (num_scored - num_allowed))
    batch.add([FailedScore(kind="a", line="a")] * num_allowed)
    with pytest.raises(RewardError):
        batch.add([FailedScore(kind="a", line="a")])


def test_all_scores_may_fail_with_a_share_of_one() -> None:
    FailedScores("step 1", num_completions=8, max_share=1.0).add([FailedScore(kind="a", line="a")] * 8)
