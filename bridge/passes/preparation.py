"""Preparing a model for training: attention over packed sequences, its layers, and a check of what comes out.

Whatever is chosen has to give what transformers itself gives for each sequence alone: a family that treats positions
or masks in a way of its own is refused here, and not trained wrongly.

Not covered: the head (`logprobs.py`), how many tokens fit (`budget.py`).
Shape suffixes: S1 sequences and one more, T tokens, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UnsupportedModelError
from bridge.passes import attention, layers, wide_linear
from bridge.passes.logprobs import check_head

Note = Callable[[str], None]

LENGTHS = (24, 13, 7, 7, 2)
"""Tokens of the sequences that are compared."""
WINDOW = 5
"""Tokens that a sliding window is narrowed to meanwhile, so that the sequences are longer than it."""
TOLERANCE = 1 / 8
"""Largest difference from each sequence alone, as a share of what it would be if sequences ran into one another.

Tiny models of 21 families in bf16 came to between 1/260 and 1/70, and those that mix sequences or positions to 1/3 and
more."""
ROUNDING_TOLERANCE = 1 / 4
"""The same where rounding explains it: 28 layers of random bf16 weights on an H200 came to 1/7."""
ROUNDINGS = 2
"""Roundings to the model's dtype that are no difference, whatever mixing would make: with weights that vLLM makes up
attention hardly matters, and 48 layers of them came to 0.8 on an H200."""
COMPILE_ERRORS = (TorchDynamoException, CppCompileError, InvalidCxxCompiler)
"""What torch raises when it cannot compile; anything else is a mistake and is raised."""


def prepare(model: PreTrainedModel, config: TrainConfig, note: Note) -> None:
    """Give the model packed attention, and whatever of liger-kernel, compilation and recomputation is asked for.

    Once per run, before the first micro-batch. No parameter is moved or replaced.

    Raises:
        UnsupportedModelError: what the model computes of packed sequences is not what it computes of each alone.
        UsageError: liger-kernel was asked for, and cannot be used.
    """
    check_head(model)
    expected = _Expected(model)
    compiles = model.device.type == "cuda" if config.compile_layers is None else config.compile_layers
    if model.device.type == "cpu" and not compiles and wide_linear.is_wanted():
        wide_linear.widen(model)  # not both: torch would compile every layer for itself
    if config.liger_kernel:
        layers.use_liger_kernel(model)
    _choose_attention(model, expected, note)
    if compiles:
        _compile(model, expected, note)
    if config.gradient_checkpointing:
        layers.recompute_activations(model)


class _Expected:
    """What transformers' own plain attention makes of a few sequences, each alone, and of all run together."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        vocabulary = model.config.get_text_config().vocab_size
        self.tokens_T = (torch.arange(sum(LENGTHS), device=model.device) * 7919 + 11) % vocabulary
        chosen = model.config._attn_implementation
        _set_attention(model, "eager")  # the others leave out what they lack, as sdpa does Gemma 2's cap
        with _checking(model):
            self.alone_TH = torch.cat([_plain(model, part_T) for part_T in self.tokens_T.split(LENGTHS)])
            together_TH = _plain(model, self.tokens_T)
            _set_attention(model, chosen)
            other_TH = torch.cat([_plain(model, part_T) for part_T in self.tokens_T.split(LENGTHS)])
        self.mixed_up = self.difference(together_TH)
        explained = min(2 * self.difference(other_TH), ROUNDING_TOLERANCE * self.mixed_up)
        self.most = max(TOLERANCE * self.mixed_up, explained)
        self.rounding = ROUNDINGS * torch.finfo(self.alone_TH.dtype).eps

    def difference(self, hidden_TH: Tensor) -> float:
        """Return the median over the tokens of the relative difference, of the sequence where it is largest.

        The median, since rounding alone may send a few tokens to other experts.
        """
        error_TH, alone_TH = hidden_TH.float() - self.alone_TH.float(), self.alone_TH.float()
        relative_T = error_TH.norm(dim=1) / alone_TH.norm(dim=1)
        return max(float(part_T.median()) for part_T in relative_T.split(LENGTHS))

    def check(self, model: PreTrainedModel, note: Note) -> None:
        """Compare with the packed forward pass, as the model is prepared now.

        Raises:
            UnsupportedModelError: they differ by more than rounding.
        """
        with torch.no_grad(), _checking(model):
            found = self.difference(packed(model, self.tokens_T, LENGTHS))
        differ = f"hidden states differ by {found:.1%} from those of each alone, and by {self.mixed_up:.1%}"
        if not found <= max(self.most, self.rounding):
            raise UnsupportedModelError(
                f"{type(model).__name__} treats packed sequences in a way of its own: {differ} were they one sequence",
                remedy="train another model, or report this one",
            )
        if found > self.most:
            note(f"attention hardly matters with these weights: in packed sequences {differ} if they ran together")


