"""What a scorer and its workers send each other: frames, each a length and as many bytes.

Questions are pickled. A worker runs foreign code, which may write anything to any descriptor, so nothing that it sends
is unpickled: answers are numbered JSON of bounded size, checked field by field.
"""

import json
import math
import pickle
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from bridge.core.foreign_code import said
from bridge.errors import RewardError
from bridge.scoring.score import FailedScore, Origin, Score

HEADER = struct.Struct("!Q")
"""In front of every frame: its length in bytes."""
MAX_ANSWER_BYTES = 2**20
NOT_PICKLED = (
    "use classes and functions of modules that another process can import, not of the script that was started, or"
    " score in this process: --reward-processes 0"
)


@dataclass(frozen=True, kw_only=True)
class CannotScore:
    """Why a worker can score nothing, for the error that the trainer raises."""

    message: str
    """What is wrong."""
    remedy: str
    """How to fix it."""


class BadAnswerError(ValueError):
    """What a worker sent is not an answer."""


Answer = Origin | Score | FailedScore | CannotScore
KINDS: Mapping[str, tuple[type[Any], Mapping[str, type]]] = {
    "Origin": (Origin, {"name": str, "several": bool, "file": str, "place": str}),
    "Score": (Score, {"reward": float, "parts": dict}),
    "FailedScore": (FailedScore, {"kind": str, "line": str}),
    "CannotScore": (CannotScore, {"message": str, "remedy": str}),
}
"""Name of an answer -> its class, and the exact type of each field."""


def question(content: object) -> bytes:
    """Return the frame of a recipe, or of a problem and a completion.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        pickled = pickle.dumps(content)
    except Exception as error:  # pickling runs code of the objects inside
        raise RewardError(
            f"what scores completions, or a problem, cannot be sent to another process: {type(error).__name__}"
            f"{said(error)}",
            remedy=NOT_PICKLED,
        ) from error
    return HEADER.pack(len(pickled)) + pickled


def answer(number: int, content: Answer) -> bytes:
    """Return the frame of the answer to question `number`; question 0 is the recipe."""
    text = json.dumps([number, type(content).__name__, asdict(content)]).encode()
    return HEADER.pack(len(text)) + text


def num_bytes(received: bytes | bytearray) -> int | None:
    """Return the length of the answer's frame at the beginning of `received`; None if it is not known yet.

    Raises:
        BadAnswerError: it is longer than an answer may be.
    """
    if len(received) < HEADER.size:
        return None
    length = int(HEADER.unpack_from(received)[0])
    if length > MAX_ANSWER_BYTES:
        raise BadAnswerError(f"{length:,} bytes, expected at most {MAX_ANSWER_BYTES:,}")
    return HEADER.size + length


def read(text: bytes | bytearray) -> tuple[int, Answer]:
    """Return the number of the question and the answer to it, from a frame without its header.

    Raises:
        BadAnswerError: this is not an answer.
    """
    try:
        number, name, fields = json.loads(text, parse_constant=_refuse)
        kind, types = KINDS[name]
        found = {field: type(value) for field, value in fields.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadAnswerError("not the JSON of an answer") from error
    if type(number) is not int or found != types or not _is_finite(fields):
        raise BadAnswerError("other fields than an answer has")
    content: Answer = kind(**fields)
    return number, content


def _is_finite(fields: Mapping[str, Any]) -> bool:
    """Return whether all numbers are finite floats; JSON reads 1e999 as infinity."""
    numbers = [fields.get("reward", 0.0), *fields.get("parts", {}).values()]
    return all(type(number) is float and math.isfinite(number) for number in numbers)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
