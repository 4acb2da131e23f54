"""How a phase went on one rank, as it tells the others."""

from dataclasses import dataclass
from typing import Any, Self

from bridge.errors import BridgeError, RankError

AGREED = "was_agreed"
"""Attribute of an error that ranks raise together: how many."""
OF_TENSORS = "is_of_tensors"
"""Attribute of an error that an exchange of tensors raises: the rank that failed may tell why."""


@dataclass(frozen=True)
class Outcome:
    """How a phase went on one rank."""

    result: Any = None
    error: BaseException | None = None
    """An error that another process can raise."""
    fault: str = ""
    """Any other error, on one line."""
    raised: BaseException | None = None
    """The error itself; it does not travel."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        if isinstance(error, BridgeError):
            return cls(error=error, raised=error)
        if isinstance(error, KeyboardInterrupt):
            return cls(error=KeyboardInterrupt(), raised=error)
        return cls(fault=f"{type(error).__name__}: {error}", raised=error)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result, self.error, self.fault)

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.fault)

    @property
    def kind(self) -> int:
        """Which of several ranks' errors explains the others: the lowest."""
        error = self.error
        return 0 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, RankError) else 1
