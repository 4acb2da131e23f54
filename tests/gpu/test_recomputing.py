"""What layers keep of a long sequence on a GPU: keeping less saves memory, with the same gradients.

Not covered: bit-equal gradients (`tests/unit/passes/test_recomputing.py`, on the CPU).
"""

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bridge.config import TrainConfig
from bridge.passes import layers
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.passes.preparation import prepare, recompute_activations
from bridge.passes.prepared_model import PreparedModel
from tests.logged import nothing_logged

TOKENS = 12_000
WAYS = {
    "attention": layers.ATTENTION, "inputs": layers.INPUTS, "attention on the host": layers.HOST_ATTENTION,
    "inputs on the host": layers.HOST_INPUTS,
}  # fmt: skip


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=1000, max_position_embeddings=TOKENS, initializer_range=0.05,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).bfloat16().cuda().eval()


def batch() -> MicroBatch:
    ids = tuple(torch.randint(3, 1000, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist())
    behind = len(ids) - 100
    zeros = (0.0,) * behind
    sample = Sample(
        prompt_token_ids=ids[:100], token_ids=ids[100:], sampled_logprobs=zeros, advantages=zeros, weight=1.0
    )
    (made,) = packs([sample], max_tokens=TOKENS, device=torch.device("cuda"))
    return made


def computed(trained: PreparedModel) -> tuple[torch.Tensor, int]:
    """Return all gradients, and the memory that the second pass used; the first one compiles."""
    parameters = list(trained.model.parameters())
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        logprobs_N, _ = trained.logprobs(batch(), 1.0)
        gradients = torch.autograd.grad(logprobs_N.sum(), parameters)
        # active: with what was freed, but is not yet free for another stream
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
    return torch.cat([gradient.float().flatten().cpu() for gradient in gradients]), peak


@pytest.mark.parametrize("compiles", [True, False])
def test_recomputing_saves_memory_with_equal_gradients(compiles: bool) -> None:
    trained = prepare(model(), TrainConfig.of(model_name="m", compile_layers=compiles).compute)
    expected, most = computed(trained)
    peaks = dict[str, int]()
    for name, kept in WAYS.items():
        with nothing_logged():
            recompute_activations(trained, kept)
        assert trained.is_compiled == compiles
        own, peaks[name] = computed(trained)
        assert cosine_similarity(own, expected, dim=0) > 0.999, name
    assert most > peaks["attention"] > peaks["inputs"] > peaks["inputs on the host"]
    assert peaks["attention"] > peaks["attention on the host"]
