"""A model as a standard Hugging Face folder: written from weights that may be views, and read back in place.

Plan, validate, then apply: no weight is overwritten until every name, shape and dtype in the folder has been checked.

Not covered: writing a folder atomically (`bridge/core/atomic_folder.py`), adapters, quantized weights.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from bridge.core import json_lines
from bridge.core.paths import CONFIG_NAME
from bridge.errors import UnsupportedModelError, UsageError, first_few, own_head
from bridge.weights import model_files
from bridge.weights.copy_recorder import ViewsOnly, storage_of
from bridge.weights.layout import OTHER_MODES
from bridge.weights.rank_parts import Parts
from bridge.weights.stored_tensors import Stored, describe, headers, refuse_misfits, write_shards

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_OF_PREDICTION = re.compile(r"(?:^|\.)mtp\.")
"""Names of tensors for multi-token prediction, unless they have the number of a layer behind the last one."""
_NUMBERED = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")
"""Names of the language model's layers."""


def copy(source: Path, folder: Path) -> None:
    """Copy a model, with its weights and all other files, into the existing `folder`."""
    index = source / INDEX_NAME
    held = [source / CONFIG_NAME, *_weight_files(source), *([index] if index.is_file() else [])]
    missing = [path.name for path in held if not path.is_file()]
    if missing:
        raise UsageError(f"{source} is an incomplete model: {missing[0]} is missing", hint="name a complete folder")
    files = model_files.source_files(source)
    for path in held:
        copyfile(path, folder / path.name)
    if unread := model_files.copy(files, folder):
        raise UsageError(f"{source} cannot be copied completely: {first_few(unread)}", hint="export it again")


def save(
    model: PreTrainedModel,
    source: str | Path,
    folder: Path,
    parts: Parts | None = None,
    *,
    tokenizer: str | Path | None = None,
) -> list[str]:
    """Write `model`, which was loaded from `source`, into the existing `folder`; return one line per missing file.

    The other files are copied from `source`; if `tokenizer` names a different folder, the tokenizer comes from there.
    Weights are written first, so that they are not lost whatever has happened to `source` in the meantime.

    Weights may be views into storages of any size: the files contain only the Hugging Face tensors, tied ones once.
    Layers for multi-token prediction, which transformers does not load, are copied from `source`.

    With `parts`, `model` is one rank's part: the full tensors are gathered one by one, and the other ranks call
    `send_parts`. The result is the same folder, and any number of ranks can load it.
    """
    tensors = _whole_tensors(model, parts)
    missing = list[str]()
    try:
        _write_weights(_with_layers_of_prediction(tensors, model, source, missing), folder)
        return missing + model_files.write(
            folder, model.config, source, tokenizer=tokenizer, architecture=type(model).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
        )  # fmt: skip
    finally:
        for _ in tensors if parts is not None else ():  # the other ranks wait until everything is gathered
            pass


def send_parts(model: PreTrainedModel, parts: Parts) -> None:
    """Send this rank's parts to the rank that saves, even if saving failed there; raises RankError as `save` does."""
    for _ in _whole_tensors(model, parts):
        pass


