"""Sampling parameters for the unfiltered distribution, which the trainer computes unless filters are chosen.

A server takes parameters that a request leaves out from the model's `generation_config.json`, so every request sets all
of `WHOLE`. Temperature is not among them, because the trainer applies it too.
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
"""Sampling parameter -> its neutral value. `tests/contract` checks that these are vLLM's defaults."""
PROTOCOL = ("top_p", "presence_penalty", "frequency_penalty")
"""The parameters that are part of OpenAI's protocol, which any server accepts."""
FILTERS = ("top_k", "top_p", "min_p")
"""The parameters that keep only the likeliest tokens. If the server reports which tokens were kept, the trainer
computes the distribution over these."""
NO_DEFAULT = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
"""Further parameters that change the distribution unless they are empty or 0."""


def changes(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `params` that change the sampling distribution; None counts as left out."""
    named = {name: params[name] for name in (*WHOLE, *NO_DEFAULT) if params.get(name)}
    return {name: value for name, value in named.items() if value != WHOLE.get(name)}


def filters(choices: Any) -> dict[str, float]:
    """Return the filters that the attributes of `choices` switch on."""
    return changes({name: getattr(choices, name) for name in FILTERS})


def in_words(changed: Mapping[str, Any]) -> str:
    """Return `changed` as text, followed by its consequence for training."""
    fields = ", ".join(name if name in NO_DEFAULT else f"{name}={value}" for name, value in changed.items())
    return f"{fields}; the trainer computes the distribution without this, so importance weights and KL are off"
