"""Gradient norms, and hooks that process each gradient as soon as a backward pass has completed it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

Replicated = Mapping[Tensor, Sequence[range]]
"""Maps each trained parameter with elements on several tensor-parallel ranks, in the same order on all ranks, to the
element ranges of this rank that another rank counts in sums over all ranks."""
NOTHING: Replicated = {}


def counted(tensor: Tensor, others: Sequence[range], first: int = 0) -> Tensor:
    """Return `tensor`, a parameter's elements from `first` on, with zeros at the elements in `others`."""
    if not others:
        return tensor
    kept = tensor.clone()
    for elements in others:
        kept.view(-1)[max(0, elements.start - first) : max(0, elements.stop - first)] = 0
    return kept


def norm_of(scaled: Iterable[tuple[Tensor, float]]) -> float:
    """Return the joint L2 norm of all tensors times their factors, accumulated in float32 (waits for the device).

    Tensors with the same dtype, device and factor share a few kernels.
    """
    similar: dict[tuple[torch.dtype, torch.device, float], list[Tensor]] = {}
    for tensor, factor in scaled:
        similar.setdefault((tensor.dtype, tensor.device, factor), []).append(tensor)
    norms = []
    for (_, _, factor), tensors in similar.items():
        norm_of_each = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
        norms.append(factor * float(torch.linalg.vector_norm(norm_of_each)))
    return math.hypot(*norms)


@contextmanager
def each_gradient(parameters: Iterable[Tensor], take: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `take` with each parameter as soon as its gradient is complete inside the block, then drop the gradient.

    A parameter that is used in several places, such as a tied embedding, is completed once, with the sum.
    """

    @torch.no_grad()
    def taken(parameter: Tensor) -> None:
        take(parameter)
        parameter.grad = None

    with ExitStack() as hooks:
        for parameter in parameters:
            assert parameter.grad is None, "an older gradient would be added to the first one released"
            hooks.callback(parameter.register_post_accumulate_grad_hook(taken).remove)
        yield


@contextmanager
def each_group(groups: Sequence[Sequence[Tensor]], take: Callable[[int], None]) -> Iterator[None]:
    """Call `take` with the index of each group, in order, once all gradients of the group are complete.

    A group that the backward passes inside leave incomplete, and all groups after it, follow at the end of the block.
    Processes with the same groups therefore make the same calls, whatever gradients they have.
    """
    number_of = {parameter: number for number, group in enumerate(groups) for parameter in group}
    missing = [len(group) for group in groups]
    taken = 0

    @torch.no_grad()
    def completed(parameter: Tensor) -> None:
        nonlocal taken
        missing[number_of[parameter]] -= 1
        while taken < len(groups) and not missing[taken]:
            take(taken)
            taken += 1

    with ExitStack() as hooks:
        for parameter in number_of:
            assert parameter.grad is None, "an older gradient would be added to the first one released"
            hooks.callback(parameter.register_post_accumulate_grad_hook(completed).remove)
        yield
    with torch.no_grad():
        for number in range(taken, len(groups)):
            take(number)


@contextmanager
def added_in_float32(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Accumulate the gradients of backward passes inside the block in float32, whatever the parameters' dtype.

    A parameter's first gradient is converted when it is complete, and later ones are added to it, so that at most one
    gradient at a time exists in both dtypes. Gradients stay float32 until they are dropped.
    """

    def widen(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.float()  # a no-op if it is float32 already

    with ExitStack() as hooks:
        for parameter in parameters:
            parameter.grad_dtype = None  # lets torch add to a gradient of any dtype
            hooks.callback(parameter.register_post_accumulate_grad_hook(widen).remove)
        yield
