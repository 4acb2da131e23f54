"""Tensor-parallel layers: each rank holds some rows, columns or vocabulary entries, and outputs are summed over ranks.

A *column layer* holds some rows of its weight, and computes some of the outputs. A *row layer* holds some columns, and
computes a partial sum of every output. A *block* spans both: every rank gets the full input, computes with its own
heads, neurons or experts' neurons, and the partial outputs are summed. In the backward pass, the partial gradients of
the input are summed at the block's entry; every rank already has the full gradient of the output.

The sums are functional collectives in module hooks, so that layers can still be copied, compiled and recomputed.
A process group is stored by its name, since a copy of a module can hold a name.

Not covered: how each layer is cut, and where blocks begin (`parallel.py`); the head (`logprobs.py`).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from bridge.passes.recurrence import is_stateful

OWN_NUMBERS = ("num_attention_heads", "num_heads", "num_key_value_heads", "num_key_value_groups")
"""Attributes in which attention modules store their numbers of heads."""
OWN_SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
"""Attributes in which layers with a recurrent state store their sizes."""


@dataclass(frozen=True)
class VocabularyPart:
    """The vocabulary entries (words) that this part holds."""

    start: int
    """Index of the first word."""
    group: str
    """Name of the parts' process group."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a column layer that this part computes."""

    start: int
    """Index of the first output."""
    num_all: int
    """Number of outputs of the full layer."""
    is_first: bool
    """Whether this is the first part that computes these outputs."""
    group: str
    """Name of the parts' process group."""


def reduced(tensor: Tensor, operation: Literal["sum", "max"], group: str) -> Tensor:
    """Return the elementwise sum or maximum over all parts."""
    done: Tensor = collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), operation, group))  # type: ignore[arg-type]
    return done


def enter(block: nn.Module, group: str, *, adds_up: bool) -> None:
    """Sum the gradients of the block's inputs over all parts; with `adds_up`, also its output."""
    block.register_forward_pre_hook(partial(_on_entrance, group), with_kwargs=True)
    if adds_up:
        block.register_forward_hook(partial(_on_exit, group))


def make_row(layer: nn.Linear, group: str) -> None:
    """Turn a linear layer into a row layer; its parameters stay in place."""
    layer.__class__ = RowLinear
    layer.register_forward_hook(partial(_on_exit, group))


def make_vocabulary(embedding: nn.Embedding, words: VocabularyPart) -> None:
    """Let each part look up its own words, and sum the results; the embedding's parameter stays in place."""
    embedding.words = words  # type: ignore[assignment]
    if embedding.padding_idx is not None:
        own = embedding.padding_idx - words.start
        embedding.padding_idx = own if 0 <= own < len(embedding.weight) else None
    embedding.forward = MethodType(_embed, embedding)  # type: ignore[method-assign]


def make_gathering(norm: nn.Module, outputs: Outputs) -> None:
    """Compute a norm over the column layer's outputs of all parts; the norm's parameters stay in place."""
    norm.outputs = outputs  # type: ignore[assignment]
    norm.forward = MethodType(_over_all_parts, norm)


def count_own_heads(block: nn.Module, num_parts: int) -> None:
    """Replace the numbers of heads that a block's code reads by this part's numbers."""
    if is_stateful(block):
        for name in OWN_SIZES:
            if isinstance(size := getattr(block, name, None), int):
                setattr(block, name, size // num_parts)
    config = getattr(block, "config", None)
    num_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return
    all_pairs = getattr(config, "num_key_value_heads", None) or num_heads
    heads = num_heads // num_parts
    pairs = max(1, all_pairs // num_parts)
    block.config = OwnHeads(config, {"num_attention_heads": heads, "num_key_value_heads": pairs})  # type: ignore[assignment]
    for name, number in zip(OWN_NUMBERS, (heads, heads, pairs, heads // pairs), strict=True):
        if isinstance(getattr(block, name, None), int):
            setattr(block, name, number)


class OwnHeads:
    """A view of a model's configuration with this part's numbers of heads.

    Everything else is read from the model's configuration at the time of the access, since the attention is chosen
    after this view is created. In a copy of the model, the view reads the copy's configuration.
    """

    def __init__(self, config: Any, own: Mapping[str, int]) -> None:
        self.__dict__.update(own, _config=config, _own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnHeads":
        return OwnHeads(copy.deepcopy(self.__dict__["_config"], memo), self.__dict__["_own"])


class RowLinear(nn.Linear):
    """A row layer: it returns a partial output without the bias, which is added once, after the sum."""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight)


def _on_entrance(group: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(_entered(group, value) for value in args), {name: _entered(group, kwargs[name]) for name in kwargs}


def _entered(group: str, given: Any) -> Any:
    if isinstance(given, Tensor) and given.is_floating_point() and given.requires_grad:
        return _CopyToParts.apply(given, group)  # type: ignore[no-untyped-call]
    return given


def _on_exit(group: str, module: nn.Module, _: tuple[Any, ...], share: Tensor) -> Tensor:
    output: Tensor = _SumOverParts.apply(share, group)  # type: ignore[no-untyped-call]
    bias = module.bias if isinstance(module, RowLinear) else None
    return output if bias is None else output + bias


class _CopyToParts(torch.autograd.Function):
    """Forward: the identity. Backward: a sum over the parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: str) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduced(gradient, "sum", ctx.group), None


class _SumOverParts(torch.autograd.Function):
    """Forward: a sum over the parts. Backward: the identity."""

    @staticmethod
    def forward(_: Any, share: Tensor, group: str) -> Tensor:
        return reduced(share, "sum", group)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _embed(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    """Look up this part's words, with zeros for all others, and sum over the parts."""
    words = embedding.words
    assert isinstance(words, VocabularyPart)
    own = ids - words.start
    is_own = (own >= 0) & (own < len(embedding.weight))
    rows: Tensor = type(embedding).forward(embedding, torch.where(is_own, own, 0))
    share = torch.where(is_own.unsqueeze(-1), rows, 0.0)
    output: Tensor = _SumOverParts.apply(share, words.group)  # type: ignore[no-untyped-call]
    return output


def _over_all_parts(norm: nn.Module, own: Tensor) -> Tensor:
    """Normalize the outputs of all parts, and return this part's; each output is taken from the first part that has it.

    Each part has only a partial gradient, so the backward pass sums the gradients of all parts.
    """
    outputs = norm.outputs
    num_own = own.shape[-1]
    assert isinstance(outputs, Outputs)
    if num_own == outputs.num_all:  # a norm outside sharded layers
        return type(norm).forward(norm, own)  # type: ignore[no-any-return]
    filled = nn.functional.pad(
        own * float(outputs.is_first), (outputs.start, outputs.num_all - outputs.start - num_own)
    )
    whole: Tensor = _SumOverParts.apply(_CopyToParts.apply(filled, outputs.group), outputs.group)  # type: ignore[no-untyped-call]
    normed: Tensor = type(norm).forward(norm, whole)
    return normed.narrow(-1, outputs.start, num_own)
