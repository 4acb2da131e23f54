"""Problems of one's own, a JSON object a line: a prompt, text or chat messages, and an answer if there is one.

Not covered: reading the file (`rows.py`), and comparing with the answer (`rewards.py`).
"""

from collections.abc import Mapping
from typing import Any

from bridge.types import Problem
from environments.inspection import problem_fault
from environments.rows import BadRowError, column
from environments.task import Columns, Format


def problem(values: Mapping[str, Any], columns: Columns) -> Problem:
    """Return the problem of one row; its other columns stay with it, for rewards of one's own.

    Raises:
        BadRowError: it has no prompt.
    """
    made: Any = {**values, "prompt": column(values, columns.prompt)}
    if columns.answer in values:
        made["answer"] = values[columns.answer]
    if fault := problem_fault(made):
        raise BadRowError(f"is no problem: {fault}")
    checked: Problem = made
    return checked


JSONL = Format(problem=problem, prompt_column="prompt", reward="exact")
