"""The record of one check, which `bridge doctor` and `bridge verify` print alike."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["PASS", "WARN", "FAIL", "SKIP"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one check found, what it expected, and how to fix the difference."""

    name: str
    """What was checked, in a few words."""
    status: Status
    """PASS; WARN: it may hurt later; FAIL: attaching cannot work; SKIP: not checked, `found` says why."""
    found: str
    """What there is, with its values."""
    expected: str
    """What there should be."""
    remedy: str | None = None
    """One line with the command that fixes it; None for PASS, and for a SKIP that needs no fix."""

    def __post_init__(self) -> None:
        assert self.remedy or self.status in ("PASS", "SKIP"), f"{self.name}: {self.status} without a remedy"


def passed(name: str, found: str, expected: str) -> Check:
    """Report that `found` is as `expected`."""
    return Check(name=name, status="PASS", found=found, expected=expected)


def warned(name: str, found: str, expected: str, remedy: str) -> Check:
    """Report what may hurt later."""
    return Check(name=name, status="WARN", found=found, expected=expected, remedy=remedy)


def failed(name: str, found: str, expected: str, remedy: str) -> Check:
    """Report what makes attaching impossible."""
    return Check(name=name, status="FAIL", found=found, expected=expected, remedy=remedy)


def skipped(name: str, reason: str, expected: str, remedy: str | None = None) -> Check:
    """Report that `name` was not checked, and why."""
    return Check(name=name, status="SKIP", found=reason, expected=expected, remedy=remedy)


def any_failed(checks: Iterable[Check]) -> bool:
    """Tell whether one of `checks` failed."""
    return any(check.status == "FAIL" for check in checks)