def packed(model: PreTrainedModel, tokens_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the last hidden states of sequences of these lengths, packed.

    Shapes: [T] -> [T, H].
    """
    starts_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens_T.device)
    positions_T = torch.cat([torch.arange(length, device=tokens_T.device) for length in lengths])
    return attention.packed_hidden(model, tokens_T, positions_T, starts_S1, longest=max(lengths))


def _plain(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    hidden_1TH: Tensor = model.get_decoder()(input_ids=tokens_T.unsqueeze(0), use_cache=False).last_hidden_state
    return hidden_1TH[0]


def _choose_attention(model: PreTrainedModel, expected: _Expected, note: Note) -> None:
    """Use our attention where it is right, else the model's own, which makes a mask of the positions."""
    own = model.config._attn_implementation
    try:
        _set_attention(model, attention.NAME)
        expected.check(model, note)
    except UnsupportedModelError as error:
        _set_attention(model, own)
        expected.check(model, note)
        note(f"attention: the model's own ({own}), with a mask of tokens x tokens: {error.message}")
    else:
        if model.config._attn_implementation != attention.NAME:
            note(f"attention: {type(model).__name__}'s own, with a mask of tokens x tokens: it can have no other")


def _set_attention(model: PreTrainedModel, name: str) -> None:
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def _compile(model: PreTrainedModel, expected: _Expected, note: Note) -> None:
    """Compile the layers, forward and backward; where torch cannot, or what comes out is wrong, leave them."""
    layers.compile_layers(model)
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            expected.check(model, note)
            for lengths in (LENGTHS, LENGTHS[1:]):
                _run_backward(model, expected.tokens_T[: sum(lengths)], lengths)
    except (*COMPILE_ERRORS, UnsupportedModelError) as error:
        layers.uncompile_layers(model)
        note(f"layers are not compiled: {' '.join(str(error).strip().splitlines()[:2])}")
    else:
        torch._dynamo.config.suppress_errors = True  # a form that comes later and fails runs uncompiled, with a warning


def _run_backward(model: PreTrainedModel, tokens_T: Tensor, lengths: Sequence[int]) -> None:
    """Go through the backward pass, if there is one, without leaving a gradient or calling what waits for one."""
    if trained := first_trained(model):
        torch.autograd.grad(packed(model, tokens_T, lengths).float().sum(), trained)


def first_trained(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained parameters of the first layer that has any: their gradients need all of the backward pass."""
    candidates = ([p for p in part.parameters() if p.requires_grad] for part in (*layers.decoder_layers(model), model))
    return next((trained for trained in candidates if trained), [])


@contextmanager
def _checking(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout off and narrow sliding windows, and put both back."""
    config = model.config.get_text_config()
    windows = [m for m in (config, *model.modules()) if isinstance(getattr(m, "sliding_window", None), int)]
    before = [(owner, "sliding_window", owner.sliding_window) for owner in windows]
    before += [(module, "training", True) for module in model.modules() if module.training]
    for owner, name, _ in before:
        setattr(owner, name, WINDOW if name == "sliding_window" else False)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
