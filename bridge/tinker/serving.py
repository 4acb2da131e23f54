"""Run the Tinker API: HTTP in a separate thread, and all work on the weights in the calling thread."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from queue import SimpleQueue

import uvicorn

from bridge.core import paths
from bridge.core.interrupt import next_item, wait_until
from bridge.engine.policy import Policy
from bridge.errors import UsageError
from bridge.tinker import api, wire
from bridge.tinker.adapters import Adapters
from bridge.tinker.all_weights import AllWeights
from bridge.tinker.paths import Checkpoints
from bridge.tinker.service import Job, Service
from bridge.tinker.training import Trainer

CLOSING_S = 2
"""Longest wait for requests in flight when the server stops."""


def check_key(host: str, key: str | None) -> None:
    """Raise UsageError for a key that the SDK would not send, or an address that needs one."""
    if key is not None and not (key.startswith(api.PREFIX) and key.isascii() and key.isprintable()):
        raise UsageError(
            f"the API key does not begin with {api.PREFIX}: the tinker client sends no other",
            hint=f"--api-key {api.PREFIX}SECRET, or TINKER_API_KEY",
        )
    if key is None and not _is_loopback(host):
        raise UsageError(
            f"--host {host} is reachable from other machines, and there is no API key",
            hint=f"--api-key {api.PREFIX}SECRET, or leave --host out",
        )


def trainer_of(policy: Policy, folder: Path, *, base_name: str, most_adapters: int | None) -> Trainer:
    """Return the trainer of the clients' models, with checkpoints below `folder`.

    It trains up to `most_adapters` adapters at a time; None: all weights.

    Raises:
        UsageError: the server takes no adapters, or there is no folder of the base model's weights.
    """
    if most_adapters is None:
        return AllWeights(policy, base_folder(policy.model_name), base_name, Checkpoints(folder))
    return Adapters(policy, base_name, Checkpoints(folder), most_models=most_adapters)


def base_folder(model: str) -> Path:
    """Return the folder with the weights of the served model, which for a name is in the hub's cache.

    Raises:
        UsageError: there is none.
    """
    if paths.is_folder(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:
        raise UsageError(
            f"the weights of {model} are not in the hub's cache: a new model starts from them", hint="--model FOLDER"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def serve(trainer: Trainer, *, host: str, port: int, key: str | None) -> list[str]:
    """Answer clients until Ctrl-C; return the paths of what was saved at the end.

    Raises:
        UsageError: the address cannot be used, or the SDK's messages are missing.
    """
    wire.messages()
    jobs: SimpleQueue[Job] = SimpleQueue()
    with _answering(Service(trainer, jobs), host, port, key):
        try:
            while True:
                next_item(jobs)()
        except KeyboardInterrupt:
            return trainer.rescue()


class _Server(uvicorn.Server):
    """Ends the service's polls before it waits for requests in flight."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        await super().shutdown(sockets)


@contextmanager
def _answering(service: Service, host: str, port: int, key: str | None) -> Iterator[None]:
    """Answer HTTP requests inside the block, in another thread."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}", hint="--port with another one") from error
    config = uvicorn.Config(
        api.app(service, key), ws="none", log_config=None, access_log=False, proxy_headers=False,
        server_header=False, timeout_graceful_shutdown=CLOSING_S, timeout_keep_alive=60,
    )  # fmt: skip
    server = _Server(config, service)
    thread = threading.Thread(target=server.run, args=([listener],), name="tinker api", daemon=True)
    thread.start()
    try:
        wait_until(lambda limit_s: server.started or _ended(thread, limit_s))
        if not server.started:
            raise UsageError("the HTTP server did not start", hint="its log says why")
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=CLOSING_S + 3)
        listener.close()


def _ended(thread: threading.Thread, limit_s: float) -> bool:
    thread.join(timeout=min(limit_s, 0.05))
    return not thread.is_alive()
