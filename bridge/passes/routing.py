"""Router replay: a mixture of experts computes with the experts that the server chose for each token.

Server and trainer round differently, so that a token with two nearly equal experts may go to different ones, and its
log-probability then differs by far more than rounding explains. With replay every layer uses the server's choice. The
layer still computes the weights of these experts itself, and their gradient reaches its router.

Routers of all families choose experts with `torch.topk` over their scores. In a block with experts, that call returns
the given choice, in the server's order, with the scores that the router computed for it. A trial forward pass finds out
which call it is. A router that first chooses groups of experts gets the groups of the given experts: DeepSeek-V2 sets
the scores of all other groups to 0, so a given expert outside the chosen groups would have no weight.

Not covered: how the server reports its choice (`bridge_patches/routed_experts.py`).
Source: "Rollout Routing Replay" (arXiv 2510.11370).
Shape suffixes: T tokens, L layers with experts, K experts of a token, E experts of a layer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from bridge.errors import BridgeError, UnsupportedModelError, with_class

UNKNOWN = -1
"""Marks an expert that was not recorded: the router chooses."""
NUM_TOKENS = 16
"""Tokens of the example with which a model is checked."""
SAME = 0.01
"""Largest difference when the router's own choice is given, as a share of the difference when a wrong one is given."""
HINT = "--no-router-replay"
CHOICES = (torch.topk, torch.Tensor.topk)
HELD = ("forward", "num_choices", "chosen_TK", "own_TK", "num_rerouted", "tokens_E")
"""Attributes of a block while it replays given experts."""
MISFITS = (AttributeError, TypeError, ValueError, LookupError, NotImplementedError)
"""Errors raised by a model whose router has an unsupported signature."""


class Replay(TorchFunctionMode):
    """Replaces the choice of one block's router by the given one; if none is given, records the router's own."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self._block = block
        self._other_groups_T: Tensor | None = None
        """For each token, whether the router would have chosen different groups; None: it does not choose groups."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        block = self._block
        scores_TE = _scores(*args, **(kwargs or {})) if func in CHOICES else None
        if scores_TE is None:
            return result
        if block.chosen_TK is None:
            block.num_choices = scores_TE.shape[1]  # the last call counts: groups are chosen before experts
            block.own_TK = result.indices
        elif block.num_choices == scores_TE.shape[1] and block.chosen_TK.shape == result.indices.shape:
            taken = _taken(block, scores_TE, result.values, result.indices, self._other_groups_T)
            return torch.return_types.topk(taken)
        elif _are_groups(block, scores_TE):
            groups_TR, self._other_groups_T = _groups_of_given(block, scores_TE, result.indices)
            return torch.return_types.topk((scores_TE.gather(1, groups_TR), groups_TR))
        return result


