"""`none --reload transfer`: send the trainer's own weights to servers on other GPUs through vLLM's NCCL engine.

    pause     all servers; if one cannot be paused, the others resume
    meet      before the first transfer: all workers join vLLM's sender; if one cannot, all servers resume
    send      vLLM's sender broadcasts to all workers of all servers, which load layer by layer
    publish   the version is incremented, all servers resume

An unfinished transfer leaves the servers paused, and they have to be restarted: vLLM keeps the pieces of a layer that
it has received, and would load them together with those of the next transfer.
"""

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bridge.core.address import free_port
from bridge.core.concurrency import in_thread
from bridge.core.interrupt import next_item
from bridge.errors import AttachError, BridgeError, ServerUnreachableError, UsageError, first_line
from bridge.modes.none import OwnCopy
from bridge.server import discovery, fence, manifest
from bridge.server.client import max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update, Window
from bridge.server.protocol import InFlight
from bridge.server.receiver import LOOPBACK, PatchedReceiver, Receiver, StockReceiver, address_seen_by
from bridge.weights import model_folder
from bridge.weights.attach import OpenedModel

logger = logging.getLogger(__name__)

SENDER = "bridge_patches.sender"
"""Module whose functions import vLLM; `bridge` itself never imports it."""
RESTART = "check its log; restart it, and each server that stays paused, whose weights may be half-written"


class Receivers:
    """All servers of a run, which get the same weights. Pauses and vLLM's sender treat them as one server."""

    def __init__(self, servers: Sequence[Receiver], in_flight: InFlight) -> None:
        self._servers = servers
        self._in_flight: InFlight = in_flight
        self.num_workers: Sequence[int] = ()
        """Number of workers of each server."""
        self.on_failure: Callable[[BaseException], object] = lambda _: None
        """Called if a worker will not join an exchange, which the trainer would otherwise wait for."""
        self.failure: BaseException | None = None
        """The latest error."""
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """Outcomes of the latest calls, one item per server."""

    def check(self, model: str, vllm: str) -> None:
        """Refuse servers that cannot receive these weights, before any server is changed."""
        self.num_workers = [server.check(model, vllm) for server in self._servers]

    def pause(self) -> None:
        try:
            self._all(lambda server: server.pause(self._in_flight))
        except BridgeError:
            self.resume()
            raise

    def resume(self, error: BaseException | None = None) -> None:  # noqa: ARG002  the servers hold no memory of the trainer
        """Undo a pause before an error is raised; log each server that does not confirm, and so may stay paused."""
        with suppress(AttachError):  # a server was not paused
            self._all(self._resume)

    def _resume(self, server: Receiver) -> None:
        try:
            server.resume()
        except (ServerUnreachableError, UsageError) as error:  # dead, or still waits for other servers
            logger.warning(f"{error.message}; {error.hint}")

    def publish(self, version: int) -> int:
        """Let all servers serve `version`, and return it."""
        self._all(lambda server: server.publish(version))
        return version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers of all servers join, each with its own rank."""
        offsets = {
            server: init_info["rank_offset"] + sum(self.num_workers[:index])
            for index, server in enumerate(self._servers)
        }

        def join(server: Receiver) -> None:
            info = {**init_info, "rank_offset": offsets[server]}
            server.transfer("init_weight_transfer_engine", {"init_info": info})

        self._all(join, is_exchange=True)

    def start_weight_update(self) -> None:
        self._all(lambda server: server.transfer("start_weight_update", {}))

    def update_weights(self, update_info: Any) -> None:
        self._all(lambda server: server.transfer("update_weights", {"update_info": update_info}), is_exchange=True)

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002  vLLM's own counter
        self._all(lambda server: server.transfer("finish_weight_update", {}))

    def abandon_exchange(self) -> None:
        """Unblock the caller of an exchange: it is vLLM's thread, and the interpreter joins that thread at exit."""
        self._outcomes.put(AttachError("the transfer was abandoned", hint=RESTART))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def _all(self, call: Callable[[Receiver], object], *, is_exchange: bool = False) -> None:
        """Call all servers concurrently, and raise the first error.

        In an exchange, the error is raised immediately, because the other servers wait for the one that failed.
        """
        outcomes = self._outcomes = queue.SimpleQueue()
        for server in self._servers:
            started = in_thread(partial(call, server), "receiver")
            started.add_done_callback(lambda ended: outcomes.put(ended.exception()))
        errors = (error for _ in self._servers if (error := next_item(outcomes)) is not None)
        first = next(errors, None)
        if first is None:
            return
        if is_exchange:
            self.failure = first
            self.on_failure(first)
        else:
            list(errors)  # wait for the remaining calls
        raise first


