"""Router replay: a mixture of experts computes with the experts that the server chose for each token.

Server and trainer round differently, so that a token between two experts may go to one here and to the other there, and
its log-probability differs by far more than rounding explains. With replay every layer takes the server's choice; it
computes how much these experts count itself, and its router gets the gradient of that.

A router, whatever its family, chooses by `torch.topk` over its experts. In a block with experts that call returns the
given choice, in the server's order, with the scores that the router has computed for it. Which call that is, a forward
pass shows beforehand. A router that first chooses groups of experts gets the groups of the given ones: DeepSeek-V2 sets
the scores of all other groups to 0, and a given expert of one of those would count nothing.

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
"""Stands for an expert that was not recorded: the router chooses."""
NUM_TOKENS = 16
"""Tokens of the example with which a model is checked."""
SAME = 0.01
"""Largest difference with a router's own choice, as a share of that with another one."""
HINT = "--no-router-replay"
CHOICES = (torch.topk, torch.Tensor.topk)
HELD = ("forward", "num_choices", "chosen_TK", "own_TK", "num_rerouted", "tokens_E")
"""Attributes of a block while it replays given experts."""
MISFITS = (AttributeError, TypeError, ValueError, LookupError, NotImplementedError)
"""Errors of a model whose router has another signature."""


class Replay(TorchFunctionMode):
    """While active, the choice of one block's router is the given one; before there is any, its own is noted."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self._block = block
        self._other_groups_T: Tensor | None = None
        """For each token, whether its router would have chosen other groups of experts; None: it chooses no groups."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        block = self._block
        scores_TE = _scores(*args, **(kwargs or {})) if func in CHOICES else None
        if scores_TE is None:
            return result
        if block.chosen_TK is None:
            block.num_choices = scores_TE.shape[1]  # a router that first chooses among groups does this last
            block.own_TK = result.indices
        elif block.num_choices == scores_TE.shape[1] and block.chosen_TK.shape == result.indices.shape:
            taken = _taken(block, scores_TE, result.values, result.indices, self._other_groups_T)
            return torch.return_types.topk(taken)
        elif _are_groups(block, scores_TE):
            groups_TR, self._other_groups_T = _groups_of_given(block, scores_TE, result.indices)
            return torch.return_types.topk((scores_TE.gather(1, groups_TR), groups_TR))
        return result


class RouterReplay:
    """The blocks of a model that take given experts, layer by layer; made by `of` and `if_known`.

    Their `forward` is `_replayed` until `release`.
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
        """Let `model` compute with given experts from now on; None: it has none.

        `shape` is the server's number of layers with experts, and of experts of a token; None: it reports none.

        Raises:
            UnsupportedModelError: its routers choose in a way that is not known, or other numbers than the server's, or
                it cannot be called like other language models.
        """
        return None if shape is None and not _blocks(model) else cls(model, shape)

    @classmethod
    def if_known(cls, model: PreTrainedModel, shape: tuple[int, int] | None = None) -> Self | None:
        """Let `model` compute with given experts as by `of`; None, too, if the way of its routers is not known."""
        with suppress(UnsupportedModelError):
            return cls.of(model, shape)
        return None

    def release(self) -> None:
        """Let the routers choose again."""
        for block in self._blocks:
            for name in HELD:
                vars(block).pop(name, None)

    def choose(self, experts_TX: Tensor | None, num_tokens: int) -> None:
        """Have the next pass, and its backward pass, compute with these experts; None: the routers choose.

        Shape: [T, L, K] or [T, L * K] integers, `UNKNOWN` where unknown.
        """
        for number, block in enumerate(self._blocks):
            num_chosen = block.own_TK.shape[1]
            if experts_TX is None:  # of the same form as a choice: compiled layers then have one
                block.chosen_TK = block.num_rerouted.new_full((num_tokens, num_chosen), UNKNOWN, dtype=torch.int16)
            else:
                of_layers_TLK = experts_TX.view(num_tokens, len(self._blocks), num_chosen)
                block.chosen_TK = of_layers_TLK[:, number].short().contiguous()

    def watched(self, compute: Callable[[], object]) -> Tensor:
        """Return the experts that the routers choose in a pass, as `choose` takes them: [T, L * K]."""
        for block in self._blocks:
            block.chosen_TK = None
        compute()
        return torch.cat([block.own_TK for block in self._blocks], dim=1)

    def rerouted(self) -> Tensor:
        """Return how many given choices were not the router's own since the last call, and of how many: [2] int64."""
        total = torch.zeros(2, dtype=torch.int64, device=self._device)
        for block in self._blocks:
            total += block.num_rerouted
            block.num_rerouted.zero_()
        return total

    def expert_tokens(self) -> Tensor:
        """Return how many tokens were given to each expert since the last call: [L, E] int64."""
        tokens_LE = torch.stack([block.tokens_E for block in self._blocks])
        for block in self._blocks:
            block.tokens_E.zero_()
        return tokens_LE

    def _prove(self, model: PreTrainedModel, shape: tuple[int, int] | None) -> None:
        """Check on an example that the blocks choose as many experts as the server, and compute with given ones."""
        name = type(model).__name__
        blocks = self._blocks
        with refusing_misfits(model, HINT):
            plain_TH = _hidden(model)
        own = [block.own_TK for block in blocks if block.own_TK is not None]
        sizes = sorted({own_TK.shape[1] for own_TK in own})
        if len(own) != len(blocks) or len(sizes) != 1 or shape not in {None, (len(own), *sizes)}:
            of_server = f", and the server {shape[1]} in {shape[0]}" if shape else ""
            raise UnsupportedModelError(
                f"{name} chooses {sizes} experts of a token in {len(own)} of {len(blocks)} layers with experts"
                f"{of_server}",
                hint=HINT,
            )
        if len(counts := sorted({block.num_choices for block in blocks})) > 1:
            raise UnsupportedModelError(f"{name} has {counts} experts in a layer, expected one number", hint=HINT)
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
    """Return tokens of any model's vocabulary, each another one as far as it goes: [T]."""
    tokens_T = torch.arange(num_tokens, device=model.device) * 7919 + 11
    return tokens_T.remainder(model.config.get_text_config().vocab_size)


