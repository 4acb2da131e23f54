"""AdamW with a float32 master and its moments in host memory, for models whose state does not fit next to the weights.

    gradient, on the device ---> pinned buffer ---> float32 sum, or one chunk
    weight, on the device   <--- pinned buffer <--- float32 master, stepped by torch's fused AdamW

It works chunk by chunk, so that neither side needs a second copy. torch rounds pinned memory up to a power of two;
therefore the buffers have such a size, and nothing larger is pinned.

Several ranks share the work (`sharded.py`): gradients are summed on the device, and each rank has the master and the
moments of its rows.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bridge.optimizers.gradient_hooks import NOTHING, Replicated, each_gradient, norm_of
from bridge.optimizers.moments import FIRST, FLOAT32, SECOND, StateTensor
from bridge.optimizers.sharded import ShardedOptimizer
from bridge.optimizers.slabs import Member, Slab
from bridge.optimizers.split_master import Kind
from bridge.ranks.world import ALONE, Ranks

MASTER = "master"
HOST = torch.device("cpu")
CHUNK_ELEMENTS = 2**22
"""Elements per copy: a buffer takes 16 MiB, and the host's temporaries reuse memory that the allocator keeps."""
BUFFER_BYTES = 4 * CHUNK_ELEMENTS
IN_FLIGHT = 3
"""Maximum number of copies to the host in flight while the host works on earlier ones."""


@dataclass(frozen=True, kw_only=True)
class _WholeMaster(Kind):
    """AdamW's state with a full float32 master per weight."""

    def parts(self, dtype: torch.dtype) -> dict[str, StateTensor]:  # noqa: ARG002  the same for all
        return {MASTER: StateTensor(torch.float32), **self.moments.parts}


KIND = _WholeMaster(name="adamw", moments=FLOAT32)


