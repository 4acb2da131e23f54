"""What several parts of a replica hold alike: it is counted once in a sum over all parts."""

from collections.abc import Mapping, Sequence

from torch import Tensor

Alike = Mapping[Tensor, Sequence[range]]
"""Every trained parameter of which parts hold something alike, in an order that all parts have -> the elements of this
part's that another part counts."""
NOTHING: Alike = {}


def counted(tensor: Tensor, others: Sequence[range], first: int = 0) -> Tensor:
    """Return `tensor`, of a parameter's elements from `first` on, with zeros for those in `others`."""
    if not others:
        return tensor
    kept = tensor.clone()
    for each in others:
        kept.view(-1)[max(0, each.start - first) : max(0, each.stop - first)] = 0
    return kept
