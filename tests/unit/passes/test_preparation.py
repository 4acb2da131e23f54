"""Preparing a model: its choices, its refusals, and that no parameter moves."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import silu
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from bridge.config import LoraConfig, TrainConfig
from bridge.errors import UnsupportedModelError, UsageError
from bridge.passes import attention, layers, routing
from bridge.passes.packing_proof import LENGTHS as CHECKED_LENGTHS
from bridge.passes.packing_proof import Expected, difference, example_tokens, packed
from bridge.passes.preparation import prepare, recompute_activations
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.routing import RouterReplay
from bridge.weights import skeleton
from bridge.weights.adapter import Adapter
from tests.logged import logged, nothing_logged
from tests.models import tiny
from tests.models.families import FAMILIES, INSIDE
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LENGTHS = (11, 6, 2)
TOKENS = torch.arange(sum(LENGTHS)) * 5 % 97


def llama(num_layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"num_hidden_layers": num_layers}))).eval()


def noted(model: PreTrainedModel, **choices: Any) -> tuple[PreparedModel, list[str]]:
    """Prepare a model, and return it with the logged lines."""
    with logged() as lines:
        return prepare(model, TrainConfig.of(model_name="m", **choices).compute), lines


def quietly(model: PreTrainedModel, **choices: Any) -> PreparedModel:
    """Prepare a model, and check that nothing is logged."""
    with nothing_logged():
        return prepare(model, TrainConfig.of(model_name="m", **choices).compute)


def gradients(prepared: PreparedModel) -> list[Tensor]:
    trained = [parameter for parameter in prepared.model.get_decoder().parameters() if parameter.requires_grad]
    hidden = packed(prepared, TOKENS, LENGTHS)
    return list(torch.autograd.grad((hidden * torch.linspace(-1, 1, hidden.shape[1])).sum(), trained))


def assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_model_without_experts_is_not_called_for_routing() -> None:
    model, calls = llama(), list[None]()
    prepared = PreparedModel(model)
    prepared.replay = RouterReplay.if_known(model)
    model.get_decoder().register_forward_pre_hook(lambda *_: calls.append(None))
    Expected.of(prepared)
    assert len(calls) == 2 * len(CHECKED_LENGTHS) + 1, "alone with two kinds of attention, and all as one"


def test_packed_attention_is_chosen_without_a_log_line() -> None:
    model = llama()
    quietly(model)
    assert model.config._attn_implementation == attention.NAME
    assert attention.NAME not in model.config.to_json_string()  # a checkpoint's config.json must not mention it


def test_model_with_a_zero_embedding_is_prepared() -> None:
    model = llama()
    first = example_tokens(model)[0]  # its hidden state is 0, too
    with torch.no_grad():
        model.get_input_embeddings().weight[first] = 0
    quietly(model)


def test_prompts_are_shared_only_if_completions_attend_to_them(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TrainConfig.of(model_name="m").compute
    assert prepare(llama(), config).shares_prompts
    assert caplog.messages == []
    boundaries = attention.boundaries
    monkeypatch.setattr(attention, "boundaries", lambda *given: {**boundaries(*given), "seen": None})
    model = llama()
    assert not prepare(model, config).shares_prompts
    assert model.config._attn_implementation == attention.NAME
    (note,) = caplog.messages
    assert note.startswith("prompts are not shared: LlamaForCausalLM does not keep packed sequences apart")


def test_prompts_are_not_shared_without_packed_attention() -> None:
    config = Gemma2Config(**SIZES, head_dim=8)
    model = Gemma2ForCausalLM(config).eval()
    model.model._can_set_attn_implementation = lambda: False
    assert not prepare(model, TrainConfig.of(model_name="m").compute).shares_prompts


def mixture() -> PreTrainedModel:
    """Return a deep mixture of experts in bf16 whose output depends strongly on the chosen experts."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 301, "hidden_size": 128, "num_hidden_layers": 24}
    config = Qwen3MoeConfig(**sizes, head_dim=32, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, (2.0 if parameter.ndim == 3 else 0.5) / math.sqrt(parameter.shape[-1]))
        model.get_input_embeddings().weight.normal_()
    return model


