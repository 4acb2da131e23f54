"""If weights do not change, the probability ratios are 1 in every update, however the layers are compiled."""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from bridge.learn import policy_loss
from bridge.learn.policy_loss import LOSSES
from bridge.passes import attention, layers, logprobs
from bridge.passes.packing import MicroBatch
from bridge.passes.prepared_model import PreparedModel
from bridge.run import learner
from bridge.types import Completion, Group
from tests.models import tiny
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu
from tests.unit.run.test_learner import Descent, updated

LENGTHS = (60, 52, 71, 66)


@pytest.fixture(autouse=True)
def _no_code_of_other_tests() -> None:
    torch._dynamo.reset()


@pytest.fixture
def _whole_layers_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers that contain a kernel, as on a GPU, are one graph each, which takes a third of the time."""
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    with kernel_on_the_cpu():
        yield


class Still(Descent):
    """An optimizer that never changes a weight, so that every ratio must be 1."""

    def _step(self, norm: float, max_norm: float) -> None: ...


def model(**changes: int) -> PreTrainedModel:
    config = tiny.llama()
    config.update({"num_hidden_layers": 1, "initializer_range": 0.08} | changes)
    torch.manual_seed(7)
    return LlamaForCausalLM(config).bfloat16().eval()


def groups(lengths: Sequence[int] = LENGTHS) -> list[Group]:
    """Return two groups without the server's log-probabilities, since only the trainer's are compared."""
    torch.manual_seed(3)
    made = []
    for _ in range(2):
        prompt, *completions = (
            tuple(torch.randint(3, tiny.VOCABULARY, (length,)).tolist()) for length in (5, *lengths)
        )
        rows = tuple(
            Completion(
                token_ids=ids, logprobs=(math.nan,) * len(ids), text="", finish_reason="stop", versions=(0,) * len(ids)
            )
            for ids in completions
        )
        made.append(
            Group(problem={"prompt": "?"}, prompt_token_ids=prompt, completions=rows, rewards=(0.0, 1.0, 2.0, 3.0))
        )
    return made


def learnt(**choices: Any) -> dict[str, Any]:
    fixed = {"batch_size": 8, "updates_per_batch": 2, "make_optimizer": Still}
    return updated(model(), groups(), **fixed | choices)


def log_ratios(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collect each micro-batch's log ratios."""
    measured: list[Tensor] = []
    original = policy_loss.policy_loss

    def noting(logprobs_N: Tensor, old_logprobs_N: Tensor, batch: MicroBatch, *rest: Any) -> Any:
        measured.append((logprobs_N - old_logprobs_N).detach())
        return original(logprobs_N, old_logprobs_N, batch, *rest)

    monkeypatch.setattr(learner, "policy_loss", noting)
    return measured


def another_code_without_gradients(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Compile like inductor, whose code without gradients is fused, and therefore rounds, differently."""
    if torch.is_grad_enabled():
        return graph
    return lambda *inputs: [
        x * (1 + 2**-7) if torch.is_tensor(x) and x.is_floating_point() else x for x in graph(*inputs)
    ]


@pytest.mark.usefixtures("_whole_layers_compiled")
@pytest.mark.timeout(600)
def test_unchanged_weights_have_ratios_of_exactly_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", another_code_without_gradients)
    monkeypatch.setattr(logprobs, "_compiled", lambda function: function)  # the real compiler is slow
    ratios = log_ratios(monkeypatch)
    for loss, updates, passes in [("gspo", 1, 1), ("gspo", 1, 2), *((loss, 2, 2) for loss in LOSSES)]:
        ratios.clear()
        of_teacher = {"teacher": "self", "divergence": "sampled"} if loss == "distill" else {}
        metrics = learnt(
            loss=loss, compile_layers=True, updates_per_batch=updates, passes_per_batch=passes, micro_batch_tokens=150,
            **of_teacher,
        )  # fmt: skip
        assert metrics["updates"] == updates * passes
        assert len(ratios) == 4 * passes
        assert not any(log_ratios_N.any() for log_ratios_N in ratios), (loss, updates, passes)
        assert (metrics["clipped_low_share"], metrics["clipped_high_share"]) == (0, 0)


def test_first_update_needs_no_extra_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ratios are 1 whatever the kernels do, since both sides are the same numbers."""
    original, calls = PreparedModel.scores, [0]

    def noisy(*given: Any, **choices: Any) -> logprobs.Scores:
        calls[0] += 1
        scores = original(*given, **choices)
        return scores._replace(logprobs_NX=scores.logprobs_NX + torch.randn_like(scores.logprobs_NX))

    monkeypatch.setattr(PreparedModel, "scores", noisy)
    ratios = log_ratios(monkeypatch)
    learnt(loss="gspo", updates_per_batch=2, micro_batch_tokens=10_000)  # a budget that needs no probes
    assert calls == [3]
    assert not ratios[0].any()


@pytest.mark.usefixtures("_whole_layers_compiled")
def test_pass_for_entropies_uses_the_updates_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", another_code_without_gradients)
    monkeypatch.setattr(logprobs, "_compiled", lambda function: function)
    ratios = log_ratios(monkeypatch)
    metrics = learnt(compile_layers=True, updates_per_batch=1, top_entropy=0.5)
    assert metrics["updates"] == len(ratios) == 1
    assert not ratios[0].any()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for it with g++")
@pytest.mark.timeout(600)
def test_gspo_keeps_its_gradient_with_compiled_layers() -> None:
    plain, compiled = (learnt(loss="gspo", compile_layers=compiles) for compiles in (False, True))
    assert (compiled["clipped_low_share"], compiled["clipped_high_share"]) == (0, 0)
    assert compiled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.02)
