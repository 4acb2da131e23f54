"""The optimizer's state of a model in parts, as a single process has it: put together for a checkpoint, and cut again.

Moments as codes have a scale for each block, and a part has other blocks than the whole parameter. So they are decoded,
and coded anew to nearest: exactly, where the part's blocks are blocks of the whole.

Every part of every replica calls `parts` together.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.moments import CodedMoments
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.weights.parts import Parts


class WholeState:
    """The state of an optimizer of parts; it is read and written like an optimizer's."""

    def __init__(self, optimizer: ShardedOptimizer, trained: Mapping[str, nn.Parameter], parts: Parts) -> None:
        self.flags = optimizer.flags
        self._optimizer, self._parts = optimizer, parts
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        moments = optimizer.kind.moments
        self._coded = moments if isinstance(moments, CodedMoments) else None
        self._pending: dict[Tensor, dict[str, Tensor]] = {}
        """Codes of parameters that have not come whole yet."""

    @property
    def is_coded(self) -> bool:
        """Whether it is coded anew."""
        return self._coded is not None

    def num_updates(self, parameter: Tensor) -> int:
        return self._optimizer.num_updates(parameter)

    def reset(self, num_updates: Mapping[Tensor, int]) -> None:
        self._optimizer.reset(num_updates)

    def parts(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of the whole parameter in its stored form."""
        name, own = self._names[parameter], self._optimizer.parts(parameter)
        if self._coded is None:
            return {key: self._parts.whole(name, part) for key, part in own.items()}
        first, second = _decoded(self._coded, own, parameter.shape)
        codes = _coded(self._coded, self._parts.whole(name, first), self._parts.whole(name, second))
        return {key: self._parts.whole(name, part) for key, part in own.items() if key not in codes} | codes

    def put(self, parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Copy this part's share of a whole parameter's state into the optimizer's."""
        cut = self._parts.own[self._names[parameter]]
        codes = () if self._coded is None else self._coded.parts
        plain = {key: cut.of(part) for key, part in parts.items() if key not in codes}
        self._optimizer.put(parameter, plain)
        if self._coded is None or len(plain) == len(parts):
            return
        pending = self._pending.setdefault(parameter, {})
        pending |= {key: part for key, part in parts.items() if key in codes}
        if pending.keys() == self._coded.parts.keys():
            first, second = _decoded(self._coded, self._pending.pop(parameter), torch.Size(cut.shape))
            self._optimizer.put(parameter, _coded(self._coded, cut.of(first), cut.of(second)))


def _decoded(moments: CodedMoments, parts: Mapping[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return both moments as float32 of `shape`."""
    num_rows = -(-shape.numel() // moments.block)
    state = {}
    for name, part in moments.parts.items():
        width = moments.block // part.elements
        flat = parts[name].reshape(-1)
        state[name] = functional.pad(flat, (0, num_rows * width - len(flat))).view(num_rows, width)
    first, second = (moment.view(-1)[: shape.numel()].view(shape) for moment in moments.decode(state))
    return first, second


def _coded(moments: CodedMoments, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    """Return both moments in the form in which an optimizer returns a parameter's parts."""
    num_rows = -(-first.numel() // moments.block)
    blocks = [
        functional.pad(each.reshape(-1), (0, num_rows * moments.block - each.numel())).view(num_rows, moments.block)
        for each in (first, second)
    ]
    state = moments.to_nearest(blocks[0], blocks[1])
    made = {}
    for name, part in moments.parts.items():
        flat = state[name].reshape(-1)[: -(-first.numel() // part.elements)]
        made[name] = flat.view(first.shape) if part.elements == 1 else flat
    return made


def of(
    optimizer: InPlaceOptimizer, trained: Mapping[str, nn.Parameter], parts: Parts | None
) -> InPlaceOptimizer | WholeState:
    """Return what a checkpoint is written from and loaded into; `parts` None: the optimizer has whole parameters."""
    if parts is None:
        return optimizer
    assert isinstance(optimizer, ShardedOptimizer), "the library has no parts"
    return WholeState(optimizer, trained, parts)
