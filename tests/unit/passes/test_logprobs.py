"""Log-probabilities in vocabulary blocks, compared with a naive computation and with full transformers models."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bridge.errors import UnsupportedModelError
from bridge.passes import layers
from bridge.passes import logprobs as blocks
from bridge.passes.logprobs import LogitTransform, check_head, token_logprobs
from bridge.passes.packing import Kept, MicroBatch, Sample, packs
from bridge.passes.prepared_model import PreparedModel
from tests.models import tiny

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
VOCABULARY = 301
PLAIN = LogitTransform()
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks, so that every test has several blocks and a partial one at the end."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": 1000, "cuda": 1000})
    monkeypatch.setattr(blocks, "BLOCK_WORDS", 32)


@pytest.fixture
def traced_on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate what is compiled, without C++ for each form of it; kernels are a GPU's."""
    if request.node.callspec.params["device"] == "cpu":
        traced = partial(torch.compile, dynamic=True, backend="aot_eager")
        monkeypatch.setattr(blocks, "_compiled", cache(traced))


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (8, 64), (64, 8)])
def test_block_products_stay_below_the_size_limit(monkeypatch: pytest.MonkeyPatch, num_rows: int, hidden: int) -> None:
    """This holds for the logits and, with few rows, for the head's gradient, which a block computes in float32."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": 64 * 64})
    sizes = [block.stop - block.start for block, _ in blocks._blocks(num_rows, torch.empty(300, hidden), None, 300)]
    assert sizes == [64, 64, 64, 64, 44]


def naive(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    cap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    raw = hidden @ head.T + (0 if bias is None else bias)
    raw = raw / scale
    raw = raw if cap is None else cap * torch.tanh(raw / cap)
    logprobs = (raw / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.usefixtures("traced_on_the_cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cap", "scale", "with_bias", "compiles"),
    [(None, 1.0, False, False), (None, 8.0, True, False), (2.0, 1.0, False, False), (2.0, 1.0, True, True)],
)
@pytest.mark.parametrize("has_bonus", [False, True], ids=["", "entropy bonus"])
def test_values_and_gradients_match_float64(
    dtype: torch.dtype, cap: float | None, scale: float, with_bias: bool, compiles: bool, has_bonus: bool, device: str
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(VOCABULARY + 19, 16).to(device, dtype)
    leaves = [
        torch.randn(10, 16).to(device, dtype),
        fused[:VOCABULARY],
        torch.randn(VOCABULARY).to(device, dtype),
    ]
    ours, exact = [x.detach().requires_grad_() for x in leaves], [x.double().requires_grad_() for x in leaves]
    targets, weights = torch.randint(VOCABULARY, (10,), device=device), torch.randn(10, device=device)

    logprobs, entropies, _ = token_logprobs(
        ours[0],
        ours[1],
        ours[2] if with_bias else None,
        targets,
        LogitTransform(temperature=0.7, final_logit_softcapping=cap, logits_scaling=scale),
        compiles,
        differentiates_entropies=has_bonus,
    )
    expected, expected_entropies = naive(
        exact[0], exact[1], targets, temperature=0.7, bias=exact[2] if with_bias else None, cap=cap, scale=scale
    )
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert entropies.requires_grad == has_bonus
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies.float(), rtol=1e-5, atol=1e-5)

    of_entropies = torch.randn(10, device=device) * has_bonus
    (logprobs * weights + entropies * of_entropies).sum().backward()
    (expected * weights + expected_entropies * of_entropies).sum().backward()
    # on the CPU the gradient is rounded once, to its own dtype; on a GPU the logits' gradient is also rounded to bf16
    relative = 1e-5 if dtype == torch.float32 else 2**-8
    absolute = 0.02 if (dtype, device) == (torch.bfloat16, "cuda") else 1e-5
    for mine, theirs in list(zip(ours, exact, strict=True))[: 3 if with_bias else 2]:
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=relative, atol=absolute)


def test_bf16_logits_would_differ_more_than_two_engines() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(50, 64).bfloat16(), torch.randn(VOCABULARY, 64).bfloat16()
    targets = torch.randint(VOCABULARY, (50,))
    exact, _ = naive(hidden.double(), head.double(), targets)
    ours, _, _ = token_logprobs(hidden, head, None, targets, PLAIN, False)
    rounded = (hidden @ head.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    assert (ours - exact).abs().max() < 1e-4
    assert (rounded - exact).abs().max() > 0.02


def test_frozen_head_leaves_only_hidden_state_gradients() -> None:
    hidden, head = torch.randn(4, 16, requires_grad=True), torch.randn(VOCABULARY, 16)
    token_logprobs(hidden, head, None, torch.arange(4), PLAIN, False)[0].sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_empty_input_gives_empty_results_and_zero_gradients() -> None:
    hidden, head = torch.randn(0, 16, requires_grad=True), torch.randn(VOCABULARY, 16, requires_grad=True)
    logprobs, entropies, _ = token_logprobs(hidden, head, None, torch.empty(0, dtype=torch.int64), PLAIN, False)
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert head.grad is not None
    assert not head.grad.any()


def test_tokens_times_vocabulary_is_never_materialized() -> None:
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple) else (result,)
            sizes.extend(x.numel() for x in outputs if torch.is_tensor(x))
            return result

    hidden, head = torch.randn(100, 16, requires_grad=True), torch.randn(VOCABULARY, 16, requires_grad=True)
    with Watch():  # type: ignore[no-untyped-call]
        token_logprobs(hidden, head, None, torch.arange(100), PLAIN, False)[0].sum().backward()
    assert max(sizes) == head.numel() < 100 * VOCABULARY


def test_only_the_heads_gradient_is_as_large_as_the_head() -> None:
    addresses: set[int] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if torch.is_tensor(result) and result.untyped_storage().nbytes() >= head.nbytes:
                addresses.add(result.untyped_storage().data_ptr())
            return result

    hidden = torch.randn(20, 64, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(VOCABULARY, 64, dtype=torch.bfloat16, requires_grad=True)
    logprobs = token_logprobs(hidden, head, None, torch.arange(20), PLAIN, False)[0]
    with Watch():  # type: ignore[no-untyped-call]
        gradient, _ = torch.autograd.grad(logprobs.sum(), [head, hidden])
    assert addresses == {gradient.data_ptr(), head.data_ptr()}


@pytest.mark.parametrize("compiles", [False, True])
def test_targets_are_found_in_all_vocabulary_blocks(compiles: bool) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(VOCABULARY, 16, requires_grad=True), torch.randn(VOCABULARY, 16, requires_grad=True)
    targets = torch.arange(VOCABULARY)
    ours, _, _ = token_logprobs(hidden, head, None, targets, PLAIN, compiles)
    exact, _ = naive(hidden, head, targets)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
    mine, theirs = (torch.autograd.grad(x.sum(), [hidden, head]) for x in (ours, exact))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_distant_logits_neither_overflow_nor_vanish() -> None:
    hidden, head = torch.full((2, 1), 1e4), torch.linspace(-1, 1, VOCABULARY).unsqueeze(1)
    targets = torch.tensor([0, VOCABULARY - 1])
    logprobs, entropies, _ = token_logprobs(hidden, head, None, targets, PLAIN, False)
    expected, expected_entropies = naive(hidden.double(), head.double(), targets)
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(entropies, expected_entropies.float(), rtol=1e-5, atol=1e-2)


def filtered(logits: Tensor, targets: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies over the kept words, computed from all logits."""
    logprobs = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(-1)


