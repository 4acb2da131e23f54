"""Figures in README.md and docs/: marked ones are recomputed from the results, and the others are named."""

import json
from pathlib import Path

import pytest

from benchmarks import check

ROWS = [
    {"side": "trl", "variant": "8 --liger", "step_s": 4.374, "tokens_per_s": 3749.0, "ends": [[1.0, 9.0], [2.0, 7.0]]},
    {"side": "bridge", "variant": "adamw-8bit", "step_s": 2.912, "tokens_per_s": 5626.0},
]
MARKED = """<!-- figures
kept = grpo.json 7b
{claims}
-->
{text}
"""
TABLE = """
| | step | speed |
|---|---|---|
| TRL | 4.37 s | 1 |
| Bridge | **2.91 s** (`adamw-8bit`) | **1.50** |
"""
FORMULAS = "| kept[trl].step_s | kept[trl].step_s / kept[trl].step_s |\n| kept[bridge].step_s | {speed} |"
SPEED = "kept[bridge].tokens_per_s / kept[trl].tokens_per_s"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a checkout with one result file and pages without figures."""
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "grpo.json").write_text(json.dumps({"results": {"7b": ROWS}}))
    (tmp_path / "README.md").write_text("# Bridge\n\n```\n4 minutes\n```\n")
    (tmp_path / "docs" / "benchmarks.md").write_text("# Benchmarks\n")
    return tmp_path


def problems(tree: Path, claims: str, text: str, page: str = "docs/training.md") -> list[str]:
    """Return what is wrong with a page of one marked text."""
    (tree / page).write_text(MARKED.format(claims=claims, text=text))
    return check.problems(tree, tree / "results")


def test_quoted_figures_match_the_results() -> None:
    assert check.problems() == []


def test_correct_phrases_and_tables_have_no_problems(tree: Path) -> None:
    assert problems(tree, f"1.5 times = {SPEED}", "It is **1.5\ntimes** as fast.".replace("**", "")) == []
    assert problems(tree, FORMULAS.format(speed=SPEED), TABLE) == []
    assert problems(tree, "4.4 s, 2.9 s = kept[trl].step_s, kept[bridge].step_s", "4.4 s, 2.9 s") == []
    assert problems(tree, "8 s = mean(last(kept[trl].ends))", "It took 8 s.") == []


@pytest.mark.parametrize(
    ("claims", "text", "message"),
    [
        (f"1.6 times = {SPEED}", "1.6 times", "'1.6 times': 1.6 is 1.50067 in the results"),
        (f"1.5 times = {SPEED}", "1.4 times", "'1.5 times' is not in the text"),
        ("1.5 = other[trl].step_s", "1.5", "other is not known here"),
        ("1.5 = kept[trl].memory", "1.5", "no file holds 'memory' there"),
        ("1.5 = kept[verl].step_s", "1.5", "no file holds 'verl' there"),
        ("1.5 = kept[trl].variant", "1.5", "is str, expected a number"),
        ("1.5 = kept[trl].step_s, 1", "1.5", "2 values for 1 numbers"),
        ("1.5 = __import__('os')", "1.5", "is not known here"),
        ("1.5 = 1 +", "1.5", "not an expression"),
        ("old = gone.json", "1.5", "no such file in benchmarks/results"),
        ("kept", "1.5", "expected NAME = FILE"),
        (FORMULAS.format(speed="1.4"), TABLE, "'Bridge', '**1.50**': 1.50 is 1.4"),
        (FORMULAS.format(speed=""), TABLE, "'Bridge': no expression for '**1.50**'"),
        (FORMULAS.format(speed="1.5 | 1"), TABLE, "'Bridge': 3 expressions for 2 cells"),
        (FORMULAS.partition("\n")[0], TABLE, "no line for the row 'Bridge'"),
        (FORMULAS.format(speed=SPEED) + "\n| 1 | 1 |", TABLE, "the table has no row for it"),
    ],
)
def test_wrong_figures_are_named(tree: Path, claims: str, text: str, message: str) -> None:
    (problem,) = problems(tree, claims, text)
    assert problem.startswith("docs/training.md:1: ")
    assert message in problem


def test_table_without_a_result_file_must_be_marked(tree: Path) -> None:
    page = tree / "docs" / "benchmarks.md"
    page.write_text(TABLE)
    unmarked = check.problems(tree, tree / "results")
    assert len(unmarked) == 2
    assert "where the row 'TRL' comes from" in unmarked[0]
    page.write_text(f"<!-- figures: no file -->\n{TABLE}")
    (problem,) = check.problems(tree, tree / "results")
    assert 'does not say "no result file"' in problem
    page.write_text(f"<!-- figures: no file -->\nOf this there is no\nresult file.\n{TABLE}")
    assert check.problems(tree, tree / "results") == []
    assert len(check.without_file(tree)) == 1


def test_headline_figures_must_be_claimed(tree: Path) -> None:
    readme = tree / "README.md"
    readme.write_text("A step takes 2.9 s (2026-11-25, `--steps 8`), 10 to 40 ms of it waiting.\n```\n4 minutes\n```\n")
    assert len(check.problems(tree, tree / "results")) == 3
    claims = "2.9 s = kept[bridge].step_s\n10 to 40 ms = no file"
    assert problems(tree, claims, readme.read_text(), "README.md") == []
    assert check.without_file(tree) == ["README.md:1: no file holds '10 to 40 ms'"]


@pytest.mark.parametrize(
    ("shown", "value", "agree"),
    [
        ("1.50", 1.504, True),
        ("1.50", 1.506, False),
        ("1,489", 1489.4, True),
        ("1,489", 1489.6, False),
        ("-0.5", -0.46, True),
    ],
)
def test_numbers_are_compared_as_rounded(shown: str, value: float, agree: bool) -> None:
    assert check.agrees(shown, value) == agree


def test_figures_exclude_code_dates_and_names() -> None:
    text = r"H200, `--steps 8`, [2026-11-25](results/a-7b.json): 1,020,010 and -0.5 %, \|x\| 8.2 (9.5) ms, 7B, top-8"
    assert check.numbers(text) == ["1,020,010", "-0.5", "8.2", "9.5"]
