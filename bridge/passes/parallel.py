"""Tensor parallelism derived from the weight layout: the axis along which a parameter is cut decides the layer's kind.

| what is cut | kind |
|---|---|
| rows of a linear layer, its bias, channels of a convolution, or any other parameter per head | column |
| columns of a linear layer | row |
| the second or third axis of experts' weights | column or row, in a module that is a block itself |
| rows of the embedding or of the head | vocabulary |

A norm over all outputs of a column layer, whose weight every part holds in full, gathers these outputs first.
A block is the smallest module that holds both a column and a row layer. There is no table of families. That the result
equals the full model's is checked before training (`parallel_proof.py`).

The same rule covers adapters: B is a column layer beside a column layer, and A is a row layer beside a row layer. The B
after such an A is replicated, like a bias, since it is applied after the sum.

Not covered: what cut layers compute (`cut_layers.py`).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes import cut_layers, layers
from bridge.passes.cut_layers import Outputs, VocabularyPart
from bridge.weights.model_folder import state
from bridge.weights.rank_parts import Cut, Shared, shared_elements

Cuts = Mapping[str, Cut]
"""The share of each Hugging Face parameter that one tensor-parallel rank holds."""
Axes = Mapping[str, int | None]
"""The axis along which each parameter is cut; None: every part holds the full parameter."""
COLUMN = "column"
ROW = "row"
BOTH = {COLUMN, ROW}
FLAT_ELEMENTS = 2**26
"""Maximum number of gradient elements combined in one collective, in float32."""
ONE_PART = "serve it with --tensor-parallel-size 1, or train it with --mode none"


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a model that holds one part of the weights computes together with the replica's other parts."""

    cuts: Sequence[Cuts]
    """One mapping per tensor-parallel rank."""
    part: int
    """Index of this rank's part."""
    group: str
    """The name of the parts' process group."""
    shared: Sequence[Shared]
    """Parameters that several ranks hold, in the same order on every rank."""
    whole: PreTrainedModel
    """The uncut model in float32, on the meta device."""
    head_words: VocabularyPart | None
    """The vocabulary entries (words) of this part's head; None: all of them."""

    @torch.no_grad()
    def combine(self, gradients: Mapping[str, Tensor]) -> None:
        """Make the gradients of shared elements equal on all parts that hold them, in place.

        Partial gradients are summed; complete ones are replaced by the first part's. Every part must call this with
        gradients of the same parameters. It runs one collective, or a few for large models.
        """
        batch = list[Shared]()
        num_elements = 0
        for shared in self.shared:
            if shared.name in gradients:
                batch.append(shared)
                num_elements += shared.num_elements(self.cuts[0][shared.name])
            if num_elements > FLAT_ELEMENTS:
                self._combine_at_once(batch, gradients)
                batch = []
                num_elements = 0
        if batch:
            self._combine_at_once(batch, gradients)

    def _combine_at_once(self, batch: Sequence[Shared], gradients: Mapping[str, Tensor]) -> None:
        cuts = self.cuts[self.part]
        device = gradients[batch[0].name].device
        sizes = [shared.num_elements(cuts[shared.name]) for shared in batch]
        shares = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        held = (shared for shared in batch if self.part in shared.parts)
        own = {shared: shared.of(gradients[shared.name], cuts[shared.name]) for shared in held}
        for shared, flat in zip(batch, shares.split(sizes), strict=True):
            if shared in own and (self.part == shared.parts[0] or shared.adds_up):
                flat.view(own[shared].shape).copy_(own[shared])
        for shared, flat in zip(batch, cut_layers.reduced(shares, "sum", self.group).split(sizes), strict=True):
            if shared in own:
                own[shared].copy_(flat.view(own[shared].shape))


def divide(model: PreTrainedModel, cuts: Sequence[Cuts], group: dist.ProcessGroup) -> Parallel:
    """Make the model compute with its part of the weights. Call it on every part, once the weights are attached.

    `cuts` has one mapping per part, in the order of the ranks in `group`.
    """
    part = dist.get_rank(group)
    group_name = group.group_name
    whole = _whole(model, cuts[part])
    axes = {parameter: _cut_axis(parameter, [of_part[parameter] for of_part in cuts]) for parameter in cuts[0]}
    kinds = _kinds(model, axes, cuts[part])
    blocks = _blocks(model, kinds)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if embedding_words := _words(model, embedding, axes, cuts, part, group_name):
        cut_layers.make_vocabulary(embedding, embedding_words)
    head_words = _words(model, head, axes, cuts, part, group_name)
    for norm, outputs in _norms(model, axes, cuts, blocks, part, group_name):
        cut_layers.make_gathering(norm, outputs)
    rows = [owner for owner, kind in kinds.items() if kind == {ROW}]
    for owner in rows:
        cut_layers.make_row(model.get_submodule(owner), group_name)
    for path in blocks:
        block = model.get_submodule(path)
        cut_layers.enter(block, group_name, adds_up=kinds.get(path) == BOTH)
        cut_layers.count_own_heads(block, len(cuts))
    behind = {f"{owner}.bias" for owner in rows}
    behind |= {f"{owner.replace('.lora_A.', '.lora_B.')}.weight" for owner in rows}
    inside = {name for name in axes if name not in behind and not blocks.isdisjoint(_above(name))}
    return Parallel(
        cuts=cuts,
        part=part,
        group=group_name,
        shared=[*shared_elements(cuts, inside)],
        whole=whole,
        head_words=head_words,
    )


