"""Save and load the state of the optimizer and of torch's RNGs, which a run needs to resume in addition to its weights.

Both are stored in a separate folder, because vLLM loads every safetensors file next to the weights of a small model.
The state of Bridge's optimizers is saved by parameter name, in the form that a single process has: tensor-parallel
ranks join their parts to write it, and split it to read it. The state of any other torch optimizer is saved in the
order of its parameters.

Not covered: hyperparameters, which come from the configuration, and the order of the problems
(`bridge/rollouts/problems.py`).
"""

import base64
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from bridge.errors import CheckpointError, UsageError
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.moments import QuantizedMoments
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.server.manifest import Record
from bridge.weights.rank_parts import Parts
from bridge.weights.stored_tensors import describe, headers, refuse_misfits, write_shards

FOLDER = "optimizer"
STATE_NAME = "state.json"
POSITIONS = "by_position.pt"
"""File with the state of an optimizer that is not Bridge's, in the order of its parameters: for each parameter its name
and shape, its state, and the keys of the tensors on the parameter's device."""


class _State(Record):
    flags: str = "--optimizer adamw --no-offload-optimizer"
    """The flags that select an optimizer with this kind of state; the default applies to files without this field."""
    steps: dict[str, int]
    """Name of each trained parameter -> its number of updates; 0 means that it has no state yet."""
    cpu_random: str
    """RNG state of the CPU, in base64."""
    cuda_random: tuple[str, ...]
    """RNG states of the GPUs visible to the process, in order."""

    def is_usable(self) -> bool:
        """Return whether torch accepts the RNG states, and the other fields have valid values."""
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = ["cpu", *(f"cuda:{index}" for index in range(num_gpus))]
        try:
            for device, text in zip(devices, (self.cpu_random, *self.cuda_random), strict=False):
                torch.Generator(device).set_state(_from_text(text))
        except (ValueError, RuntimeError, TypeError):
            return False
        return self.flags.isprintable() and all(count >= 0 for count in self.steps.values())


def write(folder: Path | None, trained: Mapping[str, nn.Parameter], optimizer: "InPlaceOptimizer | WholeState") -> None:
    """Write the optimizer state of the `trained` parameters and the RNG state into the existing `folder`.

    All ranks that hold a part of the state call this together. Only one of them passes a `folder`.
    """
    steps = {name: optimizer.num_updates(parameter) for name, parameter in trained.items()}
    tensors = _named_tensors(steps, trained, optimizer.parts)
    try:
        if folder is not None:
            _write_state(folder, optimizer.flags, steps)
            write_shards(folder / FOLDER, "optimizer", tensors, _on_host)
    finally:
        for _ in tensors:  # the other ranks wait until all tensors are consumed, even if the disk is full
            pass


def read(folder: Path, trained: Mapping[str, nn.Parameter], optimizer: "InPlaceOptimizer | WholeState") -> None:
    """Load what `write` wrote; the optimizer keeps its own hyperparameters. Raises the errors of `checked`."""
    checked(folder, trained, optimizer)()


