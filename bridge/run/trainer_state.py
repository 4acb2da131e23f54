"""What a run needs beside its weights to go on from a checkpoint: optimizer state by name, and torch's random state.

It lies in a folder of its own: vLLM loads every file of safetensors that lies beside the weights of a small model.

Not covered: hyperparameters, which the configuration gives anew, the weights, and the order of the problems
(`bridge/rollouts/problems.py`).
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bridge.errors import CheckpointError
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.weights.stored_tensors import describe, headers, refuse_misfits

FOLDER = "optimizer"
STATE_NAME = "state.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest file, and its copy in host memory while it is written; a tensor that is larger has a file of its own."""


class _State(BaseModel):
    """The whole of `state.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    flags: str = "--optimizer adamw --no-offload-optimizer"
    """What gives an optimizer that holds its state in this way; absent: the only one that there was."""
    steps: dict[str, int]
    """Every trained parameter -> the updates that it had; 0: it has no state yet."""
    cpu_random: str
    """Random state of the CPU, base64."""
    cuda_random: tuple[str, ...]
    """Random states of the GPUs that the process saw, in its order."""


def write(folder: Path, trained: Mapping[str, nn.Parameter], optimizer: InPlaceOptimizer) -> None:
    """Write the state of the `trained` parameters and the random state into the existing `folder`."""
    place = folder / FOLDER
    place.mkdir()
    steps = {name: optimizer.num_updates(parameter) for name, parameter in trained.items()}
    shards = list(_shards(_stepped(steps, trained, optimizer.parts)))
    for number, shard in enumerate(shards, start=1):
        on_host = {key: tensor.to("cpu", copy=True) for key, tensor in shard.items()}  # no two in one memory
        save_file(on_host, place / f"optimizer-{number:05}-of-{len(shards):05}.safetensors")
    state = _State(
        flags=optimizer.flags,
        steps=steps,
        cpu_random=_to_text(torch.get_rng_state()),
        cuda_random=tuple(map(_to_text, torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())),
    )
    (place / STATE_NAME).write_text(state.model_dump_json(indent=1) + "\n")


def read(folder: Path, trained: Mapping[str, nn.Parameter], optimizer: InPlaceOptimizer) -> None:
    """Take over what `write` wrote; the hyperparameters stay the optimizer's own.

    Raises:
        CheckpointError: the checkpoint holds no such state, or that of another kind of optimizer.
        UsageError: it is of other parameters; nothing was taken over.
    """
    place = folder / FOLDER
    state = _state(folder)
    if state.flags != optimizer.flags:
        raise CheckpointError(
            f"{place} was written with {state.flags}, and this run has {optimizer.flags}: the states differ in kind",
            remedy=f"go on with {state.flags}",
        )
    files = sorted(place.glob("optimizer-*.safetensors"))
    refuse_misfits(str(place), dict.fromkeys(state.steps, "trained"), dict.fromkeys(trained, "trained"))
    found = {key: text for path in files for key, text in headers(path).items()}
    expected = {key: describe(part) for key, part in _stepped(state.steps, trained, optimizer.parts)}
    refuse_misfits(str(place), found, expected)
    optimizer.reset({trained[name]: step for name, step in state.steps.items()})
    for path in files:
        _take_over(path, trained, optimizer)
    _set_random(state)


def _stepped(
    steps: Mapping[str, int], trained: Mapping[str, nn.Parameter], parts: Callable[[Tensor], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of every parameter that had an update, by the name that they have in the files."""
    for name in (name for name in trained if steps[name]):
        yield from ((f"{name}.{part}", tensor) for part, tensor in parts(trained[name]).items())


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for key, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[key] = tensor
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def _state(folder: Path) -> _State:
    path = folder / FOLDER / STATE_NAME
    try:
        return _State.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no optimizer state to go on from: it was saved with --no-save-optimizer",
            remedy=f"serve it as a model and train that with --model-name {folder}, or take another checkpoint",
        ) from error
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path} cannot be used: it is damaged", remedy="take another checkpoint") from error


def _take_over(path: Path, trained: Mapping[str, nn.Parameter], optimizer: InPlaceOptimizer) -> None:
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  no mapping
            name, _, part = key.rpartition(".")
            optimizer.parts(trained[name])[part].copy_(file.get_tensor(key))


def _set_random(state: _State) -> None:
    torch.set_rng_state(_from_text(state.cpu_random))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, text in enumerate(state.cuda_random[:num_gpus]):
        torch.cuda.set_rng_state(_from_text(text), index)


def _to_text(random_state: Tensor) -> str:
    return base64.b64encode(bytes(random_state.tolist())).decode()


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
