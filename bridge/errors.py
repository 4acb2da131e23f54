"""The error classes: failures that a user can cause or fix. Bugs are plain `assert`s and end in exit code 1."""

from collections.abc import Sequence
from functools import partial
from typing import Any


class BridgeError(Exception):
    """A failure that the user can fix."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), hint=self.hint), (self.message,)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}"


class UsageError(BridgeError, ValueError):
    """A flag, file or environment that the caller named cannot be used."""

    exit_code = 2


class RewardError(UsageError):
    """An environment's problems or scores cannot be used."""


class GradientError(UsageError):
    """The gradient of an update is not finite; no weight was changed."""


class RejectedRequestError(UsageError):
    """A server rejected a request because of its contents, for example a prompt that is too long."""


class CheckpointError(UsageError):
    """A checkpoint is incomplete, or lacks a file that is needed."""


class AttachError(BridgeError, RuntimeError):
    """The trainer refuses to attach, or the server refuses to export."""

    exit_code = 4


class FenceBusyError(AttachError):
    """Another process holds the fence; it usually releases it within moments."""


class ManifestError(AttachError):
    """The manifest is missing, unreadable or stale, belongs to another user, or describes a different model."""


class UnsupportedModelError(AttachError):
    """A parameter of the model cannot be shared byte for byte."""


def own_head(head: str, embedding: str) -> UnsupportedModelError:
    """Return the error for a model whose configuration ties the head, but whose files hold a separate one."""
    return UnsupportedModelError(
        f"{head} differs from {embedding}, but the configuration ties them: transformers 5 and vLLM 0.32 use"
        " both, older versions drop the head",
        hint='set "tie_word_embeddings": false in config.json to keep the head everywhere, or remove it from the files',
    )


def beside_adapter(config_name: str) -> UnsupportedModelError:
    """Return the error for a folder with a full model and an adapter, which transformers merges into one model."""
    return UnsupportedModelError(
        f"it holds a full model and an adapter ({config_name}): transformers applies the adapter, vLLM does not",
        hint=f"move {config_name} and the adapter's weights to another folder; if the adapter has not been merged into"
        " the model's weights yet, merge it first: bridge export ADAPTER --out FOLDER",
    )


class IncompatibleVersionError(AttachError):
    """The patches do not support the installed vLLM."""


class ServerUnreachableError(BridgeError, ConnectionError):
    """The server does not answer, or reports that it is unhealthy."""

    exit_code = 5


class RankError(BridgeError, RuntimeError):
    """Another rank of this run failed or exited."""


class AtroposError(BridgeError, ConnectionError):
    """The Atropos API does not answer, or delivers no usable groups."""

    exit_code = 5


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, to quote it in another message."""
    return str(error).strip().partition("\n")[0]


def with_class(error: BaseException) -> str:
    """Return the error's class name and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_few(faults: Sequence[str], *, separator: str = "; ", most: int = 3) -> str:
    """Join the first `most` faults, and append the number of those left out."""
    more = f"; and {len(faults) - most} more" if len(faults) > most else ""
    return separator.join(faults[:most]) + more
