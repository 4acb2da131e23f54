"""The key that a server asks for (`--api-key`), and the header with which every client of ours sends it.

Not covered: the token in the manifest, which opens `/bridge/*` and nothing else.
"""

import os
from collections.abc import Mapping

from bridge.errors import UsageError

LOCKED = (401, 403)
"""HTTP statuses of a request without the right key."""
VARIABLE = "VLLM_API_KEY"
"""vLLM's own variable. Its server reads the key there, too, unless it has `--api-key`."""


def headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the header for a request to a server, none without a key.

    Raises:
        UsageError: no HTTP header can carry the key.
    """
    key = environment.get(VARIABLE, "")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError(
            f"{VARIABLE} has a line break, a space at an end, or a character beyond ASCII: no HTTP header can carry it",
            remedy=f"export {VARIABLE}=KEY with the very key that the server was started with",
        )
    return {"authorization": f"Bearer {key}"}


def refusal(url: str, status: int, words: str) -> UsageError:
    """Describe a server that rejected a request because of its key."""
    return UsageError(
        f"the server at {url} rejected the request with status {status}: {words}",
        remedy=f"export {VARIABLE}=KEY, the key that the server was started with",
    )