def kept_of(logits: Tensor, counts: Tensor) -> tuple[Kept, Tensor, Tensor]:
    """Keep the likeliest `counts` words per row; return `Kept` as the server sends it, the mask, and kept targets."""
    ordered, words = logits.detach().sort(dim=1, descending=True)
    thresholds = (ordered.gather(1, counts[:, None] - 1) + ordered.gather(1, counts[:, None])) / 2
    kept = Kept(thresholds.squeeze(1).float(), counts.float())
    return kept, logits >= thresholds, words.gather(1, counts[:, None] // 2).squeeze(1)


@pytest.mark.usefixtures("traced_on_the_cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cap", "temperature", "compiles"),
    [(None, 1.0, False), (None, 0.6, False), (2.0, 0.7, False), (None, 0.6, True), (2.0, 0.7, True)],
)
def test_filtered_values_match_a_mask_over_all_logits(
    cap: float | None, temperature: float, compiles: bool, device: str
) -> None:
    """Keep from one word to all but one, so that blocks are kept in full, in part and not at all."""
    torch.manual_seed(0)
    ours = [torch.randn(rows, 16, device=device).requires_grad_() for rows in (30, VOCABULARY)]
    exact = [leaf.detach().double().requires_grad_() for leaf in ours]
    counts = torch.linspace(1, VOCABULARY - 1, 30, device=device).long()
    raw = exact[0] @ exact[1].T
    logits = (raw if cap is None else cap * torch.tanh(raw / cap)) / temperature
    kept, is_kept, targets = kept_of(logits, counts)
    expected, expected_entropies = filtered(logits, targets, is_kept)
    by = LogitTransform(temperature=temperature, final_logit_softcapping=cap)
    actual, entropies, _ = token_logprobs(
        ours[0], ours[1], None, targets, by, compiles, kept, differentiates_entropies=True
    )
    assert kept.thresholds_N.grad_fn is None
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies.float(), rtol=1e-4, atol=1e-4)
    weights, of_entropies = torch.randn(2, 30, device=device)
    mine = torch.autograd.grad((actual * weights + entropies * of_entropies).sum(), ours)
    theirs = torch.autograd.grad((expected * weights + expected_entropies * of_entropies).sum(), exact)
    torch.testing.assert_close(mine, tuple(gradient.float() for gradient in theirs), rtol=1e-4, atol=1e-4)


