"""The GPU kernels with completions that share a prompt and with a long sequence, compared with float32 and each other.

Not covered: families (`tests/unit/passes/test_attention.py`, with a stand-in for the kernel).
"""

import copy
import itertools

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import MistralConfig, MistralForCausalLM

from bridge.config import TrainConfig
from bridge.passes import attention, kernels
from bridge.passes.packing import Sample, packs
from bridge.passes.preparation import prepare
from bridge.passes.prepared_model import PreparedModel
from tests.models.families import SMALL
from tests.scenarios import PARITY_LIMIT

PROMPTS = {120: (256, 256, 200, 3), 5: (40, 1), 64: (64,)}
"""Number of prompt tokens -> numbers of tokens of its completions."""


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, SMALL["vocab_size"], (count,), generator=generator).tolist())

    prompts = [(some(length), counts) for length, counts in PROMPTS.items()]
    return [
        Sample(
            prompt_token_ids=prompt,
            token_ids=some(size),
            sampled_logprobs=(0.0,) * size,
            advantages=(1.0,) * size,
            weight=1.0,
        )
        for prompt, counts in prompts
        for size in counts
    ]


def computed(prepared: PreparedModel, *, share_prompts: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities and the gradients of all parameters."""
    (batch,) = packs(samples(), max_tokens=10_000, device=prepared.model.device, share_prompts=share_prompts)
    logprobs_N, _ = prepared.logprobs(batch, 1.0)
    gradients = torch.autograd.grad(logprobs_N.sum(), list(prepared.model.parameters()))
    return logprobs_N.detach(), torch.cat([gradient.float().flatten() for gradient in gradients])


@pytest.mark.parametrize("window", [None, 50])
def test_completions_attend_to_their_shared_prompt(window: int | None, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, head_dim=64, sliding_window=window, tie_word_embeddings=False)
    config.initializer_range = 0.06
    exact = MistralForCausalLM(config).cuda()
    model = copy.deepcopy(exact).bfloat16()
    attention.choose(exact, attention.NAME)  # in float32, which the kernel does not support
    prepared = prepare(model, TrainConfig.of(model_name="m", compile_layers=False).compute)
    assert prepared.shares_prompts
    assert [note for note in caplog.messages if not note.startswith("attention: ")] == []
    in_float32 = PreparedModel(exact)
    ours, expected = computed(prepared, share_prompts=True), computed(in_float32, share_prompts=True)
    assert (ours[0] - expected[0]).abs().mean() < PARITY_LIMIT
    assert cosine_similarity(ours[1], expected[1], dim=0) > 0.99
    apart = computed(in_float32, share_prompts=False)
    assert cosine_similarity(expected[1], apart[1], dim=0) > 0.9999


LONG = 9_000
"""Length of a sequence for cuDNN; not a multiple of the padding."""
HEADS = {"groups": (8, 2), "all heads": (4, 4), "one key": (4, 1)}


def attended(
    heads: tuple[int, int], window: int | None, lengths: tuple[int, ...]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output of packed sequences with heads of 128 elements, and the gradients."""
    generator, num_tokens = torch.Generator("cuda").manual_seed(0), sum(lengths)
    shapes = [(1, count, num_tokens, 128) for count in (heads[0], heads[1], heads[1])]
    rows = [torch.randn(x, device="cuda", generator=generator).bfloat16().requires_grad_() for x in shapes]
    query, key, value = rows
    weights = torch.randn((1, num_tokens, heads[0], 128), device="cuda", generator=generator)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    output, _ = attention.attend(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        sliding_window=window,
        cu_seq_lens_q=starts,
        max_length_q=max(lengths),
    )
    return output.detach(), list(torch.autograd.grad((output.float() * weights).sum(), rows))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", HEADS)
def test_cudnn_matches_flash_attention_2(window: int | None, heads: str) -> None:
    config = MistralConfig(**{**SMALL, "num_attention_heads": HEADS[heads][0], "num_key_value_heads": HEADS[heads][1]},
                           head_dim=128)  # fmt: skip
    model = MistralForCausalLM(config).cuda().bfloat16()
    cases = [(LONG,), (kernels.LONG_TOKENS,), (LONG, 700, 3)]
    kernels.choose(model, "flash")
    expected = [attended(HEADS[heads], window, lengths) for lengths in cases]
    kernels.choose(model, "cudnn")
    try:
        for lengths, (output, gradients) in zip(cases, expected, strict=True):
            ours, own = attended(HEADS[heads], window, lengths)
            for one, other in zip((ours, *own), (output, *gradients), strict=True):
                assert (one.float() - other.float()).norm() < 0.01 * other.float().norm()
    finally:
        kernels.choose(model, "flash")
