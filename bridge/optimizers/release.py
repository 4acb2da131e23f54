"""Handle each gradient as soon as a backward pass has completed it: take it away, or widen it to float32."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


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
    missing, taken = [len(group) for group in groups], 0

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
