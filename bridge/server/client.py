"""Talk to a patched vLLM: the routes under `/bridge/*`, over one pooled connection.

Not covered: generation (`bridge/rollouts`).
"""

from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from bridge.errors import AttachError, BridgeError, FenceBusyError, ManifestError, ServerUnreachableError
from bridge.server.manifest import Manifest
from bridge.server.protocol import (
    AdapterRequest,
    AdapterSlot,
    Digests,
    Element,
    Holder,
    HolderRequest,
    InFlight,
    LeaseRequest,
    PauseRequest,
    PublishRequest,
    ReadRequest,
    Refusal,
    Status,
    Values,
    WriteRequest,
    Written,
)

Answer = TypeVar("Answer", bound=BaseModel)
CONFLICT = 409
CONTROL_LIMIT_S = 30.0
"""Longest wait for a call that a well server answers in milliseconds. vLLM's API server outlives an engine that was
killed, and such a call would wait for ever: inside the fence, where Ctrl-C is held back."""
FAREWELL_LIMIT_S = 5.0
"""Longest wait for the lease to be given back: the end of the process frees it as well."""
KEEPALIVE_S = 2.0
"""Idle time after which a connection is not used again. vLLM's API server closes one after 5 s, httpx's own limit too:
the call that ends a fence of that length could meet the end of its connection, and would be lost."""


class BridgeClient:
    """The control connection of one trainer to one server; its calls are those of the fence and of the proof.

    Every call raises ServerUnreachableError when the server does not answer or answers nonsense, AttachError with the
    server's own words when it refuses, and FenceBusyError when the same call may succeed soon. One whose connection is
    lost is sent again, once: each does the same when it is repeated.
    """

    def __init__(self, manifest: Manifest, *, timeout_s: float, url: str | None = None) -> None:
        self.url = url or manifest.url
        self.token = manifest.token
        self._holder = Holder.current()
        self._http = _open(self.url, manifest.token, timeout_s)
        self._control_limit_s = min(timeout_s, CONTROL_LIMIT_S)
        self._leased = False
        self._paused_at: int | None = None
        """The version that was served when this connection last paused the server."""

    def __enter__(self) -> Self:
        """Use the connection in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give the lease back, if this connection took it, and close."""
        if self._leased:
            with suppress(BridgeError):  # a server that is gone has no lease, and the end of this process frees it
                body, limit_s = HolderRequest(holder=self._holder), min(FAREWELL_LIMIT_S, self._control_limit_s)
                self._call("DELETE", "lease", body, Status, limit_s=limit_s)
        self._leased = False
        self._http.close()

    def status(self) -> Status:
        """Return the version and where the fence stands."""
        return self._control("GET", "status", None)

    def take_lease(self, run: str) -> Status:
        """Become the one process that updates the server, until `close` or its end; people see `run` as its name."""
        taken = self._control("POST", "lease", LeaseRequest(holder=self._holder, run=run))
        self._leased = True
        return taken

    def pause(
        self,
        in_flight: InFlight,
        *,
        version: int | None = None,
        last_checkpoint: Path | None = None,
        writes: Written = "weights",
        takeover: bool = False,
        sleep: bool = False,
    ) -> Status:
        """Stop generation and take the fence; `wait` may take as long as a request does.

        Refused where the server does not serve `version`, the one that this process wrote or found last.
        `last_checkpoint` would mend the server if this process died; `takeover` is for who writes everything anew;
        with `sleep` the memory of the KV cache is free until the fence is left.
        """
        named = None if last_checkpoint is None else str(last_checkpoint.absolute())
        body = PauseRequest(
            holder=self._holder,
            version=version,
            in_flight=in_flight,
            last_checkpoint=named,
            writes=writes,
            takeover=takeover,
            sleep=sleep,
        )
        limit_s = None if in_flight == "wait" else self._control_limit_s
        paused = self._call("POST", "pause", body, Status, limit_s=limit_s)
        self._paused_at = paused.version
        return paused

    def publish(self, version: int | None = None) -> Status:
        """Make what was written the next version, or `version` if that is later, and resume generation."""
        body = PublishRequest(holder=self._holder, after=self._paused_at, version=version)
        return self._control("POST", "publish", body)

    def resume(self) -> Status:
        """Resume generation with the same version, because nothing was written."""
        return self._control("POST", "resume", HolderRequest(holder=self._holder))

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
        body = AdapterRequest(holder=self._holder, name=name, path=str(path.absolute()))
        return self._call("POST", "adapter", body, AdapterSlot).slot

    def release_adapter(self) -> None:
        """Let the server take out the adapter that has a slot of its own, if there is one."""
        self._call("DELETE", "adapter", HolderRequest(holder=self._holder), Status)

    def _control(self, method: str, route: str, body: BaseModel | None) -> Status:
        return self._call(method, route, body, Status, limit_s=self._control_limit_s)

    def _call(
        self, method: str, route: str, body: BaseModel | None, answer: type[Answer], *, limit_s: float | None = None
    ) -> Answer:
        response = self._send(method, route, body, limit_s)
        if response.status_code == CONFLICT:
            refusal = self._parse(route, response, Refusal)
            raise (FenceBusyError if refusal.busy else AttachError)(refusal.error, remedy=refusal.remedy)
        if not response.is_success:
            raise unreachable(self.url, f"/bridge/{route} answered {response.status_code}: {response.text[:200]}")
        return self._parse(route, response, answer)

    def _send(self, method: str, route: str, body: BaseModel | None, limit_s: float | None) -> httpx.Response:
        content = None if body is None else body.model_dump_json()
        headers = {"content-type": "application/json"}
        limit = httpx.USE_CLIENT_DEFAULT if limit_s is None else httpx.Timeout(limit_s)
        send = partial(self._http.request, method, f"/bridge/{route}", content=content, headers=headers, timeout=limit)
        try:
            try:
                return send()
            except (httpx.NetworkError, httpx.RemoteProtocolError):  # the call is lost, or its answer
                return send()
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise unreachable(self.url, f"{type(error).__name__}: {error}") from error

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
