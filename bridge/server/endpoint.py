"""The server and the model that rollouts are sampled from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server for rollouts."""

    url: str
    model: str | None = None
    """The name in a request; None: the first that the server lists."""
    version: int | None = None
    """Version of the weights behind it, for a server that does not report one; None: the server reports it."""
    kv_tokens: int | None = None
    """Tokens that its KV cache holds; None: unknown."""
    reports_experts: bool = False
    """Whether requests ask it for the experts that each token was sent to."""
    starts: int = 0
    """How often this run has started the server again: what was in flight before is lost."""
    others: "tuple[Endpoint, ...]" = ()
    """Other servers with the same weights."""
