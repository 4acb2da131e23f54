"""The API key of a vLLM server, in an environment variable that both server and clients read."""

import os
from collections.abc import Mapping

from bridge.errors import UsageError

VARIABLE = "VLLM_API_KEY"
"""vLLM's own environment variable. The server also reads its key from it, unless `--api-key` is given."""


def headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the header that carries the key, empty if none is set; UsageError if the key cannot be sent."""
    key = environment.get(VARIABLE, "")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError(
            f"{VARIABLE} contains a line break, leading or trailing spaces, or a non-ASCII character, so it cannot be"
            " sent in an HTTP header",
            hint=f"export {VARIABLE}=KEY with the exact key that the server was started with",
        )
    return {"authorization": f"Bearer {key}"}
