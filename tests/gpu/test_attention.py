"""The variable-length kernel on a GPU, with completions that share a prompt, against attention written out in float32.

Not covered: families (`tests/unit/passes/test_attention.py`, with a stand-in for the kernel).
"""

import copy

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from bridge.config import TrainConfig
from bridge.passes import attention
from bridge.passes.logprobs import model_logprobs
from bridge.passes.packing import Sample, packs
from bridge.passes.preparation import prepare
from tests.models.families import SMALL
from tests.scenarios import PARITY_LIMIT

PROMPTS = {120: (256, 256, 200, 3), 5: (40, 1), 64: (64,)}
"""Tokens of a prompt -> tokens of its completions."""


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


def computed(model: PreTrainedModel, *, share_prompts: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities and the gradients of all parameters."""
    (batch,) = packs(samples(), max_tokens=10_000, device=model.device, share_prompts=share_prompts)
    logprobs_N, _ = model_logprobs(model, batch, 1.0)
    gradients = torch.autograd.grad(logprobs_N.sum(), list(model.parameters()))
    return logprobs_N.detach(), torch.cat([gradient.float().flatten() for gradient in gradients])


@pytest.mark.parametrize("window", [None, 50])
def test_completions_see_the_prompt_that_they_share(window: int | None) -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, head_dim=64, sliding_window=window, tie_word_embeddings=False)
    config.initializer_range = 0.06
    exact = MistralForCausalLM(config).cuda()
    model = copy.deepcopy(exact).bfloat16()
    attention.choose(exact, attention.NAME)  # in float32, which the kernel does not support
    assert prepare(model, TrainConfig.of(model_name="m", compile_layers=False).compute, pytest.fail)
    ours, expected = computed(model, share_prompts=True), computed(exact, share_prompts=True)
    assert (ours[0] - expected[0]).abs().mean() < PARITY_LIMIT
    assert cosine_similarity(ours[1], expected[1], dim=0) > 0.99
    apart = computed(exact, share_prompts=False)
    assert cosine_similarity(expected[1], apart[1], dim=0) > 0.9999
