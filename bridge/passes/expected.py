"""What a model makes of a few sequences, each alone, and whether it makes the same of them when they are packed.

A family that treats positions or masks in a way of its own is found out here, whatever it is called.

Not covered: what follows from it (`preparation.py`), the head (`logprobs.py`).
Shape suffixes: T tokens, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes import attention
from bridge.passes.packing import MicroBatch, Sample, packs

Note = Callable[[str], None]

LENGTHS = (24, 13, 7, 6, 2)
"""Tokens of the sequences that are compared."""
PROMPTS = (8, 8, 3, 3, 1)
"""Of which are a prompt: of the first two the same, and of the next two."""
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


class Expected:
    """What transformers' own plain attention makes of a few sequences, each alone, and of all run together."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, max_model_len: int | None = None) -> None:
        """Compute it; sequences of a run have at most `max_model_len` tokens, where that is known."""
        self._far = _farthest(model, max_model_len) - LENGTHS[0]
        self.tokens_T = example_tokens(model)
        chosen = model.config._attn_implementation
        attention.choose(model, "eager")  # the others leave out what they lack, as sdpa does Gemma 2's cap
        with _checking(model):
            self.alone_TH = torch.cat([_plain(model, part_T) for part_T in self.tokens_T.split(LENGTHS)])
            together_TH = _plain(model, self.tokens_T)
            attention.choose(model, chosen)
            other_TH = torch.cat([_plain(model, part_T) for part_T in self.tokens_T.split(LENGTHS)])
        self.mixed_up = self.difference(together_TH)
        explained = min(2 * self.difference(other_TH), ROUNDING_TOLERANCE * self.mixed_up)
        self.most = max(TOLERANCE * self.mixed_up, explained)
        self._is_told = False
        self.rounding = ROUNDINGS * torch.finfo(self.alone_TH.dtype).eps

    def difference(self, hidden_TH: Tensor, *, first: int = 0) -> float:
        """Return the median over the tokens of the relative difference, of the sequence where it is largest.

        The median, since rounding alone may send a few tokens to other experts. Sequences before `first` do not count.
        """
        error_TH, alone_TH = hidden_TH.float() - self.alone_TH.float(), self.alone_TH.float()
        relative_T = error_TH.norm(dim=1) / alone_TH.norm(dim=1)
        medians = [part_T.median() for part_T in relative_T.split(LENGTHS)[first:]]
        return float(torch.stack(medians).max())  # nan, if one is

    def check(self, model: PreTrainedModel, note: Note, *, share_prompts: bool = False) -> None:
        """Compare with the packed forward pass, as the model is prepared now.

        Once more with the first sequence at the end of the longest that a run may have: what the others are must not
        depend on how long it is.

        Raises:
            UnsupportedModelError: they differ by more than rounding.
        """
        with torch.no_grad(), _checking(model):
            tokens_T = self.tokens_T
            hidden_TH = packed_sharing(model, tokens_T) if share_prompts else packed(model, tokens_T, LENGTHS)
            found = self.difference(hidden_TH)
            if self._far > 0 and not share_prompts:
                beside_TH = packed(model, tokens_T, LENGTHS, begin=self._far)
                found = float(torch.tensor([found, self.difference(beside_TH, first=1)]).max())  # nan, if one is
        differ = f"hidden states differ by {found:.1%} from those of each alone, and by {self.mixed_up:.1%}"
        if not found <= max(self.most, self.rounding):
            raise UnsupportedModelError(
                f"{type(model).__name__} treats packed sequences in a way of its own: {differ} were they one sequence",
                remedy="train another model, or report this one",
            )
        if found > self.most and not self._is_told:
            self._is_told = True
            note(f"attention hardly matters with these weights: in packed sequences {differ} if they ran together")


def example_tokens(model: PreTrainedModel) -> Tensor:
    """Return the tokens of sequences of `LENGTHS`, of which some share `PROMPTS`: [T]."""
    vocabulary: int = model.config.get_text_config().vocab_size
    tokens_T = (torch.arange(sum(LENGTHS)) * 7919 + 11) % vocabulary
    starts = [0, *accumulate(LENGTHS)]
    for one, other in ((0, 1), (2, 3)):  # these two have one prompt
        tokens_T[starts[other] :][: PROMPTS[other]] = tokens_T[starts[one] :][: PROMPTS[one]]
    return tokens_T.to(model.device)


def packed(model: PreTrainedModel, tokens_T: Tensor, lengths: Sequence[int], *, begin: int = 0) -> Tensor:
    """Return the last hidden states of sequences of these lengths, packed; the first is at the positions from `begin`.

    Shapes: [T] -> [T, H].
    """
    positions_T = torch.cat([torch.arange(length, device=tokens_T.device) for length in lengths])
    positions_T[: lengths[0]] += begin
    spans = attention.Spans.of_lengths(lengths, tokens_T.device)
    return attention.packed_hidden(model, tokens_T, positions_T, spans)


def _farthest(model: PreTrainedModel, max_model_len: int | None) -> int:
    """Return the tokens of the longest sequence that a run may have; 0: nothing is known of it."""
    bounds = (getattr(model.config.get_text_config(), "max_position_embeddings", None), max_model_len)
    return min((bound for bound in bounds if isinstance(bound, int)), default=0)


def packed_sharing(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    """Return the last hidden states of the sequences of `LENGTHS`, packed with shared prompts: [T] -> [T, H]."""
    batch = _sharing(tokens_T)
    hidden_TH, seen = attention.packed_hidden(model, batch.tokens_T, batch.positions_T, batch.spans), batch.spans.seen
    assert seen is not None
    sequences = [keys for keys in seen.keys_U.split(seen.starts_S1.diff().tolist()) if len(keys) in LENGTHS]
    return hidden_TH[torch.cat(sequences)]  # the other spans see prompts alone


def _sharing(tokens_T: Tensor) -> MicroBatch:
    """Return the sequences of `LENGTHS` as one micro-batch in which prompts are shared."""
    samples = [
        Sample(
            prompt_token_ids=tuple(part[:prompt]),
            token_ids=tuple(part[prompt:]),
            sampled_logprobs=(0.0,) * len(part[prompt:]),
            advantages=(0.0,) * len(part[prompt:]),
            weight=0.0,
        )
        for part, prompt in zip((part_T.tolist() for part_T in tokens_T.split(LENGTHS)), PROMPTS, strict=True)
    ]
    (batch,) = packs(samples, max_tokens=sum(LENGTHS), device=tokens_T.device, share_prompts=True)
    return batch


def _plain(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    hidden_1TH: Tensor = model.get_decoder()(input_ids=tokens_T.unsqueeze(0), use_cache=False).last_hidden_state
    return hidden_1TH[0]


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
