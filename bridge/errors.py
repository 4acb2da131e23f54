"""The error tree: every failure a user can cause or mend is a leaf here.

Not covered: mistakes of ours, which are plain `assert`s and end in exit code 1.
"""


class BridgeError(Exception):
    """Something a person can mend: what is wrong, what was found and expected, and the remedy."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        """Return the message and the remedy as two lines."""
        return f"{self.message}\nhint: {self.remedy}"


class UsageError(BridgeError, ValueError):
    """A flag, a file or an environment that the caller named does not fit."""

    exit_code = 2


class RewardError(UsageError):
    """An environment's problems or scores cannot be used."""


class CheckpointError(UsageError):
    """A checkpoint is not whole, or does not hold what is wanted of it."""


class AttachError(BridgeError, RuntimeError):
    """The trainer refuses to attach, or the server refuses to export."""

    exit_code = 4


class FenceBusyError(AttachError):
    """Another process holds the fence, for a moment as a rule."""


class ManifestError(AttachError):
    """The manifest is missing, unreadable, stale, foreign or of another model."""


class UnsupportedModelError(AttachError):
    """A parameter of the model cannot be shared byte for byte."""


class IncompatibleVersionError(AttachError):
    """The installed vLLM does not fit the patches."""


class ServerUnreachableError(BridgeError, ConnectionError):
    """The server does not answer, or answered that it is unwell."""

    exit_code = 5


class AtroposError(BridgeError, ConnectionError):
    """The Atropos API does not answer, or has nothing to learn from."""

    exit_code = 5
