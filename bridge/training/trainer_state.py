"""What a run needs beside its weights to go on from a checkpoint: optimizer state by name, and torch's random state.

It lies in a folder of its own: vLLM loads every file of safetensors that lies beside the weights of a small model.

Not covered: hyperparameters, which the configuration gives anew, the weights, and the data's order (`data.py`).
"""

import base64
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bridge.errors import CheckpointError
from bridge.training.optimizer import SplitMasterAdamW, fresh_state
from bridge.weights.stored_tensors import describe, headers, refuse_misfits

FOLDER = "optimizer"
STATE_NAME = "state.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest file, and its copy in host memory while it is written; a tensor that is larger has a file of its own."""


class _State(BaseModel):
    """The whole of `state.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    steps: dict[str, int]
    """Every trained parameter -> the updates that it had; 0: it has no state yet."""
    cpu_random: str
    """Random state of the CPU, base64."""
    cuda_random: tuple[str, ...]
    """Random states of the GPUs that the process saw, in its order."""


def write(folder: Path, trained: Mapping[str, nn.Parameter], optimizer: SplitMasterAdamW) -> None:
    """Write the state of the `trained` parameters and the random state into the existing `folder`."""
    place = folder / FOLDER
    place.mkdir()
    shards = list(_shards(_tensors(trained, optimizer)))
    for number, shard in enumerate(shards, start=1):
        on_host = {key: tensor.cpu() for key, tensor in shard.items()}
        save_file(on_host, place / f"optimizer-{number:05}-of-{len(shards):05}.safetensors")
    state = _State(
        steps={name: _steps(optimizer, parameter) for name, parameter in trained.items()},
        cpu_random=_to_text(torch.get_rng_state()),
        cuda_random=tuple(map(_to_text, torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())),
    )
    (place / STATE_NAME).write_text(state.model_dump_json(indent=1) + "\n")


def read(folder: Path, trained: Mapping[str, nn.Parameter], optimizer: SplitMasterAdamW) -> None:
    """Take over what `write` wrote; the hyperparameters stay the optimizer's own.

    Raises:
        CheckpointError: the checkpoint holds no such state.
        UsageError: it is of other parameters; nothing was taken over.
    """
    place = folder / FOLDER
    state = _state(folder)
    files = sorted(place.glob("optimizer-*.safetensors"))
    refuse_misfits(str(place), dict.fromkeys(state.steps, "trained"), dict.fromkeys(trained, "trained"))
    found = {key: text for path in files for key, text in headers(path).items()}
    refuse_misfits(str(place), found, {key: describe(tensor) for key, tensor in _fresh(state, trained)})
    optimizer.state.clear()
    for path in files:
        _take_over(path, trained, optimizer)
    for name, step in state.steps.items():
        if step:
            optimizer.state[trained[name]]["step"] = step
    _set_random(state)


def _steps(optimizer: SplitMasterAdamW, parameter: nn.Parameter) -> int:
    return int(optimizer.state[parameter]["step"]) if parameter in optimizer.state else 0


def _tensors(trained: Mapping[str, nn.Parameter], optimizer: SplitMasterAdamW) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in trained.items():
        for part, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{name}.{part}", value


def _fresh(state: _State, trained: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield what the files have to hold, without memory."""
    for name in (name for name, step in state.steps.items() if step):
        for part, value in fresh_state(trained[name].detach().to("meta")).items():
            if isinstance(value, Tensor):
                yield f"{name}.{part}", value


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


def _take_over(path: Path, trained: Mapping[str, nn.Parameter], optimizer: SplitMasterAdamW) -> None:
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  no mapping
            name, _, part = key.rpartition(".")
            parameter = trained[name]
            optimizer.state[parameter][part] = file.get_tensor(key).to(parameter.device, copy=True)


def _set_random(state: _State) -> None:
    torch.set_rng_state(_from_text(state.cpu_random))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, text in enumerate(state.cuda_random[:num_gpus]):
        torch.cuda.set_rng_state(_from_text(text), index)


def _to_text(random_state: Tensor) -> str:
    return base64.b64encode(bytes(random_state.tolist())).decode()


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
