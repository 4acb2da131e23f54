r"""Grade-school word problems in the format of GSM8K: a question, and a worked answer that ends in `#### 42`.

The 162 problems in `problems/` were written for this project, so that everything can be tried offline. The data set
itself is `openai/gsm8k` on the hub (Cobbe et al. 2021, arXiv 2110.14168); they include nothing of it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.foreign_code import shortened
from bridge.types import Problem
from bridge_environments.rows import BadRowError, Format, column

SYSTEM_PROMPT = "Think step by step. Then write the answer, a number, on a last line of its own behind ####."
NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(?<=\d)")


def problem(values: Mapping[str, Any], prompt_column: str, answer_column: str) -> Problem:
    """Return the problem of one row: the question as chat messages and as text, the final number, the worked solution.

    Raises:
        BadRowError: the row lacks a column, or its answer does not end in a number.
    """
    question, solution = column(values, prompt_column), str(column(values, answer_column))
    if not isinstance(question, str) or not question.strip():
        raise BadRowError(f"has the question {shortened(repr(question))}, expected text")
    last = solution.rpartition("####")[2].strip().removeprefix("$")
    if not NUMBER.fullmatch(last):
        found = shortened(repr(last if len(last) <= 60 else f"...{last[-50:]}"))
        raise BadRowError(f"has an answer that ends in {found}, expected #### and a number")
    made: Any = {
        "prompt": [{"role": "user", "content": question}],
        "plain_prompt": f"Question: {question}\nAnswer:",
        "answer": last.replace(",", ""),
        "solution": solution,
    }
    checked: Problem = made
    return checked


GSM8K = Format(
    problem=problem,
    prompt_column="question",
    reward="math",
    system_prompt=SYSTEM_PROMPT,
    subset="main",
    bundled=Path(__file__).parent / "problems",
)