class Transfer(OwnCopy):
    """`--reload transfer`: servers that share no memory with the trainer, and may not be part of this run."""

    version = -1
    """-1 until weights are sent."""

    def _connect(self) -> None:
        self._sender: Any = None
        vllm = import_module(SENDER).version()
        self._servers = self._find_servers()
        self._receivers = Receivers(self._servers, self._config.publishing.in_flight)
        try:
            self._receivers.check(self._config.model_name, vllm)
        except BaseException:
            self._receivers.close()
            raise
        reported = [server.version for server in self._servers if server.version is not None]
        self.version = max([self.version, *reported])
        lengths = [length for server in self._servers if (length := max_model_len(server.url)) is not None]
        self.max_model_len = min(lengths, default=None)

    @property
    def endpoint(self) -> Endpoint:
        first, *others = [
            Endpoint(
                url=server.url,
                version=self.version if server.version is None else None,
                starts=self._num_starts,
            )
            for server in self._servers
        ]
        return replace(first, others=tuple(others))

    @contextmanager
    def publish(self, update: Update) -> Iterator[Window]:
        """Let the block write, and send the weights; AttachError if a server lost the last weights sent to it."""
        self.check_served()
        with super().publish(update) as window:
            yield window

    def check_served(self) -> None:
        with self._run.ranks.raise_on_all():  # an evaluation uses the servers of all ranks
            for server in self._servers:
                server.check_served()

    def open(self) -> OpenedModel:
        """Load the model, connect to all servers' workers, and send it: earlier runs may have changed their weights."""
        opened = super().open()
        if opened.device.type != import_module(SENDER).DEVICE:
            raise UsageError(
                f"--reload transfer sends from a GPU, but the trainer's weights are on {opened.device}",
                hint="use --trainer-device cuda:N, or --reload restart",
            )
        self._device = opened.device
        self._reload()
        return opened

    def restore(self, checkpoint: Path, *, version: int) -> None:
        model_folder.load_into(self._model, checkpoint)
        self.version = max(version - 1, self.version)
        self._reload()

    def revive(self, checkpoint: Path | None) -> None:  # noqa: ARG002  the trainer has the weights
        """Restart the dead server, which this run started, and send it the weights."""
        self.close()
        self._run.restart_server(self._config.model_name)
        self._num_starts += 1
        self._connect()
        self._reload()

    def close(self) -> None:
        """Disconnect from the servers without changing them."""
        self._give_up()
        self._receivers.close()

    def _find_servers(self) -> list[Receiver]:
        """Return the servers that --servers names, or the one that --vllm-config-path or --vllm-port names."""
        server = self._config.server
        timeout_s = self._config.sampling.request_timeout_s
        own = {} if self._run.process else {exported.url: exported for exported in discovery.running().values()}
        names = server.servers or (str(server.config_path or server.url()),)
        files = [name for name in names if name == str(server.config_path) or Path(name).exists()]
        manifests = {name: manifest.load(Path(name)) for name in files}
        own |= {exported.url: exported for exported in manifests.values()}
        urls = [manifests[name].url if name in manifests else _url(name) for name in names]
        if first := next((index for index, url in enumerate(urls) if url in urls[:index]), None):
            raise UsageError(
                f"--servers: {names[urls.index(urls[first])]} and {names[first]} are the same server",
                hint="name each server once",
            )
        receivers: list[Receiver] = []
        for url in urls:
            if url in own:
                receivers.append(PatchedReceiver(own[url], self._run.name, timeout_s=timeout_s))
            else:
                receivers.append(StockReceiver(url, self._run.name, timeout_s=timeout_s))
        return receivers

    def _reload(self) -> float:
        with (
            fence.run(
                Update(),
                lambda: self._receivers.publish(self.version + 1),
                server=self._receivers,
                ranks=self._run.ranks,
            ) as window,
            torch.accelerator.device_index(self._device.index),
            self._nccl_errors(),
        ):
            if self._sender is None:
                with window.preparing():
                    self._sender = self._open_sender()
            self._receivers.on_failure = lambda _: self._give_up()
            if self._device.type != "cpu":
                torch.accelerator.synchronize()  # vLLM reads the weights on its own streams
            self._sender.send_weights()
        self.version = window.times.version
        self._num_behind = 0
        return window.times.pause_s

    @contextmanager
    def _nccl_errors(self) -> Iterator[None]:
        """Destroy the NCCL group if the block fails, and turn NCCL errors into errors with a hint."""
        try:
            yield
        except BaseException as error:
            cause = error if isinstance(error, BridgeError) else self._receivers.failure
            self._give_up()
            if isinstance(cause, ServerUnreachableError):
                cause.hint = RESTART
            if cause is error or not isinstance(error, RuntimeError | OSError):
                raise
            if cause is not None:  # `error` only says that the broadcast was aborted
                raise cause from error
            raise AttachError(
                f"the weights could not be sent: {first_line(error) or repr(error)}",
                hint="the trainer and each server need separate GPUs that can reach each other over NCCL (set"
                " NCCL_DEBUG=INFO for details); restart servers that stay paused",
            ) from error

    def _open_sender(self) -> Any:
        """Return the sender once all workers have joined; do not wait if a worker cannot join."""
        address = address_seen_by([server.url for server in self._servers])
        tensors = model_folder.saved_form(self._model, model_folder.state(self._model))
        outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._receivers.on_failure = outcomes.put

        def meet() -> Any:
            with torch.accelerator.device_index(self._device.index):
                workers = sum(self._receivers.num_workers)
                return import_module(SENDER).open_sender(tensors, self._receivers, address, free_port(address), workers)

        in_thread(meet, "sender").add_done_callback(outcomes.put)
        if isinstance(first := next_item(outcomes), BaseException):
            raise first
        return first.result()

    def _give_up(self) -> None:
        """Abort the broadcast, if one is running, and destroy its group."""
        self._receivers.abandon_exchange()
        sender = self._sender
        self._sender = None
        if sender is not None:
            sender.model_update_group.destroy()


def _url(name: str) -> str:
    """Return the URL of a server that was named by a URL, HOST:PORT, or only a port."""
    if "://" not in name and not name.rpartition(":")[2].isdecimal():
        raise UsageError(
            f"--servers {name}: expected HOST:PORT, a port of this host, a URL or a manifest",
            hint="vLLM's default port is 8000",
        )
    url = name
    if "://" not in name:
        address = name if ":" in name else f"{LOOPBACK}:{name}"
        url = f"http://{address}"
    return url.rstrip("/").replace("://localhost:", f"://{LOOPBACK}:")  # Bridge's servers use 127.0.0.1, not localhost