@pytest.mark.parametrize("is_replayed", [False, True])
def test_experts_are_recorded_after_the_check_only_if_replayed(is_replayed: bool) -> None:
    """Recording in eager layers would cost up to a quarter of a step."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, head_dim=8)).eval()
    model.set_experts_implementation("batched_mm")
    compute, experts = TrainConfig.of(model_name="m").compute, (2, 2) if is_replayed else None
    with nothing_logged():
        prepared = prepare(model, compute, experts=experts)
    watched = [layer.mlp for layer in model.get_decoder().layers if "forward" in vars(layer.mlp)]
    assert len(watched) == (2 if is_replayed else 0)
    assert (prepared.replay is not None) == is_replayed
    if prepared.replay is not None:
        assert prepared.replay.watched(lambda: routing.plain_hidden(model, TOKENS)).shape == (len(TOKENS), 2 * 2)


def test_experts_swapped_by_rounding_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many layers, swaps change hidden states as much as mixed sequences do, unless all passes use one choice."""
    quietly(mixture())
    monkeypatch.setattr(RouterReplay, "if_known", lambda _: None)
    with pytest.raises(UnsupportedModelError, match="does not keep packed sequences apart"):
        noted(mixture())


def test_replayed_experts_do_not_hide_mixed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture()

    def as_one(prepared: PreparedModel, tokens_T: Tensor, _: Tensor, __: Any, experts_TX: Tensor) -> Tensor:
        assert prepared.replay is not None
        prepared.replay.choose(experts_TX, len(tokens_T))
        return routing.plain_hidden(prepared.model, tokens_T)

    monkeypatch.setattr(PreparedModel, "own_hidden", as_one)
    with pytest.raises(UnsupportedModelError, match="does not keep packed sequences apart"):
        noted(model)


def test_weights_that_barely_attend_are_not_refused() -> None:
    """With vLLM's dummy weights, for example, mixed sequences change less than rounding does."""
    wide = {"vocab_size": 301, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    model = Qwen2ForCausalLM(Qwen2Config(**(SIZES | wide))).bfloat16().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1e-3, 1e-3, generator=generator)
    _, (note,) = noted(model)
    assert note.startswith("attention hardly matters with these weights: hidden states differ by ")
    assert model.config._attn_implementation == attention.NAME


def test_family_that_mixes_sequences_is_refused_by_name() -> None:
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)).eval()
    mamba = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)).eval()
    for model in (bloom, mamba):
        with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} does not keep packed sequences"):
            noted(model)


def test_family_with_an_unsupported_signature_is_refused() -> None:
    """The model's exception is not a bug in Bridge, and is reported without a traceback."""

    class Odd(LlamaForCausalLM): ...

    model = Odd(LlamaConfig(**SIZES)).eval()
    model.model.forward = lambda tokens: tokens
    with pytest.raises(UnsupportedModelError, match="Odd cannot be called like other language models: TypeError: "):
        noted(model)


def test_model_whose_positions_do_not_restart_is_refused() -> None:
    class Counting(GPT2LMHeadModel): ...

    torch.manual_seed(0)
    model = Counting(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    counts = model.transformer.forward
    model.transformer.forward = lambda *args, **inputs: counts(*args, **{**inputs, "position_ids": None})
    with pytest.raises(UnsupportedModelError, match=r"Counting does not keep packed sequences apart"):
        noted(model)


@pytest.mark.parametrize("family", sorted(INSIDE))
def test_only_the_inner_language_model_is_prepared(family: str) -> None:
    config = FAMILIES[family]()
    model = skeleton.auto_class(config).from_config(config).eval()
    noted(model)
    assert attention.chosen(model) == attention.NAME
    assert model.config.vision_config._attn_implementation != attention.NAME


def test_model_with_a_lost_window_keeps_its_own_attention() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4096)).eval()
    for layer in model.model.layers:
        call = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, call=call, **inputs: without_window(call, *args, **inputs)
    _, (note,) = noted(model)
    assert note.startswith("attention: the model's own (sdpa), with a mask of tokens x tokens: MistralForCausalLM")
    assert model.config._attn_implementation == "sdpa"
    assert model.config.sliding_window == 4096