def test_entropy_alone_has_its_gradient() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 16, requires_grad=True), torch.randn(VOCABULARY, 16, requires_grad=True)
    targets = torch.arange(5)
    _, entropies, _ = token_logprobs(hidden, head, None, targets, PLAIN, False, differentiates_entropies=True)
    _, expected = naive(hidden, head, targets)
    mine, theirs = (torch.autograd.grad(one.sum(), (hidden, head)) for one in (entropies, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_tied_head_gets_both_gradients_over_kept_words() -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(VOCABULARY, 16, requires_grad=True), torch.arange(20)
    logits = table[ids] @ table.T
    kept, is_kept, targets = kept_of(logits, torch.full((20,), 7))
    actual, _, _ = token_logprobs(table[ids], table, None, targets, PLAIN, False, kept)
    expected, _ = filtered(logits, targets, is_kept)
    mine, theirs = (torch.autograd.grad(values.sum(), table)[0] for values in (actual, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_threshold_below_all_logits_changes_no_bit() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(20, 16), torch.randn(VOCABULARY, 16)
    everything = Kept(torch.full((20,), torch.finfo(torch.float32).min), torch.zeros(20))
    plain, all_kept = (
        token_logprobs(hidden, head, None, torch.arange(20), PLAIN, False, k)[:2] for k in (None, everything)
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, all_kept, strict=True))


def test_words_near_the_threshold_barely_change_the_sum() -> None:
    """Without the count of kept words, one word more or less would change the result by 1 / 20 nats."""
    torch.manual_seed(0)
    logits = torch.randn(200, VOCABULARY, dtype=torch.float64).mul(0.3)
    kept, is_kept, targets = kept_of(logits, torch.full((200,), 20))
    moved = (logits + 0.01 * torch.randn_like(logits)).float()
    exact, _ = filtered(moved, targets, is_kept)
    moved_logprobs, _, _ = token_logprobs(moved, torch.eye(VOCABULARY), None, targets, PLAIN, False, kept)
    uncounted, _ = filtered(moved, targets, moved >= kept.thresholds_N[:, None])
    assert (moved_logprobs - exact).abs().max() < 0.002
    assert (uncounted - exact).abs().max() > 0.02


def test_normalizer_is_continuous_at_the_threshold() -> None:
    kept = Kept(torch.tensor([0.0]), torch.tensor([2.0]))
    around = [torch.tensor([[1.0, step, -2.0]]) for step in (-1e-4, 1e-4)]
    one, other = (token_logprobs(x, torch.eye(3), None, torch.tensor([0]), PLAIN, False, kept)[0] for x in around)
    assert (one - other).abs() < 2e-4
    torch.testing.assert_close(one, 1 - torch.tensor([math.e + 1]).log(), rtol=1e-3, atol=1e-3)


def micro_batch(lengths: list[tuple[int, int]]) -> MicroBatch:
    """Return one pack of sequences with these lengths of (prompt, completion)."""
    samples = [
        Sample(
            prompt_token_ids=tuple(torch.randint(VOCABULARY, (prompt,)).tolist()),
            token_ids=tuple(torch.randint(VOCABULARY, (completion,)).tolist()),
            sampled_logprobs=(0.0,) * completion,
            advantages=(1.0,) * completion,
            weight=1.0,
        )
        for prompt, completion in lengths
    ]
    (packed,) = packs(samples, max_tokens=1000, device=torch.device("cpu"))
    return packed


def models() -> list[PreTrainedModel]:
    return [
        LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
        Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5, pad_token_id=0)),
        GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    ]


@pytest.mark.parametrize("index", range(4))
def test_log_probs_match_the_models_own_logits(index: int) -> None:
    torch.manual_seed(0)
    model = models()[index].eval()
    batch = micro_batch([(3, 5), (1, 2), (4, 4)])
    ours, entropies = PreparedModel(model).logprobs(batch, 0.8)
    parts = torch.tensor_split(batch.tokens_T, batch.spans.starts_S1[1:-1].tolist())
    whole = torch.cat([model(input_ids=part.unsqueeze(0)).logits[0] for part in parts]).float() / 0.8
    every = whole.log_softmax(-1)[batch.rows_N]
    expected = every.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1)
    assert ours.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-5)

    parameters = list(model.parameters())
    mine, theirs = (torch.autograd.grad(x, parameters) for x in (ours.sum(), expected.sum()))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("index", range(4))
