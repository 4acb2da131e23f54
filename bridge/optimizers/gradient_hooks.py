"""Gradients: their norm, and what is done with each one as soon as a backward pass has completed it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

Replicated = Mapping[Tensor, Sequence[range]]
"""Every trained parameter of which several tensor-parallel ranks hold the same elements, in an order that all ranks
have -> those elements of this rank's that another one counts in a sum over all ranks."""
NOTHING: Replicated = {}


def counted(tensor: Tensor, others: Sequence[range], first: int = 0) -> Tensor:
    """Return `tensor`, of a parameter's elements from `first` on, with zeros for those in `others`."""
    if not others:
        return tensor
    kept = tensor.clone()
    for elements in others:
        kept.view(-1)[max(0, elements.start - first) : max(0, elements.stop - first)] = 0
    return kept


def norm_of(scaled: Iterable[tuple[Tensor, float]]) -> float:
    """Return the L2 norm of all tensors together, each times its factor, accumulated in float32 (waits for the device).

    Tensors of one dtype, device and factor share a few kernels.
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
    """Call `take` with each parameter whose gradient a backward pass inside has completed, then drop the gradient.

    A parameter that is used in several places, such as tied embeddings, is completed once, with the sum.
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
    """Call `take` with the number of each group, in their order, once all gradients of the group are complete.

    Groups that a backward pass inside leaves incomplete, and those after them, follow at the end of the block. So every
    process that has the same groups makes the same calls, whatever its gradients.
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
    """Accumulate the gradients of the backward passes inside in float32, whatever the dtype of the parameters.

    A parameter's first gradient is widened when it is complete and later ones are added to it, so that at most one
    gradient exists in both dtypes. They stay float32 until they are dropped.
    """

    def widen(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.float()  # the same tensor if it is float32 already

    with ExitStack() as hooks:
        for parameter in parameters:
            parameter.grad_dtype = None  # lets torch add to a gradient of any dtype
            hooks.callback(parameter.register_post_accumulate_grad_hook(widen).remove)
        yield
