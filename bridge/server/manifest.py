"""The manifest: what a server writes so that a trainer can attach, and how it is found and checked.

Not covered: opening the handles (`cuda_ipc.py`, `shared_memory.py`) and the model's layout (`layout.py`).
"""

import errno
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from bridge.core.address import Urls
from bridge.core.process import ProcessIdentity, boot_id
from bridge.errors import ManifestError
from bridge.server.shard import Dtype, Shard

MANIFEST_NAME = "vllm_bridge_config.json"
SCHEMA_VERSION: Literal[1] = 1
DEFAULT_FOLDER = Path("/tmp/atropos_bridge")  # noqa: S108  the documented place, checked for ownership on reading
START_SERVER = "start one with: bridge serve-vllm --model MODEL"
MARK = {"ipc_handles", "param_mappings", "single_copy_enabled"}
"""Keys of every manifest, whichever version wrote it: a file that has all of them may be replaced by another one."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Manifest(Shard):
    """The whole of `vllm_bridge_config.json`; its own shard is rank 0's."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Format of this file."""
    model: str
    """The model as it was given to vLLM: a folder or a hub name."""
    dtype: Dtype
    """torch's name of the weights' element type."""
    backend: Literal["cuda_ipc", "shared_memory"]
    """How handles are opened."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens of the longest sequence that it serves; None where a manifest of before does not say."""
    tp_degree: int = Field(ge=1)
    """Tensor-parallel ranks."""
    dp_shard_degree: int = Field(ge=1)
    """Data-parallel shards; 1 unless several engines share the data."""
    num_params: int = Field(ge=1)
    """Elements of all Hugging Face parameters on all ranks together, padding left out."""
    param_names: tuple[str, ...]
    """The Hugging Face parameters, sorted."""
    shared_weights_enabled: bool
    """True in every manifest that this package wrote."""
    single_copy_enabled: bool
    """True in every manifest that this package wrote."""
    other_shards: tuple[Shard, ...]
    """What the ranks after the first export, in their order."""
    host: str
    """Host name of the server, for messages."""
    boot_id: str
    """Tells one boot of one host from all others."""
    server: ProcessIdentity
    """The API server's process."""
    url: Urls = Field(pattern=r"^https?://[^/\s]+:\d{1,5}$")
    """Where the server answers."""
    token: str = Field(pattern=r"^[!-~]+$", repr=False)
    """Bearer token for `/bridge/*`."""
    versions: dict[str, str]
    """Versions of bridge, vllm, torch and transformers on the server's side."""

    def shard(self, rank: int = 0) -> Shard:
        """Return what tensor-parallel `rank` exports."""
        return self if rank == 0 else self.other_shards[rank - 1]


def search_path() -> tuple[Path, ...]:
    """Return where a manifest is looked for when no path is given, first place first."""
    folders = [Path(os.environ["LOGDIR"])] if os.environ.get("LOGDIR") else []
    return tuple(folder / MANIFEST_NAME for folder in (*folders, Path.cwd(), DEFAULT_FOLDER))


def resolve_path(given: Path | None) -> Path:
    """Turn `--vllm-config-path` into the file to read or write: a folder means the file in it.

    Raises:
        ManifestError: the system cannot even look there.
    """
    if given is None:
        return search_path()[0]
    with _one_line_errors(given):
        return given / MANIFEST_NAME if given.is_dir() else given


def find(given: Path | None = None) -> Path:
    """Return the path of the manifest to use.

    Raises:
        ManifestError: there is none; a given path that is missing is never a reason to look elsewhere.
    """
    if given is not None:
        path = resolve_path(given)
        if not _is_file(path):
            raise ManifestError(f"no manifest at {path}", remedy=f"{START_SERVER} --vllm-config-path {given}")
        return path
    for path in search_path():
        if _is_file(path):
            return path
    places = ", ".join(str(path.parent) for path in search_path())
    raise ManifestError(
        f"no manifest: no {MANIFEST_NAME} in {places}",
        remedy=f"{START_SERVER} (here, or name its file with --vllm-config-path)",
    )


def read(path: Path) -> Manifest:
    """Read and validate the manifest at `path`, without asking whether its server lives.

    Raises:
        ManifestError: gone, another user's, no JSON, cut short, of another schema, or edited by hand.
    """
    try:
        document = json.loads(_content(path))
    except (ValueError, RecursionError) as error:  # no JSON, no text, a number of 5,000 digits, 5,000 brackets
        raise ManifestError(
            f"{path} is no whole JSON document ({error}): it was cut short or edited",
            remedy=f"restart the server, which writes it anew; {START_SERVER}",
        ) from error
    return _parse(path, document)