def plain_hidden(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    """Return the last hidden states of one sequence, which is not packed: [T] -> [T, H]."""
    hidden_1TH: Tensor = model.get_decoder()(input_ids=tokens_T.unsqueeze(0), use_cache=False).last_hidden_state
    return hidden_1TH[0]


@contextmanager
def refusing_misfits(model: PreTrainedModel, hint: str) -> Iterator[None]:
    """Refuse a model that cannot be called like other language models, instead of raising what its own code raises."""
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
    """Turn dropout off, and restore it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def balance(tokens_LE: Tensor) -> dict[str, float | None]:
    """Return, by name, the metrics of how evenly tokens are spread over experts; None if there are no experts.

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
    """Call the block; one function for all of them, so that layers of one kind still share their compiled code."""
    with Replay(block):
        return type(block).forward(block, *args, **options)


def _scores(input: Tensor, k: int, dim: int = -1, *_: bool, **__: bool) -> Tensor | None:  # noqa: A002, ARG001  torch's
    """Return what `torch.topk` chooses from if that may be experts for each token; it takes the same arguments."""
    return input if input.dim() == 2 and dim in {-1, 1} else None


def _are_groups(block: Any, scores_TG: Tensor) -> bool:
    """Return whether these are scores of groups, each of as many experts that follow one another."""
    num_tokens, num_groups = scores_TG.shape
    is_per_token = num_tokens == len(block.chosen_TK)
    return is_per_token and num_groups < block.num_choices and block.num_choices % num_groups == 0


def _groups_of_given(block: Any, scores_TG: Tensor, own_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return groups that hold all given experts, the router's own where none are given; and where these are others."""
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
    """Return the given experts and the router's scores of them, and count where its own choice is another one."""
    is_known_T1 = block.chosen_TK[:, :1] != UNKNOWN
    indices_TK = torch.where(is_known_T1, block.chosen_TK.long(), own_TK)
    scores_TK = scores_TE.gather(1, indices_TK)
    if torch.is_grad_enabled():  # a reference counts nothing
        differs_T = scores_TK.detach().amin(1) < own_scores_TK.detach().amin(1)
        differs_T = differs_T if other_groups_T is None else differs_T | other_groups_T
        block.num_rerouted += torch.stack([differs_T.sum(), is_known_T1.sum()])
        block.tokens_E.scatter_add_(0, indices_TK.flatten(), is_known_T1.expand_as(indices_TK).flatten().long())
    return scores_TK, indices_TK


def _hidden(model: PreTrainedModel) -> Tensor:
    """Return the last hidden states of an example: [T, H]."""
    with torch.no_grad(), without_dropout(model):
        return plain_hidden(model, made_up_tokens(model, NUM_TOKENS)).float()
