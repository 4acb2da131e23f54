"""How long a sequence the server takes, and what that leaves for a completion.

Not covered: a prompt that is too long for the server, which refuses it (`connections.py`).
"""

from collections.abc import Callable
from typing import TypeVar

import httpx

from bridge.config.rollouts import RolloutConfig
from bridge.errors import UsageError
from bridge.server import api_key
from bridge.server.client import CONTROL_LIMIT_S

Choices = TypeVar("Choices", bound=RolloutConfig)


def max_model_len(url: str) -> int | None:
    """Return the tokens of the longest sequence of the server at `url`; None where it does not say."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=api_key.headers(), trust_env=False, timeout=CONTROL_LIMIT_S)
        lengths = [int(model["max_model_len"]) for model in answer.json()["data"] if model.get("max_model_len")]
    except (httpx.TransportError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever needs an answer asks again, and says so
    return min(lengths, default=None)


def fit_completions(config: Choices, longest: int | None, note: Callable[[str], None]) -> Choices:
    """Return `config` with completions that a server takes whose longest sequence has `longest` tokens; None: unknown.

    A choice that nobody made gives way, and `note` hears of it: half of the sequence is left for the prompt.

    Raises:
        UsageError: the choice that was made leaves no room for a prompt.
    """
    if longest is None:
        return config
    if "max_new_tokens" in config.model_fields_set:
        if config.max_new_tokens >= longest:
            raise UsageError(
                f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt: the server's longest sequence,"
                f" prompt and completion, has {longest} tokens",
                remedy=f"--max-new-tokens {max(longest // 2, 1)}, or serve with a larger --max-model-len",
            )
        return config
    half = max(longest // 2, 1)
    if config.max_new_tokens <= half:
        return config
    note(f"--max-new-tokens {half}: half of the server's longest sequence, which has {longest} tokens")
    return config.model_copy(update={"max_new_tokens": half})