def checked(
    folder: Path, trained: Mapping[str, nn.Parameter], optimizer: "InPlaceOptimizer | WholeState"
) -> Callable[[], None]:
    """Check what `write` wrote, and return a function that loads it.

    Raises:
        CheckpointError: the optimizer state is missing or damaged, or belongs to a different kind of optimizer.
        UsageError: it belongs to different parameters; nothing was loaded.
    """
    state = _read_state(folder, optimizer.flags)
    path = folder / FOLDER
    files = sorted(path.glob("optimizer-*.safetensors"))
    refuse_misfits(str(path), dict.fromkeys(state.steps, "trained"), dict.fromkeys(trained, "trained"))
    stored = {key: text for file in files for key, text in headers(file).items()}
    expected = {key: describe(part) for key, part in _named_tensors(state.steps, trained, optimizer.parts)}
    refuse_misfits(str(path), stored, expected)

    def load() -> None:
        optimizer.reset({trained[name]: step for name, step in state.steps.items()})
        for name in files:
            with safe_open(name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  `file` is not a mapping
                    parameter, _, part = key.rpartition(".")
                    optimizer.put(trained[parameter], {part: file.get_tensor(key)})
        _set_random(state)

    return load


def write_foreign(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state of an optimizer that is not Bridge's into the existing `folder`.

    Raises:
        UsageError: the state holds values that cannot be saved.
    """
    states = [
        (described, *_state_of(parameter, optimizer))
        for described, parameter in zip(_described(model, optimizer), parameters(optimizer), strict=True)
    ]
    for key, value in (entry for _, state, _ in states for entry in state.items()):
        if not (value is None or isinstance(value, Tensor | int | float | str)):
            raise UsageError(
                f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}, expected a tensor or a number",
                hint="save this optimizer's state yourself, and call policy.save(step=STEP) without the optimizer",
            )
    _write_state(folder, _kind(optimizer), {})
    torch.save(states, folder / FOLDER / POSITIONS)


def checked_foreign(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Check what `write_foreign` wrote, and return a function that loads it; raises the errors of `checked`."""
    path = folder / FOLDER / POSITIONS
    states = _by_position(path) if path.is_file() else []
    if path.is_file() and [which for which, _, _ in states] != [*_described(model, optimizer)]:
        raise CheckpointError(
            f"the parameters in {path} differ from those of {type(optimizer).__name__}, or are in a different order",
            hint="create the optimizer with the same parameters, in the same order as before",
        )
    state = _read_state(folder, _kind(optimizer))

    def load() -> None:
        for parameter, (_, stored, on_device) in zip(parameters(optimizer), states, strict=True):
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if key in on_device else value for key, value in stored.items()
            }
        _set_random(state)

    return load


def _by_position(path: Path) -> list[tuple[Any, dict[str, Any], list[str]]]:
    """Read what `write_foreign` wrote, without running code from the file; CheckpointError if it is anything else."""
    try:
        states = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # the file may hold any bytes
        raise _damaged(path) from error
    num_bytes = path.stat().st_size
    entries: list[Any] = states if isinstance(states, list) else [None]
    if not all(isinstance(entry, tuple | list) and len(entry) == 3 for entry in entries):
        raise _damaged(path)
    for _, state, on_device in entries:
        if not isinstance(state, dict) or not isinstance(on_device, list) or not {*map(str, on_device)} <= state.keys():
            raise _damaged(path)
        for value in state.values():
            is_known = value is None or isinstance(value, Tensor | int | float | str)
            if not is_known or (isinstance(value, Tensor) and value.numel() * value.itemsize > num_bytes):
                raise _damaged(path)
    return [(described, state, on_device) for described, state, on_device in entries]


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class WholeState:
    """The optimizer state of tensor-parallel parts, read and written in the form that a single process has.

    Quantized moments have one scale per block, and the blocks of a part differ from those of the full parameter. So
    they are decoded, and quantized again with rounding to nearest. This is exact where the blocks of the part are also
    blocks of the full parameter. All ranks of all replicas call `parts` together.
    """

    def __init__(self, optimizer: ShardedOptimizer, trained: Mapping[str, nn.Parameter], parts: Parts) -> None:
        self.flags = optimizer.flags
        self._optimizer = optimizer
        self._parts = parts
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        moments = optimizer.kind.moments
        self.codes = moments if isinstance(moments, QuantizedMoments) else None
        self._pending: dict[Tensor, dict[str, Tensor]] = {}
        """Quantized values of parameters for which some have not been read yet."""

    def num_updates(self, parameter: Tensor) -> int:
        return self._optimizer.num_updates(parameter)

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        self._optimizer.reset(num_updates)

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of the full parameter in its stored form."""
        name = self._names[parameter]
        own = self._optimizer.parts(parameter)
        if self.codes is None:
            return {key: self._parts.whole(name, part) for key, part in own.items()}
        first, second = _decoded(self.codes, own, parameter.shape)
        codes = _quantized(self.codes, self._parts.whole(name, first), self._parts.whole(name, second))
        return {key: self._parts.whole(name, part) for key, part in own.items() if key not in codes} | codes

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of a full parameter's state into the optimizer."""
        cut = self._parts.own[self._names[parameter]]
        codes = () if self.codes is None else self.codes.parts
        plain = {key: cut.of(part) for key, part in parts.items() if key not in codes}
        self._optimizer.put(parameter, plain)
        if self.codes is None or len(plain) == len(parts):
            return
        pending = self._pending.setdefault(parameter, {})
        pending |= {key: part for key, part in parts.items() if key in codes}
        if pending.keys() == self.codes.parts.keys():
            first, second = _decoded(self.codes, self._pending.pop(parameter), torch.Size(cut.shape))
            self._optimizer.put(parameter, _quantized(self.codes, cut.of(first), cut.of(second)))


def _write_state(folder: Path, flags: str, steps: dict[str, int]) -> None:
    (folder / FOLDER).mkdir()
    state = _State(
        flags=flags,
        steps=steps,
        cpu_random=_to_text(torch.get_rng_state()),
        cuda_random=tuple(map(_to_text, torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())),
    )
    (folder / FOLDER / STATE_NAME).write_text(state.model_dump_json(indent=1) + "\n")


def _read_state(folder: Path, flags: str) -> _State:
    """Return the saved state; CheckpointError if it is missing, damaged, or from an optimizer with different flags."""
    path = folder / FOLDER
    try:
        state = _State.model_validate_json((path / STATE_NAME).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no optimizer state to resume from: it was saved with --no-save-optimizer",
            hint=f"serve it as a model and train that with --model-name {folder}, or use a different checkpoint",
        ) from error
    except (OSError, ValidationError) as error:
        raise _damaged(path / STATE_NAME) from error
    if not state.is_usable():
        raise _damaged(path / STATE_NAME)
    if state.flags != flags:
        raise CheckpointError(
            f"{path} was written with {state.flags}, but this run has {flags}: their states are incompatible",
            hint=f"resume with {state.flags}",
        )
    return state


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} cannot be used: it is damaged", hint="use a different checkpoint")


