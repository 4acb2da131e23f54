"""The manifest: what a server exports so that a trainer can attach, and the file that holds it."""

import errno
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge.core import atomic_file
from bridge.core.address import Urls
from bridge.core.paths import expanded
from bridge.core.process import ProcessIdentity, boot_id
from bridge.errors import ManifestError, UsageError, first_few
from bridge.types import Quantization

MANIFEST_NAME = "vllm_bridge_config.json"
SCHEMA_VERSION: Literal[2] = 2
DEFAULT_FOLDER = Path("/tmp/atropos_bridge")  # noqa: S108  documented; a manifest of another user is refused
START_SERVER = "start one with: bridge serve-vllm --model MODEL"
REWRITTEN = "restart the server, which rewrites it"
KEYS = {"ipc_handles", "param_mappings", "single_copy_enabled"}
"""Keys that every version of Bridge writes to a manifest. A file that has all of them may be replaced."""
Dtype = Annotated[str, Field(pattern="^(bfloat16|float16|float32|float64)$")]
"""torch's name for a trainable dtype."""


class Record(BaseModel):
    """A frozen record that refuses unknown keys and documents every field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class View(Record):
    """A Hugging Face parameter inside one of vLLM's parameters: all of it, or a slice of a fused one."""

    parameter: str
    """vLLM's name for the parameter that holds it."""
    offset: int = Field(ge=0)
    """Offset of the view's first element in the parameter, in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: tuple[int, ...] = ()
    """Shape of the full Hugging Face parameter if this view is one rank's part of it; empty: the view is all of it."""
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Indices of the full parameter that are in this part, as runs (start, length) for each axis; empty: all."""


class Handle(Record):
    """One of vLLM's parameters inside a storage that another process can open."""

    storage_size: int = Field(gt=0)
    """Size of the storage in bytes."""
    storage_offset: int = Field(ge=0)
    """Bytes between the start of the opened allocation and the storage."""
    tensor_offset: int = Field(default=0, ge=0)
    """Elements between the start of the storage and the parameter's first element."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Dtype


class CudaHandle(Handle):
    """A parameter in GPU memory: the eight items of torch's IPC tuple, and where the parameter is in the storage."""

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    device_index: int
    """The GPU's index in the exporting process. Other processes must use the shard's `gpu_uuid` instead."""
    ipc_handle_b64: str
    """The CUDA IPC memory handle, with torch's prefix."""
    ref_counter_handle_b64: str
    """Name of torch's shared reference counter."""
    ref_counter_offset: int
    """Offset in that counter's file."""
    event_handle_b64: str
    """The CUDA IPC event handle; empty when there is nothing to wait for."""
    event_sync_required: bool


class SharedMemoryHandle(Handle):
    """A parameter in a shared-memory file of the server."""

    kind: Literal["shared_memory"] = "shared_memory"
    path: str = Field(pattern=r"^/[^\x00]+$")


AnyHandle = Annotated[CudaHandle | SharedMemoryHandle, Field(discriminator="kind")]


class LoraSlot(Record):
    """vLLM's LoRA slots for one Hugging Face module; an adapter in slot `i` is element `i` of both tensors.

    A rank holds the same columns of A and the same rows of B as it holds of the module's weight
    (`Shard.param_mappings`).
    """

    lora_a: AnyHandle
    """Shape (slots, 1 or experts, largest rank, this rank's inputs): the adapter's A in its first rows, zeros below."""
    lora_b: AnyHandle
    """Shape (slots, 1 or experts, this rank's outputs, largest rank): the adapter's B in its first columns, else zeros.

    Already scaled by alpha / rank, as vLLM's `LoRALayerWeights.optimize` does.
    """


