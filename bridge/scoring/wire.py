"""What the trainer and a worker send each other: pickled questions, and answers that are checked field by field.

A score may write anything to any descriptor, so answers are JSON of bounded size.
"""

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from bridge.core.foreign_code import said
from bridge.errors import RewardError
from bridge.scoring.score import FailedScore, Origin, Score, as_reward
from bridge.scoring.tools import Reply

HEADER = struct.Struct("!Q")
"""Before each question and each answer: its length in bytes."""
MAX_ANSWER_BYTES = 2**20
STOP = b"s"
"""Sent by the trainer: let the scoring process write its stack, and end it. A closed connection: end it at once."""
STATUS = struct.Struct("!i")
"""Sent to the trainer once all have ended: the exit code of the scoring process, or minus its signal."""
NOT_PICKLED = (
    "use classes and functions of modules that another process can import, not of the script that was started, or"
    " score in this process: --reward-processes 0"
)


@dataclass(frozen=True, kw_only=True)
class CannotScore:
    """The error that the trainer raises because a worker can score nothing."""

    message: str
    remedy: str


Answer = Origin | Score | FailedScore | Reply | CannotScore
ANSWERS: Mapping[str, tuple[type[Any], Mapping[str, type]]] = {
    "Origin": (Origin, {"name": str, "file": str, "place": str}),
    "Score": (Score, {"reward": float, "parts": dict, "turns": list}),
    "FailedScore": (FailedScore, {"kind": str, "line": str, "is_raised": bool}),
    "Reply": (Reply, {"text": str, "is_error": bool}),
    "CannotScore": (CannotScore, {"message": str, "remedy": str}),
}
"""Name of an answer -> its class, and the exact type of each field."""


class NotPickledError(RewardError):
    """A question cannot be sent to another process."""


class BadAnswerError(ValueError):
    """What a worker sent is not an answer."""


def question(content: object) -> bytes:
    """Return a recipe, or a problem and a completion, as workers read them.

    Raises:
        NotPickledError: it cannot be pickled.
    """
    try:
        pickled = pickle.dumps(content)
    except Exception as error:  # pickling runs code of the objects inside
        raise NotPickledError(
            f"what scores completions, or a problem, cannot be sent to another process: {type(error).__name__}"
            f"{said(error)}",
            remedy=NOT_PICKLED,
        ) from error
    return HEADER.pack(len(pickled)) + pickled


def read(text: bytes) -> tuple[int, Answer]:
    """Return the number of the question and the answer to it.

    Raises:
        BadAnswerError: this is not an answer.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        number, name, fields = json.loads(text, parse_constant=refuse)
        kind, types = ANSWERS[name]
        found = {field: type(value) for field, value in fields.items()}
        numbers = [fields.get("reward", 0.0), *fields.get("parts", {}).values(), *fields.get("turns", ())]
        are_rewards = all(type(one) is float and as_reward(one) is not None for one in numbers)  # 1e999 is infinity
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadAnswerError("not the JSON of an answer") from error
    if type(number) is not int or found != types or not are_rewards:
        raise BadAnswerError("other fields than an answer has")
    return number, kind(**fields)


def packed(number: int, answer: Answer) -> bytes:
    """Return the answer to question `number` with its header."""
    text = json.dumps([number, type(answer).__name__, asdict(answer)]).encode()
    return HEADER.pack(len(text)) + text
