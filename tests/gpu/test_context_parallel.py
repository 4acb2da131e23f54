"""One long sequence split over two GPUs, with NCCL and the bf16 kernels, and complete runs on slices.

Not covered: every kind of attention (`tests/unit/passes/test_slices.py`, on the CPU), speed (`benchmarks/train_step.py`
with `--ranks 2`).
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bridge.passes import attention, slices
from bridge.passes.packing import Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import Ranks
from tests import scenarios
from tests.cpu import test_gpus
from tests.cpu.test_context_parallel import SLICES
from tests.gpu.test_several_gpus import SHARE, config
from tests.models import tiny
from tests.unit.several_ranks import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TOKENS = 32_768
LONG = Qwen3Config(
    vocab_size=2_000, hidden_size=512, intermediate_size=1_024, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=TOKENS,
)  # fmt: skip
MOST_NATS = 0.05
MOST_SHARE = 0.05
"""Tolerance for a gradient: the ranks' bf16 sums cover different tokens, and their products have different shapes."""


def compared(ranks: Ranks) -> tuple[float, float]:
    """Return the differences in log-probabilities and gradients between a split and an unsplit sequence."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LONG, dtype=torch.bfloat16).eval()
    attention.choose(model, attention.NAME)
    prepared = PreparedModel(model)
    ids = tuple(torch.randint(0, LONG.vocab_size, (TOKENS - 3,)).tolist())
    zeros = (0.0,) * (len(ids) - 8)
    sample = Sample(prompt_token_ids=ids[:8], token_ids=ids[8:], sampled_logprobs=zeros, advantages=zeros, weight=1.0)
    (pack,) = packs([sample], max_tokens=TOKENS, device=model.device)
    results = []
    for is_cut in (False, True):
        if is_cut:
            prepared.slices = slices.cut(model, ranks.cp_group)
        model.zero_grad()
        with ranks.in_pass():
            logprobs_N, _ = prepared.logprobs(pack, 1.0)
            (logprobs_N * torch.linspace(-1, 1, len(logprobs_N), device="cuda")).sum().backward()
        gradients = [p.grad.float() for p in model.parameters()]
        results.append((logprobs_N.detach(), [ranks.all_reduce(x) for x in gradients] if is_cut else gradients))
    (whole_N, whole), (cut_N, cut) = results
    shares = [float((one - other).norm() / other.norm()) for one, other in zip(cut, whole, strict=True)]
    return float((cut_N - whole_N).abs().max()), max(shares)


def test_long_sequence_on_two_gpus_matches_one_gpu() -> None:
    for result in on_ranks(2, compared, cp_size=2, on_gpus=True, limit_s=110):
        assert not isinstance(result, BaseException), result
        nats, share = result
        assert nats < MOST_NATS
        assert share < MOST_SHARE


def test_slices_train_and_one_gpu_resumes(tmp_path: Path) -> None:
    model = tiny.write(config(), tmp_path / "model", std=0.06)
    kept = *SHARE, "--save-path", str(tmp_path / "saved"), "--training-steps"
    test_gpus.run(model, tmp_path, *SLICES, *kept, "3", gpus=2)
    test_gpus.run(model, tmp_path, "--resume", *kept, "5", gpus=1)
    test_gpus.run(model, tmp_path, "--resume", *SLICES, *kept, "7", gpus=2)
    rows = test_gpus.metrics(tmp_path)
    assert [row["step"] for row in rows] == [*range(1, 8)]
    assert all(float(str(row["logprob_diff_mean"])) < scenarios.PARITY_LIMIT for row in rows)
