"""Which model of each server an environment of ours samples from: the one that is trained.

Not covered: sampling (`bridge/rollouts`).
"""

import httpx
from pydantic import ValidationError

from bridge.errors import UsageError
from bridge.rollouts.openai_api import Models
from bridge.server import api_key
from bridge.server.client import CONTROL_LIMIT_S, unreachable
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
    names = [model.id for model in _models(url).data]
    if renamed := [name for name in names if name.startswith(f"{ADAPTER}-")]:
        raise UsageError(
            f"the adapter that is trained at {url} gets a new name with every step, now {renamed[-1]}",
            remedy="train it with --lora-handover memory, which keeps its name",
        )
    return Endpoint(url=url, model=ADAPTER if ADAPTER in names else None)


def _models(url: str) -> Models:
    try:
        with httpx.Client(timeout=CONTROL_LIMIT_S, trust_env=False, headers=api_key.headers()) as http:
            answer = http.get(f"{url}/v1/models")
        if answer.status_code in api_key.LOCKED:
            raise api_key.refusal(url, answer.status_code, answer.text[:200])
        answer.raise_for_status()
        return Models.model_validate_json(answer.content)
    except (httpx.HTTPError, httpx.InvalidURL, ValidationError) as error:
        words = " ".join(str(error).split())[:200]
        raise unreachable(url, f"/v1/models: {type(error).__name__}: {words}") from error
