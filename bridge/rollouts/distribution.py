"""Sampling parameters for the whole distribution, as the trainer computes it unless filters are chosen.

A server fills in what a request leaves out from the model's `generation_config.json`: every request names all of
`WHOLE`. Temperature is not among them, because the trainer applies it as well.
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
"""Parameters of OpenAI's protocol, which any server accepts."""
FILTERS = ("top_k", "top_p", "min_p")
"""Those that keep the likeliest tokens alone: the trainer computes the distribution over what they kept, if the server
reports it."""
NO_DEFAULT = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
"""Parameters that change the distribution too, unless they are empty or 0."""


def changes(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `params` that make a server sample from another distribution; None counts as left out."""
    named = {name: params[name] for name in (*WHOLE, *NO_DEFAULT) if params.get(name)}
    return {name: value for name, value in named.items() if value != WHOLE.get(name)}


def filters(choices: Any) -> dict[str, float]:
    """Return the filters that are switched on, by the attributes of `choices`."""
    return changes({name: getattr(choices, name) for name in FILTERS})


def in_words(changed: Mapping[str, Any]) -> str:
    """Return `changed` as text, with what it means for training."""
    fields = ", ".join(name if name in NO_DEFAULT else f"{name}={value}" for name, value in changed.items())
    return f"{fields}; the trainer computes the distribution without it, so importance weights and KL are off"