class RouterReplay:
    """The blocks of a model that compute with given experts, layer by layer. Create it with `of` or `if_known`.

    The blocks' `forward` is `_replayed` until `release`.
    """

    def __init__(self, model: PreTrainedModel, shape: tuple[int, int] | None) -> None:
        self._device = model.device
        self._blocks = _blocks(model)
        for block in self._blocks:
            block.chosen_TK = None
            block.own_TK = None
            block.num_rerouted = torch.zeros(2, dtype=torch.int64, device=model.device)
            block.forward = MethodType(_replayed, block)
        try:
            self._prove(model, shape)
        except BaseException:
            self.release()
            raise

    @classmethod
    def of(cls, model: PreTrainedModel, shape: tuple[int, int] | None = None) -> Self | None:
        """Make `model` compute with given experts from now on; None: the model has no experts.

        `shape` is the server's number of layers with experts, and of experts per token; None: it reports neither.

        Raises:
            UnsupportedModelError: the routers choose experts in an unsupported way, their numbers differ from the
                server's, or the model cannot be called like other language models.
        """
        return None if shape is None and not _blocks(model) else cls(model, shape)

    @classmethod
    def if_known(cls, model: PreTrainedModel, shape: tuple[int, int] | None = None) -> Self | None:
        """Like `of`, but return None if the model's routers are not supported."""
        with suppress(UnsupportedModelError):
            return cls.of(model, shape)
        return None

    def release(self) -> None:
        """Let the routers choose again."""
        for block in self._blocks:
            for name in HELD:
                vars(block).pop(name, None)

    def choose(self, experts_TX: Tensor | None, num_tokens: int) -> None:
        """Set the experts of the next forward pass and its backward pass; None: the routers choose.

        Shape: [T, L, K] or [T, L * K] integers, `UNKNOWN` where unknown.
        """
        for number, block in enumerate(self._blocks):
            num_chosen = block.own_TK.shape[1]
            if experts_TX is None:  # a tensor instead of None, so that layers are compiled only once
                block.chosen_TK = block.num_rerouted.new_full((num_tokens, num_chosen), UNKNOWN, dtype=torch.int16)
            else:
                of_layers_TLK = experts_TX.view(num_tokens, len(self._blocks), num_chosen)
                block.chosen_TK = of_layers_TLK[:, number].short().contiguous()

    def watched(self, compute: Callable[[], object]) -> Tensor:
        """Run a pass and return the experts that its routers choose, in the layout of `choose`: [T, L * K]."""
        for block in self._blocks:
            block.chosen_TK = None
        compute()
        return torch.cat([block.own_TK for block in self._blocks], dim=1)

    def rerouted(self) -> Tensor:
        """Since the last call: how many given choices were not the router's own, and how many were given: [2] int64."""
        total = torch.zeros(2, dtype=torch.int64, device=self._device)
        for block in self._blocks:
            total += block.num_rerouted
            block.num_rerouted.zero_()
        return total

    def expert_tokens(self) -> Tensor:
        """Return how many tokens each expert was given since the last call: [L, E] int64."""
        tokens_LE = torch.stack([block.tokens_E for block in self._blocks])
        for block in self._blocks:
            block.tokens_E.zero_()
        return tokens_LE

    def _prove(self, model: PreTrainedModel, shape: tuple[int, int] | None) -> None:
        """Check on an example that the blocks choose as many experts as the server does, and use the given ones."""
        name = type(model).__name__
        blocks = self._blocks
        with refusing_misfits(model, HINT):
            plain_TH = _hidden(model)
        own = [block.own_TK for block in blocks if block.own_TK is not None]
        sizes = sorted({own_TK.shape[1] for own_TK in own})
        if len(own) != len(blocks) or len(sizes) != 1 or shape not in {None, (len(own), *sizes)}:
            of_server = f", and the server {shape[1]} in {shape[0]}" if shape else ""
            raise UnsupportedModelError(
                f"{name} chooses {sizes} experts per token in {len(own)} of {len(blocks)} layers with experts"
                f"{of_server}",
                hint=HINT,
            )
        if len(counts := sorted({block.num_choices for block in blocks})) > 1:
            raise UnsupportedModelError(
                f"{name} has different numbers of experts per layer ({counts}); they must all be equal", hint=HINT
            )
        for block in blocks:
            block.tokens_E = torch.zeros(block.num_choices, dtype=torch.int64, device=model.device)
        own_TLK = torch.stack(own, dim=1)
        self.choose(own_TLK, NUM_TOKENS)
        same_TH = _hidden(model)
        self.choose((own_TLK + 1) % blocks[0].num_choices, NUM_TOKENS)
        other_TH = _hidden(model)
        if not (same_TH - plain_TH).norm() < SAME * (other_TH - plain_TH).norm():
            raise UnsupportedModelError(f"{name} does not compute with the experts that its routers choose", hint=HINT)
        self.choose(None, NUM_TOKENS)


def made_up_tokens(model: PreTrainedModel, num_tokens: int) -> Tensor:
    """Return made-up tokens of the model's vocabulary; they repeat only if the vocabulary is small: [T]."""
    tokens_T = torch.arange(num_tokens, device=model.device) * 7919 + 11
    return tokens_T.remainder(model.config.get_text_config().vocab_size)


def plain_hidden(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    """Return the last hidden states of one unpacked sequence: [T] -> [T, H]."""
    hidden_1TH: Tensor = model.get_decoder()(input_ids=tokens_T.unsqueeze(0), use_cache=False).last_hidden_state
    return hidden_1TH[0]


@contextmanager
def refusing_misfits(model: PreTrainedModel, hint: str) -> Iterator[None]:
    """Turn errors of the model's own code inside the block into UnsupportedModelError: its signature does not fit."""
    try:
        yield
    except MISFITS as error:
        if isinstance(error, BridgeError):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be called like other language models: {with_class(error)}", hint=hint
        ) from error


