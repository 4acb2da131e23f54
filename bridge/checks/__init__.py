"""The checks of `bridge doctor` and `bridge verify`: small functions that judge facts, and the record that they return.

*Facts* are what a child process reports about torch, the driver and a model (`probe.py`). A *trial* lets two processes
actually share memory (`hardware.py`).

May import: `bridge`, psutil, httpx and packaging; torch only in a child process, or in `one_copy_proof.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from bridge.errors import BridgeError

Status = Literal["PASS", "WARN", "FAIL", "SKIP"]


@dataclass(frozen=True)
class Check:
    """What one check found, what it expected, and how to fix the difference."""

    name: str
    """What was checked, in a few words."""
    status: Status
    """PASS; WARN: it may cause trouble later; FAIL: attaching cannot work; SKIP: not checked, `found` says why."""
    found: str
    """The actual state, with its values."""
    expected: str
    """The state that passes."""
    hint: str | None = None
    """One line with the command that fixes it; None for PASS, and for a SKIP that needs no fix."""

    def __post_init__(self) -> None:
        assert self.hint or self.status in ("PASS", "SKIP"), f"{self.name}: {self.status} without a hint"


def passed(name: str, found: str, expected: str) -> Check:
    return Check(name, "PASS", found, expected)


def warned(name: str, found: str, expected: str, hint: str) -> Check:
    return Check(name, "WARN", found, expected, hint)


def failed(name: str, found: str, expected: str, hint: str) -> Check:
    return Check(name, "FAIL", found, expected, hint)


def skipped(name: str, reason: str, expected: str, hint: str | None = None) -> Check:
    return Check(name, "SKIP", reason, expected, hint)


def judged(name: str, good: bool, found: str, expected: str, hint: str, *, otherwise: Status = "FAIL") -> Check:
    """Return PASS if what was found is `good`, else the status `otherwise` with the fix."""
    return passed(name, found, expected) if good else Check(name, otherwise, found, expected, hint)


def tried(name: str, action: Callable[[], str], expected: str) -> Check:
    """Return PASS with what `action` returns, or FAIL with the BridgeError that it raises."""
    try:
        return passed(name, action(), expected)
    except BridgeError as error:
        return failed(name, error.message, expected, error.hint)


def any_failed(checks: Iterable[Check]) -> bool:
    return any(check.status == "FAIL" for check in checks)
