"""A model as a plain Hugging Face folder: written from weights that may be views, and read back in place.

Plan, validate, then apply: no byte of a model is overwritten before every name, shape and type in the folder fits it.

Not covered: that a folder is there whole or not at all (`bridge/core/whole_folder.py`), adapters, quantised weights.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copyfile

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from transformers import PreTrainedModel
from transformers.utils import logging

from bridge.errors import UsageError
from bridge.weights.saved_form import saved_form
from bridge.weights.stored_tensors import describe, headers, refuse_misfits

MAX_SHARD_BYTES = 5 * 10**9
"""Largest file of weights, and of their copy in host memory while it is written."""
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
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


def save(model: PreTrainedModel, tokenizer_source: str | Path, folder: Path) -> None:
    """Write `model` and its tokenizer into the existing `folder`.

    Weights may be views into storages of any size: the files hold the Hugging Face tensors alone, tied ones once.

    Raises:
        UsageError: `tokenizer_source` has no tokenizer; nothing was written.
        OSError, SafetensorError: the disk is full or refuses.
    """
    copied = tokenizer_files(tokenizer_source)
    with no_progress_bar():
        model.save_pretrained(
            folder,
            state_dict=_state_of_own_storages(model),
            max_shard_size=MAX_SHARD_BYTES,
            save_original_format=False,  # it is in the files' form already, and transformers would copy all experts
        )
    for path in copied:
        copyfile(path, folder / path.name)


def check(model: PreTrainedModel, folder: Path) -> None:
    """Refuse a folder whose weights are not those of `model` by name, shape and type; only headers are read.

    Raises:
        UsageError: names up to three offenders.
    """
    _plan(model, folder)


def load_into(model: PreTrainedModel, folder: Path) -> None:
    """Copy the folder's weights into the memory of the model's parameters, one tensor at a time.

    Raises:
        UsageError: as `check` does; no parameter was touched.
    """
    places = saved_form(model, dict(model.named_parameters(remove_duplicate=False)))
    for path, names in _plan(model, folder).items():
        with torch.no_grad(), safe_open(path, framework="pt") as file:
            for name in names:
                places[name].copy_(file.get_tensor(name))


def _plan(model: PreTrainedModel, folder: Path) -> dict[Path, list[str]]:
    """Return, per file, the names of the tensors to copy; everything has been checked."""
    places: dict[str, Path] = {}
    found: dict[str, str] = {}
    for path in _weight_files(folder):
        described = headers(path)
        places |= dict.fromkeys(described, path)
        found |= described
    expected, aliases = _parameters(model)
    buffers = {name for name, _ in model.named_buffers()}
    left_out = {name for name in found.keys() & aliases.keys() if aliases[name] in found}
    wanted = {name: text for name, text in found.items() if name not in buffers | left_out}
    refuse_misfits(str(folder), {aliases.get(name, name): text for name, text in wanted.items()}, expected)
    plan: dict[Path, list[str]] = {}
    for name in wanted:
        plan.setdefault(places[name], []).append(name)
    return plan


def _parameters(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, str]]:
    """Return what is saved of each parameter, a tied one once, and the other names of tied ones -> their first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    saved = saved_form(model, dict(model.named_parameters()))
    return {name: describe(tensor) for name, tensor in saved.items()}, aliases


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that the folder's index names, or its only one."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return [folder / SINGLE_NAME]
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [folder / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is no index of weights", remedy="name a folder that is whole") from error


def _state_of_own_storages(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict over the same memory in the files' form, each tensor as a storage of its own.

    `save_pretrained` tells by the storage which tensors are shared: it would clone every slice of a fused tensor on
    the GPU (most of the model) and count the whole storage for the size of a file. Tied tensors still coincide.
    """
    return {name: from_dlpack(tensor) for name, tensor in saved_form(model, model.state_dict()).items()}


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers' progress bars off stderr, which is for what people read."""
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
