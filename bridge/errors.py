"""The error tree: failures that a user can cause or fix. Bugs are plain `assert`s and end in exit code 1."""

from collections.abc import Sequence
from functools import partial
from typing import Any


class BridgeError(Exception):
    """Something a person can fix: what happened, what was found and expected, and the hint."""

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
    """A flag, a file or an environment that the caller named cannot be used."""

    exit_code = 2


class RewardError(UsageError):
    """An environment's problems or scores cannot be used."""


class GradientError(UsageError):
    """The gradient of an update is not finite; no weight was changed."""


class RejectedRequestError(UsageError):
    """A server rejects a request for what it contains, such as a prompt that is too long."""


class CheckpointError(UsageError):
    """A checkpoint is incomplete or lacks what is needed."""


class AttachError(BridgeError, RuntimeError):
    """The trainer refuses to attach, or the server refuses to export."""

    exit_code = 4


class FenceBusyError(AttachError):
    """Another process holds the fence, usually for a moment."""


class ManifestError(AttachError):
    """The manifest is missing, unreadable, stale, another user's, or for another model."""


class UnsupportedModelError(AttachError):
    """A parameter of the model cannot be shared byte for byte."""


def own_head(head: str, embedding: str) -> UnsupportedModelError:
    """Return the error for a model whose configuration ties the head, and whose files hold a different head."""
    return UnsupportedModelError(
        f"{head} differs from {embedding}, and the configuration ties them: transformers 5 and vLLM 0.32 use"
        " both, older ones drop the head",
        hint='"tie_word_embeddings": false in its config.json keeps the head everywhere; or remove it from the files',
    )


def beside_adapter(config_name: str) -> UnsupportedModelError:
    """Return the error for a folder with a whole model and an adapter, of which transformers makes one model."""
    return UnsupportedModelError(
        f"it holds a whole model and an adapter ({config_name}): transformers adds that to the weights, vLLM does not",
        hint=f"move {config_name} and the adapter's weights to another folder; if the model does not have the"
        " adapter in its weights yet, merge it first: bridge export ADAPTER --out FOLDER",
    )


class IncompatibleVersionError(AttachError):
    """The patches do not support the installed vLLM."""


class ServerUnreachableError(BridgeError, ConnectionError):
    """The server does not answer, or reports that it is unhealthy."""

    exit_code = 5


class RankError(BridgeError, RuntimeError):
    """Another rank of this run failed or exited."""


class AtroposError(BridgeError, ConnectionError):
    """The Atropos API does not answer, or has nothing to learn from."""

    exit_code = 5


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a message of one's own."""
    return str(error).strip().partition("\n")[0]


def with_class(error: BaseException) -> str:
    """Return the class of an error, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_few(faults: Sequence[str], *, separator: str = "; ", most: int = 3) -> str:
    """Return the first faults as text, and how many more there are."""
    more = f"; and {len(faults) - most} more" if len(faults) > most else ""
    return separator.join(faults[:most]) + more
