"""Exchange tensors between ranks, as bytes, because neither NCCL nor gloo supports every dtype.

Sums are accumulated in rank order, so that results do not depend on a library's reduction algorithm.

Shape suffixes: R blocks, B elements per block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.errors import BridgeError, RankError
from bridge.ranks.messages import OF_TENSORS, gather_bytes
from bridge.ranks.watch import Watch
from bridge.types import Result


class Tensors:
    """Exchanges tensors with the other ranks of a group."""

    def __init__(self, rank: int, world_size: int, tp_size: int, cp_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.tp_size = tp_size
        self.cp_size = cp_size
        self.is_broken = False
        """Whether a rank exited, so that the others can no longer agree on anything."""
        self._tensors: dist.ProcessGroup | None = None
        """torch's process group for tensors; None: the default group."""
        self._watch: Watch | None = None
        self._all: Any = self
        """The object for this process in the group of all ranks."""
        self._members: Sequence[int] = range(world_size)
        """The global ranks of the group's members."""

    @property
    def pass_size(self) -> int:
        """Number of ranks that compute one pass together."""
        return self.tp_size * self.cp_size

    @property
    def share(self) -> int:
        """Index of the share of a batch that this rank trains on, from 0 to `num_shares` - 1."""
        return self.rank // self.pass_size

    @property
    def num_shares(self) -> int:
        """Number of shares that a batch is split into."""
        return self.world_size // self.pass_size

    def one_per_share(self, results: Sequence[Result]) -> list[Result]:
        """Return the results of the first rank of each share of a batch."""
        return [*results[:: self.pass_size]]

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Return the sum of `numbers` over all ranks, accumulated in rank order."""
        return numbers if self.world_size == 1 else sum_in_order(self._of_every_rank(numbers))

    def all_reduce_shares(self, numbers: Tensor) -> Tensor:
        """Return the sum of `numbers` over the shares of a batch, in order; all ranks of a share have equal numbers."""
        return numbers if self.world_size == 1 else sum_in_order(self._of_every_rank(numbers)[:: self.pass_size])

    def _of_every_rank(self, numbers: Tensor) -> Tensor:
        return self.all_gather(numbers.reshape(1, -1).contiguous()).view(self.world_size, *numbers.shape)

    def all_gather(self, mine: Tensor) -> Tensor:
        """Concatenate every rank's tensor [R, ...] in rank order: [ranks * R, ...]."""
        whole = mine.new_empty((self.world_size * len(mine), *mine.shape[1:]))
        self._exchange(gather_bytes, _bytes(whole), _bytes(mine))
        return whole

    def all_gather_into(self, whole: Tensor) -> None:
        """Fill `whole` [ranks * R, ...] in place; each rank has already filled its own R rows."""
        count = len(whole) // self.world_size
        self._exchange(gather_bytes, _bytes(whole), _bytes(whole[self.rank * count : (self.rank + 1) * count]))

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Return the sum over the ranks of this rank's rows of `whole` [ranks * R, ...], as float32 [R, ...].

        Each rank receives its rows from all others, in their original dtype, and sums them.
        """
        received = torch.empty_like(whole)
        self._exchange(dist.all_to_all_single, _bytes(received), _bytes(whole))
        return sum_in_order(received.view(self.world_size, -1, *whole.shape[1:]))

    def all_to_all(self, sent: Sequence[bytes | bytearray], lengths: Sequence[int]) -> list[bytes]:
        """Send `sent[i]` to rank i, and return the bytes that each rank sent to this one; `lengths` are their sizes."""
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        joined = np.frombuffer(bytearray().join(sent), dtype=np.uint8)
        sizes = [len(content) for content in sent]
        act = partial(dist.all_to_all_single, output_split_sizes=[*lengths], input_split_sizes=sizes)
        self._exchange(act, received, torch.from_numpy(joined))
        return [part.numpy().tobytes() for part in received.split([*lengths])]

    def _exchange(self, act: Callable[..., Any], received: Tensor, sent: Tensor) -> None:
        """Run the collective `act` under the watch."""
        watch = self._all._watch
        assert watch is not None, "a single rank exchanges nothing"
        try:
            with self._errors_of_torch():
                watch.exchange(lambda: act(received, sent, group=self._tensors, async_op=True), self._members)
        except RankError as error:
            setattr(error, OF_TENSORS, True)
            raise

    @contextmanager
    def _errors_of_torch(self) -> Iterator[None]:
        """Convert torch's errors about a lost rank to RankError."""
        world = self._all
        try:
            yield
        except RankError:
            world.is_broken = True
            raise
        except RuntimeError as error:
            if isinstance(error, BridgeError | torch.OutOfMemoryError):
                raise
            world.is_broken = True
            watched = world._watch.reason if world._watch is not None else ""
            reason = watched or str(error).partition(". This is")[0].splitlines()[0]
            raise RankError(
                f"rank {world.rank} of {world.world_size} lost another rank: {reason}",
                hint="continue with --resume; the rank that exited first says why",
            ) from error


def sum_in_order(tensors: Tensor) -> Tensor:
    """Sum tensors [ranks, ...] in order, in float32 or wider."""
    total = tensors[0].float() if tensors.dtype == torch.bfloat16 else tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
