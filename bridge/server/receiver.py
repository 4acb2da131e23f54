"""Servers that receive a trainer's weights by vLLM's weight transfer: a stock vLLM, or a patched one on this host.

Both are paused, called and resumed in the same way. A stock vLLM has the routes with `VLLM_SERVER_DEV_MODE=1`, and has
neither a lease nor versions. A patched one refuses that mode, and takes the calls from the holder of its fence.
"""

import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import AliasPath, BaseModel, Field

from bridge.errors import AttachError, BridgeError, IncompatibleVersionError, ServerUnreachableError
from bridge.server import fence, protocol
from bridge.server.client import CONNECT_LIMIT_S, BridgeClient, VllmClient, error_message, unreachable
from bridge.server.manifest import Manifest
from bridge.server.protocol import TRANSFER_FLAG, HolderRequest, InFlight, Status

LOOPBACK = "127.0.0.1"
ENGINE = "nccl"
"""vLLM's engine that broadcasts whole weights from one GPU to others."""
MAX_WORKERS = 2**16
"""More are a mistake, and NCCL would wait for them."""
FLAGS = f"{TRANSFER_FLAG[0]} '{TRANSFER_FLAG[1]}'"
STOCK = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL {FLAGS}"
"""Command that starts a stock vLLM with weight transfer."""
TransferCall = Literal["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
"""vLLM's names of the calls by which its workers receive weights."""


class TransferRequest(HolderRequest):
    """`POST /bridge/transfer`: make one of these calls; only for the holder of the fence."""

    call: TransferCall
    """The workers' method."""
    arguments: dict[str, Any]
    """Arguments of the call, by name."""


class _ServerInfo(BaseModel):
    """Fields of `GET /server_info` that are read."""

    served: str = Field(validation_alias=AliasPath("vllm_config", "model_config", "model"))
    world_size: int = Field(
        ge=1, le=MAX_WORKERS, validation_alias=AliasPath("vllm_config", "parallel_config", "world_size")
    )
    """Workers of one engine."""
    num_engines: int = Field(
        1, ge=1, le=MAX_WORKERS, validation_alias=AliasPath("vllm_config", "parallel_config", "data_parallel_size")
    )
    engine: str | None = Field(None, validation_alias=AliasPath("vllm_config", "weight_transfer_config", "backend"))


class _Version(BaseModel):
    version: str


class _Pause(BaseModel):
    is_paused: bool


class _WeightInfo(BaseModel):
    weight_version: str


class _Reset(BaseModel):
    success: bool


class StockReceiver(VllmClient):
    """A vLLM without Bridge's patches, on any host."""

    version: int | None = None
    """Version of the weights, if the server reports one with each token."""
    _served: str | None = None
    """Name that vLLM gave the last weights; None before 0.32."""

    def __init__(self, url: str, run: str, *, timeout_s: float) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self._run = run
        self._nonce = secrets.token_hex(4)
        """Makes the name of the weights unique: runs in two containers may have the same name."""

    def check(self, model: str, vllm: str) -> int:
        """Return its number of workers; refuse a server that cannot be fed `model` by this `vllm`, and change nothing.

        Raises:
            AttachError: it is another model or vLLM, has no such engine, or an earlier transfer did not end.
        """
        if self._send("GET", "/is_paused", limit_s=self._control_limit_s).status_code == httpx.codes.NOT_FOUND:
            raise AttachError(f"the server at {self.url} cannot be fed: it has no route /is_paused", hint=STOCK)
        info = self._answer("GET", "/server_info?config_format=json", _ServerInfo)
        _refuse_misfit(self.url, model, info.served, vllm, self._answer("GET", "/version", _Version).version)
        if info.engine != ENGINE:
            raise AttachError(
                f"the server at {self.url} has the weight-transfer engine {info.engine}, expected {ENGINE}",
                hint=STOCK,
            )
        if self._answer("GET", "/is_paused", _Pause).is_paused:
            raise AttachError(
                f"the server at {self.url} is paused: another trainer is feeding it, or ended while it did",
                hint="wait for that trainer; if it has ended, restart the server, whose weights may be half-written",
            )
        return info.world_size * info.num_engines

    def pause(self, in_flight: InFlight) -> None:
        """Stop generating, and drop cached keys and values; a failed call leaves the server serving."""
        limit_s = None if in_flight == "wait" else self._control_limit_s
        try:
            self._call(f"/pause?mode={in_flight}", limit_s=limit_s)
            reset = self._answer("POST", "/reset_prefix_cache?reset_running_requests=true", _Reset)
            if not reset.success:
                raise AttachError(
                    f"the server at {self.url} refuses to drop its prefix cache, so stale keys and values would be"
                    " served; nothing was sent",
                    hint="retry when no other request runs, or restart the server",
                )
        except BridgeError:
            with suppress(BridgeError):  # it may be dead
                self.resume()
            raise

    def resume(self) -> None:
        """Generate: none of its weights were sent, or all of them."""
        try:
            self._call("/resume", limit_s=self._control_limit_s)
        except ServerUnreachableError as error:
            error.hint = f"its weights are whole; if it is still paused: curl -X POST {self.url}/resume, or restart it"
            raise

    def publish(self, version: int) -> None:
        """Generate with the weights that it received, and name them."""
        name = f"{self._run}: version {version} ({self._nonce})"
        limit_s = self._control_limit_s
        try:
            response = self._send("POST", "/update_weight_version", {"new_version": name}, limit_s=limit_s)
            if response.status_code != httpx.codes.NOT_FOUND:
                self._refuse_failure("/update_weight_version", response)
                self._served = name
        finally:  # whatever it answers, its weights are whole
            self.resume()

    def check_served(self) -> None:
        """Raise AttachError if the server no longer has the weights that it received last, as far as it reports it."""
        if self._served is None:
            return
        served = self._answer("GET", "/weight_info", _WeightInfo, limit_s=self._control_limit_s).weight_version
        if served != self._served:
            raise AttachError(
                f"the server at {self.url} serves weights named {served!r}, expected {self._served!r}: it was"
                " restarted, or another trainer feeds it; nothing that it generated since the last step counts",
                hint="--resume, which begins by sending the newest weights to all servers",
            )

    def transfer(self, call: TransferCall, arguments: Mapping[str, Any]) -> None:
        """Make a call of vLLM's weight transfer in all of its workers."""
        self._call(f"/{call}", dict(arguments))

    def _call(self, route: str, body: dict[str, Any] | None = None, *, limit_s: float | None = None) -> None:
        self._refuse_failure(route, self._send("POST", route, body, limit_s=limit_s))

    def _refuse_failure(self, route: str, response: httpx.Response) -> None:
        if not response.is_success:
            raise unreachable(self.url, f"{route} answered {response.status_code}: {error_message(response)}")


class PatchedReceiver(BridgeClient):
    """Receiver of a Bridge server on this host; this process takes its lease."""

    version: int | None = None

    def __init__(self, exported: Manifest, run: str, *, timeout_s: float) -> None:
        super().__init__(exported, timeout_s=timeout_s)
        self._exported = exported
        self._run = run

    def check(self, model: str, vllm: str) -> int:
        exported = self._exported
        _refuse_misfit(self.url, model, exported.model, vllm, exported.versions.get("vllm", "unknown"))
        status = fence.when_free(lambda: self.take_lease(self._run))
        status.refuse_torn()
        if not status.can_receive_weights:
            raise AttachError(
                f"the server at {self.url} has no weight-transfer engine {ENGINE}",
                hint=f"bridge serve-vllm --model {exported.model} -- {FLAGS}",
            )
        self.version = status.version
        return exported.tp_degree

    def pause(self, in_flight: InFlight, **choices: Any) -> Status:
        """Wait for the fence; the server refuses if it serves another version than it was sent."""
        pause = partial(super().pause, in_flight, version=self.version, **choices)
        return fence.pause_when_free(self, lambda _: pause())

    def publish(self, version: int | None = None) -> Status:
        status = super().publish(version)
        self.version = status.version
        return status

    def check_served(self) -> None:
        """Raise ServerUnreachableError if another server has its place, which does not know this one's token."""
        self.status()

    def transfer(self, call: TransferCall, arguments: Mapping[str, Any]) -> None:
        body = TransferRequest(holder=self._holder, call=call, arguments=dict(arguments))
        self._answer("POST", protocol.TRANSFER, Status, body)


Receiver = StockReceiver | PatchedReceiver
"""One server that is fed."""


def _refuse_misfit(url: str, model: str, served: str, ours: str, theirs: str) -> None:
    """Refuse a server of another model, or of a vLLM that may send and receive in another way."""
    if served not in (model, str(Path(model).absolute())):
        raise AttachError(
            f"the server at {url} serves {served}, expected {model} (--model-name)",
            hint="serve the model that is trained, or train the one that is served",
        )
    if ours.partition("+")[0] != theirs.partition("+")[0]:
        raise IncompatibleVersionError(
            f"the server at {url} runs vLLM {theirs}, and the trainer sends with vLLM {ours}, expected the same",
            hint=f"pip install vllm=={theirs} for the trainer, or serve with {ours}",
        )


def address_seen_by(urls: Sequence[str]) -> str:
    """Return this host's address as the servers see it; ServerUnreachableError if one does not answer.

    Over IPv4, as both ends of vLLM's transfer meet.
    """
    addresses = []
    for url in urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.socket(socket.AF_INET) as connection:
            connection.settimeout(CONNECT_LIMIT_S)
            try:
                connection.connect((parts.hostname or "", port))
            except OSError as error:
                raise unreachable(url, f"over IPv4, where vLLM's weight transfer meets: {error}") from error
            addresses.append(connection.getsockname()[0])
    return next((address for address in addresses if address != LOOPBACK), LOOPBACK)