def without_window(call: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Call an attention layer without its window, like a layer that leaves the window to the mask."""
    config = call.__self__.config  # type: ignore[attr-defined]
    window, config.sliding_window = config.sliding_window, None
    try:
        return call(*args, **inputs)
    finally:
        config.sliding_window = window


def test_windows_stored_in_layers_are_restored() -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=48)).eval()
    held = [layer.self_attn.sliding_window for layer in model.model.layers]
    noted(model)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == held
    assert 48 in held


def test_capped_scores_are_compared_with_eager_attention() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=0.01, initializer_range=0.5)
    model = Gemma2ForCausalLM(config).eval()
    quietly(model)
    assert model.config._attn_implementation == attention.NAME


def test_check_restores_windows_and_dropout() -> None:
    torch.manual_seed(0)
    model = Starcoder2ForCausalLM(Starcoder2Config(**SIZES, sliding_window=48)).eval()
    dropout = model.model.layers[1].dropout = nn.Dropout(0.5)
    assert dropout.training
    noted(model)
    assert dropout.training
    assert [module for module in model.modules() if module.training] == [dropout]
    assert model.config.sliding_window == 48


@pytest.mark.parametrize("frozen", [False, True])
def test_recomputed_activations_give_the_same_gradients(frozen: bool) -> None:
    model = llama()
    if frozen:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.requires_grad_()
    prepared, _ = noted(model)
    expected = gradients(prepared)
    calls = count_calls(model.model.layers[0].self_attn)
    with nothing_logged():
        recompute_activations(prepared)
    assert_close(gradients(prepared), expected)
    assert len(calls) == 2  # forward, and once more


def count_calls(module: nn.Module) -> list[None]:
    calls: list[None] = []
    module.register_forward_hook(lambda *_: calls.append(None))
    return calls


def test_recomputing_does_not_turn_dropout_on() -> None:
    torch.manual_seed(0)
    config = Starcoder2Config(**SIZES, residual_dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5)
    model = Starcoder2ForCausalLM(config).eval()
    prepared, _ = noted(model)
    expected = gradients(prepared)
    with nothing_logged():
        recompute_activations(prepared)
    assert_close(gradients(prepared), expected)


def test_hooks_run_once_and_no_parameter_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    model = llama()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    hooked: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: hooked.append(id(parameter)))
    prepared, _ = noted(model, compile_layers=True, gradient_checkpointing=True)
    assert hooked == []
    assert all(parameter.grad is None for parameter in model.parameters())
    packed(prepared, TOKENS, LENGTHS).sum().backward()
    assert sorted(hooked) == sorted(id(parameter) for parameter in model.get_decoder().parameters())
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    with kernel_on_the_cpu():
        yield


@pytest.mark.usefixtures("_kernel")
def test_backward_is_not_compiled_before_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()  # otherwise code that another test compiled is reused
    differentiated = list[bool]()

    def compiled(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        differentiated.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(layers, "COMPILER", compiled)
    noted(llama(), compile_layers=True, activation_offload=True)
    assert differentiated
    assert not any(differentiated)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("recomputed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_layers_give_the_same_gradients(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    differentiated = list[bool]()  # for each compiled graph

    def noting(graph: torch.fx.GraphModule, _: Any) -> Any:
        differentiated.append(torch.is_grad_enabled())
        return graph

    monkeypatch.setattr(layers, "COMPILER", noting)
    numbers = []
    for num_layers in (1, 3):
        torch._dynamo.reset()
        differentiated.clear()
        expected, model = gradients(PreparedModel(llama(num_layers))), llama(num_layers)
        prepared = quietly(model, compile_layers=True, gradient_checkpointing=recomputed)
        assert any(differentiated), "the backward pass is compiled, too"
        assert_close(gradients(prepared), expected)
        numbers.append(len(differentiated))
        packed(prepared, TOKENS[:9], (5, 4)).sum().backward()
        assert len(differentiated) == numbers[-1] > 0  # no recompilation, whatever the lengths
    assert numbers[0] == numbers[1]  # nor does the number of layers matter


@pytest.mark.usefixtures("_kernel")
def test_with_an_adapter_the_first_layer_shares_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch.compiler.reset()
    counters.clear()
    model = llama(3)
    Adapter(model, LoraConfig(r=2), seed=0, base_name="m")
    quietly(model, compile_layers=True, gradient_checkpointing=False)
    assert counters["frames"] == {"total": 4, "ok": 4}, "as many as without an adapter, whose test follows"


@pytest.mark.slow
@pytest.mark.usefixtures("_kernel")
def test_recomputing_layers_compile_only_their_recomputing_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    recomputed_flags: list[bool] = []
    compile_layers = layers.compile_layers

    def noting(model: PreTrainedModel, **flags: bool) -> None:
        recomputed_flags.append(flags["recomputed"])
        compile_layers(model, **flags)

    monkeypatch.setattr(layers, "compile_layers", noting)
    model = llama()
    prepared = quietly(model, compile_layers=True, gradient_checkpointing=True)
    assert recomputed_flags == [True]
    assert layers.are_compiled(model)
    kept = kept_bytes(prepared)
    with nothing_logged():
        recompute_activations(prepared)
    assert kept_bytes(prepared) == kept


def kept_bytes(prepared: PreparedModel) -> int:
    """Return the bytes kept for the backward pass, without parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = packed(prepared, TOKENS, LENGTHS)
    own = {parameter.untyped_storage().data_ptr() for parameter in prepared.model.parameters()}
    assert hidden.requires_grad
    return sum(size for address, size in kept.items() if address not in own)


@pytest.mark.slow
@pytest.mark.usefixtures("_kernel")
def test_compiled_recomputed_layers_keep_only_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    expected, model = gradients(PreparedModel(llama())), llama()
    prepared = quietly(model, compile_layers=True)
    before = kept_bytes(prepared)
    with nothing_logged():
        recompute_activations(prepared)
    assert kept_bytes(prepared) < before / 2
    assert not model.is_gradient_checkpointing
    assert_close(gradients(prepared), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("_kernel")
def test_layer_with_graph_breaks_is_recomputed_by_a_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch._dynamo.reset()
    expected, model = gradients(PreparedModel(llama())), llama()
    calls: list[None] = []

    class Uncompiled(nn.Module):
        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def forward(self, x: Tensor) -> Tensor:
            calls.append(None)
            return silu(x)

    for layer in model.model.layers:
        layer.mlp.act_fn = Uncompiled()
    prepared, (note,) = noted(model, compile_layers=True, gradient_checkpointing=True)
    assert note == "layers are not compiled: they are recomputed, and torch splits a layer into several graphs"
    assert model.is_gradient_checkpointing
    calls.clear()
    assert_close(gradients(prepared), expected)
    assert len(calls) == 2 * len(model.model.layers)


@pytest.mark.usefixtures("_kernel")
def test_recomputed_layer_draws_the_same_random_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch._dynamo.reset()
    model = llama(1)
    dropout = nn.Dropout(0.5).eval()
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), dropout)
    prepared = quietly(model)
    dropout.train()
    expected = seeded_gradients(prepared)
    layers.compile_layers(model)
    recompute_activations(prepared)
    assert caplog.messages == ["layers are not compiled: they are recomputed, and they draw random numbers"]
    assert_close(seeded_gradients(prepared), expected)


