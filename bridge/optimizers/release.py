"""Gradients that are taken away as soon as they are complete, in the middle of a backward pass.

Not covered: what is done with them (`factory.py` steps, `offload.py` adds them up in host memory).
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
