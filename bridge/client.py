"""Talk to a patched vLLM: the routes under `/bridge/*`, over one pooled connection.

Not covered: generation (`bridge/rollouts`).
"""

from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from bridge.errors import AttachError, ManifestError, ServerUnreachableError
from bridge.process import ProcessIdentity
from bridge.protocol import (
    AdapterRequest,
    AdapterSlot,
    Digests,
    Element,
    InFlight,
    PauseRequest,
    ReadRequest,
    Refusal,
    ReleaseRequest,
    Status,
    Values,
    WriteRequest,
    Written,
)
from bridge.weights.manifest import Manifest

Answer = TypeVar("Answer", bound=BaseModel)
CONFLICT = 409
CONTROL_LIMIT_S = 30.0
"""Longest wait for a call that a well server answers in milliseconds. vLLM's API server outlives an engine that was
killed, and such a call would wait for ever: inside the fence, where Ctrl-C is held back."""
KEEPALIVE_S = 2.0
"""Idle time after which a connection is not used again. vLLM's API server closes one after 5 s, httpx's own limit too:
the call that ends a fence of that length could meet the end of its connection, and would be lost."""


class BridgeClient:
    """The control connection of one trainer to one server; its calls are those of the fence and of the proof.

    Every call raises ServerUnreachableError when the server does not answer or answers nonsense, and AttachError
    with the server's own words when it refuses.
    """

    def __init__(self, manifest: Manifest, *, timeout_s: float, url: str | None = None) -> None:
        self.url = url or manifest.url
        self._holder = ProcessIdentity.current()
        self._http = _open(self.url, manifest.token, timeout_s)
        self._control_limit_s = min(timeout_s, CONTROL_LIMIT_S)

    def __enter__(self) -> Self:
        """Use the connection in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def status(self) -> Status:
        """Return the version and where the fence stands."""
        return self._control("GET", "status", None)

    def pause(
        self,
        in_flight: InFlight,
        *,
        last_checkpoint: Path | None = None,
        writes: Written = "weights",
        takeover: bool = False,
        sleep: bool = False,
    ) -> Status:
        """Stop generation and take the fence; `wait` may take as long as a request does.

        `last_checkpoint` would mend the server if this process died; `takeover` is for who writes everything anew;
        with `sleep` the memory of the KV cache is free until the fence is left.
        """
        named = None if last_checkpoint is None else str(last_checkpoint.absolute())
        body = PauseRequest(
            holder=self._holder,
            in_flight=in_flight,
            last_checkpoint=named,
            writes=writes,
            takeover=takeover,
            sleep=sleep,
        )
        if in_flight == "wait":
            return self._call("POST", "pause", body, Status)
        return self._control("POST", "pause", body)

    def publish(self, version: int | None = None) -> Status:
        """Make what was written the next version, or `version` if that is later, and resume generation."""
        return self._control("POST", "publish", ReleaseRequest(holder=self._holder, version=version))

    def resume(self) -> Status:
        """Resume generation with the same version, because nothing was written."""
        return self._control("POST", "resume", ReleaseRequest(holder=self._holder))

    def digests(self) -> dict[str, str]:
        """Return the digest of each of vLLM's parameters, computed by the server."""
        return self._call("GET", "tensors/digest", None, Digests).digests

    def read(self, elements: tuple[Element, ...]) -> tuple[float, ...]:
        """Return the server's view of `elements`."""
        return self._call("POST", "tensors/read", ReadRequest(elements=elements), Values).values

    def write(self, elements: tuple[Element, ...], values: tuple[float, ...]) -> None:
        """Let the server set `elements`; only inside the fence."""
        self._call("POST", "tensors/write", WriteRequest(holder=self._holder, elements=elements, values=values), Status)

    def adapter(self, name: str, path: Path) -> int:
        """Let the server serve the adapter in folder `path` as `name`, alone among pinned ones; return its slot."""
        body = AdapterRequest(name=name, path=str(path.absolute()))
        return self._call("POST", "adapter", body, AdapterSlot).slot

    def release_adapter(self) -> None:
        """Let the server take out the adapter that has a slot of its own, if there is one."""
        self._call("DELETE", "adapter", None, Status)

    def _control(self, method: str, route: str, body: BaseModel | None) -> Status:
        return self._call(method, route, body, Status, limit_s=self._control_limit_s)

    def _call(
        self, method: str, route: str, body: BaseModel | None, answer: type[Answer], *, limit_s: float | None = None
    ) -> Answer:
        content = None if body is None else body.model_dump_json()
        headers = {"content-type": "application/json"}
        limit = httpx.USE_CLIENT_DEFAULT if limit_s is None else httpx.Timeout(limit_s)
        try:
            response = self._http.request(method, f"/bridge/{route}", content=content, headers=headers, timeout=limit)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise unreachable(self.url, f"{type(error).__name__}: {error}") from error
        if response.status_code == CONFLICT:
            refusal = self._parse(route, response, Refusal)
            raise AttachError(refusal.error, remedy=refusal.remedy)
        if not response.is_success:
            raise unreachable(self.url, f"/bridge/{route} answered {response.status_code}: {response.text[:200]}")
        return self._parse(route, response, answer)

    def _parse(self, route: str, response: httpx.Response, kind: type[Answer]) -> Answer:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise unreachable(self.url, f"/bridge/{route} answered what is no {kind.__name__}") from error


def _open(url: str, token: str, timeout_s: float) -> httpx.Client:
    """Open a connection past any proxy: the server is on this host."""
    headers = {"authorization": f"Bearer {token}"}
    try:
        limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False, limits=limits)
    except httpx.InvalidURL as error:
        raise ManifestError(
            f"{url} is no address of a server: {error}", remedy="--vllm-port, or restart the server"
        ) from error


def unreachable(url: str, reason: str) -> ServerUnreachableError:
    """Describe a server that does not answer, or not as ours does."""
    return ServerUnreachableError(
        f"the server at {url} does not answer as expected ({reason})",
        remedy="look into its log, and restart it with: bridge serve-vllm --model MODEL",
    )
