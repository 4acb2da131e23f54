"""How long a sequence the server takes, and what that leaves for a completion.

Not covered: a prompt that is too long for the server, which refuses it (`connections.py`).
"""

from collections.abc import Callable
from typing import TypeVar

import httpx

from bridge.config import FeedConfig, TrainConfig
from bridge.config.rollouts import DEFAULT_NEW_TOKENS
from bridge.errors import UsageError
from bridge.server import api_key
from bridge.server.client import CONTROL_LIMIT_S

Choices = TypeVar("Choices", TrainConfig, FeedConfig)


def max_model_len(url: str) -> int | None:
    """Return the tokens of the longest sequence of the server at `url`; None where it does not say."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=api_key.headers(), trust_env=False, timeout=CONTROL_LIMIT_S)
        lengths = [int(model["max_model_len"]) for model in answer.json()["data"] if model.get("max_model_len")]
    except (httpx.TransportError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever needs an answer asks again, and says so
    return min(lengths, default=None)


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
