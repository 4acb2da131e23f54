"""Servers that receive a trainer's weights through vLLM's weight transfer: stock vLLM, or a patched one on this host.

Both are paused, called and resumed in the same way. A stock vLLM has the routes only with `VLLM_SERVER_DEV_MODE=1`, and
has neither a lease nor versions. A patched one refuses that mode, and accepts the calls from the holder of its fence.
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
"""vLLM's engine that broadcasts full weights from one GPU to others."""
MAX_WORKERS = 2**16
"""A larger number is a mistake, and NCCL would wait for that many."""
FLAGS = f"{TRANSFER_FLAG[0]} '{TRANSFER_FLAG[1]}'"
STOCK = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL {FLAGS}"
"""Command that starts a stock vLLM with weight transfer."""
TransferCall = Literal["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
"""vLLM's names for the calls through which its workers receive weights."""


class TransferRequest(HolderRequest):
    """`POST /bridge/transfer`: make one of the `TransferCall`s; only for the holder of the fence."""

    call: TransferCall
    """The workers' method to call."""
    arguments: dict[str, Any]
    """Arguments of the call, by name."""


class _ServerInfo(BaseModel):
    """The fields of `GET /server_info` that Bridge reads."""

    served: str = Field(validation_alias=AliasPath("vllm_config", "model_config", "model"))
    world_size: int = Field(
        ge=1, le=MAX_WORKERS, validation_alias=AliasPath("vllm_config", "parallel_config", "world_size")
    )
    """Number of workers per engine."""
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
    """Name under which vLLM serves the last weights; None before vLLM 0.32."""

    def __init__(self, url: str, run: str, *, timeout_s: float) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self._run = run
        self._nonce = secrets.token_hex(4)
        """Makes the name of the weights unique, since runs in two containers may have the same name."""

    def check(self, model: str, vllm: str) -> int:
        """Return the server's number of workers, without changing anything.

        Raises:
            AttachError: the server has a different model, or no NCCL engine, or an earlier transfer did not finish.
            IncompatibleVersionError: the server runs a vLLM version other than `vllm`.
        """
        if self._send("GET", "/is_paused", limit_s=self._control_limit_s).status_code == httpx.codes.NOT_FOUND:
            raise AttachError(f"the server at {self.url} cannot receive weights: no route /is_paused", hint=STOCK)
        info = self._answer("GET", "/server_info?config_format=json", _ServerInfo)
        _refuse_misfit(self.url, model, info.served, vllm, self._answer("GET", "/version", _Version).version)
        if info.engine != ENGINE:
            raise AttachError(
                f"the server at {self.url} has the weight-transfer engine {info.engine}, expected {ENGINE}",
                hint=STOCK,
            )
        if self._answer("GET", "/is_paused", _Pause).is_paused:
            raise AttachError(
                f"the server at {self.url} is paused: another trainer is sending weights, or exited while doing so",
                hint="wait for that trainer; if it has exited, restart the server, whose weights may be half-written",
            )
        return info.world_size * info.num_engines

    def pause(self, in_flight: InFlight) -> None:
        """Stop generating, and drop cached keys and values; if this fails, the server keeps serving."""
        limit_s = None if in_flight == "wait" else self._control_limit_s
        try:
            self._call(f"/pause?mode={in_flight}", limit_s=limit_s)
            reset = self._answer("POST", "/reset_prefix_cache?reset_running_requests=true", _Reset)
            if not reset.success:
                raise AttachError(
                    f"the server at {self.url} refuses to drop its prefix cache, so stale keys and values would be"
                    " served; nothing was sent",
                    hint="retry when no other request is running, or restart the server",
                )
        except BridgeError:
            with suppress(BridgeError):  # the server may be dead
                self.resume()
            raise

    def resume(self) -> None:
        """Resume generation, after either none or all of the weights were sent."""
        try:
            self._call("/resume", limit_s=self._control_limit_s)
        except ServerUnreachableError as error:
            error.hint = f"its weights are intact; if it is still paused: curl -X POST {self.url}/resume, or restart it"
            raise

    def publish(self, version: int) -> None:
        """Set the version of the weights that the server received, and resume generation with them."""
        name = f"{self._run}: version {version} ({self._nonce})"
        limit_s = self._control_limit_s
        try:
            response = self._send("POST", "/update_weight_version", {"new_version": name}, limit_s=limit_s)
            if response.status_code != httpx.codes.NOT_FOUND:
                self._refuse_failure("/update_weight_version", response)
                self._served = name
        finally:  # the server has all weights, whatever its answer
            self.resume()

    def check_served(self) -> None:
        """Raise AttachError if the server reports weights other than those it received last."""
        if self._served is None:
            return
        served = self._answer("GET", "/weight_info", _WeightInfo, limit_s=self._control_limit_s).weight_version
        if served != self._served:
            raise AttachError(
                f"the server at {self.url} serves weights named {served!r}, expected {self._served!r}: it was"
                " restarted, or another trainer sends it weights; nothing that it generated since the last step counts",
                hint="use --resume, which first sends the newest weights to all servers",
            )

    def transfer(self, call: TransferCall, arguments: Mapping[str, Any]) -> None:
        """Make a weight-transfer call in all of the server's workers."""
        self._call(f"/{call}", dict(arguments))

    def _call(self, route: str, body: dict[str, Any] | None = None, *, limit_s: float | None = None) -> None:
        self._refuse_failure(route, self._send("POST", route, body, limit_s=limit_s))

    def _refuse_failure(self, route: str, response: httpx.Response) -> None:
        if not response.is_success:
            raise unreachable(self.url, f"{route} answered {response.status_code}: {error_message(response)}")


class PatchedReceiver(BridgeClient):
    """A server patched by Bridge, on this host; this process takes the server's lease."""

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
        """Wait for the fence; the server refuses if it does not serve the version that it was last sent."""
        pause = partial(super().pause, in_flight, version=self.version, **choices)
        return fence.pause_when_free(self, lambda _: pause())

    def publish(self, version: int | None = None) -> Status:
        status = super().publish(version)
        self.version = status.version
        return status

    def check_served(self) -> None:
        """Raise ServerUnreachableError if the server was replaced by another one, which rejects this token."""
        self.status()

    def transfer(self, call: TransferCall, arguments: Mapping[str, Any]) -> None:
        body = TransferRequest(holder=self._holder, call=call, arguments=dict(arguments))
        self._answer("POST", protocol.TRANSFER, Status, body)


Receiver = StockReceiver | PatchedReceiver
"""A server that receives weights."""


def _refuse_misfit(url: str, model: str, served: str, ours: str, theirs: str) -> None:
    """Refuse a server with a different model, or with a vLLM version whose transfer may be incompatible."""
    if served not in (model, str(Path(model).absolute())):
        raise AttachError(
            f"the server at {url} serves {served}, expected {model} (--model-name)",
            hint="serve the model that is trained, or train the one that is served",
        )
    if ours.partition("+")[0] != theirs.partition("+")[0]:
        raise IncompatibleVersionError(
            f"the server at {url} runs vLLM {theirs}, but the trainer uses vLLM {ours}, expected the same version",
            hint=f"pip install vllm=={theirs} for the trainer, or serve with {ours}",
        )


def address_seen_by(urls: Sequence[str]) -> str:
    """Return this host's IPv4 address as the servers see it; ServerUnreachableError if a server does not answer.

    vLLM's weight transfer connects over IPv4.
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
                raise unreachable(url, f"over IPv4, which vLLM's weight transfer requires: {error}") from error
            addresses.append(connection.getsockname()[0])
    return next((address for address in addresses if address != LOOPBACK), LOOPBACK)
