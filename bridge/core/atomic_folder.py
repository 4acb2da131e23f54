"""Write folders atomically: into a scratch folder next to the target, which then replaces the target in one step.

A scratch folder's name identifies the process that writes it, so that the next writer can remove those that killed
processes left. Leftovers of writers on a different host or in a different container are kept.
"""

import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from bridge.core.interrupt import deferred_interrupt
from bridge.core.process import ProcessIdentity, boot_id
from bridge.errors import BridgeError, UsageError

_SCRATCH_NAME = re.compile(
    r"\..+\.(?P<pid>\d+)-(?P<start_ticks>\d+)-(?P<namespace>\d+)-(?P<boot>\w{8})-(?P<host>\w{8})-\w{8}\.scratch"
)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def write(
    folder: Path, *, replaceable: Callable[[Path], bool], durable: bool = True, flag: str = "--save-path"
) -> Iterator[Path]:
    """Yield a scratch folder next to `folder`, and rename it to `folder` at the end of the block.

    After an error, `folder` is unchanged. `replaceable` decides whether an existing folder may be replaced; an empty
    one always may. With `durable`, all content is on disk before the final name appears. File modes follow the umask.
    `flag` is the option that chooses a different folder, used in error messages.

    Raises:
        UsageError: the existing folder may not be replaced, or the disk is full, or a write fails.
    """
    folder = folder.resolve()
    scratch = _scratch_path(folder)
    try:
        with _one_line_errors(folder, scratch, flag):
            _check_replaceable(folder, replaceable, flag)
            scratch.mkdir(parents=True)
            for path in folder.parent.iterdir():
                writer = _SCRATCH_NAME.fullmatch(path.name)
                if writer and _is_gone(writer):
                    shutil.rmtree(path, ignore_errors=True)
            yield scratch
            _apply_umask(scratch)
            for path in (*scratch.rglob("*"), scratch) if durable else ():
                _fsync(path)
            _move(scratch, folder, replaceable, flag)
            if durable:
                _fsync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove `folder` atomically, by renaming it first.

    Raises:
        OSError: `folder` cannot be renamed; it is unchanged.
    """
    scratch = _scratch_path(folder)
    folder.rename(scratch)
    shutil.rmtree(scratch, ignore_errors=True)


def _scratch_path(folder: Path) -> Path:
    """Return a new hidden path next to `folder` whose name identifies this process."""
    here = ProcessIdentity.current()
    namespace = here.pid_namespace.removeprefix("pid:[").removesuffix("]")
    writer = f"{here.pid}-{here.start_ticks}-{namespace}-{_short(boot_id())}-{_short(os.uname().nodename)}"
    return folder.with_name(f".{folder.name}.{writer}-{secrets.token_hex(4)}.scratch")


def _is_gone(writer: re.Match[str]) -> bool:
    """Return whether the process in a scratch folder's name has definitely exited."""
    if writer["host"] != _short(os.uname().nodename):
        return False
    if writer["boot"] != _short(boot_id()):  # the writer ran before this host's last boot
        return True
    identity = ProcessIdentity(
        pid=int(writer["pid"]), start_ticks=int(writer["start_ticks"]), pid_namespace=f"pid:[{writer['namespace']}]"
    )
    return identity.is_visible() and not identity.is_alive()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _check_replaceable(folder: Path, replaceable: Callable[[Path], bool], flag: str) -> None:
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not empty and not (folder.is_dir() and replaceable(folder)):
        raise UsageError(
            f"{folder} exists, and Bridge did not write it", hint=f"move it away, or choose another with {flag}"
        )


@contextmanager
def _one_line_errors(folder: Path, scratch: Path, flag: str) -> Iterator[None]:
    try:
        yield
    except BridgeError:  # raised first, because some BridgeErrors are OSErrors, too
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps OSErrors in its own
        nearest = next(path for path in folder.parents if os.access(path, os.F_OK))
        num_bytes = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        raise UsageError(
            f"cannot write {folder}: {' '.join(str(error).split())} (after {num_bytes} bytes, with "
            f"{shutil.disk_usage(nearest).free} bytes free)",
            hint=f"free some disk space, or choose a different folder with {flag}",
        ) from error


def _apply_umask(scratch: Path) -> None:
    """Apply the umask's mode to everything in `scratch`, because safetensors creates files with mode 0600."""
    folders = scratch.stat().st_mode & 0o777
    for path in (path for path in scratch.rglob("*") if not path.is_symlink()):
        path.chmod(folders if path.is_dir() else folders & 0o666)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@deferred_interrupt()  # an interrupt while neither name exists would lose both folders
def _move(scratch: Path, folder: Path, replaceable: Callable[[Path], bool], flag: str) -> None:
    """Rename `scratch` to `folder`; a previous `folder` becomes `scratch`."""
    _check_replaceable(folder, replaceable, flag)
    if not folder.exists() or not any(folder.iterdir()):
        scratch.rename(folder)
    elif not _exchange(scratch, folder):  # unsupported: for an instant, `folder` does not exist
        old = _scratch_path(folder)
        folder.rename(old)
        scratch.rename(folder)
        old.rename(scratch)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one system call; return False if that is unsupported. Source: renameat2(2)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))
