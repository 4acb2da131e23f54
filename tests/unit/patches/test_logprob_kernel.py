"""The log-probability kernel, launched by vLLM's own function; a stand-in computes its results."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bridge_patches import logprob_kernel

pytestmark = pytest.mark.xdist_group("contract")  # one worker imports vLLM for all of them


@pytest.fixture
def logprob() -> Any:
    return pytest.importorskip("vllm.v1.worker.gpu.sample.logprob")


class Kernel:
    """Accepts the arguments of vLLM's kernel, and computes with torch."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(output: Tensor, logits: Tensor, _: int, ids: Tensor, *__: int, **launched: Any) -> None:
            self.launches.append({**launched, "grid": grid})
            output.copy_(logits.log_softmax(dim=-1).gather(1, ids))

        return launch


def test_vllm_launches_the_kernel_with_larger_chunks(monkeypatch: pytest.MonkeyPatch, logprob: Any) -> None:
    kernel = Kernel()
    monkeypatch.setattr(logprob, "_topk_log_softmax_kernel", kernel)
    monkeypatch.setattr(logprob, "triton", type("Triton", (), {"next_power_of_2": staticmethod(lambda n: n)}))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    logits, ids = torch.randn(3, 40_000), torch.tensor([[5], [39_999], [0]])
    expected = logits.log_softmax(dim=-1).gather(1, ids)
    before = logprob.compute_token_logprobs(logits, ids)
    logprob_kernel.patch()
    after = logprob.compute_token_logprobs(logits, ids)
    torch.testing.assert_close((before, after), (expected, expected))
    plain, larger = kernel.launches
    assert larger == {**plain, "BLOCK_SIZE": 16_384, "num_warps": 16}
    assert plain["BLOCK_SIZE"] < larger["BLOCK_SIZE"]


def test_cpu_kernel_is_not_patched(monkeypatch: pytest.MonkeyPatch, logprob: Any) -> None:
    monkeypatch.setattr(logprob, "_topk_log_softmax_kernel", kernel := Kernel())
    logprob_kernel.patch()
    assert logprob._topk_log_softmax_kernel is kernel
