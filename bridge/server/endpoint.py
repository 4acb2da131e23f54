"""The server and the model that rollouts are sampled from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server for rollouts."""

    url: str
    model: str | None = None
    """Model name to request; None: the first model that the server lists."""
    version: int | None = None
    """Version of the weights behind it, for a server that does not report one; None: the server reports it."""
    kv_tokens: int | None = None
    """Capacity of its KV cache in tokens; None: unknown."""
    reports_experts: bool = False
    """Whether requests ask for the experts that each token was routed to."""
    starts: int = 0
    """Number of times this run has restarted the server; each restart loses the in-flight requests."""
    others: "tuple[Endpoint, ...]" = ()
    """Further servers with the same weights."""
