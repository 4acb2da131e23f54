"""Divergences from a teacher: values and gradients against float64 over the whole vocabulary."""

import math
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from bridge.passes import logprobs as blocks
from bridge.passes.divergence import Divergence, DivergenceKind
from bridge.passes.logprobs import Comparison, LogitTransform, Prediction, token_logprobs

KINDS: list[DivergenceKind] = ["reverse_kl", "forward_kl", "jsd"]
ROWS, WORDS = 10, 301
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks, so that every test has several blocks and a partial one at the end."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": 1000, "cuda": 1000})
    monkeypatch.setattr(blocks, "BLOCK_WORDS", 32)


def exact(kind: DivergenceKind, beta: float, policy: Tensor, teacher: Tensor) -> Tensor:
    """Return the divergence of two rows of log-probabilities, written as in the paper."""
    if kind == "reverse_kl":
        return (policy.exp() * (policy - teacher)).sum(-1)
    if kind == "forward_kl":
        return (teacher.exp() * (teacher - policy)).sum(-1)
    mixture = (beta * teacher.exp() + (1 - beta) * policy.exp()).log()
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    of_policy = (policy.exp() * (policy - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * of_policy


def transformed(logits: Tensor, by: LogitTransform) -> Tensor:
    logits = logits / by.logits_scaling
    if by.final_logit_softcapping is not None:
        logits = by.final_logit_softcapping * torch.tanh(logits / by.final_logit_softcapping)
    return logits / by.temperature


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("teacher_words", "cap", "with_bias", "compiles"),
    [
        (WORDS, None, False, False),
        (WORDS, 2.0, True, False),
        (WORDS + 50, None, True, False),
        (WORDS - 50, 2.0, False, False),
        (WORDS - 50, None, True, True),
        (WORDS, 2.0, True, True),
    ],
    ids=["", "soft cap and bias", "teacher pads more", "policy pads more", "policy pads more, compiled", "compiled"],
)
def test_values_and_gradients_match_float64(
    kind: DivergenceKind,
    dtype: torch.dtype,
    teacher_words: int,
    cap: float | None,
    with_bias: bool,
    compiles: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log-probabilities and entropies, which are over all words, have gradients at the same time."""
    if compiles and device == "cpu":
        monkeypatch.setattr(blocks, "_compiled", cache(partial(torch.compile, dynamic=True, backend="aot_eager")))
    torch.manual_seed(0)
    leaves = [torch.randn(ROWS, 16) / 2, torch.randn(WORDS, 16) / 2, torch.randn(WORDS) / 2]
    leaves = [leaf.to(device, dtype) for leaf in leaves]
    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    hidden = (torch.randn(ROWS, 24) / 2).to(device, dtype)
    head = (torch.randn(teacher_words, 24) / 2).to(device, dtype)
    bias = torch.randn(teacher_words).to(device, dtype)
    targets = torch.randint(WORDS, (ROWS,), device=device)
    by = LogitTransform(temperature=0.7, final_logit_softcapping=cap)
    of_teacher = LogitTransform(temperature=0.7, logits_scaling=2.0)
    divergence = Divergence(kind=kind, beta=0.3)

    scores = token_logprobs(
        ours[0], ours[1], ours[2] if with_bias else None, targets, by, compiles,
        differentiates_entropies=True,
        teacher=Comparison(divergence, Prediction(hidden_NG=hidden, head_VG=head, bias_V=bias, by=of_teacher)),
    )  # fmt: skip
    common = min(WORDS, teacher_words)
    logits = transformed(wide[0] @ wide[1].T + (wide[2] if with_bias else 0), by)
    taught = transformed(hidden.double() @ head.double().T + bias.double(), of_teacher)[:, :common].log_softmax(-1)
    expected = exact(kind, 0.3, logits[:, :common].log_softmax(-1), taught)
    every = logits.log_softmax(-1)
    assert scores.divergences_N is not None
    torch.testing.assert_close(scores.divergences_N, expected.float(), rtol=1e-5, atol=1e-5)
    assert (expected > 0.1).all()

    factors = torch.randn(3, ROWS, device=device)
    (
        scores.logprobs_NX * factors[0] + scores.entropies_N * factors[1] + scores.divergences_N * factors[2]
    ).sum().backward()
    entropies = -(every.exp() * every).sum(-1)
    (
        every.gather(1, targets[:, None])[:, 0] * factors[0] + entropies * factors[1] + expected * factors[2]
    ).sum().backward()
    absolute = 0.03 if (dtype, device) == (torch.bfloat16, "cuda") else 1e-5
    for leaf, reference in zip(ours[: 2 + with_bias], wide, strict=False):
        assert leaf.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=TOLERANCE[dtype], atol=absolute)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_equal_to_its_teacher_has_no_divergence(kind: DivergenceKind) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, 16, requires_grad=True)
    head = torch.randn(WORDS, 16)
    own = Prediction(hidden_NG=hidden.detach(), head_VG=head, bias_V=None, by=LogitTransform())
    scores = token_logprobs(
        hidden, head, None, torch.zeros(ROWS, dtype=torch.int64), LogitTransform(), False,
        teacher=Comparison(Divergence(kind=kind), own),
    )  # fmt: skip
    assert scores.divergences_N is not None
    assert scores.divergences_N.abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(scores.divergences_N.sum(), hidden)
    assert gradient.abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_listed_words_give_a_lower_bound(kind: DivergenceKind) -> None:
    """All words but one listed are exact: the last one is the rest."""
    torch.manual_seed(0)
    policy, teacher = torch.randn(2, ROWS, 20).double().log_softmax(-1)
    divergence = Divergence(kind=kind, beta=0.3)
    whole = exact(kind, 0.3, policy, teacher)
    bounds = [divergence.of_listed(policy[:, :count], teacher[:, :count]) for count in (4, 12, 19)]
    torch.testing.assert_close(bounds[-1], whole, rtol=1e-9, atol=1e-9)
    assert (bounds[0] <= bounds[1] + 1e-12).all()
    assert (bounds[1] <= whole + 1e-12).all()
    assert (bounds[0] > 0).all()


def test_jsd_with_an_even_mixture_is_at_most_log_2() -> None:
    policy = torch.tensor([[0.0, -math.inf]]).clamp(min=-80)
    terms, _ = Divergence(kind="jsd").parts(policy, policy.flip(1))
    assert math.isclose(terms.sum().item(), math.log(2), rel_tol=1e-6)