class Shard(Record):
    """The share of the model that one tensor-parallel rank of a server exports."""

    rank: int
    gpu_uuid: str | None
    """UUID of the GPU that holds the shard; None on the CPU."""
    model_class: str = ""
    """vLLM's class for the model; empty in manifests of older versions."""
    ipc_handles: dict[str, AnyHandle]
    """vLLM's parameters by vLLM's name."""
    param_mappings: dict[str, View]
    """Hugging Face parameter -> where it is."""
    padding: dict[str, Annotated[int, Field(ge=0)]]
    """vLLM's parameter -> number of elements at its end that no Hugging Face parameter owns (padded vocabulary)."""
    quantized: dict[str, Quantization] = {}
    """vLLM's parameter -> how it is quantized for serving; its handle opens the unquantized weight."""
    lora_slots: dict[str, LoraSlot] = {}
    """Module, such as `model.layers.0.self_attn.q_proj` or `...experts.lora.up_proj` -> its LoRA slots."""


class Manifest(Shard):
    """One server, and what each of its ranks exports; the fields of rank 0 are at the top level."""

    other_shards: tuple[Shard, ...]
    """Shards of the ranks after the first, in order."""
    schema_version: Literal[2] = SCHEMA_VERSION
    """Format of the file."""
    model: str
    """The model argument that vLLM got: a folder or a hub name."""
    dtype: Dtype
    """torch's name for the weights' dtype."""
    backend: Literal["cuda_ipc", "shared_memory"]
    """How handles are opened."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens; None in manifests of older versions."""
    tp_degree: int = Field(ge=1)
    """Number of tensor-parallel ranks."""
    dp_shard_degree: int = Field(ge=1)
    """Number of data-parallel shards; 1 unless several engines split the requests."""
    num_params: int = Field(ge=1)
    """Total number of elements of the Hugging Face parameters on all ranks, without padding."""
    param_names: tuple[str, ...]
    """Names of the Hugging Face parameters, sorted."""
    shared_weights_enabled: bool
    single_copy_enabled: bool
    """Both are true in every manifest that Bridge writes."""
    host: str
    """The server's host name, used in messages."""
    boot_id: str
    server: ProcessIdentity
    """The API server's process."""
    url: Urls = Field(pattern=r"^https?://[^/\s]+:\d{1,5}$")
    """URL of the server."""
    token: str = Field(pattern=r"^[!-~]+$", repr=False)
    """Bearer token for `/bridge/*`."""
    versions: dict[str, str]
    """The server's versions of bridge, vllm, torch and transformers."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All shards, in rank order."""
        return (self, *self.other_shards)


def search_path() -> tuple[Path, ...]:
    """Return where to look for a manifest when no path is given, in order."""
    folders = [expanded(os.environ["LOGDIR"])] if os.environ.get("LOGDIR") else []
    return tuple(folder / MANIFEST_NAME for folder in (*folders, Path.cwd(), DEFAULT_FOLDER))


def resolve_path(given: Path | None) -> Path:
    """Resolve `--vllm-config-path` to a file: a folder means the manifest in it, None the default path."""
    if given is None:
        return search_path()[0]
    with _one_line_errors(given):
        return given / MANIFEST_NAME if given.is_dir() else given


def find(given: Path | None = None) -> Path:
    """Return the path of the manifest to use, or raise ManifestError; if `given`, no other path is tried."""
    paths = search_path() if given is None else (resolve_path(given),)
    for path in paths:
        with _one_line_errors(path):
            if path.is_file():
                return path
    if given is not None:
        raise ManifestError(f"no manifest at {paths[0]}", hint=f"{START_SERVER} --vllm-config-path {given}")
    message = f"no manifest: no {MANIFEST_NAME} in {', '.join(str(path.parent) for path in paths)}"
    raise ManifestError(message, hint=f"{START_SERVER} (in this folder), or name its file with --vllm-config-path")


def load(given: Path | None = None) -> Manifest:
    """Find, read and check the manifest of a live server on this host, or raise ManifestError."""
    path = find(given)
    manifest = read(path)
    check_server(manifest, path)
    return manifest


