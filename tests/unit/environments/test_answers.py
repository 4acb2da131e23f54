"""What counts as a completion's answer, and when it is right."""

import threading

import pytest

from bridge.errors import RewardError
from bridge_environments import rewards


@pytest.mark.parametrize(
    "completion",
    [
        "#### 1,234",
        "12 * 100 = 1200, and 34 more.\n#### 1234",
        "#### 1234\nI hope that helps, in all 3 cases!",
        "**#### 1234**",
        "#### **1,234**",
        "#### $1,234.00",
        "#### 1234 eggs per day",
        "#### x = 1234",
        r"\boxed{1234}",
        r"#### \boxed{1{,}234}",
        r"\[ \boxed{\$1\,234} \]",
        r"\boxed{1234\text{ km}}",
        r"\boxed{\text{1234 apples}}",
        r"\boxed{\frac{2468}{2}}",
        r"first \boxed{12}, or rather \boxed{1234}",
        "#### 12\n#### 1234",
        r"#### 12, no: \boxed{1234}",
        "The answer is 1234.",
        "The answer is 12. No, the answer is 1234.",
        "The answer is 1234, after 3 steps.",
        r"\boxed{12}, no: \fbox{1234}",
        "$1,234.00",
        "1200 and 34 make 1234",
        "1200+34=1234",
    ],
)
def test_right_answer_is_found_in_any_format(completion: str) -> None:
    assert rewards.is_right("1234", completion)


@pytest.mark.parametrize(
    ("completion", "counts"),
    [
        (r"<think>First \boxed{12}, no.</think>The answer is 1234.", True),
        (r"First \boxed{12}, no.</think>The answer is 1234.", True),
        ("<think>12?</think>#### 1234", True),
        ("#### 1234\n<think>Was that right?", True),
        (r"<think>Maybe \boxed{1234}. No,", False),
        ("<think>Is it\n#### 1234\nor", False),
        ("<think>It is 1234", False),
        (r"<think>\boxed{1234}</think>", False),
        ("<think>a</think><think>1234", False),
    ],
)
def test_thought_is_not_an_answer(completion: str, counts: bool) -> None:
    assert rewards.is_right("1234", completion) is counts
    assert rewards.is_marked({"prompt": "q"}, "<think>#### 1") == rewards.is_marked({"prompt": "q"}, "") == 0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "no idea",
        "#### 1235",
        "#### -1234",
        "#### 1234.5",
        "#### 12 34 56",
        r"\boxed{1234} and so \boxed{12}",
        "#### 1234\n#### 12",
        "1234 is it, plus 1",
        "1234, and then\n####",
        "1234, and then\n#### ",
        r"1234, and then \boxed{}",
        r"1234, and then \boxed{1234",
        "#### 1,2",
        "#### " + "1234 " * 200,
    ],
)
def test_wrong_empty_or_truncated_answers_score_zero(completion: str) -> None:
    assert not rewards.is_right("1234", completion)


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("0.5", "#### 1/2"),
        ("1/2", r"\boxed{0.5}"),
        (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt 2}}"),
        ("x+1", r"\boxed{1+x}"),
        ("-3", "#### -3"),
        ("50", "#### 50%"),
        (42, "#### 42"),
        (2.5, "#### 2.50"),
        ("6*7=<<6*7=42>>42 eggs.\n#### 42", "#### 42"),
        ("1,000,000", "#### 1000000"),
    ],
)
def test_equal_numbers_and_formulas_are_right(answer: object, completion: str) -> None:
    assert rewards.is_right(answer, completion)


@pytest.mark.parametrize("heading", ["#### Final answer", "#### **Answer:**", "####", "##### So"])
def test_heading_above_text_is_not_an_answer_mark(heading: str) -> None:
    for answer in ("The answer is 1234.", "**1234**", r"\[ 1234 \]", r"\boxed{1234}"):
        assert rewards.is_right("1234", f"12 and 34\n\n{heading}\n\n{answer}")
    assert not rewards.is_right("1234", f"1234\n{heading}\n\nIt is 12.")
    assert not rewards.is_right("1234", f"1234\n{heading}\n\n")
    assert not rewards.is_marked({"prompt": "q"}, f"{heading}\n\n1234")
    assert rewards.is_right("1234", f"#### 1234\n{heading}\n\nThat was 1 answer.")


