"""Save and load what a run needs besides its weights to resume: the state of the optimizer and of torch's RNGs.

Both are in a folder of their own: vLLM loads every safetensors file beside the weights of a small model. Optimizers of
Bridge are saved by the names of their parameters, as a single process has them: tensor-parallel ranks put their parts
together to write them, and cut them again to read them. Any other torch optimizer is saved in its own order.

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
"""The state of an optimizer that is not Bridge's, in its order: for each parameter its name and shape, its state, and
the keys of what lies on the parameter's device."""


class _State(Record):
    flags: str = "--optimizer adamw --no-offload-optimizer"
    """The flags of an optimizer with this kind of state; absent: written before there was another one."""
    steps: dict[str, int]
    """Every trained parameter -> its number of updates; 0: it has no state yet."""
    cpu_random: str
    """Random state of the CPU, base64."""
    cuda_random: tuple[str, ...]
    """Random states of the GPUs that the process saw, in its order."""

    def is_usable(self) -> bool:
        """Return whether torch would take the random states, and the rest could have been written by `write`."""
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = ["cpu", *(f"cuda:{index}" for index in range(num_gpus))]
        try:
            for device, text in zip(devices, (self.cpu_random, *self.cuda_random), strict=False):
                torch.Generator(device).set_state(_from_text(text))
        except (ValueError, RuntimeError, TypeError):
            return False
        return self.flags.isprintable() and all(count >= 0 for count in self.steps.values())


def write(folder: Path | None, trained: Mapping[str, nn.Parameter], optimizer: "InPlaceOptimizer | WholeState") -> None:
    """Write the state of the `trained` parameters and the random state into the existing `folder`.

    Several ranks call this together: each has a part of the state. Only one of them has a `folder`.
    """
    steps = {name: optimizer.num_updates(parameter) for name, parameter in trained.items()}
    tensors = _named_tensors(steps, trained, optimizer.parts)
    try:
        if folder is not None:
            _write_state(folder, optimizer.flags, steps)
            write_shards(folder / FOLDER, "optimizer", tensors, _on_host)
    finally:
        for _ in tensors:  # the other ranks wait until all of it was read, even if the disk is full
            pass


def read(folder: Path, trained: Mapping[str, nn.Parameter], optimizer: "InPlaceOptimizer | WholeState") -> None:
    """Load what `write` wrote; the hyperparameters stay the optimizer's own. Raises as `checked` does."""
    checked(folder, trained, optimizer)()


def checked(
    folder: Path, trained: Mapping[str, nn.Parameter], optimizer: "InPlaceOptimizer | WholeState"
) -> Callable[[], None]:
    """Check what `write` wrote, and return what loads it.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, a damaged one, or one of another kind of optimizer.
        UsageError: it is of other parameters; nothing was loaded.
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
                for key in file.keys():  # noqa: SIM118  no mapping
                    parameter, _, part = key.rpartition(".")
                    optimizer.put(trained[parameter], {part: file.get_tensor(key)})
        _set_random(state)

    return load


def write_foreign(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state of an optimizer that is not Bridge's into the existing `folder`; UsageError if torch cannot."""
    states = [
        (described, *_state_of(parameter, optimizer))
        for described, parameter in zip(_described(model, optimizer), parameters(optimizer), strict=True)
    ]
    for key, value in (entry for _, state, _ in states for entry in state.items()):
        if not (value is None or isinstance(value, Tensor | int | float | str)):
            raise UsageError(
                f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}, expected a tensor or a number",
                hint="save that optimizer yourself, and policy.save(step=STEP) without it",
            )
    _write_state(folder, _kind(optimizer), {})
    torch.save(states, folder / FOLDER / POSITIONS)


def checked_foreign(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Check what `write_foreign` wrote, and return what loads it; raises as `checked` does."""
    path = folder / FOLDER / POSITIONS
    states = _by_position(path) if path.is_file() else []
    if path.is_file() and [which for which, _, _ in states] != [*_described(model, optimizer)]:
        raise CheckpointError(
            f"{path} has other parameters than {type(optimizer).__name__}, or another order",
            hint="make the optimizer as before",
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
    """Return what `write_foreign` wrote; CheckpointError if it is anything else. Nothing in the file is run."""
    try:
        states = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever the bytes are
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
    """The state of an optimizer of tensor-parallel parts, read and written like a single process's.

    Moments as codes have a scale for each block, and a part has other blocks than the whole parameter. So they are
    decoded, and coded again to nearest: exactly, where the part's blocks are blocks of the whole. Every part of every
    replica calls `parts` together.
    """

    def __init__(self, optimizer: ShardedOptimizer, trained: Mapping[str, nn.Parameter], parts: Parts) -> None:
        self.flags = optimizer.flags
        self._optimizer = optimizer
        self._parts = parts
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        moments = optimizer.kind.moments
        self.codes = moments if isinstance(moments, QuantizedMoments) else None
        self._pending: dict[Tensor, dict[str, Tensor]] = {}
        """Codes of parameters whose other codes are still to come."""

    def num_updates(self, parameter: Tensor) -> int:
        return self._optimizer.num_updates(parameter)

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        self._optimizer.reset(num_updates)

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of the whole parameter in its stored form."""
        name = self._names[parameter]
        own = self._optimizer.parts(parameter)
        if self.codes is None:
            return {key: self._parts.whole(name, part) for key, part in own.items()}
        first, second = _decoded(self.codes, own, parameter.shape)
        codes = _coded(self.codes, self._parts.whole(name, first), self._parts.whole(name, second))
        return {key: self._parts.whole(name, part) for key, part in own.items() if key not in codes} | codes

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Copy this part's share of a whole parameter's state into the optimizer's."""
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
            self._optimizer.put(parameter, _coded(self.codes, cut.of(first), cut.of(second)))


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
    """Return the state that an optimizer with these flags wrote; CheckpointError if there is none."""
    path = folder / FOLDER
    try:
        state = _State.model_validate_json((path / STATE_NAME).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no optimizer state to resume from: it was saved with --no-save-optimizer",
            hint=f"serve it as a model and train that with --model-name {folder}, or take another checkpoint",
        ) from error
    except (OSError, ValidationError) as error:
        raise _damaged(path / STATE_NAME) from error
    if not state.is_usable():
        raise _damaged(path / STATE_NAME)
    if state.flags != flags:
        raise CheckpointError(
            f"{path} was written with {state.flags}, and this run has {flags}: the states differ in kind",
            hint=f"resume with {state.flags}",
        )
    return state


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} cannot be used: it is damaged", hint="take another checkpoint")


def _named_tensors(
    steps: Mapping[str, int], trained: Mapping[str, nn.Parameter], parts: Callable[[Tensor], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of every parameter that had an update, by their names in the files."""
    for name in (name for name in trained if steps[name]):
        yield from ((f"{name}.{part}", tensor) for part, tensor in parts(trained[name]).items())


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)  # no two in one memory


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


def _coded(moments: QuantizedMoments, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    """Return both moments in the form in which an optimizer returns a parameter's parts."""
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
    """Yield the name and the shape of each parameter of an optimizer; an empty name if the model does not have it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return ((names.get(id(parameter), ""), [*parameter.shape]) for parameter in parameters(optimizer))


def _state_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a parameter, and the keys of what lies on the parameter's device.

    torch keeps a count of steps on the CPU, unless the optimizer is fused or capturable.
    """
    state = dict(optimizer.state.get(parameter, {}))
    on_device = [key for key, value in state.items() if isinstance(value, Tensor) and value.device == parameter.device]
    if parameter.device.type == "cpu":  # where a count is in either case
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
