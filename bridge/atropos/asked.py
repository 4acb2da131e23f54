"""Which model of each server an environment of ours samples from: the one that is trained.

Not covered: sampling (`bridge/rollouts`).
"""

from bridge.errors import UsageError
from bridge.server.client import VllmClient
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import ADAPTER


def endpoints(server_url: str) -> list[Endpoint]:
    """Return whom to ask: of each server the adapter that is trained, else the model itself.

    Raises:
        UsageError: no server is named, or one that wants another key, or whose adapter changes its name every step.
        ServerUnreachableError: one does not answer as vLLM does.
    """
    return [_endpoint(url) for url in urls(server_url)]


def urls(server_url: str) -> list[str]:
    """Return where the servers answer that `--server-url` names.

    Raises:
        UsageError: it names none.
    """
    found = [url.strip().rstrip("/") for url in server_url.split(",") if url.strip()]
    if not found:
        raise UsageError("no server is named to sample from", remedy="--server-url http://127.0.0.1:9001")
    return found


def _endpoint(url: str) -> Endpoint:
    with VllmClient(url) as server:
        names = [model.id for model in server.models()]
    if renamed := [name for name in names if name.startswith(f"{ADAPTER}-")]:
        raise UsageError(
            f"the adapter that is trained at {url} gets a new name with every step, now {renamed[-1]}",
            remedy="train it with --lora-handover memory, which keeps its name",
        )
    return Endpoint(url=url, model=ADAPTER if ADAPTER in names else None)