def test_supported_heads_pass_the_check(index: int) -> None:
    check_head(models()[index].bfloat16().eval())


def test_head_that_transforms_logits_is_refused() -> None:
    class Doubled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    with pytest.raises(UnsupportedModelError, match=r"Doubled computes logits .* differ by 50.0%"):
        check_head(Doubled(LlamaConfig(**SIZES)))


class Wrapped(nn.Module):
    """A head that adds 1 to the output of an inner layer, and exposes that layer's weight as its own."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.inside = inside

    @property
    def weight(self) -> Tensor:
        return self.inside.weight

    def forward(self, hidden: Tensor) -> Any:
        return self.inside(hidden) + 1


def with_lora(model: PreTrainedModel) -> None:
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"]))


def with_modules_to_save(model: PreTrainedModel) -> None:
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))


def with_a_wrapper(model: PreTrainedModel) -> None:
    model.set_output_embeddings(Wrapped(model.get_output_embeddings()))


@pytest.mark.parametrize("wrap", [with_lora, with_modules_to_save, with_a_wrapper])
def test_wrapped_head_is_refused(wrap: Callable[[PreTrainedModel], None]) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    wrap(model)
    sample = Sample(
        prompt_token_ids=(1, 2), token_ids=(3, 4), sampled_logprobs=(0.0, 0.0), advantages=(1.0, 1.0), weight=1.0
    )
    (batch,) = packs([sample], max_tokens=8, device=torch.device("cpu"))
    for compute in (lambda: check_head(model), lambda: PreparedModel(model).logprobs(batch, 1.0)):
        with pytest.raises(UnsupportedModelError, match="the head of LlamaForCausalLM is wrapped"):
            compute()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_wide_linear_rounds_product_and_gradients_once(shape: tuple[int, ...], has_bias: bool) -> None:
    layer = nn.Linear(16, 5, bias=has_bias, dtype=torch.bfloat16)
    rows = random(*shape).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (rows, *layer.parameters())]
    layers.widen(layer)
    out = layer(rows)
    expected = functional.linear(*exact)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.detach().float().bfloat16())
    gradient = random(*expected.shape)
    out.backward(gradient)
    expected.backward(gradient.double())
    for rounded, right in zip((rows, *layer.parameters()), exact, strict=True):
        assert rounded.grad is not None
        assert right.grad is not None
        assert torch.equal(rounded.grad, right.grad.float().bfloat16())


def test_frozen_wide_linear_passes_gradients_through() -> None:
    layer = nn.Linear(8, 4, dtype=torch.bfloat16).requires_grad_(False)
    layers.widen(layer)
    rows = random(3, 8).requires_grad_()
    layer(rows).sum().backward()
    assert rows.grad is not None
    assert [parameter.grad for parameter in layer.parameters()] == [None, None]


def test_wide_linear_leaves_float32_unchanged() -> None:
    layer = nn.Linear(8, 4)
    rows = random(3, 8, dtype=torch.float32)
    before = layer(rows)
    layers.widen(layer)
    assert torch.equal(layer(rows), before)


def test_widening_keeps_parameters_and_outputs() -> None:
    model = AutoModelForCausalLM.from_config(tiny.llama(), dtype=torch.bfloat16).eval()
    tokens = torch.arange(3, 19).unsqueeze(0)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        before = model(input_ids=tokens).logits.float()
        layers.widen(model)
        after = model(input_ids=tokens).logits.float()
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert (after - before).abs().max() < before.abs().max() / 64


def test_only_bf16_layers_are_widened_without_gradients() -> None:
    rows, weight, bias = random(3, 8), random(4, 8), random(4)
    expected = functional.linear(rows.double(), weight.double(), bias.double()).float().bfloat16()
    assert torch.equal(layers.wide_linear(rows, weight, bias), expected)
    wide = [tensor.float() for tensor in (rows, weight, bias)]
    assert torch.equal(layers.wide_linear(*wide), functional.linear(*wide))
