"""How long a sequence the server takes.

Not covered: a prompt that is too long for the server, which refuses it (`connections.py`).
"""

import os

import httpx

from bridge.client import CONTROL_LIMIT_S
from bridge.rollouts.connections import KEY


def max_model_len(url: str) -> int | None:
    """Return the tokens of the longest sequence of the server at `url`; None where it does not say."""
    key = os.environ.get(KEY)
    headers = {"authorization": f"Bearer {key}"} if key else None
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False, timeout=CONTROL_LIMIT_S)
        lengths = [int(model["max_model_len"]) for model in answer.json()["data"] if model.get("max_model_len")]
    except (httpx.TransportError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return None  # whoever needs an answer asks again, and says so
    return min(lengths, default=None)