def is_manifest(path: Path) -> bool:
    """Tell whether the file at `path` is a manifest of this user, of whichever version of Bridge."""
    try:
        document = json.loads(_content(path))
    except (ManifestError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.keys() >= MARK


def _content(path: Path) -> bytes:
    """Return what is in the file, which is opened once: the file that was checked is the file that is read.

    Raises:
        ManifestError: it cannot be opened, is a link or no plain file, or another user owns it or may write to it.
    """
    with _one_line_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # no waiting for a FIFO
        with os.fdopen(descriptor, "rb") as file:
            _check_opened(path, os.fstat(descriptor))
            return file.read()


def _check_opened(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ManifestError(f"{path} is no plain file", remedy=START_SERVER)
    if found.st_uid != os.getuid():
        raise ManifestError(
            f"{path} belongs to user {found.st_uid}, expected {os.getuid()}: another user's server cannot be attached"
            " to",
            remedy=START_SERVER,
        )
    if found.st_mode & OTHERS_WRITE:
        raise ManifestError(
            f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}), expected 0600",
            remedy=f"restart the server, which writes it anew; or, if nobody has changed it: chmod 600 {path}",
        )


def _is_file(path: Path) -> bool:
    with _one_line_errors(path):
        return path.is_file()


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ManifestError(
                f"{path} is a symbolic link, expected the manifest itself",
                remedy=f"--vllm-config-path {os.path.realpath(path)}",
            ) from error
        raise ManifestError(
            f"the manifest {path} cannot be used: {error.strerror}",
            remedy=f"ls -ld {path.parent} {path}; or name another place with --vllm-config-path",
        ) from error


def _parse(path: Path, document: object) -> Manifest:
    if not isinstance(document, dict):
        raise ManifestError(f"{path} holds a {type(document).__name__}, expected an object", remedy=START_SERVER)
    if document.get("ipc_handles") == {}:
        raise ManifestError(
            f"{path} has no ipc_handles: a vLLM without Bridge's patches wrote it",
            remedy=f"{START_SERVER}; bridge doctor names the patches and the installed vLLM",
        )
    if document.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise ManifestError(
            f"{path} has schema version {document['schema_version']}, expected {SCHEMA_VERSION}",
            remedy="install the same Bridge on both sides and restart the server",
        )
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'the document'}: {fault['msg']}"
            for fault in error.errors()[:3]
        )
        raise ManifestError(
            f"{path} does not fit the manifest's schema in {error.error_count()} places ({faults})",
            remedy="it was edited or written by another Bridge: restart the server, which writes it anew",
        ) from error


def check_server(manifest: Manifest, path: Path) -> None:
    """Check that the server that wrote `manifest` is a live process of this host.

    Raises:
        ManifestError: another host, an earlier boot, another pid namespace, or a dead server.
    """
    if manifest.boot_id != boot_id():
        here = socket.gethostname()
        cause = (
            "it was written before this host's last boot"
            if manifest.host == here
            else f"it was written on host {manifest.host}, this is {here}"
        )
        raise ManifestError(f"{path} is of no use here: {cause}", remedy=START_SERVER)
    if not manifest.server.is_visible():
        raise ManifestError(
            f"{path} was written in another pid namespace (a container?), where pid {manifest.server.pid} lives",
            remedy="run both in one container, or share it: docker run --pid=container:NAME --ipc=container:NAME",
        )
    if not manifest.server.is_alive():
        raise ManifestError(
            f"{path} is stale: its server, pid {manifest.server.pid}, is gone",
            remedy=f"remove the file or {START_SERVER}",
        )


def load(given: Path | None = None) -> Manifest:
    """Find, read and check the manifest of a live server of this host.

    Raises:
        ManifestError: for any reason that `find`, `read` and `check_server` give.
    """
    path = find(given)
    manifest = read(path)
    check_server(manifest, path)
    return manifest


def write(manifest: Manifest, path: Path) -> None:
    """Write `manifest` to `path` atomically, readable by its owner alone.

    Raises:
        ManifestError: the place cannot be written to, or holds another file than a manifest, which stays.
    """
    refuse_other_file(path)
    with _one_line_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, manifest.model_dump_json(indent=1))


def refuse_other_file(path: Path) -> None:
    """Check that a manifest may be written to `path`: there is none yet, or one that is replaced.

    Raises:
        ManifestError: something else is there.
    """
    if os.path.lexists(path) and not is_manifest(path):
        raise ManifestError(
            f"{path} is no manifest of Bridge, and is left alone",
            remedy=f"choose another place with --vllm-config-path, or remove it yourself: rm {path}",
        )


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_own(path: Path, server: ProcessIdentity) -> None:
    """Remove the manifest at `path` if `server` wrote it; leave anything else alone."""
    try:
        if read(path).server == server:
            path.unlink()
    except (ManifestError, OSError):
        return
