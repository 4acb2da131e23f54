"""A prepared model is independent of others, and its release restores transformers' results to the bit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from bridge.config import LoraConfig, TrainConfig
from bridge.errors import BridgeError, UnsupportedModelError, UsageError
from bridge.passes import attention, image_proof, layers
from bridge.passes.layers import ALL, HOST_INPUTS
from bridge.passes.packing_proof import LENGTHS, example_tokens, packed
from bridge.passes.preparation import prepare, recompute_activations
from bridge.passes.prepared_model import PreparedModel
from bridge.weights.adapter import Adapter
from tests.logged import nothing_logged
from tests.models.families import FAMILIES
from tests.unit.passes import test_image_embeddings, test_routing
from tests.unit.passes.test_preparation import SIZES
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if hasattr(config, "num_experts"):
        model.set_experts_implementation("batched_mm")
    return model


def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return made(LlamaConfig(**SIZES), dtype)


def mixture() -> PreTrainedModel:
    return made(Qwen3MoeConfig(**SIZES | EXPERTS))


def with_rates_of_dropout() -> PreTrainedModel:
    """Return a model whose layers store dropout rates as numbers, and which is partly in training mode."""
    rates = {"residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5}
    model = made(Starcoder2Config(**SIZES, **rates))
    model.get_decoder().layers[1].dropout = nn.Dropout(0.5)
    return model


def with_an_adapter() -> PreTrainedModel:
    model = llama()
    Adapter(model, LoraConfig(r=2, dropout=0.5), seed=0, base_name="m")
    return model


def recomputing_by_itself() -> PreTrainedModel:
    model = llama().train()
    model.gradient_checkpointing_enable()
    return model


def computed(model: PreTrainedModel) -> list[Tensor]:
    """Return the logits and gradients of a padded batch, as transformers computes them."""
    torch.manual_seed(1)
    ids, mask = example_tokens(model)[:24].view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    model.zero_grad()
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [logits.detach(), *gradients]


def held(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return the attributes of every module except its parameters, and its number of hooks."""
    return {
        name: {key: len(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def prepared_by(model: PreTrainedModel, experts: tuple[int, int] | None = None, **choices: Any) -> PreparedModel:
    return prepare(model, TrainConfig.of(model_name="m", **choices).compute, experts=experts)


KINDS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any], Callable[[PreparedModel], object]]] = {
    "packed attention": (llama, {}, lambda ours: ours.shares_prompts),
    "recomputed": (llama, {"gradient_checkpointing": True}, lambda ours: ours.model.is_gradient_checkpointing),
    "compiled": (llama, {"compile_layers": True}, lambda ours: ours.is_compiled),
    "compiled and recomputed": (
        llama,
        {"compile_layers": True, "gradient_checkpointing": True},
        lambda ours: ours.model.is_gradient_checkpointing,
    ),
    "multiplied in float32": (lambda: llama(torch.bfloat16), {}, lambda ours: has_own_forward(ours.model.lm_head)),
    "with given experts": (mixture, {"experts": (2, 2)}, lambda ours: ours.replay),
    "with experts of its own": (mixture, {}, lambda ours: ours.shares_prompts),
    "with a state": (
        lambda: made(FAMILIES["Qwen3-Next"]()),
        {},
        lambda ours: any(map(has_own_forward, mixers_with_a_state(ours.model))),
    ),
    "without dropout": (
        with_rates_of_dropout,
        {"gradient_checkpointing": True},
        lambda ours: ours.model.model.embedding_dropout == 0 and ours.model.model.layers[0].training,
    ),
    "beneath an adapter": (
        with_an_adapter,
        {"compile_layers": True, "gradient_checkpointing": True},
        lambda ours: ours.model.is_gradient_checkpointing,
    ),
    "recomputing before": (recomputing_by_itself, {}, lambda ours: ours.shares_prompts),
}
"""How to make and prepare a model of each kind, and what the preparation must have changed: otherwise the test of
`release` would prove nothing."""


BY_KERNEL = ("compiled", "beneath an adapter")
"""Kinds whose layers contain a kernel as on a GPU: one graph per form, which takes a third of the time."""


def has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module)


def mixers_with_a_state(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]


@pytest.mark.parametrize("kind", KINDS)
def test_released_model_computes_as_before(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "bf16_is_emulated", lambda: True)
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: kind in BY_KERNEL)
    make, choices, is_changed = KINDS[kind]
    model = make()
    before, expected, own_attention = held(model), computed(model), attention.chosen(model)
    with kernel_on_the_cpu():
        prepared = prepared_by(model, **choices)
        assert is_changed(prepared)
        packed(prepared, example_tokens(model), LENGTHS)
    assert attention.chosen(model) == attention.NAME
    prepared.release()
    assert attention.chosen(model) == own_attention
    assert held(model) == before
    for one, other in zip(computed(model), expected, strict=True):
        assert one.equal(other)
    assert (prepared.replay, prepared.kept, prepared.shares_prompts) == (None, ALL, False)


