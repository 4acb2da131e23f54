"""Length-dependent RoPE: every sequence uses the server's frequencies, whatever it is packed with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig, PretrainedConfig, PreTrainedModel

from bridge.config import TrainConfig
from bridge.engine.reference import open_reference
from bridge.errors import BridgeError, UnsupportedModelError, UsageError
from bridge.passes.packing_proof import packed
from bridge.passes.preparation import prepare
from bridge.passes.prepared_model import PreparedModel
from bridge.weights import loaded, rope
from bridge.weights.attach import attach, reattach
from tests.logged import nothing_logged
from tests.models import tiny
from tests.models.families import minimax_m2
from tests.unit import toy_server
from tests.unit.toy_server import ToyServer

ORIGINAL, LONGEST = 16, 256
SIZES: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + index for index in range(16)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
SHORT_SEQUENCE, LONG_SEQUENCE = 9, 40


def llama(rope_parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(**SIZES, rope_parameters=dict(rope_parameters))


def made(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    config.initializer_range = 0.2
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def turned(model: PreTrainedModel, *positions: int) -> Tensor:
    """Return the cosines and sines of the first of `positions`."""
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([positions]))
    return torch.cat([cos[0, 0], sin[0, 0]])


def of_factors(name: str, position: int, scaling: float = 1.0) -> Tensor:
    frequencies = 1 / (torch.tensor(LONG[f"{name}_factor"]) * 10_000 ** (torch.arange(0, 32, 2) / 32))
    angles = (position * frequencies).repeat(2)
    return torch.cat([angles.cos(), angles.sin()]) * scaling


@torch.no_grad()
def hidden(prepared: PreparedModel, *lengths: int) -> Tensor:
    """Return the hidden states of the first of several sequences of these lengths."""
    tokens = torch.arange(sum(lengths)) * 7 % 301
    return packed(prepared, tokens, lengths)[: lengths[0]]


@pytest.mark.parametrize("max_model_len", [ORIGINAL, LONGEST])
def test_short_sequence_packed_with_a_long_one_is_unchanged(max_model_len: int) -> None:
    model = made(llama(LONG))
    plain = PreparedModel(model)
    beside = hidden(plain, SHORT_SEQUENCE, LONG_SEQUENCE)
    assert (beside - hidden(plain, SHORT_SEQUENCE)).abs().max() > 0.1  # as in transformers
    rope.follow_server(model, max_model_len)
    with nothing_logged():
        prepared = prepare(model, TrainConfig.of(model_name="m").compute)
    beside = hidden(prepared, SHORT_SEQUENCE, LONG_SEQUENCE)
    torch.testing.assert_close(beside, hidden(prepared, SHORT_SEQUENCE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("max_model_len", "factors"), [(ORIGINAL, "short"), (ORIGINAL + 1, "long"), (200, "long")])
@pytest.mark.parametrize("scales", [{}, {"short_mscale": 1.25, "long_mscale": 1.5}])
def test_factors_depend_on_the_servers_max_length(max_model_len: int, factors: str, scales: dict[str, float]) -> None:
    model = made(llama(LONG | scales))
    rope.follow_server(model, max_model_len)
    scaling = scales.get(f"{factors}_mscale", 1.4142135)  # sqrt(1 + log(256 / 16) / log(16))
    for others in ((), (LONGEST - 1,)):
        torch.testing.assert_close(turned(model, 5, *others), of_factors(factors, 5, scaling))


def test_phi_with_partial_rotary_follows_the_server() -> None:
    parameters = LONG | {"partial_rotary_factor": 0.5}
    factors = {name: parameters[name][:8] for name in ("short_factor", "long_factor")}
    model = made(Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=parameters | factors))
    rope.follow_server(model, LONGEST)
    plain = PreparedModel(model)
    beside = hidden(plain, SHORT_SEQUENCE, LONG_SEQUENCE)
    torch.testing.assert_close(beside, hidden(plain, SHORT_SEQUENCE), rtol=1e-4, atol=1e-4)


def test_scaling_independent_of_length_is_unchanged() -> None:
    model = made(tiny.llama())
    before = turned(model, 5)
    rope.follow_server(model, None)
    assert model.model.rotary_emb.rope_type == "llama3"
    assert torch.equal(turned(model, 5), before)


def test_dynamic_scaling_within_max_position_is_unchanged() -> None:
    model = made(llama(DYNAMIC))
    before = turned(model, 5)
    rope.follow_server(model, LONGEST)
    assert torch.equal(turned(model, 5, LONGEST + 50), before)


@pytest.mark.parametrize("max_model_len", [None, LONGEST])
def test_packing_check_detects_length_dependent_rope(max_model_len: int | None) -> None:
    """The check must cover long positions: short sequences all use the short factors."""
    model = made(llama(LONG | {"original_max_position_embeddings": 64}))
    with pytest.raises(UnsupportedModelError, match="does not keep packed sequences apart"):
        prepare(model, TrainConfig.of(model_name="m").compute, max_model_len=max_model_len)


def test_packing_check_stops_at_the_servers_length() -> None:
    model = made(llama(LONG | {"original_max_position_embeddings": 64}))
    with nothing_logged():
        prepare(model, TrainConfig.of(model_name="m").compute, max_model_len=64)


def refused(config: PretrainedConfig, kind: type[BridgeError], **server: Any) -> str:
    model = made(config)
    with pytest.raises(kind) as caught:
        rope.follow_server(model, **{"max_model_len": LONGEST, **server})
    assert "\n" not in caught.value.message + caught.value.hint
    return f"{caught.value.message}; {caught.value.hint}"


def test_server_without_a_known_length_is_refused() -> None:
    message = refused(llama(LONG), UsageError, max_model_len=None)
    assert message.startswith("LlamaForCausalLM has longrope RoPE, which depends on max_model_len")


def test_server_with_transformers_backend_is_refused() -> None:
    message = refused(llama(LONG), UnsupportedModelError, server_class="TransformersForCausalLM")
    assert message.startswith("LlamaForCausalLM has longrope RoPE, and vLLM runs it as TransformersForCausalLM")


def test_dynamic_scaling_beyond_max_position_is_refused() -> None:
    message = refused(llama(DYNAMIC), UsageError, max_model_len=LONGEST + 1)
    assert "has frequencies only up to 256 tokens, but the server's max_model_len is 257" in message
    assert "--max-model-len 256" in message
    trained = llama(DYNAMIC | {"max_trained_positions": 64})
    assert "max_trained_positions" in refused(trained, UnsupportedModelError)


def test_different_longrope_implementation_is_refused() -> None:
    scales = {"short_mscale": 1.2, "long_mscale": 1.2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = PhimoeConfig(**SIZES, **experts, original_max_position_embeddings=ORIGINAL, rope_parameters=LONG | scales)
    message = refused(config, UnsupportedModelError)
    assert message.startswith("PhimoeRotaryEmbedding computes longrope RoPE differently from vLLM")


@pytest.fixture
def server(tmp_path: Path) -> ToyServer:
    return toy_server.serve(llama(LONG), tmp_path / "model")


def test_attached_model_follows_its_servers_rope(server: ToyServer) -> None:
    attached = attach(server.edited(max_model_len=LONGEST))
    of_long, of_short = (of_factors(name, 5, 1.4142135) for name in ("long", "short"))
    torch.testing.assert_close(turned(attached.model, 5), of_long)
    reattached = reattach(attached, server.edited(max_model_len=ORIGINAL))  # restarted with a different length
    torch.testing.assert_close(turned(reattached.model, 5, LONGEST - 1), of_short)
    with pytest.raises(UnsupportedModelError, match="vLLM runs it as TransformersForCausalLM"):
        attach(server.edited(max_model_len=LONGEST, model_class="TransformersForCausalLM"))


def test_loaded_models_follow_the_servers_rope(server: ToyServer) -> None:
    folder = server.manifest.model
    own = loaded.load(folder, device="cpu", max_model_len=LONGEST)
    torch.testing.assert_close(turned(own.model, 5), of_factors("long", 5, 1.4142135))
    with pytest.raises(UsageError, match="the server does not report it"):
        loaded.load(folder, device="cpu")
    config = TrainConfig.of(model_name=folder, kl_coef=0.1, reference_model=folder)
    with nothing_logged():
        reference = open_reference(
            config.loss,
            config.compute,
            PreparedModel(own.model),
            own.device,
            has_adapter=False,
            max_model_len=LONGEST,
        )
    assert reference is not None
    torch.testing.assert_close(turned(reference.prepared.model, 5), of_factors("long", 5, 1.4142135))


def test_rope_width_unknown_to_transformers_is_refused() -> None:
    """Transformers before 5.19 rotates entire heads of MiniMax-M2, whose configuration rotates only a part of them."""
    rope.follow_server(made(minimax_m2()), LONGEST)
    config = minimax_m2()
    config.rope_parameters["partial_rotary_factor"] = 1.0
    with pytest.raises(UnsupportedModelError, match="rotates 64 dimensions of each head of MiniMaxM2"):
        rope.follow_server(made(config), LONGEST)
