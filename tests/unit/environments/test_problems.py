"""The bundled word problems: every calculation is recomputed, and each ends in the stated answer."""

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from bridge_environments.dataset import GSM8K

assert GSM8K.bundled is not None
SPLITS = {
    name: [json.loads(line) for line in (GSM8K.bundled / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("train", "test")
}
EVERY = [row for rows in SPLITS.values() for row in rows]
ANNOTATION = re.compile(r"(\S+)=<<([^<>=]+)=([^<>=]+)>>(\S+)")
OPERATIONS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
STEPS = re.compile(r"\b(?:the|of|in|at|for|an?|is|are|takes?|that|so|with|first|each|together|left|they|costs?)\b")
IN_WORDS = {Fraction(number) for number in ("1", "2", "3", "4", "5", "10", "12", "60", "100", "1000", "0.5", "1.5")}
"""Numbers written as words in the questions, and common knowledge."""


def worked_out(node: ast.expr) -> Fraction:
    """Return the exact value of a formula of numbers and the four operations."""
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](worked_out(node.left), worked_out(node.right))
    assert isinstance(node, ast.Constant), ast.dump(node)
    return Fraction(str(node.value))


def value(formula: str) -> Fraction:
    return worked_out(ast.parse(formula, mode="eval").body)


def test_bundled_problems_are_numerous_and_unique() -> None:
    assert len(SPLITS["train"]) >= 120
    assert len(SPLITS["test"]) >= 40
    assert len({row["question"] for row in EVERY}) == len(EVERY)
    assert all(row.keys() == {"question", "answer"} for row in EVERY)


def test_held_out_problems_have_different_situations() -> None:
    def situations(split: str) -> set[str]:
        # Problems of one situation differ in names, things and numbers, but not in how they are solved.
        return {" ".join(STEPS.findall(row["answer"])) for row in SPLITS[split]}

    assert len(situations("train") | situations("test")) >= 45
    assert len(situations("train") & situations("test")) <= 3  # two may share the same few words


def test_calculations_are_right_and_end_in_the_answer() -> None:
    for row in EVERY:
        solution, mark, answer = row["answer"].rpartition("\n#### ")
        annotations = ANNOTATION.findall(solution)
        assert mark, row
        assert len(annotations) == solution.count("<<") == solution.count(">>") >= 2, row
        for shown, formula, result, repeated in annotations:
            assert shown.lstrip("(") == formula.lstrip("("), row
            assert value(formula) == Fraction(result) > 0, row
            assert re.fullmatch(rf"{re.escape(result)}(%|\D*)", repeated), row
        assert annotations[-1][2] == answer, row


def test_every_number_is_given_or_calculated_before() -> None:
    for row in EVERY:
        known = {Fraction(number) for number in re.findall(r"\d+(?:\.\d+)?", row["question"])} | IN_WORDS
        known |= {Fraction(number) / 100 for number in re.findall(r"(\d+)%", row["question"])}
        for _, formula, result, _ in ANNOTATION.findall(row["answer"]):
            assert {Fraction(number) for number in re.findall(r"\d+(?:\.\d+)?", formula)} <= known, row
            known.add(Fraction(result))
