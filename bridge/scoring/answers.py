"""What a worker answers, as plain data: numbered JSON of bounded size, checked field by field.

A worker runs foreign code, which may write anything to any descriptor. So nothing it sends is unpickled.

Not covered: what it is sent, which is pickled (`worker.py`).
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from bridge.scoring.scoring import Fault, Origin, Score

HEADER = struct.Struct("!Q")
"""In front of every frame, in both directions: its length in bytes."""
MAX_ANSWER_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why nothing can be scored here, for the error that the trainer raises."""

    message: str
    """What is wrong."""
    remedy: str
    """How to fix it."""


class BadAnswerError(ValueError):
    """What a worker sent is no answer."""


Answer = Origin | Score | Fault | Refusal
KINDS: Mapping[str, tuple[type[Any], Mapping[str, type]]] = {
    "Origin": (Origin, {"name": str, "several": bool, "file": str, "place": str}),
    "Score": (Score, {"reward": float, "parts": dict}),
    "Fault": (Fault, {"kind": str, "line": str}),
    "Refusal": (Refusal, {"message": str, "remedy": str}),
}
"""Name of an answer -> its class, and the exact type of each of its fields."""


def framed(number: int, answer: Answer) -> bytes:
    """Encode the answer to question `number`; question 0 is the recipe."""
    text = json.dumps([number, type(answer).__name__, asdict(answer)]).encode()
    return HEADER.pack(len(text)) + text


def num_bytes(received: bytes | bytearray) -> int | None:
    """Return how long the frame is that begins with `received`, its header included; None: not known yet.

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
    """Return a frame's content: the number of the question, and the answer.

    Raises:
        BadAnswerError: it is none.
    """
    try:
        number, name, fields = json.loads(text, parse_constant=_refuse)
        kind, types = KINDS[name]
        found = {field: type(value) for field, value in fields.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadAnswerError("no JSON of an answer") from error
    if type(number) is not int or found != types or not _is_finite(fields):
        raise BadAnswerError("other fields than an answer has")
    answer: Answer = kind(**fields)
    return number, answer


def _is_finite(fields: Mapping[str, Any]) -> bool:
    """Tell whether all numbers are finite floats; JSON reads 1e999 as infinity."""
    numbers = [fields.get("reward", 0.0), *fields.get("parts", {}).values()]
    return all(type(number) is float and math.isfinite(number) for number in numbers)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