def _whole(model: PreTrainedModel, cuts: Cuts) -> PreTrainedModel:
    empty = dict[int, Tensor]()
    for name, held in state(model).items():
        whole = torch.empty(cuts[name].shape, device="meta")
        empty[id(held)] = nn.Parameter(whole) if isinstance(held, nn.Parameter) else whole
    return copy.deepcopy(model, empty).float()


def _cut_axis(name: str, cuts: Sequence[Cut]) -> int | None:
    """Return the axis along which a parameter is cut; None: every part holds the full parameter."""
    (shape,) = {cut.shape for cut in cuts}
    axes = {axis for cut in cuts for axis, size in enumerate(cut.part_shape) if size != shape[axis]}
    if len(axes) > 1:
        raise _refusal(name, f"is cut along {len(axes)} axes")
    return next(iter(axes), None)


def _kinds(model: PreTrainedModel, axes: Axes, cuts: Cuts) -> dict[str, set[str]]:
    """Return the kinds of the cut parameters in each decoder module that has any, by module name; not the embedding."""
    decoder = set(model.get_decoder().modules()) - {model.get_input_embeddings()}
    kinds = dict[str, set[str]]()
    for name, axis in axes.items():
        owner, _, _ = name.rpartition(".")
        module = model.get_submodule(owner)
        if axis is None or module not in decoder:
            continue
        num_axes = len(cuts[name].shape)
        if num_axes == 3 and axis == 0 and type(module) is not nn.Conv1d:
            raise _refusal(name, "is cut by experts: expert parallelism is not supported")
        is_row = axis == num_axes - 1 and (type(module) is nn.Linear or num_axes == 3)
        kinds.setdefault(owner, set()).add(ROW if is_row and num_axes > 1 else COLUMN)
    return kinds


def _blocks(model: PreTrainedModel, kinds: Mapping[str, set[str]]) -> set[str]:
    """Return the names of the blocks: for each cut module, the smallest enclosing module that holds both kinds."""
    whole = {id(layer) for layer in layers.decoder_layers(model)}
    layer_names = {name for name, module in model.named_modules() if id(module) in whole}
    under = dict[str, set[str]]()
    for owner, kind in kinds.items():
        for path in (owner, *_above(owner)):
            under.setdefault(path, set()).update(kind)
    blocks = set[str]()
    for owner, kind in kinds.items():
        inside = (path for path in (owner, *_above(owner)) if not layer_names.isdisjoint(_above(path)))
        around = [path for path in inside if under[path] == BOTH]
        if not around:
            raise _refusal(owner, f"is a {next(iter(kind))} layer without its counterpart")
        blocks.add(around[0])
    for owner in kinds:
        inner, *outer = (path for path in (owner, *_above(owner)) if path in blocks)
        if outer:
            raise _refusal(outer[0], f"is cut, and so is {inner} inside it; expected only one of them to be cut")
    return blocks


def _norms(
    model: PreTrainedModel,
    axes: Axes,
    cuts: Sequence[Cuts],
    blocks: set[str],
    part: int,
    group: str,
) -> Iterator[tuple[nn.Module, Outputs]]:
    """Yield each norm that may normalize all outputs of a column layer in its block, and this part's outputs."""
    for name, axis in axes.items():
        owner, _, leaf = name.rpartition(".")
        block = next((path for path in _above(owner) if path in blocks), None)
        if axis is not None or leaf != "weight" or block is None or len(cuts[part][name].shape) != 1:
            continue
        size = cuts[part][name].shape[0]
        columns = [column for column in axes if column.startswith(f"{block}.") and axes[column] == 0]
        same_size = (column for column in columns if cuts[part][column].shape[0] == size)
        held = {tuple(of_part[column].runs[0] for of_part in cuts) for column in same_size}
        by_part = held.pop() if len(held) == 1 else ()
        if by_part and all(len(runs) == 1 for runs in by_part):
            start, _ = by_part[part][0]
            yield model.get_submodule(owner), Outputs(start, size, by_part.index(by_part[part]) == part, group)


def _above(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module or parameter, innermost first."""
    while name:
        name, _, _ = name.rpartition(".")
        yield name


def _words(
    model: PreTrainedModel, module: nn.Module, axes: Axes, cuts: Sequence[Cuts], part: int, group: str
) -> VocabularyPart | None:
    """Return the vocabulary entries of the embedding or the head that this part holds; None: all of them."""
    name = next(parameter_name for parameter_name, parameter in model.named_parameters() if parameter is module.weight)
    if axes[name] is None:
        return None
    runs = [of_part[name].runs[0] for of_part in cuts]
    if axes[name] != 0 or any(len(words) != 1 or not words[0][1] for words in runs):
        raise _refusal(name, "is cut in an unsupported way; expected one range of consecutive rows on each part")
    return VocabularyPart(start=runs[part][0][0], group=group)


def _refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} {reason}", hint=ONE_PART)
