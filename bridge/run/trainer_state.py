"""What a run needs besides its weights to resume: the optimizer's state by name, and torch's random state.

Both are in a folder of their own: vLLM loads every safetensors file beside the weights of a small model.

Not covered: hyperparameters, which come from the configuration, and the order of the problems
(`bridge/rollouts/problems.py`).
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bridge.errors import CheckpointError
from bridge.weights.stored_tensors import describe, headers, refuse_misfits

FOLDER = "optimizer"
STATE_NAME = "state.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest file, and its copy in host memory while it is written; a larger tensor has a file of its own."""


class SavedState(Protocol):
    """An optimizer's state, by parameter: an `InPlaceOptimizer`, or a `WholeState` of its parts."""

    flags: str
    """The flags of an optimizer with this kind of state."""

    def num_updates(self, parameter: Tensor) -> int: ...

    def reset(self, num_updates: Mapping[Tensor, int]) -> None: ...

    def parts(self, parameter: Tensor) -> dict[str, Tensor]: ...

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None: ...


class _State(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    flags: str = "--optimizer adamw --no-offload-optimizer"
    """The flags of an optimizer with this kind of state; absent: written before there was another one."""
    steps: dict[str, int]
    """Every trained parameter -> its number of updates; 0: it has no state yet."""
    cpu_random: str
    """Random state of the CPU, base64."""
    cuda_random: tuple[str, ...]
    """Random states of the GPUs that the process saw, in its order."""


def write(folder: Path | None, trained: Mapping[str, nn.Parameter], optimizer: SavedState) -> None:
    """Write the state of the `trained` parameters and the random state into the existing `folder`.

    Several ranks call this together: each has a part of the state. Only one of them has a `folder`.
    """
    steps = {name: optimizer.num_updates(parameter) for name, parameter in trained.items()}
    whole = _stepped(steps, trained, optimizer.parts)
    try:
        if folder is not None:
            _write(folder, steps, whole, optimizer.flags)
    finally:
        for _ in whole:  # the others wait until all of it was read, even if the disk is full
            pass


def _write(folder: Path, steps: dict[str, int], parts: Iterable[tuple[str, Tensor]], flags: str) -> None:
    place = folder / FOLDER
    place.mkdir()
    files = list[Path]()
    for shard in _shards(parts):
        files.append(place / f"{len(files)}.safetensors")
        save_file(shard, files[-1])
    for number, file in enumerate(files, start=1):
        file.rename(place / f"optimizer-{number:05}-of-{len(files):05}.safetensors")
    state = _State(
        flags=flags,
        steps=steps,
        cpu_random=_to_text(torch.get_rng_state()),
        cuda_random=tuple(map(_to_text, torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())),
    )
    (place / STATE_NAME).write_text(state.model_dump_json(indent=1) + "\n")


def read(folder: Path, trained: Mapping[str, nn.Parameter], optimizer: SavedState) -> None:
    """Load what `write` wrote; the hyperparameters stay the optimizer's own.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, a damaged one, or one of another kind of optimizer.
        UsageError: it is of other parameters; nothing was loaded.
    """
    place = folder / FOLDER
    try:
        state = _State.model_validate_json((place / STATE_NAME).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no optimizer state to resume from: it was saved with --no-save-optimizer",
            remedy=f"serve it as a model and train that with --model-name {folder}, or take another checkpoint",
        ) from error
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{place / STATE_NAME} cannot be used: it is damaged", remedy="take another checkpoint"
        ) from error
    if state.flags != optimizer.flags:
        raise CheckpointError(
            f"{place} was written with {state.flags}, and this run has {optimizer.flags}: the states differ in kind",
            remedy=f"resume with {state.flags}",
        )
    files = sorted(place.glob("optimizer-*.safetensors"))
    refuse_misfits(str(place), dict.fromkeys(state.steps, "trained"), dict.fromkeys(trained, "trained"))
    found = {key: text for path in files for key, text in headers(path).items()}
    expected = {key: describe(part) for key, part in _stepped(state.steps, trained, optimizer.parts)}
    refuse_misfits(str(place), found, expected)
    optimizer.reset({trained[name]: step for name, step in state.steps.items()})
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  no mapping
                name, _, part = key.rpartition(".")
                optimizer.put(trained[name], {part: file.get_tensor(key)})
    _set_random(state)


def _stepped(
    steps: Mapping[str, int], trained: Mapping[str, nn.Parameter], parts: Callable[[Tensor], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of every parameter that had an update, by their names in the files."""
    for name in (name for name in trained if steps[name]):
        yield from ((f"{name}.{part}", tensor) for part, tensor in parts(trained[name]).items())


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for key, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[key] = tensor.to("cpu", copy=True)  # no two in one memory
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def _set_random(state: _State) -> None:
    torch.set_rng_state(_from_text(state.cpu_random))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, text in enumerate(state.cuda_random[:num_gpus]):
        torch.cuda.set_rng_state(_from_text(text), index)


def _to_text(random_state: Tensor) -> str:
    return base64.b64encode(bytes(random_state.tolist())).decode()


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
