"""The sampling parameters for the whole distribution, which is the one that the trainer computes.

A server takes what a request leaves out from the model's `generation_config.json`: every request names all of `WHOLE`.

Not covered: temperature, which the trainer applies as well.
"""

from collections.abc import Mapping
from typing import Any

WHOLE: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling parameter -> the value that changes nothing. `tests/contract` checks that vLLM has no other default."""
PROTOCOL = ("top_p", "presence_penalty", "frequency_penalty")
"""Those that are part of OpenAI's protocol, so that any server takes them."""
NO_DEFAULT = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
"""Parameters that change the distribution as well, and have no default: empty or 0 changes nothing."""


def changes(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `params` with which a server samples from another distribution; None stands for left out."""
    named = {name: params[name] for name in (*WHOLE, *NO_DEFAULT) if params.get(name)}
    return {name: value for name, value in named.items() if value != WHOLE.get(name)}


def in_words(changed: Mapping[str, Any]) -> str:
    """Return `changed` in words, with what it means for training."""
    fields = ", ".join(name if name in NO_DEFAULT else f"{name}={value}" for name, value in changed.items())
    return f"{fields}; the trainer computes the distribution without that, so importance weights and KL are off"
