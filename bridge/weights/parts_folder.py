"""A model in parts as a plain Hugging Face folder: gathered and written tensor by tensor, and read back part by part.

The folder is the one that a single process writes (`model_folder.py`), and any number of parts can load it.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import copyfile

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from bridge.weights import model_folder
from bridge.weights.copy_recorder import storage_of
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
        model_folder.write(tensors, model, folder)
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
    if parts.tp_group.is_rank_zero:
        yield from model_folder.buffers(model)


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


def _like(whole: Tensor, view: Tensor) -> Tensor:
    """Return the same view of the contiguous `whole` that `view` is of its own storage."""
    return whole.as_strided(view.shape, view.stride(), int(whole.storage_offset() + view.storage_offset()))