def _whole_tensors(model: PreTrainedModel, parts: Parts | None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor to write; with `parts`, check that the ranks agree, then gather each tensor in host memory."""
    held = state(model)
    if parts is None:
        yield from saved_form(model, held).items()
        return
    parts.check_equal(held)
    whole = _on_meta(model, parts)
    views = saved_form(model, whole)
    for name, tensor in held.items():
        gathered = parts.whole(name, tensor)
        for key, view in views.items():
            if storage_of(view) == storage_of(whole[name]):
                yield key, _like(gathered, view).contiguous()


def _with_layers_of_prediction(
    tensors: Iterable[tuple[str, Tensor]], model: PreTrainedModel, source: str | Path, missing: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, then those for multi-token prediction in the files of `source`, which training does not change.

    vLLM speculates with these layers, and the configuration says how many there are. If one cannot be read, a line is
    added to `missing`.
    """
    written = set[str]()
    for name, tensor in tensors:
        written.add(name)
        yield name, tensor
    folder = model_files.found(source).folder
    try:
        files = [] if folder is None else [path for path in _weight_files(folder) if path.is_file()]
        for path in files:
            for name in headers(path).keys() - written:
                if _is_of_prediction(name, model):
                    yield name, _tensor(path, name)
    except (UsageError, OSError, SafetensorError) as error:
        missing.append(f"the layers for multi-token prediction of {source} ({' '.join(str(error).split())})")


def _is_of_prediction(name: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor is for multi-token prediction: its own part of a model, or a layer behind the last one.

    Source: Qwen3-Next and Qwen 3.5 store `mtp.layers.0`; DeepSeek-V3 with 61 layers, and GLM-4.5, `model.layers.61`.
    """
    numbered = _NUMBERED.match(name)
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    is_behind = numbered is not None and num_layers is not None and int(numbered[1]) >= num_layers
    return is_behind or _OF_PREDICTION.search(name) is not None


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write `tensors`, and an index if there are several files.

    This does not use `save_pretrained`: with several ranks, that writes only on the first one, and it would clone every
    slice of a fused tensor (most of the model) on the GPU.
    """
    files = write_shards(
        folder, "model", tensors,
        lambda tensor: from_dlpack(tensor.contiguous()),  # only the view, not its full storage; no copy if contiguous
        metadata={"format": "pt"},
    )  # fmt: skip
    if len(files) == 1:
        (folder / next(iter(files))).rename(folder / SINGLE_NAME)
    else:
        weight_map = {name: file for file, held in files.items() for name in held}
        total = sum(num_bytes for held in files.values() for num_bytes in held.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the files contain, by name; a buffer that several modules share appears once."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that the files contain, by their names in the model; a tied parameter appears once."""
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def saved_form(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of `parameters` (those of `model`, by name) with the names and shapes used in checkpoint files.

    In memory, transformers stacks the experts of a layer in one parameter; a file has two or three tensors per expert.
    Source: transformers 5.17 and 5.19, `core_model_loading.py`, which `save_pretrained` uses.
    """
    held = {name: tensor.detach() for name, tensor in parameters.items()}
    with torch.no_grad(), ViewsOnly([*held.values()]):
        saved: dict[str, Tensor] = revert_weight_conversion(model, held)
    ours = {storage_of(tensor) for tensor in held.values()}
    others = [name for name, tensor in saved.items() if storage_of(tensor) not in ours]
    if others or sum(t.numel() for t in saved.values()) != sum(t.numel() for t in held.values()):
        raise UnsupportedModelError(
            f"{', '.join(others[:3]) or type(model).__name__}: the saved form is not a view of the parameters",
            hint=OTHER_MODES,
        )
    return saved


def check(model: PreTrainedModel, folder: Path, parts: Parts | None = None) -> None:
    """Check that the folder's weights match those of `model` in name, shape and dtype.

    This reads only headers, and the values of a tied tensor that is stored twice.
    """
    _files_of(model, folder, _on_meta(model, parts))


def load_into(model: PreTrainedModel, folder: Path, parts: Parts | None = None) -> None:
    """Copy the folder's weights, or this rank's part of them, into the model; if any does not fit, none is changed."""
    whole = _on_meta(model, parts)
    held = state(model)
    firsts = first_names(model) | {name: name for name in held}
    views = saved_form(model, {name: whole[first] for name, first in firsts.items()})
    owners = {storage_of(tensor): name for name, tensor in whole.items()}
    files = _files_of(model, folder, whole)
    stored = dict[str, list[str]]()
    for name in files:
        stored.setdefault(owners[storage_of(views[name])], []).append(name)
    with torch.no_grad(), ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {*files.values()}}
        for owner, names in stored.items():
            own = held[owner]
            target = own if parts is None else torch.empty(whole[owner].shape, dtype=own.dtype)
            for name in names:
                _like(target, views[name]).copy_(opened[files[name]].get_tensor(name))
            if parts is not None:
                own.copy_(parts.own[owner].of(target))


def first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of each parameter to its first name; a tied parameter has several names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _on_meta(model: PreTrainedModel, parts: Parts | None) -> dict[str, Tensor]:
    """Return the full tensors of the model, with the shapes that the files contain, on the meta device."""
    return {
        name: torch.empty(tensor.shape if parts is None else parts.own[name].shape, dtype=tensor.dtype, device="meta")
        for name, tensor in state(model).items()
    }


def _like(whole: Tensor, view: Tensor) -> Tensor:
    """Return a view of the contiguous `whole` with the offset, shape and stride of `view`."""
    assert whole.is_contiguous(), whole.stride()
    return whole.as_strided(view.shape, view.stride(), int(whole.storage_offset() + view.storage_offset()))


def _files_of(model: PreTrainedModel, folder: Path, whole: Mapping[str, Tensor]) -> dict[str, Path]:
    """Return the file of each tensor to copy, after checking all of them against the `whole` parameters."""
    files: dict[str, Path] = {}
    held: dict[str, Stored] = {}
    for path in _weight_files(folder):
        stored = headers(path)
        files |= dict.fromkeys(stored, path)
        held |= stored
    aliases = {name: first for name, first in first_names(model).items() if first != name}
    saved = saved_form(model, whole)
    computed = {name for name, _ in model.named_buffers()} - whole.keys()
    left_out = computed | {name for name in aliases if aliases[name] in held}
    left_out |= {name for name in held.keys() - saved.keys() if _is_of_prediction(name, model)}
    for ignored in model._keys_to_ignore_on_load_unexpected or ():
        left_out |= {name for name in held.keys() - saved.keys() - aliases.keys() if re.search(ignored, name)}
    wanted = {name: text for name, text in held.items() if name not in left_out}
    expected = {name: describe(tensor) for name, tensor in saved.items()}
    # vLLM keeps some parameters in float32; the model's dtype is accepted for them, too.
    narrow = {name: describe(tensor.to(model.dtype)) for name, tensor in saved.items()}
    described = {aliases.get(name, name): text for name, text in wanted.items()}
    described = {name: expected[name] if text == narrow.get(name) else text for name, text in described.items()}
    refuse_misfits(str(folder), described, expected)
    for name, first in aliases.items():
        if {name, first} <= held.keys() and not _tensor(files[name], name).equal(_tensor(files[first], first)):
            raise own_head(name, first)
    return {name: files[name] for name in wanted}


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files that the folder's index names, or its single weight file."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return [folder / SINGLE_NAME]
    try:
        names = set(json_lines.parsed(index.read_bytes())["weight_map"].values())
        return [folder / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is not a valid weight index", hint="name a complete folder") from error


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers' progress bars off stderr, where users read Bridge's own output."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
