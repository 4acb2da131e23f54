"""How a phase went on one rank, as it reports it to the others."""

from dataclasses import dataclass
from typing import Any, Self

from bridge.errors import BridgeError, RankError
from bridge.ranks import messages

AGREED = "was_agreed"
"""Attribute of an error that ranks raise together: how many."""
OF_TENSORS = "is_of_tensors"
"""Attribute of an error that an exchange of tensors raises: the rank that failed may report why."""
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Outcome:
    """How a phase went on one rank."""

    result: Any = None
    error: BaseException | None = None
    """An error that every rank can raise: one of ours, or an interrupt."""
    fault: str = ""
    """Any other error, on one line."""
    raised: BaseException | None = None
    """The error itself, on the rank that raised it."""
    message: bytes = b"[null]"
    """The result as it is sent."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        if isinstance(error, BridgeError):
            return cls(error=error, raised=error)
        if isinstance(error, KeyboardInterrupt):
            return cls(error=KeyboardInterrupt(), raised=error)
        return cls(fault=f"{type(error).__name__}: {error}", raised=error)

    def dumps(self) -> bytes:
        """Return a line about an error, and the result on the next one."""
        error = self.error
        kind = INTERRUPTED if isinstance(error, KeyboardInterrupt) else ""
        text, remedy = self.fault, ""
        if isinstance(error, BridgeError):
            kind = messages.name_of(type(error))
            text = error.message
            remedy = error.remedy
        return messages.dumps([kind, text, remedy]) + b"\n" + self.message

    @classmethod
    def loads(cls, message: bytes) -> Self:
        line, _, result = message.partition(b"\n")
        kind, text, remedy = messages.loads(line)
        if kind == INTERRUPTED:
            return cls(error=KeyboardInterrupt())
        if kind:
            return cls(error=messages.error(kind, text, remedy))
        return cls(fault=text, result=messages.loads(result)[0])

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.fault)

    @property
    def kind(self) -> int:
        """Which of several ranks' errors explains the others: the lowest."""
        error = self.error
        return 0 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, RankError) else 1