def _named_tensors(
    steps: Mapping[str, int], trained: Mapping[str, nn.Parameter], parts: Callable[[Tensor], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the state tensors of each parameter that has been updated, with their names in the files."""
    for name in (name for name in trained if steps[name]):
        yield from ((f"{name}.{part}", tensor) for part, tensor in parts(trained[name]).items())


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)  # safetensors refuses tensors that share memory


def _decoded(moments: QuantizedMoments, parts: Mapping[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return both moments as float32 of `shape`."""
    num_rows = -(-shape.numel() // moments.block)
    state = {}
    for name, part in moments.parts.items():
        width = moments.block // part.elements
        flat = parts[name].reshape(-1)
        state[name] = functional.pad(flat, (0, num_rows * width - len(flat))).view(num_rows, width)
    first, second = (moment.view(-1)[: shape.numel()].view(shape) for moment in moments.decode(state))
    return first, second


def _quantized(moments: QuantizedMoments, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    """Quantize both moments; the result has the form of an optimizer's `parts`."""
    num_rows = -(-first.numel() // moments.block)
    blocks = [
        functional.pad(moment.reshape(-1), (0, num_rows * moments.block - moment.numel())).view(num_rows, moments.block)
        for moment in (first, second)
    ]
    state = moments.to_nearest(blocks[0], blocks[1])
    parts = {}
    for name, part in moments.parts.items():
        flat = state[name].reshape(-1)[: -(-first.numel() // part.elements)]
        parts[name] = flat.view(first.shape) if part.elements == 1 else flat
    return parts


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"an optimizer {type(optimizer).__qualname__}"


def _described(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and shape of each parameter of an optimizer; the name is empty if the model does not have it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return ((names.get(id(parameter), ""), [*parameter.shape]) for parameter in parameters(optimizer))


def _state_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a parameter, and the keys of the tensors on the parameter's device.

    torch keeps step counts on the CPU, unless the optimizer is fused or capturable.
    """
    state = dict(optimizer.state.get(parameter, {}))
    on_device = [key for key, value in state.items() if isinstance(value, Tensor) and value.device == parameter.device]
    if parameter.device.type == "cpu":  # step counts are on the CPU, too
        on_device = [key for key in on_device if state[key].shape == parameter.shape]
    return state, on_device


def _set_random(state: _State) -> None:
    torch.set_rng_state(_from_text(state.cpu_random))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, text in enumerate(state.cuda_random[:num_gpus]):
        torch.cuda.set_rng_state(_from_text(text), index)


def _to_text(random_state: Tensor) -> str:
    return base64.b64encode(bytes(random_state.tolist())).decode()


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
