"""Prepare a model for training: choose its attention and layers, and check the result after each choice.

The model must compute for packed sequences what transformers computes for each sequence alone. A family that treats
positions or masks differently is refused here, whatever its name, and never trained wrongly.

Not covered: the head (`logprobs.py`), how many tokens fit (`budget.py`).
Shape suffixes: T tokens, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from transformers import PreTrainedModel

from bridge.config import ComputeConfig
from bridge.errors import BridgeError, UnsupportedModelError
from bridge.passes import attention, kernels, layers, offload, recurrence, slices
from bridge.passes.logprobs import check_head
from bridge.passes.packing import Sample, packs

Note = Callable[[str], None]
"""Reports one line to the user."""
MISFITS = (AttributeError, TypeError, ValueError, LookupError, NotImplementedError)
"""What a family raises that must be called differently from the others."""
COMPILE_ERRORS = (TorchDynamoException, CppCompileError, InvalidCxxCompiler)
"""What torch raises when it cannot compile; anything else is a bug and is raised."""
LENGTHS = (24, 13, 7, 6, 2)
"""Tokens of the sequences that are compared."""
PROMPTS = (8, 8, 3, 3, 1)
"""How many of them are a prompt: the first two share one, and the next two."""
WINDOW = 5
"""Tokens that sliding windows are narrowed to for the check, so that the sequences are longer."""
TOLERANCE = 1 / 8
"""Largest difference from each sequence alone, as a share of the difference if all were one sequence.