def read(path: Path) -> Manifest:
    """Read and validate the manifest at `path`, whose server may have exited; ManifestError if it cannot be used."""
    try:
        document = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        message = f"{path} is not a complete JSON document ({error}): it was truncated or edited"
        raise ManifestError(message, hint=f"{REWRITTEN}; {START_SERVER}") from error
    if not isinstance(document, dict):
        raise ManifestError(f"{path} holds a {type(document).__name__}, expected an object", hint=START_SERVER)
    if document.get("ipc_handles") == {}:
        raise ManifestError(
            f"{path} has no ipc_handles: it was written by a vLLM without Bridge's patches",
            hint=f"{START_SERVER}; bridge doctor names the patches and the installed vLLM",
        )
    if document.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise ManifestError(
            f"{path} has schema version {document['schema_version']}, expected {SCHEMA_VERSION}",
            hint="install the same version of Bridge for server and trainer, and restart the server",
        )
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ManifestError(
            f"{path} is not a valid manifest: {first_few(faults)}",
            hint=f"it was edited, or written by a different version of Bridge: {REWRITTEN}",
        ) from error


def check_server(manifest: Manifest, path: Path) -> None:
    """Raise ManifestError unless the server that wrote `manifest` is a live process on this host."""
    if manifest.boot_id != boot_id():
        here = socket.gethostname()
        origin = "before this host's last boot" if manifest.host == here else f"on host {manifest.host}, this is {here}"
        raise ManifestError(f"{path} cannot be used here: it was written {origin}", hint=START_SERVER)
    if not manifest.server.is_visible():
        raise ManifestError(
            f"{path} was written in a different PID namespace (a container?) by pid {manifest.server.pid}",
            hint="run both in one container, or share it: docker run --pid=container:NAME --ipc=container:NAME",
        )
    if not manifest.server.is_alive():
        message = f"{path} is stale: its server, pid {manifest.server.pid}, has exited"
        raise ManifestError(message, hint=f"remove the file or {START_SERVER}")


def write(manifest: Manifest, path: Path) -> None:
    """Write `manifest` to `path` atomically, readable only by its owner.

    ManifestError if the path cannot be written, or holds a file that is not a manifest.
    """
    refuse_other_file(path)
    with _one_line_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        atomic_file.replace(path, manifest.model_dump_json(indent=1).encode(), mode=0o600)
    except UsageError as error:
        hint = f"make room for it in {path.parent}, or choose another path with --vllm-config-path"
        raise ManifestError(error.message, hint=hint) from error


def refuse_other_file(path: Path) -> None:
    """Raise ManifestError if there is a file at `path` that is not a manifest of this user, of any version."""
    document = None
    with suppress(ManifestError, ValueError, RecursionError):
        document = json.loads(_content(path))
    if os.path.lexists(path) and not (isinstance(document, dict) and document.keys() >= KEYS):
        raise ManifestError(
            f"{path} is not a Bridge manifest, and was not overwritten",
            hint=f"choose another path with --vllm-config-path, or remove it yourself: rm {path}",
        )


def remove_own(path: Path, server: ProcessIdentity) -> None:
    """Remove the manifest at `path` if `server` wrote it."""
    with suppress(ManifestError, OSError):
        if read(path).server == server:
            path.unlink()


def _content(path: Path) -> bytes:
    """Return the content of the file. It is opened only once, so that the file read is the one that was checked."""
    with _one_line_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO does not block
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ManifestError(f"{path} is not a regular file", hint=START_SERVER)
            if status.st_uid != os.getuid():
                owner = f"user {status.st_uid}, expected {os.getuid()}"
                raise ManifestError(f"{path} belongs to {owner}: its server cannot be used", hint=START_SERVER)
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ManifestError(
                    f"{path} is writable by other users (mode {stat.S_IMODE(status.st_mode):04o}), expected 0600",
                    hint=f"{REWRITTEN}; or, if nobody has changed it: chmod 600 {path}",
                )
            return file.read()


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            message = f"{path} is a symbolic link, expected the manifest itself"
            raise ManifestError(message, hint=f"--vllm-config-path {os.path.realpath(path)}") from error
        raise ManifestError(
            f"cannot use the manifest {path}: {error.strerror}",
            hint=f"ls -ld {path.parent} {path}; or choose another path with --vllm-config-path",
        ) from error
