"""Checkpoints: a plain Hugging Face folder in safetensors, there whole or not at all.

Not covered: the optimizer's state, and loading into live weights (`bridge restore`).
"""

import ctypes
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from transformers import PreTrainedModel
from transformers.utils import logging

from bridge.errors import UsageError

MARKER_NAME = "bridge_checkpoint.json"
"""Written last: a folder that holds it is a whole checkpoint of ours."""
MAX_SHARD_BYTES = 5 * 10**9
"""Largest file of weights, and of their copy in host memory while it is written."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_COPIED_FILES = (*_TOKENIZER_FILES, "generation_config.json")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def tokenizer_files(source: str | Path) -> tuple[Path, ...]:
    """Return the tokenizer's files of `source`, a folder or a hub name, and its generation defaults if it has any.

    Call it once before training: a checkpoint must not fail for want of them.

    Raises:
        UsageError: `source` has no tokenizer, or cannot be reached.
    """
    for folder in _source_folders(str(source)):
        found = tuple(folder / name for name in _COPIED_FILES if (folder / name).is_file())
        if any(path.name in _TOKENIZER_FILES for path in found):
            return found
    raise UsageError(
        f"{source} has no tokenizer files (such as tokenizer.json): its checkpoints would be of no use",
        remedy="put the tokenizer's files beside the model's weights",
    )


def save(
    model: PreTrainedModel, tokenizer_source: str | Path, folder: Path, *, step: int, extra: Mapping[str, Any]
) -> Path:
    """Write `model` to `folder` atomically and return the folder; an older checkpoint of ours there is replaced.

    `extra` is kept in the marker file, as JSON. Weights may be views into storages of any size: the files hold the
    Hugging Face tensors alone, tied ones once.

    Raises:
        UsageError: `folder` exists and is no checkpoint of ours, or the disk is full or refuses; no half one is left.
    """
    folder = folder.resolve()
    copied = tokenizer_files(tokenizer_source)
    with _one_line_errors(folder, model), _scratch(folder) as scratch:
        with _no_progress_bar():
            model.save_pretrained(scratch, state_dict=_state_of_own_storages(model), max_shard_size=MAX_SHARD_BYTES)
        for path in copied:
            shutil.copyfile(path, scratch / path.name)
        (scratch / MARKER_NAME).write_text(json.dumps({"step": step, **extra}, indent=1) + "\n")
        for path in (*scratch.iterdir(), scratch):
            _fsync(path)
        _move(scratch, folder)
        _fsync(folder.parent)
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Tell whether `folder` is a whole checkpoint of ours."""
    return (folder / MARKER_NAME).is_file()


def _check_replaceable(folder: Path) -> None:
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not empty and not is_checkpoint(folder):
        raise UsageError(
            f"{folder} exists and is no checkpoint of ours (no {MARKER_NAME} in it): not replaced",
            remedy="move it away, or name another folder with --save-path",
        )


def _state_of_own_storages(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict over the same memory, each tensor as a storage of its own.

    `save_pretrained` tells by the storage which tensors are shared: it would clone every slice of a fused tensor on
    the GPU (most of the model) and count the whole storage for the size of a file. Tied tensors still coincide.
    """
    return {name: from_dlpack(tensor.detach()) for name, tensor in model.state_dict().items()}


@contextmanager
def _one_line_errors(folder: Path, model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error in its own
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        free_bytes = shutil.disk_usage(next(path for path in folder.parents if path.exists())).free
        raise UsageError(
            f"cannot write the checkpoint {folder}: {error} ({num_bytes} bytes of weights, {free_bytes} bytes free)",
            remedy="make room there, or name another folder with --save-path",
        ) from error


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Give a new folder beside `folder`; whatever it is at the end, if it still is, goes away."""
    _check_replaceable(folder)
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _source_folders(source: str) -> Iterator[Path]:
    """Yield where `source` may lie: the folder itself, or the hub's cache as it is and then as a download leaves it."""
    if Path(source).is_dir():
        yield Path(source)
        return
    for local_files_only in (True, False):
        with suppress(OSError, HFValidationError):  # not cached, no such model, no network: the next, or none
            yield Path(snapshot_download(source, allow_patterns=[*_COPIED_FILES], local_files_only=local_files_only))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(scratch: Path, folder: Path) -> None:
    """Put `scratch` in the place of `folder`; what was there lies in `scratch` afterwards, if anywhere."""
    if not is_checkpoint(folder):
        scratch.rename(folder)
    elif not _exchange(scratch, folder):  # a file system that cannot: for an instant there is no `folder`
        old = scratch.with_name(f"{scratch.name}.old")
        folder.rename(old)
        scratch.rename(folder)
        old.rename(scratch)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one system call; tell whether this system can. Source: renameat2(2)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