Tiny models of 21 families in bf16 came to between 1/260 and 1/70, and those that mix sequences or positions to 1/3 and
more."""
ROUNDING_TOLERANCE = 1 / 4
"""The same where rounding explains it: 28 layers of random bf16 weights on an H200 came to 1/7."""
ROUNDINGS = 2
"""Roundings to the model's dtype that never count: 48 layers of vLLM's dummy weights came to 0.8 on an H200."""


def prepare(model: PreTrainedModel, compute: ComputeConfig, note: Note, *, max_model_len: int | None = None) -> bool:
    """Give the model packed attention and, where requested, Liger kernels, compiled layers and recomputed activations.

    Call it once per run, before the first micro-batch. No parameter is moved or replaced. Return whether completions of
    one prompt may share it. `max_model_len` bounds the length of a sequence, where it is known.
    """
    try:
        check_head(model)
        expected = Expected.of(model, max_model_len)
    except MISFITS as error:
        if isinstance(error, BridgeError):
            raise
        words = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be called like other language models: {words}",
            remedy="train another model, of those in docs/families.md, or report this one",
        ) from error
    compiles = model.device.type == "cuda" if compute.compile_layers is None else compute.compile_layers
    if model.device.type == "cpu" and not compiles and layers.bf16_is_emulated():
        layers.widen(model)  # not both: torch would compile every layer separately
    if compute.liger_kernel:
        layers.use_liger_kernel(model)
    recurrence.keep_apart(model)
    _choose_attention(model, expected, compute.attention, note)
    if compiles:
        _compile(model, expected, note, recomputed=bool(compute.gradient_checkpointing or compute.activation_offload))
    shares_prompts = _may_share_prompts(model, expected, note)
    if compute.gradient_checkpointing:
        _recompute(model, note)
    return shares_prompts


def recompute_activations(model: PreTrainedModel, note: Note, kept: layers.Kept = layers.INPUTS) -> None:
    """Let each layer keep only its input for the backward pass, or what is `kept`, and compute the rest again there.

    The compiler does so where a layer is one graph without random numbers, which it would draw anew. Any other layer is
    called again, and not compiled: of several graphs, the second call might use others than the first.
    """
    offload.use(model, on_host=kept.on_host)
    if layers.are_compiled(model):
        layers.compile_layers(model, recomputed=True, keeps_attention=kept.attention)
    _recompute(model, note, keeps_attention=kept.attention)


def _choose_attention(model: PreTrainedModel, expected: "Expected", kernel: str, note: Note) -> None:
    """Use Bridge's attention where it is correct, else the model's own, which makes a mask from the positions."""
    kernel_note = kernels.choose(model, kernel)
    own = attention.chosen(model)
    try:
        attention.choose(model, attention.NAME)
        expected.check(model, note)
    except UnsupportedModelError as error:
        if slices.of(model) is not None:
            raise
        attention.choose(model, own)
        expected.check(model, note)
        note(f"attention: the model's own ({own}), with a mask of tokens x tokens: {error.message}")
    else:
        if attention.chosen(model) != attention.NAME:
            note(f"attention: the only one of {type(model).__name__}, with a mask of tokens x tokens")
        elif model.device.type == "cuda":
            note(kernel_note)


def _may_share_prompts(model: PreTrainedModel, expected: "Expected", note: Note) -> bool:
    if attention.chosen(model) != attention.NAME:
        return False
    try:
        expected.check(model, note, share_prompts=True)
    except UnsupportedModelError as error:
        note(f"prompts are not shared: {error.message}")
        return False
    return True


def _compile(model: PreTrainedModel, expected: "Expected", note: Note, *, recomputed: bool) -> None:
    """Compile the layers; undo it where torch cannot, or the result is wrong.

    Compile the backward pass, too, unless activations are recomputed or offloaded: `_recompute` does it then.
    """
    layers.let_inputs_need_gradients(model)
    layers.compile_layers(model, recomputed=recomputed)
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            expected.check(model, note)
            if not recomputed:
                _run_all_forms(model)
    except (*COMPILE_ERRORS, UnsupportedModelError) as error:
        layers.uncompile_layers(model)
        note(f"layers are not compiled: {' '.join(str(error).strip().splitlines()[:2])}")
    else:
        torch._dynamo.config.suppress_errors = True  # a form that comes later and fails runs uncompiled, with a warning


def _recompute(model: PreTrainedModel, note: Note, *, keeps_attention: bool = False) -> None:
    """Leave recomputing to the compiled layers if they can, else to transformers."""
    if layers.are_compiled(model):
        reason = _against_recomputing(model)
        if reason is None:
            return
        layers.uncompile_layers(model)
        note(f"layers are not compiled: they are recomputed, and {reason}")
    layers.call_again(model, keeps_attention=keeps_attention)


def _against_recomputing(model: PreTrainedModel) -> str | None:
    """Compile the layers and return why their code cannot run twice; None: it can."""
    num_breaks, random_state = _num_breaks(), _random_state(model.device)
    try:
        with torch._dynamo.config.patch(suppress_errors=False):
            _run_all_forms(model)
    except COMPILE_ERRORS as error:
        return f"torch cannot compile that: {' '.join(str(error).strip().splitlines()[:2])}"
    if _num_breaks() > num_breaks:
        return "torch makes several graphs of one"
    return None if torch.equal(_random_state(model.device), random_state) else "draw random numbers"


def _num_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _run_all_forms(model: PreTrainedModel) -> None:
    """Run forward and backward what a run needs: several sequences, other lengths, shared prompts.

    No gradient is left, and no hook on gradients is called.
    """
    tokens_T, trained = _example_tokens(model), layers.first_trained(model)
    forms: list[Callable[[], Tensor]] = [
        lambda: packed(model, tokens_T, LENGTHS),
        lambda: packed(model, tokens_T[LENGTHS[0] :], LENGTHS[1:]),
    ]
    if attention.chosen(model) == attention.NAME:
        forms.append(lambda: _packed_sharing(model, tokens_T))
    for compute_hidden in forms if trained else ():
        torch.autograd.grad(compute_hidden().float().sum(), trained)


@dataclass
class Expected:
    """What transformers' eager attention computes for a few sequences, each alone, and how far others may differ."""

    tokens_T: Tensor
    """All sequences, one after the other."""
    alone_TH: Tensor
    """Last hidden states of each sequence alone."""
    mixed_up: float
    """Difference if all were one sequence."""
    most: float
    """Largest difference that counts as none."""
    farthest: int
    """Position from which the first sequence still fits; not positive: unknown."""
    is_noted: bool = False

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, max_model_len: int | None = None) -> Self:
        """Run the model on the sequences, each alone and all as one, with eager attention and with its own."""
        bounds = (getattr(model.config.get_text_config(), "max_position_embeddings", None), max_model_len)
        tokens_T, own_attention = _example_tokens(model), attention.chosen(model)
        attention.choose(model, "eager")  # the others leave out what they lack, as sdpa does Gemma 2's cap
        with _checking(model):
            alone_TH = torch.cat([_plain(model, part_T) for part_T in tokens_T.split(LENGTHS)])
            mixed_up = difference(_plain(model, tokens_T), alone_TH)
            attention.choose(model, own_attention)
            other_TH = torch.cat([_plain(model, part_T) for part_T in tokens_T.split(LENGTHS)])
        explained = min(2 * difference(other_TH, alone_TH), ROUNDING_TOLERANCE * mixed_up)
        return cls(
            tokens_T=tokens_T,
            alone_TH=alone_TH,
            mixed_up=mixed_up,
            most=max(TOLERANCE * mixed_up, explained),
            farthest=min((bound for bound in bounds if isinstance(bound, int)), default=0) - LENGTHS[0],
        )

    def check(self, model: PreTrainedModel, note: Note, *, share_prompts: bool = False) -> None:
        """Compare with the packed forward pass of the model as it is prepared now.

        And once more with the first sequence at the end of the longest possible one: the others must not depend on it.
        """
        tokens_T = self.tokens_T
        with torch.no_grad(), _checking(model):
            hidden_TH = _packed_sharing(model, tokens_T) if share_prompts else packed(model, tokens_T, LENGTHS)
            differs = difference(hidden_TH, self.alone_TH)
            if self.farthest > 0 and not share_prompts:
                beside_TH = packed(model, tokens_T, LENGTHS, begin=self.farthest)
                beside = difference(beside_TH, self.alone_TH, first=1)
                differs = float(torch.tensor([differs, beside]).max())  # NaN if either is
        line = f"hidden states differ by {differs:.1%} from those of each sequence alone, and by {self.mixed_up:.1%}"
        if not differs <= max(self.most, ROUNDINGS * torch.finfo(self.alone_TH.dtype).eps):
            raise UnsupportedModelError(
                f"{type(model).__name__} does not keep packed sequences apart: {line} if all are one sequence",
                remedy="train another model, or report this one",
            )
        if differs > self.most and not self.is_noted:
            self.is_noted = True
            note(f"attention hardly matters with these weights: packed, {line} if all are one sequence")


