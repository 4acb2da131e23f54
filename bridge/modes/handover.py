"""What every way of getting a trained adapter into vLLM's LoRA slot offers to `lora_only`.

Not covered: the two ways, `memory_handover.py` and `disk_handover.py`; the adapter (`bridge/weights/adapter.py`).
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import httpx

from bridge.core.whole_folder import written_whole
from bridge.errors import UsageError
from bridge.server import api_key
from bridge.server.client import CONTROL_LIMIT_S, BridgeClient, unreachable
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.server.protocol import ADAPTER, TOKEN_HEADER
from bridge.weights.adapter import Adapter


class Handover(Protocol):
    """One way for an adapter to reach the server."""

    @property
    def version(self) -> int:
        """Version of the adapter that the server serves."""
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether the server can free its KV cache while `publish` runs."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """The server, and the name to ask for."""
        ...

    def take(self, adapter: Adapter) -> None:
        """Let the server serve the adapter as it is."""
        ...

    def beside_bytes(self, adapter: Adapter) -> int:
        """Return the bytes of the adapter that this process holds beside the server's."""
        ...

    def publish(
        self,
        adapter: Adapter,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare`, then `write`, which changes the adapter, and make the result the next version."""
        ...

    def restore(self, adapter: Adapter, write: Callable[[], None], *, version: int) -> None:
        """Run `write`, which sets the whole adapter, and make the result `version` or a later one."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def seat(client: BridgeClient, folder: Path) -> int:
    """Let the server load the adapter in `folder` into a slot of its own, and return the slot.

    Raises:
        AttachError: it refuses.
        ServerUnreachableError: it does not answer, or not as vLLM does.
    """
    with opened(client.url, CONTROL_LIMIT_S, client.token) as http:
        unload_earlier(http)  # or there may be no slot
    return client.adapter(ADAPTER, folder)


def opened(url: str, timeout_s: float, token: str | None) -> httpx.Client:
    """Open a connection to vLLM's own routes for adapters, past any proxy, with the server's key if there is one.

    By the manifest's `token` a patched server knows the trainer that has its lease.
    """
    headers = api_key.headers() | ({} if token is None else {TOKEN_HEADER: token})
    return httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, headers=headers)


def unload(http: httpx.Client, name: str) -> None:
    """Let the server forget the adapter `name`."""
    post(http, "unload_lora_adapter", {"lora_name": name})


def unload_earlier(http: httpx.Client) -> None:
    """Let the server forget what an earlier run handed over by disk.

    Raises:
        ServerUnreachableError: the server does not answer, or not as vLLM does.
        UsageError: it wants another key.
    """
    answer = _answer(http, "GET", "models")
    try:
        names = [model["id"] for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise unreachable(str(http.base_url), f"{type(error).__name__}: {error}") from error
    for name in names:
        if name.startswith(f"{ADAPTER}-"):
            unload(http, name)


def post(http: httpx.Client, route: str, body: dict[str, str]) -> None:
    """Call one of vLLM's own routes for adapters.

    Raises:
        ServerUnreachableError: the server does not answer, or is unwell.
        UsageError: it takes no adapter, or not this one, or wants another key.
    """
    url, answer = str(http.base_url), _answer(http, "POST", route, body)
    words = _words(answer)
    if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise unreachable(url, f"/v1/{route} answered {answer.status_code}: {words}")
    if not answer.is_success:
        raise UsageError(
            f"the server at {url} takes no adapter: {answer.status_code} {words}",
            remedy="bridge serve-vllm --max-lora-rank R; any other vLLM: --enable-lora --max-lora-rank R and the "
            "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        )


def _answer(http: httpx.Client, method: str, route: str, body: dict[str, str] | None = None) -> httpx.Response:
    url = str(http.base_url)
    try:
        answer = http.request(method, f"/v1/{route}", json=body)
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise unreachable(url, f"{type(error).__name__}: {error}") from error
    if answer.status_code in api_key.LOCKED:
        raise api_key.refusal(url, answer.status_code, _words(answer))
    return answer


def _words(answer: httpx.Response) -> str:
    return " ".join(answer.text.split())[:300]


def saved(adapter: Adapter, folder: Path) -> Path:
    """Write the adapter to `folder`, whole, and return its absolute path."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(folder, replaceable=lambda _: True, durable=False) as scratch:
        adapter.save(scratch)
    return folder


def discard(folder: Path) -> None:
    """Remove a saved adapter, and the folder around it if nothing else is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty
        folder.parent.rmdir()
