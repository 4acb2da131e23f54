"""vLLM's log-probability kernel with Bridge's launch options."""

import pytest
import torch

from bridge_patches.logprob_kernel import LAUNCH, Launched

pytest.importorskip("vllm")


@pytest.mark.parametrize("vocabulary", [1_000, LAUNCH["BLOCK_SIZE"], 152_064])
def test_log_probabilities_match_log_softmax(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample import logprob

    logits = torch.randn(64, vocabulary, device="cuda") * 5
    ids = torch.randint(vocabulary, (64, 3), device="cuda")
    expected = logits.double().log_softmax(dim=-1).gather(1, ids)
    stock = logprob.compute_token_logprobs(logits, ids)
    monkeypatch.setattr(logprob, "_topk_log_softmax_kernel", Launched(logprob._topk_log_softmax_kernel))
    ours = logprob.compute_token_logprobs(logits, ids)
    off_stock, off_ours = ((computed - expected).abs().max().item() for computed in (stock, ours))
    assert off_ours <= max(2 * off_stock, 1e-5), (off_ours, off_stock)
