"""The length of the server's longest sequence, and what it leaves for a completion."""

from collections.abc import Callable
from typing import TypeVar

from bridge.config import FeedConfig, TrainConfig
from bridge.config.rollouts import DEFAULT_NEW_TOKENS
from bridge.errors import UsageError

Choices = TypeVar("Choices", TrainConfig, FeedConfig)


def fit_completions(config: Choices, longest: int | None, note: Callable[[str], None]) -> Choices:
    """Return `config` with completions that fit a server whose longest sequence has `longest` tokens; None: unknown.

    Where nobody chose a length, half of the sequence is left for the prompt, and `note` reports a shorter default.

    Raises:
        UsageError: the chosen length leaves no room for a prompt.
    """
    chosen = config.sampling.max_new_tokens
    if longest is None:
        return config
    half = max(longest // 2, 1)
    if chosen is not None and chosen >= longest:
        raise UsageError(
            f"--max-new-tokens {chosen} leaves no room for a prompt: the server's longest sequence, prompt and"
            f" completion, has {longest} tokens",
            remedy=f"--max-new-tokens {half}, or serve with a larger --max-model-len",
        )
    if chosen is not None or half >= DEFAULT_NEW_TOKENS:
        return config
    note(f"--max-new-tokens {half}: half of the server's longest sequence, which has {longest} tokens")
    return config.changed(max_new_tokens=half)