def difference(hidden_TH: Tensor, alone_TH: Tensor, *, first: int = 0) -> float:
    """Return the median relative difference over the tokens of the sequence in which it is largest, from `first`.

    The median, since rounding alone may send a few tokens to other experts. Where the hidden state of a token is 0, as
    at the start of a sequence whose first embedding is 0, an equal one differs by 0.
    """
    error_T = (hidden_TH.float() - alone_TH.float()).norm(dim=1)
    relative_T = torch.where(error_T == 0, 0.0, error_T / alone_TH.float().norm(dim=1))
    medians = [part_T.median() for part_T in relative_T.split(LENGTHS)[first:]]
    return float(torch.stack(medians).max())  # NaN if one is


def packed(model: PreTrainedModel, tokens_T: Tensor, lengths: Sequence[int], *, begin: int = 0) -> Tensor:
    """Return the last hidden states of packed sequences; the first one's positions count from `begin`.

    Shapes: [T] -> [T, H].
    """
    positions_T = torch.cat([torch.arange(length, device=tokens_T.device) for length in lengths])
    positions_T[: lengths[0]] += begin
    starts_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens_T.device)
    spans = attention.Spans(starts_S1=starts_S1, longest=max(lengths))
    return slices.whole_hidden(model, tokens_T, positions_T, spans)


def _packed_sharing(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    """Return the last hidden states of the sequences of `LENGTHS`, packed with shared prompts: [T] -> [T, H]."""
    samples = []
    for part_T, prompt in zip(tokens_T.split(LENGTHS), PROMPTS, strict=True):
        ids, zeros = tuple(part_T.tolist()), (0.0,) * (len(part_T) - prompt)
        tokens: dict[str, Any] = {"prompt_token_ids": ids[:prompt], "token_ids": ids[prompt:]}
        samples.append(Sample(**tokens, sampled_logprobs=zeros, advantages=zeros, weight=0.0))
    (batch,) = packs(samples, max_tokens=sum(LENGTHS), device=tokens_T.device, share_prompts=True)
    hidden_TH, seen = slices.whole_hidden(model, batch.tokens_T, batch.positions_T, batch.spans), batch.spans.seen
    assert seen is not None
    sequences = [keys for keys in seen.keys_U.split(seen.starts_S1.diff().tolist()) if len(keys) in LENGTHS]
    return hidden_TH[torch.cat(sequences)]  # the other spans are prompts


def _example_tokens(model: PreTrainedModel) -> Tensor:
    """Return the tokens of sequences of `LENGTHS`, some of which share `PROMPTS`: [T]."""
    vocabulary: int = model.config.get_text_config().vocab_size
    tokens_T = (torch.arange(sum(LENGTHS)) * 7919 + 11) % vocabulary
    starts = [0, *accumulate(LENGTHS)]
    for first, second in ((0, 1), (2, 3)):
        tokens_T[starts[second] :][: PROMPTS[second]] = tokens_T[starts[first] :][: PROMPTS[first]]
    return tokens_T.to(model.device)


def _plain(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    hidden_1TH: Tensor = model.get_decoder()(input_ids=tokens_T.unsqueeze(0), use_cache=False).last_hidden_state
    return hidden_1TH[0]


@contextmanager
def _checking(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout off and narrow sliding windows, and restore both."""
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