class OffloadedAdamW(ShardedOptimizer):
    """AdamW with a float32 master in host memory: bit for bit torch's fused AdamW on float32 weights.

    With `streams`, for a single rank only, gradients are summed in host memory as soon as they are complete.
    """

    flags = "--optimizer adamw --offload-optimizer"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        streams: bool = False,
        ranks: Ranks = ALONE,
        replicated: Replicated = NOTHING,
        **hyperparameters: Any,
    ) -> None:
        assert not streams or ranks.world_size == 1, "the configuration allows streams only with one rank"
        super().__init__(params, kind=KIND, ranks=ranks, replicated=replicated, state_device=HOST, **hyperparameters)
        self._streams = streams
        self._streamed: dict[Tensor, Tensor] = {}
        self._is_summed: set[Tensor] = set()
        self._to_host = _ToHost(self._device)
        self._to_device = _ToDevice(self._device)

    def allocate(self) -> None:
        super().allocate()
        if self._streams and not self._streamed:
            self._streamed = {p: torch.empty(p.numel(), dtype=torch.float32).zero_() for p in self._steps}

    @contextmanager
    def releasing(self, *, max_norm: float = math.inf) -> Iterator[None]:  # noqa: ARG002  `step` clips
        """Add each gradient to its sum in host memory as soon as it is complete, then drop it.

        The sums start at zero and cover all backward passes inside; `step` clips them by their global norm.
        """
        assert self._streams, "created without streams"
        self.allocate()
        self._is_summed.clear()
        try:
            with each_gradient(self._steps, self._add):
                yield
        finally:
            self._to_host.finish()

    def global_norm(self) -> float:
        if self._is_summed:
            summed = (parameter for parameter in self._steps if parameter in self._is_summed)
            return norm_of((self._streamed[parameter], self._factors[parameter]) for parameter in summed)
        return super().global_norm()

    def _state(self) -> Iterable[Tensor]:
        return [*super()._state(), *self._streamed.values()]

    def _has_gradient(self, parameter: Tensor) -> bool:
        return parameter in self._is_summed or super()._has_gradient(parameter)

    def _step(self, norm: float, max_norm: float) -> None:
        self.allocate()
        self._num_changed = []
        self._gathered = None
        factor = max_norm / norm if norm > max_norm else 1.0
        ready = self._ready()
        for slab, indices in ready:
            members = [slab.members[index] for index in indices]
            if self._ranks.world_size == 1:
                for member in members:
                    weight = member.parameter.detach()
                    self._step_member(slab, member, weight, self._gradient(member.parameter), factor)
                continue
            with self._rows_of_all(slab, Tensor.detach) as weight_RB:
                for member in members:
                    rows = slab.own(member)
                    weight_rb = weight_RB[rows.start : rows.stop]
                    sum_rb = self._sums[slab][slab.held(rows)]
                    self._step_member(slab, member, weight_rb, sum_rb, factor)
                self._to_host.finish()
        self._to_host.finish()
        self._count(ready)
        self._is_summed.clear()

    def _gradient(self, parameter: Tensor) -> Tensor:
        """Return the gradient on the device, or its sum in host memory."""
        gradient = self._streamed[parameter] if parameter in self._is_summed else parameter.grad
        assert gradient is not None, tuple(parameter.shape)
        return gradient

    def _step_member(self, slab: Slab, member: Member, weight: Tensor, gradient: Tensor, factor: float) -> None:
        """Step this rank's rows of a member; `weight` and `gradient` hold these rows."""
        rows = slab.own(member)
        block = slab.kind.moments.block
        num_elements = min(len(rows) * block, member.parameter.numel() - (rows.start - member.rows.start) * block)
        if num_elements <= 0:  # this rank has no rows, or only padding
            return
        number = self._steps[member.parameter] + 1
        held = [slab.state[name][slab.held(rows)] for name in (MASTER, FIRST, SECOND)]
        weight, master, first, second, gradient = (
            tensor.reshape(-1)[:num_elements] for tensor in (weight, *held, gradient)
        )
        if number == 1:  # not in `allocate`: a checkpoint may be loaded between `allocate` and the first step
            master.copy_(weight)
        for chunk in _chunks(weight, master, first, second, gradient):
            step = partial(self._step_chunk, chunk[:-1], member.group, number, factor)
            if gradient.device == HOST:
                step(chunk[-1])
            else:
                self._to_host.take(chunk[-1], step)

    def _step_chunk(
        self, state: Sequence[Tensor], group: Mapping[str, Any], number: int, factor: float, gradient: Tensor
    ) -> None:
        """Step one chunk of the master with a gradient in host memory, and start sending the weight."""
        weight, master, first, second = state
        gradient = gradient.float() * factor
        before = master.to(weight.dtype, copy=True)
        beta1, beta2 = group["betas"]
        adamw(
            [master], [gradient], [first], [second], [], [torch.tensor(number - 1.0)], fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip
        after = master.to(weight.dtype)
        words = torch.int16 if weight.dtype == torch.bfloat16 else torch.int32
        self._num_changed.append((after.view(words) != before.view(words)).sum())
        self._to_device.send(after, weight)

    def _add(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        is_first = parameter not in self._is_summed
        self._is_summed.add(parameter)
        for total, gradient in _chunks(self._streamed[parameter], parameter.grad.reshape(-1)):
            self._to_host.take(gradient, total.copy_ if is_first else total.add_)


class _ToHost:
    """Copies from the device; some are in flight while the host uses earlier ones."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._free: list[Tensor] = []
        self._in_flight: deque[tuple[torch.cuda.Event, Tensor, Tensor, Callable[[Tensor], object]]] = deque()

    def take(self, tensor: Tensor, use: Callable[[Tensor], object]) -> None:
        """Copy a flat tensor, which may then be freed, and call `use` with the copy, at the latest in `finish`."""
        if not self._is_cuda:
            use(tensor)
            return
        if len(self._in_flight) == IN_FLIGHT:
            self._use_oldest()
        buffer = self._free.pop() if self._free else _pinned()
        copy = buffer.view(tensor.dtype)[: tensor.numel()]
        copy.copy_(tensor, non_blocking=True)
        self._in_flight.append((torch.cuda.current_stream().record_event(), buffer, copy, use))

    def finish(self) -> None:
        while self._in_flight:
            self._use_oldest()

    def _use_oldest(self) -> None:
        event, buffer, copy, use = self._in_flight.popleft()
        event.synchronize()
        use(copy)
        self._free.append(buffer)


class _ToDevice:
    """Copies to the device from one of two buffers, while the host fills the other."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._sent: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def send(self, tensor: Tensor, target: Tensor) -> None:
        """Write a flat tensor into `target` on the device, in stream order."""
        if not self._is_cuda:
            target.copy_(tensor)
            return
        if len(self._sent) < 2:
            buffer = _pinned()
        else:
            event, buffer = self._sent.popleft()
            event.synchronize()
        staged = buffer.view(tensor.dtype)[: tensor.numel()].copy_(tensor)
        target.copy_(staged, non_blocking=True)
        self._sent.append((torch.cuda.current_stream().record_event(), buffer))


def _pinned() -> Tensor:
    return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)


def _chunks(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK_ELEMENTS) for tensor in flat), strict=True)