def seeded_gradients(prepared: PreparedModel) -> list[Tensor]:
    torch.manual_seed(2)
    return gradients(prepared)


@pytest.mark.usefixtures("_kernel")
def test_uncompilable_layers_are_recomputed_by_a_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the compiler failed")

    monkeypatch.setattr(layers, "COMPILER", "eager")
    monkeypatch.setattr(layers, "_keeping_inputs", broken)
    torch._dynamo.reset()
    expected, model = gradients(PreparedModel(llama())), llama()
    prepared, (note,) = noted(model, compile_layers=True, gradient_checkpointing=True)
    assert note.startswith("layers are not compiled: ")
    assert "the compiler failed" in note
    assert model.is_gradient_checkpointing
    assert_close(gradients(prepared), expected)


def test_each_form_of_a_layer_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's operator needs the scale as a number; as an input of the graph it would cause another trace."""
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    torch.compiler.reset()
    counters.clear()
    with kernel_on_the_cpu():
        quietly(llama().bfloat16(), compile_layers=True, gradient_checkpointing=False)
    traced = counters["aot_autograd"]
    assert traced["total"] == traced["ok"] == 4, "packed and with shared prompts, with and without gradients"


def test_layers_with_different_constants_share_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """DiffLlama has a different constant per layer: 17 layers in four forms would exceed the limit and run eagerly."""
    monkeypatch.setattr(layers, "COMPILER", "eager")
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    torch.compiler.reset()
    counters.clear()
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES)).bfloat16().eval()
    with kernel_on_the_cpu():
        quietly(model, compile_layers=True, gradient_checkpointing=False)
    assert counters["frames"] == {"total": 4, "ok": 4}, "packed and with shared prompts, with and without gradients"