@contextmanager
def without_dropout(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout off inside the block, and restore it afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def balance(tokens_LE: Tensor) -> dict[str, float | None]:
    """Return metrics, by name, of how evenly tokens are spread over experts; their values are None without experts.

    Source of `max_vio`: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664).
    """
    if not tokens_LE.numel():
        return {"max_vio": None, "dead_experts": None}
    loads_LE = tokens_LE / tokens_LE.mean(1, keepdim=True)
    is_dead_LE = tokens_LE == 0
    return {"max_vio": (loads_LE.amax(1) - 1).mean().item(), "dead_experts": is_dead_LE.double().mean().item()}


def _blocks(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.get_decoder().modules() if "experts" in dict(module.named_children())]


def _replayed(block: nn.Module, *args: Any, **options: Any) -> Any:
    """Call the block with replay; all blocks use this same function, so that similar layers share compiled code."""
    with Replay(block):
        return type(block).forward(block, *args, **options)


def _scores(input: Tensor, k: int, dim: int = -1, *_: bool, **__: bool) -> Tensor | None:  # noqa: A002, ARG001  torch's
    """Return the scores passed to `torch.topk` (same arguments), if they may be scores of experts for each token."""
    return input if input.dim() == 2 and dim in {-1, 1} else None


def _are_groups(block: Any, scores_TG: Tensor) -> bool:
    """Return whether these are scores of groups, where groups are consecutive experts in equal numbers."""
    num_tokens, num_groups = scores_TG.shape
    is_per_token = num_tokens == len(block.chosen_TK)
    return is_per_token and num_groups < block.num_choices and block.num_choices % num_groups == 0


def _groups_of_given(block: Any, scores_TG: Tensor, own_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the groups of the given experts, or the router's own if none are given; and where the two differ."""
    chosen_TK = block.chosen_TK.long()
    num_groups = scores_TG.shape[1]
    is_known_T1 = chosen_TK[:, :1] != UNKNOWN
    none_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
    groups_TK = chosen_TK.clamp(min=0) // (block.num_choices // num_groups)
    is_given_TG = none_TG.scatter(1, groups_TK, is_known_T1.expand_as(groups_TK))
    is_own_TG = none_TG.scatter(1, own_TC, torch.ones_like(own_TC, dtype=torch.bool))
    num_returned = max(own_TC.shape[1], min(num_groups, chosen_TK.shape[1]))
    own_TR = torch.cat([own_TC, own_TC[:, :1].expand(-1, num_returned - own_TC.shape[1])], dim=1)
    given_TR = is_given_TG.byte().topk(num_returned, dim=1).indices
    return torch.where(is_known_T1, given_TR, own_TR), (is_given_TG & ~is_own_TG).any(1)


def _taken(
    block: Any, scores_TE: Tensor, own_scores_TK: Tensor, own_TK: Tensor, other_groups_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the router's scores of the given experts, and these experts; count where the router's choice differs."""
    is_known_T1 = block.chosen_TK[:, :1] != UNKNOWN
    indices_TK = torch.where(is_known_T1, block.chosen_TK.long(), own_TK)
    scores_TK = scores_TE.gather(1, indices_TK)
    if torch.is_grad_enabled():  # do not count choices of a reference model, which needs no gradients
        differs_T = scores_TK.detach().amin(1) < own_scores_TK.detach().amin(1)
        differs_T = differs_T if other_groups_T is None else differs_T | other_groups_T
        block.num_rerouted += torch.stack([differs_T.sum(), is_known_T1.sum()])
        block.tokens_E.scatter_add_(0, indices_TK.flatten(), is_known_T1.expand_as(indices_TK).flatten().long())
    return scores_TK, indices_TK


def _hidden(model: PreTrainedModel) -> Tensor:
    """Return the last hidden states of the example: [T, H]."""
    with torch.no_grad(), without_dropout(model):
        return plain_hidden(model, made_up_tokens(model, NUM_TOKENS)).float()
