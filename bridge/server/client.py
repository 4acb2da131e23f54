"""Clients for a vLLM server. No other module opens an HTTP connection to one.

Requests to vLLM's own routes carry `VLLM_API_KEY`, if it is set; requests to `/bridge/*` carry the token from the
manifest. A client that has a token sends it to vLLM's own routes too, in a separate header: a patched vLLM then knows
that a change to its adapters comes from the trainer that holds the lease. Proxy settings are ignored.
"""

import functools
import os
import secrets
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError, field_validator

from bridge.errors import AttachError, BridgeError, FenceBusyError, ServerUnreachableError, UsageError
from bridge.server import api_key, protocol
from bridge.server.limited_http import AsyncLimitedTransport, LimitedTransport
from bridge.server.manifest import Manifest
from bridge.server.protocol import BRIDGE_ROUTES, Holder, InFlight, Refusal, Status

Answer = TypeVar("Answer", bound=BaseModel)
CONFLICT = 409
LOCKED = (401, 403)
"""Statuses of a request with the wrong key."""
CONNECT_LIMIT_S = 15.0
"""Connect timeout: the kernel of a running host accepts a connection immediately."""
CONTROL_LIMIT_S = 30.0
"""Timeout of a call that takes a healthy server milliseconds. vLLM's API server survives a killed engine: without a
timeout the call would block forever, inside the fence, where Ctrl-C is held back."""
SCAN_LIMIT_S = 60.0
"""Timeout of a scan of all weights."""
RETURN_LIMIT_S = 5.0
"""Timeout for returning the lease, which also expires when this process exits."""
KEEPALIVE_S = 2.0
"""Idle time after which a connection is not reused: vLLM closes it after 5 s, and a request at that moment is lost."""
_tls = functools.cache(httpx.create_ssl_context)  # slow, so all clients share one context


