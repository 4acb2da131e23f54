"""Your own problems, one JSON object per line: a prompt (text or chat messages) and an optional answer."""

from collections.abc import Mapping
from typing import Any

from bridge.types import Problem
from bridge_environments.inspection import problem_fault
from bridge_environments.rows import BadRowError, Format, column


def problem(values: Mapping[str, Any], prompt_column: str, answer_column: str) -> Problem:
    """Return the problem of one row; other columns stay in it, for your own rewards.

    Raises:
        BadRowError: it has no prompt.
    """
    made: Any = {**values, "prompt": column(values, prompt_column)}
    if answer_column in values:
        made["answer"] = values[answer_column]
    if fault := problem_fault(made):
        raise BadRowError(f"is not a problem: {fault}")
    checked: Problem = made
    return checked


JSONL = Format(problem=problem, prompt_column="prompt", reward="exact")
