"""The weights of a replica whose parts lie with several ranks: put together, and compared where parts hold them alike.

Every part of the replica calls these functions together.

Not covered: gradients (`bridge/passes/parallel.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.errors import RankError
from bridge.ranks.world import Ranks
from bridge.weights.cut import Cut, held_by
from bridge.weights.digest import digest

CHUNK = 2**26
"""Elements of a part that are gathered at once."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What each part holds of every parameter, and the ranks that hold them."""

    cuts: Sequence[Mapping[str, Cut]]
    """By part."""
    tp_group: Ranks

    @property
    def own(self) -> Mapping[str, Cut]:
        """What this part holds."""
        return self.cuts[self.tp_group.rank]

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """Return a parameter, or something else of its shape, in host memory, put together from all parts.

        `mine` is this one's. The device holds `CHUNK` elements of each part at a time.
        """
        cuts = [cuts[name] for cuts in self.cuts]
        if all(cut.axis is None for cut in cuts):
            return mine.detach().cpu()
        own = mine.detach().reshape(-1)
        flat = [torch.empty(cut.num_elements, dtype=mine.dtype) for cut in cuts]
        most = max(map(len, flat))
        for start in range(0, most, CHUNK):
            row = own.new_zeros(1, min(CHUNK, most - start))
            row[0, : len(own[start : start + CHUNK])] = own[start : start + CHUNK]
            for place, found in zip(flat, self.tp_group.all_gather(row), strict=True):
                place[start : start + CHUNK] = found[: len(place[start : start + CHUNK])]
        whole = torch.empty(cuts[0].shape, dtype=mine.dtype)
        for cut, part in zip(cuts, flat, strict=True):
            cut.put(whole, part.view(cut.part_shape))
        return whole

    def check_alike(self, parameters: Mapping[str, Tensor]) -> None:
        """Compare what several parts hold.

        Raises:
            RankError: they differ.
        """
        mine = {
            (name, start): digest(tensor)
            for name, parameter in parameters.items()
            for start, tensor in self._shared(name, parameter)
        }
        for part, other in enumerate(self.tp_group.all_gather_object(mine)):
            differing = sorted(
                name for name, start in mine.keys() & other.keys() if mine[name, start] != other[name, start]
            )
            if differing:
                raise RankError(
                    f"parts {self.tp_group.rank} and {part} of a replica differ in {differing[0]}, expected equal"
                    " values: the weights are not saved",
                    remedy="resume from the last checkpoint; and report it, with the model and the GPUs",
                )

    def _shared(self, name: str, parameter: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a parameter that other parts hold, too, with their first index in the whole."""
        cuts = [cuts[name] for cuts in self.cuts]
        axis = next((cut.axis for cut in cuts if cut.axis is not None), None)
        if axis is None:
            yield 0, parameter
        elif axis == 0:
            offset = 0
            for start, length, holders in held_by([cut.runs[0] for cut in cuts]):
                if self.tp_group.rank in holders:
                    if len(holders) > 1:
                        yield start, parameter[offset : offset + length]
                    offset += length
