"""Packed attention against transformers' own, one sequence at a time; the kernel's call is tested with a stand-in."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from bridge.errors import UnsupportedModelError, UsageError
from bridge.passes import attention, kernels, layers
from bridge.passes.packing import Sample, packs
from bridge.passes.packing_proof import packed
from bridge.passes.prepared_model import PreparedModel
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, the last layer by a window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "llama": LlamaConfig(**SIZES),
    "mistral, by a window": MistralConfig(**SIZES, sliding_window=4),
    "gemma 2": Gemma2Config(
        **SIZES, head_dim=8, sliding_window=4, attn_logit_softcapping=0.02, query_pre_attn_scalar=3
    ),
    "gemma 3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4),
    "phi": PhiConfig(**SIZES),
    "phi 3": Phi3Config(**SIZES, sliding_window=4),
    "olmo 2": Olmo2Config(**SIZES),
    "starcoder 2": Starcoder2Config(**SIZES, sliding_window=4),
    "gpt 2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=4),
    "gpt-oss, with sinks": GptOssConfig(
        **SIZES, head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None
    ),
    "deepseek 3, values of another size": DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}), kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        moe_intermediate_size=16,
    ),
}  # fmt: skip
LENGTHS = (19, 12, 5, 5, 2, 1)


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    with kernel_on_the_cpu():
        yield


@pytest.fixture
def long_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace cuDNN's kernel for single sequences by torch's CPU kernel; return the list of lengths that it got."""
    lengths = list[int]()

    def backend(_: object) -> Any:
        return nullcontext()

    def counted(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        lengths.append(q.shape[2])
        return by_cudnn(q, k, v, scale)

    by_cudnn = kernels.by_cudnn
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(kernels, "LONG_TOKENS", 10)
    monkeypatch.setattr(kernels._Choice, "head_sizes", frozenset({8}))
    monkeypatch.setattr(kernels, "sdpa_kernel", backend)
    monkeypatch.setattr(kernels, "by_cudnn", counted)
    return lengths


def tiny(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # other tests share this configuration
    config.initializer_range = 0.5  # otherwise attention would barely matter
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def tokens() -> Tensor:
    return torch.randint(3, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def alone(model: PreTrainedModel) -> Tensor:
    parts = tokens().split(LENGTHS)
    return torch.cat([model.get_decoder()(input_ids=x[None], use_cache=False).last_hidden_state[0] for x in parts])


def gradients(model: PreTrainedModel, hidden: Tensor) -> list[Tensor]:
    """Return the gradients of a loss that weighs every element differently."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    trained = [p for p in model.get_decoder().parameters() if p.requires_grad]
    return list(
        torch.autograd.grad((hidden * weights).sum(), trained, materialize_grads=True)
    )  # experts without tokens have no gradient


def assert_same(ours: Tensor, expected: Tensor, model: PreTrainedModel) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(gradients(model, ours), gradients(model, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max() + 1e-3))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_match_separate_sequences(family: str) -> None:
    model = tiny(FAMILIES[family])
    expected = alone(model)
    model.set_attn_implementation(attention.NAME)
    assert_same(packed(PreparedModel(model), tokens(), LENGTHS), expected, model)


@pytest.mark.parametrize("family", ["qwen2", "mistral, by a window", "gemma 3", "mixtral"])
def test_transformers_attention_separates_by_positions(family: str) -> None:
    model = tiny(FAMILIES[family])
    expected = alone(model)
    model.set_attn_implementation("sdpa")
    assert_same(packed(PreparedModel(model), tokens(), LENGTHS), expected, model)


def test_attention_never_builds_a_tokens_by_tokens_mask() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple) else (result,)
            largest = max([largest, *(x.numel() for x in outputs if torch.is_tensor(x))])
            return result

    model = tiny(FAMILIES["mistral, by a window"])
    model.set_attn_implementation(attention.NAME)
    lengths = (8,) * 250
    with Watch():  # type: ignore[no-untyped-call]
        packed(PreparedModel(model), torch.arange(2000) % 97, lengths).sum().backward()
    assert largest < 2000 * 2000 / 10


def test_attention_without_boundaries_treats_rows_separately() -> None:
    model = tiny(FAMILIES["mistral, by a window"])
    ids = tokens()[:20].reshape(2, 10)
    expected = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation(attention.NAME)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "choices", [{"attention_mask": torch.ones(1, 1, 3, 3)}, {"position_bias": torch.ones(3, 3)}, {"dropout": 0.1},
              {"is_causal": False}],
)  # fmt: skip
def test_unsupported_attention_is_refused_naming_the_layer(choices: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(UnsupportedModelError, match=r"the attention of Identity needs a mask, a bias"):
        attention.attend(torch.nn.Identity(), x, x, x, **({"attention_mask": None} | choices))


def test_kv_cache_is_refused_in_training() -> None:
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(UnsupportedModelError, match=r"a cache"):
        attention.attend(torch.nn.Identity(), x[:, :, :1], x, x, None)


@pytest.mark.parametrize(
    "lengths", [(5,), (4, 4, 4), (9, 8, 7), (1, 9, 1, 9), (3, 2, 1) * 20, (*range(40, 0, -1),), (6,) * 50]
)
def test_blocks_keep_sequence_order_and_limit_padding(lengths: tuple[int, ...]) -> None:
    blocks = list(attention.similar((length, length) for length in lengths))
    assert tuple(span[1] for span in itertools.chain(*blocks)) == lengths
    assert all(min(block)[1] >= attention.LEAST_FILLED * max(block, key=lambda span: span[1])[1] for block in blocks)


def test_sequences_of_equal_length_share_one_block() -> None:
    spans = [(7, 7)] * 100 + [(6, 6)] * 100
    assert list(attention.similar(spans)) == [spans[:100], spans[100:]]


def shared(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the hidden states of sequences that share prompts, and those of the same sequences run separately.

    Prompts have several lengths, and one, few or many completions, short and long.
    """
    ids = iter(torch.randint(3, 97, (2000,), generator=torch.Generator().manual_seed(2)).tolist())

    def some(count: int) -> tuple[int, ...]:
        return tuple(next(ids) for _ in range(count))

    sizes = {7: (9, 6, 6, 5, 1), 1: (3, 2), 12: (4,), 5: (5,) * 20}
    samples = [
        Sample(
            prompt_token_ids=prompt,
            token_ids=some(size),
            sampled_logprobs=(0.0,) * size,
            advantages=(0.0,) * size,
            weight=1.0,
        )
        for prompt, counts in ((some(length), counts) for length, counts in sizes.items())
        for size in counts
    ]
    (apart,) = packs(samples, max_tokens=10_000, device=torch.device("cpu"))
    (batch,) = packs(samples, max_tokens=10_000, device=torch.device("cpu"), share_prompts=True)
    assert len(batch.tokens_T) < 0.6 * len(apart.tokens_T)
    decoder, rows = model.get_decoder(), {}
    for part in apart.tokens_T.tensor_split(apart.spans.starts_S1[1:-1].tolist()):
        rows[tuple(part.tolist())] = decoder(input_ids=part[None], use_cache=False).last_hidden_state[0]
    expected = []
    assert batch.spans.seen is not None
    for positions in batch.spans.seen.keys_U.split(batch.spans.seen.starts_S1.diff().tolist()):
        whole = rows.get(tuple(batch.tokens_T[positions].tolist()))
        if whole is not None:
            expected.append((positions, whole))
    assert len(expected) == len(samples)
    model.set_attn_implementation(attention.NAME)
    hidden = PreparedModel(model).own_hidden(batch.tokens_T, batch.positions_T, batch.spans)
    return torch.cat([hidden[positions] for positions, _ in expected]), torch.cat([whole for _, whole in expected])


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_sharing_a_prompt_match_separate_sequences(family: str) -> None:
    model = tiny(FAMILIES[family])
    ours, expected = shared(model)
    assert_same(ours, expected, model)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("family", ["qwen2", "mistral, by a window", "gpt 2"])
def test_kernel_attends_to_shared_prompts(family: str) -> None:
    model = tiny(FAMILIES[family])
    ours, expected = shared(model)
    assert_same(ours, expected, model)


@pytest.mark.slow
@pytest.mark.usefixtures("_kernel")
def test_compiled_layers_share_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    model = tiny(FAMILIES["llama"])
    layers.compile_layers(model)
    ours, expected = shared(model)
    assert_same(ours, expected, model)


def test_gradients_of_a_shared_prompt_are_summed_in_float32() -> None:
    keys = torch.randn(4, 1, 8).bfloat16().requires_grad_()
    positions = torch.arange(4).repeat(1000)
    attention._gathered(keys, positions).backward(torch.full((4000, 1, 8), 1 / 256, dtype=torch.bfloat16))
    assert keys.grad is not None
    assert torch.equal(keys.grad, torch.full_like(keys.grad, 1000 / 256))  # in bf16 the sum would stop at 1


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral, by a window", "gemma 3", "gpt 2"])
def test_kernel_receives_boundaries_window_scale_and_groups(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return varlen.varlen_attn(*args, **options)

    monkeypatch.setattr(kernels, "varlen_attn", counted)
    model = tiny(FAMILIES[family])
    expected = alone(model)
    model.set_attn_implementation(attention.NAME)
    assert_same(packed(PreparedModel(model), tokens(), LENGTHS), expected, model)
    assert calls == 2  # one per layer


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma 3", "gpt 2", "mistral, by a window"])
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_long_sequence_uses_cudnn_unless_a_window_is_shorter(
    family: str, compiles: bool, long_lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    model = tiny(FAMILIES[family])
    several = [tokens()[:length] for length in (19, 12, 9)]
    expected = [model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in several]
    if compiles:
        layers.compile_layers(model)
    num_full = sum(kind != "sliding_attention" for kind in _kinds(model))
    model.set_attn_implementation(attention.NAME)
    with kernel_on_the_cpu():
        for ids, hidden in zip(several, expected, strict=True):
            assert_same(packed(PreparedModel(model), ids, (len(ids),)), hidden, model)
    assert compiles or long_lengths == [19] * num_full + [12] * num_full
    if not compiles:
        with kernel_on_the_cpu():
            packed(PreparedModel(model), tokens(), LENGTHS)  # several sequences
        assert len(long_lengths) == 2 * num_full


def _kinds(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config()
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return getattr(config, "layer_types", None) or [kind] * len(layers.decoder_layers(model))


@pytest.mark.parametrize("wanted", ["cudnn", "flash"])
def test_requested_kernel_is_refused_without_a_gpu(wanted: str) -> None:
    with pytest.raises(UsageError, match=f"--attention {wanted} cannot be used: .* runs only on a GPU"):
        kernels.choose(tiny(FAMILIES["qwen2"]), wanted)


def of_heads(size: int) -> Mock:
    """Return a model that claims to be on a GPU, with heads of this size."""
    model = Mock(device=torch.device("cuda"))
    model.config.get_text_config.return_value = Qwen3Config(**SIZES, head_dim=size)
    return model


@pytest.fixture
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels._Choice, "head_sizes", frozenset())


@pytest.mark.usefixtures("_no_choice")
def test_log_says_why_a_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = of_heads(128)
    monkeypatch.setattr(kernels, "_error", lambda _: 0.5)
    with pytest.raises(UsageError, match=r"--attention cudnn cannot be used: its error is 50.0%, expected at most 2%"):
        kernels.choose(on_gpu, "cudnn")
    assert not kernels.is_long(10**6, 128)
    line = kernels.choose(on_gpu, "auto")
    assert line == "attention: FlashAttention 2; cudnn is not used: its error is 50.0%, expected at most 2%"
    monkeypatch.setattr(kernels, "_error", lambda _: 0.01)
    assert kernels.choose(on_gpu, "auto").startswith("attention: cuDNN for")
    assert kernels.is_long(kernels.LONG_TOKENS, 128)
    assert not kernels.is_long(kernels.LONG_TOKENS - 1, 128)
    assert kernels.choose(on_gpu, "flash") == "attention: FlashAttention 2"
    assert not kernels.is_long(10**6, 128)
    with pytest.raises(UsageError, match="a head has 256 elements, expected at most 128"):
        kernels.choose(of_heads(256), "cudnn")


@pytest.mark.usefixtures("_no_choice")
def test_second_model_in_the_process_keeps_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = of_heads(64)
    monkeypatch.setattr(kernels, "_error", lambda model: 0.5 if model is wrong else 0.0)
    for _ in range(2):  # in either order
        kernels.choose(wrong, "auto")
        kernels.choose(of_heads(128), "auto")
        assert kernels.is_long(10**6, 128)
        assert not kernels.is_long(10**6, 64)
    kernels.choose(wrong, "auto")
    kernels.choose(tiny(FAMILIES["qwen2"]), "auto")
    assert kernels.is_long(10**6, 128)


def test_kernel_check_detects_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(FAMILIES["qwen3"])

    def right(q: Tensor, k: Tensor, v: Tensor, _scale: float | None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def error(kernel: Callable[..., Tensor]) -> float:
        monkeypatch.setattr(kernels, "by_cudnn", kernel)
        return kernels._error(model)

    assert error(right) < kernels.EXAMPLE_ERROR
    assert error(lambda q, k, v, scale: right(q, k, v.roll(1, 2), scale)) > kernels.EXAMPLE_ERROR
    assert error(lambda q, k, v, scale: right(q, k, v, scale) * torch.nan) > kernels.EXAMPLE_ERROR


@pytest.mark.usefixtures("_kernel")
def test_compiled_layers_accept_any_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    model = tiny(FAMILIES["llama"])
    expected = alone(model)
    model.set_attn_implementation(attention.NAME)
    layers.compile_layers(model)
    assert_same(packed(PreparedModel(model), tokens(), LENGTHS), expected, model)
    shorter = packed(PreparedModel(model), tokens()[LENGTHS[0] :], LENGTHS[1:])
    torch.testing.assert_close(shorter, expected[LENGTHS[0] :], rtol=1e-4, atol=1e-4)
