"""What happens to a gradient as soon as it is complete, in the middle of a backward pass: taken away, or widened.

Not covered: what is done with those taken away (`split_adamw.py` steps, `offload.py` adds them up in host memory).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


@contextmanager
def each_gradient(parameters: Iterable[Tensor], take: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `take` with each parameter when a backward pass inside has completed its gradient, and drop the gradient.

    A parameter that is used in several places, such as tied embeddings, is complete once, with the sum.
    """

    @torch.no_grad()
    def taken(parameter: Tensor) -> None:
        take(parameter)
        parameter.grad = None

    with ExitStack() as hooks:
        for parameter in parameters:
            assert parameter.grad is None, "a gradient from before would be added to the first that is released"
            hooks.callback(parameter.register_post_accumulate_grad_hook(taken).remove)
        yield


@contextmanager
def added_in_float32(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Add up in float32 the gradients of the backward passes inside, whatever the type of the parameters.

    The first gradient of a parameter is widened when it is complete, the next ones are added to it where it lies: no
    more than one gradient exists in both types. They stay float32 until they are dropped.
    """

    def widen(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.float()  # the same tensor, where it is float32 already

    with ExitStack() as hooks:
        for parameter in parameters:
            parameter.grad_dtype = None  # torch then adds to a gradient of any type
            hooks.callback(parameter.register_post_accumulate_grad_hook(widen).remove)
        yield