class Authorization(httpx.Auth):
    """Adds the token to requests to Bridge's own routes; to all others, the API key or the URL's credentials."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if request.url.path.startswith(BRIDGE_ROUTES):
            request.headers["authorization"] = f"Bearer {self._token}"
        else:
            request.headers.update(api_key.headers())
            if self._token is not None:
                request.headers[protocol.TOKEN_HEADER] = self._token
            if request.url.userinfo:  # credentials of a proxy, which httpx leaves to a custom Auth
                yield from httpx.BasicAuth(request.url.username, request.url.password).auth_flow(request)
                return
        yield request


def open_http(url: str, *, token: str | None = None, timeout_s: float = CONTROL_LIMIT_S) -> httpx.Client:
    """Open connections to the server at `url`; UsageError if that is not a URL."""
    try:
        return httpx.Client(base_url=url, **_options(LimitedTransport, token, timeout_s))
    except httpx.InvalidURL as error:
        raise UsageError(f"{url} is not the address of a server: {error}", hint="give http://HOST:PORT") from error


def open_async_http(*, timeout_s: float | None = None) -> httpx.AsyncClient:
    """Open connections to any servers; by default, only connecting has a timeout."""
    return httpx.AsyncClient(**_options(AsyncLimitedTransport, None, timeout_s))


def _options(transport: Callable[..., Any], token: str | None, timeout_s: float | None) -> dict[str, Any]:
    connect_s = CONNECT_LIMIT_S if timeout_s is None else min(CONNECT_LIMIT_S, timeout_s)
    return {
        "auth": Authorization(token),
        "timeout": httpx.Timeout(timeout_s, connect=connect_s),
        "trust_env": False,
        "transport": transport(
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S), trust_env=False, verify=_tls(trust_env=False)
        ),
    }


class ServedModel(BaseModel):
    """One entry of `GET /v1/models`."""

    id: str
    owned_by: str | None = None
    """Owner that the server reports: `vllm`, unless a proxy sends its own answer."""
    max_model_len: Annotated[int, Field(lt=2**53)] | None = None
    """Longest sequence in tokens; vLLM reports it for models, not for adapters."""

    @field_validator("max_model_len")
    @classmethod
    def _none_is_unknown(cls, length: int | None) -> int | None:
        return length if length is not None and length > 0 else None


class ServedModels(BaseModel):
    """The answer of `GET /v1/models`."""

    data: Annotated[tuple[ServedModel, ...], Field(min_length=1)]


class VllmClient:
    """vLLM's own routes for health, models and adapters.

    Every call raises ServerUnreachableError if the server does not answer or its answer is malformed, and
    UsageError if it rejects the API key.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = CONTROL_LIMIT_S) -> None:
        self.url = url
        self._http = open_http(url, token=token, timeout_s=timeout_s)
        self._control_limit_s = min(timeout_s, CONTROL_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def check_health(self) -> None:
        """Raise ServerUnreachableError if the server reports that it is unhealthy; UsageError if no key can be sent."""
        api_key.headers()
        with suppress(UsageError):  # a proxy may require a key for this route only
            response = self._send("GET", "/health", limit_s=self._control_limit_s)
            if response.is_server_error:
                raise unreachable(self.url, f"/health answered {response.status_code}")

    def models(self) -> tuple[ServedModel, ...]:
        """Return the served models and adapters."""
        return self._answer("GET", "/v1/models", ServedModels, limit_s=self._control_limit_s).data

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapter in `folder` as `name`; UsageError if the server does not accept it, or any adapter."""
        self._change_adapters("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, limit_s=None)

    def unload_adapter(self, name: str) -> None:
        self._change_adapters("/v1/unload_lora_adapter", {"lora_name": name}, limit_s=self._control_limit_s)

    def earlier_adapters(self) -> list[str]:
        """Return the names of adapters left by earlier runs with `--lora-handover disk`."""
        return [model.id for model in self.models() if model.id.startswith(f"{protocol.ADAPTER}-")]

    def unload_earlier_adapters(self) -> None:
        for name in self.earlier_adapters():
            self.unload_adapter(name)

    def _change_adapters(self, route: str, body: dict[str, str], *, limit_s: float | None) -> None:
        response = self._send("POST", route, body, limit_s=limit_s)
        status = response.status_code
        words = error_message(response)
        if response.is_server_error:
            raise unreachable(self.url, f"{route} answered {status}: {words}")
        if not response.is_success:
            raise UsageError(
                f"the server at {self.url} does not accept the adapter: {status} {words}",
                hint="bridge serve-vllm --max-lora-rank R; any other vLLM: --enable-lora --max-lora-rank R and the"
                " environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            )

    def _send(self, method: str, route: str, body: Any = None, *, limit_s: float | None = None) -> httpx.Response:
        """Return the response. Idempotent requests to `/bridge/*` are retried once if the connection is lost."""
        limit = httpx.USE_CLIENT_DEFAULT if limit_s is None else httpx.Timeout(limit_s)
        is_idempotent = route.startswith(BRIDGE_ROUTES) and route != protocol.TRANSFER
        lost = (httpx.NetworkError, httpx.RemoteProtocolError) if is_idempotent else ()
        try:
            try:
                response = self._http.request(method, route, json=body, timeout=limit)
            except lost:
                response = self._http.request(method, route, json=body, timeout=limit)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise unreachable(self.url, f"{type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            raise unreachable(self.url, "another thread has closed the connection") from error
        if response.status_code in LOCKED and not route.startswith(BRIDGE_ROUTES):
            raise key_rejected(self.url, response)
        return response

    def _answer(
        self, method: str, route: str, kind: type[Answer], body: BaseModel | None = None, limit_s: float | None = None
    ) -> Answer:
        content = None if body is None else body.model_dump(mode="json")
        response = self._send(method, route, content, limit_s=limit_s)
        if refused := refusal_of(response):
            raise (FenceBusyError if refused.busy else AttachError)(refused.error, hint=refused.hint)
        if not response.is_success:
            raise unreachable(self.url, f"{route} answered {response.status_code}: {error_message(response)}")
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            fault = error.errors(include_input=False)[0]
            where = ".".join(map(str, fault["loc"])) or "body"
            reason = f"the answer of {route} is not a valid {kind.__name__}: {where}: {fault['msg']}"
            raise unreachable(self.url, reason) from error


class BridgeClient(VllmClient):
    """Adds the routes under `/bridge/*`, for one trainer and one server.

    Every call may also raise AttachError, with the server's own message, if the server refuses it, or FenceBusyError if
    the same call may succeed soon.
    """

    def __init__(
        self, manifest: Manifest, *, timeout_s: float, url: str | None = None, holder: Holder | None = None
    ) -> None:
        """Connect on behalf of `holder`, by default only this process."""
        super().__init__(url or manifest.url, token=manifest.token, timeout_s=timeout_s)
        self._holder = holder or Holder.current()
        self._name = secrets.token_hex(8)
        """Distinguishes this client from other clients of the same holder."""
        self._pid = os.getpid()
        self._leased = False
        self._paused_at: int | None = None
        """The version served when this client last paused the server."""

    def close(self) -> None:
        """Return the lease if this client took it, and close the connections; a forked process only closes them."""
        if self._leased and self._pid == os.getpid():
            with suppress(BridgeError):  # a dead server has no lease, and any other expires when this process exits
                self._control("DELETE", "/bridge/lease", limit_s=min(RETURN_LIMIT_S, self._control_limit_s))
        self._leased = False
        super().close()

    def status(self) -> Status:
        return self._answer("GET", "/bridge/status", Status, limit_s=self._control_limit_s)

    def take_lease(self, run: str) -> Status:
        """Become the only process that updates the server, until `close`; `run` names it in error messages."""
        body = protocol.LeaseRequest(holder=self._holder, client=self._name, run=run)
        status = self._control("POST", "/bridge/lease", body)
        self._leased = True
        return status

    def pause(self, in_flight: InFlight, *, last_checkpoint: Path | None = None, **choices: Any) -> Status:
        """Stop generation and take the fence; with `wait` this may take as long as a request does.

        `choices` are fields of `PauseRequest`. The server refuses if it does not serve their `version`.
        """
        checkpoint = None if last_checkpoint is None else str(last_checkpoint.absolute())
        body = protocol.PauseRequest(
            holder=self._holder, client=self._name, in_flight=in_flight, last_checkpoint=checkpoint, **choices
        )
        limit_s = None if in_flight == "wait" else self._control_limit_s
        paused = self._answer("POST", "/bridge/pause", Status, body, limit_s=limit_s)
        self._paused_at = paused.version
        return paused

    def publish(self, version: int | None = None) -> Status:
        """Publish what was written as the next version, or as `version` if that is higher, and resume generation."""
        body = protocol.PublishRequest(holder=self._holder, after=self._paused_at, version=version)
        return self._control("POST", "/bridge/publish", body)

    def resume(self) -> Status:
        """Resume generation with the same version, since nothing was written."""
        return self._control("POST", "/bridge/resume")

    def finiteness(self) -> protocol.Finiteness:
        """Return whether every weight is a finite number; the server scans all of them."""
        return self._answer("GET", "/bridge/tensors/finite", protocol.Finiteness, limit_s=SCAN_LIMIT_S)

    def digests(self, part: int = 0, *, quantized: bool = False) -> dict[str, str]:
        """Return digests, computed by the server, of vLLM's parameters on one rank, or of their FP8 copies."""
        query = ""
        if quantized:
            query = f"?part={part}&quantized=true"
        elif part:
            query = f"?part={part}"
        return self._answer("GET", f"/bridge/tensors/digest{query}", protocol.Digests).digests

    def read(self, elements: tuple[protocol.Element, ...]) -> tuple[float, ...]:
        """Return `elements` as the server reads them."""
        body = protocol.ReadRequest(elements=elements)
        return self._answer("POST", "/bridge/tensors/read", protocol.Values, body).values

    def write(self, elements: tuple[protocol.Element, ...], values: tuple[float, ...]) -> None:
        """Let the server set `elements`; only allowed inside the fence."""
        body = protocol.WriteRequest(holder=self._holder, elements=elements, values=values)
        self._answer("POST", "/bridge/tensors/write", Status, body)

    def load_into_slot(self, folder: Path) -> int:
        """Let the server load the adapter in `folder` into a pinned slot, and return the slot."""
        self.unload_earlier_adapters()  # otherwise there may be no free slot
        return self.adapter(protocol.ADAPTER, folder)

    def adapter(self, name: str, folder: Path) -> int:
        """Let the server load an adapter into a pinned slot as `name`, and return the slot."""
        body = protocol.AdapterRequest(holder=self._holder, name=name, path=str(folder.absolute()))
        return self._answer("POST", "/bridge/adapter", protocol.AdapterSlot, body).slot

    def open_slots(self, folder: Path) -> tuple[int, ...]:
        """Let the server load the adapter in `folder` into every free slot, to be rewritten, and return the slots."""
        body = protocol.SlotsRequest(holder=self._holder, path=str(folder.absolute()))
        return self._answer("POST", "/bridge/adapter/slots", protocol.AdapterSlots, body).slots

    def reserve_slot(self, name: str, keep: tuple[str, ...] = ()) -> int:
        """Return an open slot that no request uses, to be written; waits for one. Its old contents are not served.

        The slots of the adapters in `keep` are not reserved.
        """
        body = protocol.SlotRequest(holder=self._holder, name=name, keep=keep)
        return self._answer("POST", "/bridge/adapter/reserve", protocol.AdapterSlot, body).slot

    def serve_slot(self, name: str) -> None:
        """Serve the adapter that was written into the slot reserved for `name`."""
        body = protocol.SlotRequest(holder=self._holder, name=name)
        self._answer("POST", "/bridge/adapter/serve", Status, body)

    def release_adapter(self) -> None:
        """Let the server remove the adapters from the slots that a trainer writes, if there are any."""
        self._control("DELETE", "/bridge/adapter")

    def _control(self, method: str, route: str, body: BaseModel | None = None, limit_s: float | None = None) -> Status:
        body = body or protocol.HolderRequest(holder=self._holder, client=self._name)
        return self._answer(method, route, Status, body, limit_s=limit_s or self._control_limit_s)


def max_model_len(url: str) -> int | None:
    """Return the longest sequence, in tokens, of the server at `url`; None if it does not report one."""
    try:
        with VllmClient(url) as server:
            lengths = [model.max_model_len for model in server.models() if model.max_model_len]
    except (ServerUnreachableError, UsageError):
        return None  # the first rollout reports the error
    return min(lengths, default=None)


def refusal_of(response: httpx.Response) -> Refusal | None:
    """Return the refusal of a patched vLLM; None if the response is anything else."""
    with suppress(ValidationError):
        return Refusal.model_validate_json(response.content) if response.status_code == CONFLICT else None
    return None


def error_message(response: httpx.Response) -> str:
    """Return the server's own error message on one line, truncated."""
    words = response.text
    with suppress(ValueError, KeyError, TypeError):
        fault = response.json()["error"]  # a plain string on vLLM's development routes
        words = fault if isinstance(fault, str) else str(fault["message"])
    return " ".join(words.split())[:300]


def key_rejected(url: str, response: httpx.Response) -> UsageError:
    """Return the error for a response in `LOCKED`."""
    return UsageError(
        f"the server at {url} rejected the request with status {response.status_code}: {error_message(response)}",
        hint=f"export {api_key.VARIABLE}=KEY, the key that the server was started with",
    )


def unreachable(url: str, reason: str) -> ServerUnreachableError:
    """Return the error for a server that does not answer, or whose answer is malformed."""
    return ServerUnreachableError(
        f"the server at {url} does not answer as expected ({reason})",
        hint="check its log, and restart it with: bridge serve-vllm --model MODEL",
    )
