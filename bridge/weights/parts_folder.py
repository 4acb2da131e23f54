"""A model in parts as a plain Hugging Face folder: gathered and written tensor by tensor, and read back part by part.

The folder is the one that a single process writes (`model_folder.py`), and any number of parts can load it.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import copyfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from bridge.weights import model_folder
from bridge.weights.copy_recorder import storage_of
from bridge.weights.model_folder import INDEX_NAME, MAX_SHARD_BYTES, SINGLE_NAME
from bridge.weights.parts import Parts


def save(model: PreTrainedModel, parts: Parts, tokenizer_source: str | Path, folder: Path) -> None:
    """Write the model and its tokenizer into the existing `folder`; meanwhile the other parts call `pass_on`.

    Raises:
        UsageError: `tokenizer_source` has no tokenizer; nothing was written.
        RankError: what parts hold alike differs; nothing was written.
        OSError, SafetensorError: the disk is full or refuses.
    """
    parts.check_alike(dict(model.named_parameters()))
    tensors = _gathered(model, parts)
    try:
        copied = model_folder.tokenizer_files(tokenizer_source)
        _write(tensors, folder)
        model_folder.save_configuration(model, folder)
        for path in copied:
            copyfile(path, folder / path.name)
    finally:
        for _ in tensors:  # the other parts wait until all of it was gathered, even if the disk is full
            pass


def pass_on(model: PreTrainedModel, parts: Parts) -> None:
    """Take part while another part saves, or would if it could.

    Raises:
        RankError: as `save` does.
    """
    parts.check_alike(dict(model.named_parameters()))
    for _ in _gathered(model, parts):
        pass


def load_into(model: PreTrainedModel, parts: Parts, folder: Path) -> None:
    """Copy this part of the folder's weights into the memory of the model's parameters, one parameter at a time.

    Raises:
        UsageError: as `model_folder.check` does; no parameter was touched.
    """
    whole = _whole_on_meta(model, parts)
    places = {name: path for path, names in model_folder.plan(model, folder, whole).items() for name in names}
    views = model_folder.saved_form(model, _with_aliases(model, whole))
    owners = {storage_of(tensor): name for name, tensor in whole.items()}
    pieces: dict[str, list[str]] = {}
    for name in places:
        pieces.setdefault(owners[storage_of(views[name])], []).append(name)
    with torch.no_grad(), ExitStack() as files:
        opened = {path: files.enter_context(safe_open(path, framework="pt")) for path in {*places.values()}}
        for owner, names in pieces.items():
            parameter = model.get_parameter(owner)
            made = torch.empty(whole[owner].shape, dtype=parameter.dtype)
            for name in names:
                _like(made, views[name]).copy_(opened[places[name]].get_tensor(name))
            parameter.copy_(parts.own[owner].of(made))


def check(model: PreTrainedModel, parts: Parts, folder: Path) -> None:
    """As `model_folder.check`."""
    model_folder.plan(model, folder, _whole_on_meta(model, parts))


def _gathered(model: PreTrainedModel, parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the files in host memory, whole."""
    whole = _whole_on_meta(model, parts)
    views = model_folder.saved_form(model, whole)
    for name, parameter in model.named_parameters():
        made = parts.whole(name, parameter)
        for key, view in views.items():
            if storage_of(view) == storage_of(whole[name]):
                yield key, _like(made, view).contiguous()
    if parts.within.leads:
        yield from (
            (name, buffer.cpu()) for name, buffer in model.state_dict().items() if not _is_parameter(model, name)
        )


def _write(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write files of at most `MAX_SHARD_BYTES`, and an index if there are several."""
    files, shard, num_bytes, total = list[dict[str, None]](), dict[str, Tensor](), 0, 0

    def flush() -> None:
        path = folder / f"{len(files)}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files.append(dict.fromkeys(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
            num_bytes = 0
        shard[name] = tensor.clone()  # no two in one memory
        num_bytes, total = num_bytes + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / SINGLE_NAME)
        return
    weight_map = dict[str, str]()
    for number, names in enumerate(files, start=1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"{number - 1}.safetensors").rename(path)
        weight_map |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _whole_on_meta(model: PreTrainedModel, parts: Parts) -> dict[str, Tensor]:
    """Return every parameter as it is when whole, without memory."""
    return {
        name: torch.empty(parts.own[name].shape, dtype=parameter.dtype, device="meta")
        for name, parameter in model.named_parameters()
    }


def _with_aliases(model: PreTrainedModel, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the other names of tied parameters."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: whole[first[id(p)]] for name, p in model.named_parameters(remove_duplicate=False)}


def _is_parameter(model: PreTrainedModel, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(owner)._parameters


def _like(whole: Tensor, view: Tensor) -> Tensor:
    """Return the same view of the contiguous `whole` that `view` is of its own storage."""
    return whole.as_strided(view.shape, view.stride(), int(whole.storage_offset() + view.storage_offset()))