def test_uncompilable_layers_run_eagerly_with_one_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(layers, "COMPILER", broken)
    torch._dynamo.reset()
    expected, model = gradients(PreparedModel(llama())), llama()
    prepared, (note,) = noted(model, compile_layers=True)
    assert note.startswith("layers are not compiled: ")
    assert "no compiler here" in note
    assert_close(gradients(prepared), expected)


@pytest.mark.usefixtures("_kernel")
def test_compiled_layers_with_wrong_results_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *inputs: [x * 2 if torch.is_tensor(x) and x.is_floating_point() else x for x in graph(*inputs)]

    monkeypatch.setattr(layers, "COMPILER", wrong)
    torch._dynamo.reset()
    expected, model = gradients(PreparedModel(llama())), llama()
    prepared, (note,) = noted(model, compile_layers=True)
    assert note.startswith("layers are not compiled: LlamaForCausalLM does not keep packed sequences apart")
    assert_close(gradients(prepared), expected)


def on_a_gpu(model_type: str) -> Any:
    return SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(model_type=model_type))


def test_liger_kernel_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--liger-kernel cannot be used: Liger kernels run only on a GPU"):
        layers.use_liger_kernel(llama())
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"liger-kernel is not installed") as caught:
        layers.use_liger_kernel(on_a_gpu("llama"))
    assert "pip install liger-kernel" in caught.value.hint


def test_liger_kernel_is_applied_without_its_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[dict[str, Any]] = []
    package = SimpleNamespace(_apply_liger_kernel_to_instance=lambda **options: applied.append(options))
    table = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": object()})
    modules = {"liger_kernel.transformers": package, "liger_kernel.transformers.monkey_patch": table}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr("importlib.import_module", modules.__getitem__)
    model = on_a_gpu("llama")
    layers.use_liger_kernel(model)
    assert applied == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    with pytest.raises(UsageError, match=r"Liger does not support other models"):
        layers.use_liger_kernel(on_a_gpu("other"))


@pytest.mark.parametrize("sequence", range(len(CHECKED_LENGTHS)))
def test_nan_hidden_states_fail_the_packing_check(sequence: int) -> None:
    model = AutoModelForCausalLM.from_config(tiny.llama()).eval()
    alone_TH = Expected.of(PreparedModel(model)).alone_TH
    broken_TH = alone_TH.clone()
    broken_TH.split(CHECKED_LENGTHS)[sequence].fill_(math.nan)
    assert math.isnan(difference(broken_TH, alone_TH))