def test_release_undoes_later_choices() -> None:
    """A run's budget may make layers keep less, and a caller may add hooks."""
    model = llama()
    before, expected = held(model), computed(model)
    prepared = prepared_by(model)
    with nothing_logged():
        recompute_activations(prepared, HOST_INPUTS)

    def refuse(_: object, __: object, given: dict[str, Any]) -> None:
        if "attention_mask" in given:
            raise UsageError("padding", hint="none")

    prepared.hooks.append(model.register_forward_pre_hook(refuse, with_kwargs=True))
    with pytest.raises(UsageError):
        computed(model)
    for _ in range(2):  # the second call has nothing to release
        prepared.release()
        assert held(model) == before
        assert all(one.equal(other) for one, other in zip(computed(model), expected, strict=True))
    assert prepared.kept == ALL


class OfItsOwnSignature(LlamaForCausalLM): ...


class Keeping(LlamaForCausalLM):
    supports_gradient_checkpointing = False


def of_its_own_signature() -> PreTrainedModel:
    model = OfItsOwnSignature(LlamaConfig(**SIZES)).eval()
    whole = model.model.forward
    model.model.forward = lambda input_ids, attention_mask=None, **_: whole(input_ids, attention_mask)
    return model


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any], type[BridgeError]]] = {
    "sequences that mix": (
        lambda: made(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
        {},
        UnsupportedModelError,
    ),
    "positions that are not taken": (of_its_own_signature, {}, UnsupportedModelError),
    "other experts than the server's": (mixture, {"experts": (2, 3), "router_replay": True}, UnsupportedModelError),
    "layers that cannot recompute": (
        lambda: Keeping(LlamaConfig(**SIZES)).eval(),
        {"gradient_checkpointing": True},
        UnsupportedModelError,
    ),
    "a kernel that is not there": (mixture, {"experts": (2, 2), "attention": "cudnn"}, UsageError),
    "Liger kernels on a CPU": (lambda: llama(torch.bfloat16), {"liger_kernel": True}, UsageError),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_model_is_left_unchanged(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "bf16_is_emulated", lambda: True)
    make, choices, error = REFUSED[reason]
    model = make()
    before, expected, own_attention = held(model), computed(model), attention.chosen(model)
    with pytest.raises(error):
        prepared_by(model, **choices)
    assert attention.chosen(model) == own_attention
    assert held(model) == before
    assert all(one.equal(other) for one, other in zip(computed(model), expected, strict=True))


def test_experts_given_to_one_model_do_not_reach_another() -> None:
    config = test_routing.FAMILIES["qwen 3 moe"]
    pack = test_routing.pack_of(test_routing.samples(test_routing.chosen(config)))
    plain = PreparedModel(test_routing.model_of(config))
    own_N, _ = plain.logprobs(pack, 1.0)
    first, of_first = test_routing.replaying(test_routing.model_of(config))
    given_N, _ = first.logprobs(pack, 1.0)
    assert not torch.allclose(given_N, own_N, atol=1e-4)
    assert plain.logprobs(pack, 1.0)[0].equal(own_N)
    second, of_second = test_routing.replaying(test_routing.model_of(config))
    first.replay = of_first
    of_first.rerouted()
    assert second.logprobs(pack, 1.0)[0].equal(given_N)
    assert of_first.rerouted().tolist() == [0, 0]
    assert of_second.rerouted().all()
    first.release()
    assert first.logprobs(pack, 1.0)[0].equal(own_N)
    assert second.logprobs(pack, 1.0)[0].equal(given_N)


def test_two_models_recompute_and_slice_independently() -> None:
    """For example a trained model and its reference, of which only one is recomputed."""
    first, second = (prepared_by(llama()) for _ in range(2))
    with nothing_logged():
        recompute_activations(first, HOST_INPUTS)
    assert (first.kept, second.kept) == (HOST_INPUTS, ALL)
    assert not second.model.is_gradient_checkpointing
    first.release()
    assert attention.chosen(second.model) == attention.NAME
    assert second.shares_prompts


def test_images_are_checked_once_per_prepared_model(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = list[int]()
    monkeypatch.setattr(image_proof, "prove", lambda _, samples: proved.append(len(samples)))
    model = test_image_embeddings.model_of("Mistral 3")
    *seen, text = test_image_embeddings.samples_of(model)[:7]
    first, second = PreparedModel(model), PreparedModel(model)
    first.prove_images([text])
    assert proved == []
    for _ in range(2):
        first.prove_images([text, *seen])
    assert proved == [len(seen)]
    second.prove_images(seen)
    assert proved == [len(seen)] * 2