@pytest.mark.parametrize("written", ["3/4", "**3/4**", "*3/4*", "***3/4***", "__3/4__", "_3/4_", "`3/4`"])
@pytest.mark.parametrize(
    "completion", ["Final answer: {}", "The answer is {}.", "{}", "#### {}", "#### It is {}, as shown", r"\boxed{{{}}}"]
)
def test_emphasis_does_not_hide_a_fraction(completion: str, written: str) -> None:
    assert rewards.is_right("3/4", completion.format(written))
    assert not rewards.is_right("4", completion.format(written))


@pytest.mark.parametrize("formula", ["2*3*4", "x_1 + x_2", r"\frac{a_{1}}{b_{2}}", r"\underbrace{a}_{b} + _{5}"])
def test_operators_and_indices_are_not_emphasis(formula: str) -> None:
    assert rewards._joined(formula) == formula


def test_part_of_a_formula_is_not_the_answer() -> None:
    assert not rewards.is_right("2", r"\boxed{\frac{1}{\sqrt 2}}")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>1234</answer>", True),
        ("<think>12?</think>\n<Answer>\n1,234\n</Answer>\n", True),
        ("The answer is <answer>$1,234.00</answer>", True),
        ("<answer>The total is 1234 eggs.</answer> It took 12 steps.", True),
        (r"<answer>\frac{2468}{2}</answer>", True),
        ("<answer>12</answer> No: <answer>1234</answer><answer></answer>", True),
        ("I use <answer> and </answer>: <answer>1234</answer>", True),
        (r"<answer>12</answer> or \boxed{1234}", True),
        ("#### 1234\n<answer>as above</answer>", True),
        ("<answer>" + "word " * 200 + "so it is 1234.</answer>", True),
        ("<answer>12</answer> of 1234", False),
        ("<answer>-1234</answer>", False),
        ("<answer>12 or 1234 or 13</answer>", False),
        (r"\boxed{12} <answer>1234</answer>", False),
        ("<answer>1234", False),
    ],
)
def test_tagged_answer_counts_without_another_mark(completion: str, expected: bool) -> None:
    assert rewards.is_right("1234", completion) == expected


def test_tagged_answer_is_marked() -> None:
    texts = ("<answer>B</answer>", "<answer>B", "<answer> </answer>", "<think><answer>B</answer>")
    assert [rewards.is_marked({"prompt": "q"}, text) for text in texts] == [1, 0, 0, 0]
    assert rewards.is_right("x + 1", "<answer>1+x</answer>")


@pytest.mark.parametrize("answer", ["??", "", "Lima", "#### two of them"])
def test_unparsable_reference_answer_is_named(answer: str) -> None:
    with pytest.raises(RewardError, match="is not a number or formula") as caught:
        rewards.is_right(answer, "#### 42")
    assert f"the answer {answer!r}" in caught.value.message


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("nothing", None),
        ("#### 7 eggs \nmore", "7 eggs"),
        (r"\boxed{\frac{1}{2}} ok", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        ("####", ""),
        (r"\boxed{\frac{1}{2}", ""),
    ],
)
def test_last_answer_mark_is_read_up_to_its_end(completion: str, expected: str | None) -> None:
    assert rewards.marked(completion) == expected


def test_answers_are_compared_without_warnings_in_any_thread(capfd: pytest.CaptureFixture[str]) -> None:
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.append(rewards.is_right("7", "#### 7")))
    thread.start()
    thread.join()
    assert verdicts == [True]
    assert capfd.readouterr() == ("", "")


def test_only_the_end_of_a_long_completion_is_searched() -> None:
    assert rewards.is_right("7", "1 " * 50_000 + "so it is 7")
    assert not rewards.is_right("7", "7 is it" + " word" * 1000)
