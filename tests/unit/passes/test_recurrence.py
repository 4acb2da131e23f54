"""Recurrent layers: packed sequences match separate ones, forward and backward, eager, recomputed and compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UnsupportedModelError
from bridge.passes import attention, layers, recurrence
from bridge.passes.packing_proof import Expected, packed
from bridge.passes.preparation import prepare
from bridge.passes.prepared_model import PreparedModel
from tests.models.families import FAMILIES

HYBRIDS = ("Qwen3.5 (text)", "Qwen3-Next")
LENGTHS = (70, 70, 69, 11, 6, 1)
"""Sequence lengths: more than the 64 tokens of a chunk, equal ones, similar ones, and short ones."""
TOKENS = torch.arange(sum(LENGTHS)) * 7919 % 301
TOLERANCE = 1e-4


def hybrid(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.normal_(parameter, -2.0, 0.1)  # a state that fades slowly
    return model.eval()


def gradients(model: PreTrainedModel, hidden_TH: Tensor) -> dict[str, Tensor]:
    trained = {name: parameter for name, parameter in model.get_decoder().named_parameters() if "experts" not in name}
    weights = torch.linspace(-1, 1, hidden_TH.numel()).view(hidden_TH.shape)
    return dict(zip(trained, torch.autograd.grad((hidden_TH * weights).sum(), [*trained.values()]), strict=True))


def alone(model: PreTrainedModel) -> Tensor:
    parts = TOKENS.split(LENGTHS)
    return torch.cat([model.get_decoder()(input_ids=part.unsqueeze(0)).last_hidden_state[0] for part in parts])


@pytest.fixture(autouse=True)
def _eager_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "form", [lambda _: None, layers.call_again, layers.compile_layers], ids=["plain", "recomputed", "compiled"]
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_recurrent_states_match_separate_sequences(family: str, form: Callable[[PreTrainedModel], None]) -> None:
    model = hybrid(family)
    expected = alone(model)
    expected_gradients = gradients(model, expected)
    attention.choose(model, attention.NAME)
    recurrence.keep_apart(model)
    form(model)
    hidden = packed(PreparedModel(model), TOKENS, LENGTHS)
    torch.testing.assert_close(hidden, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for name, gradient in gradients(model, hidden).items():
        difference = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert difference < 10 * TOLERANCE, (name, difference)


@pytest.mark.parametrize("family", HYBRIDS)
def test_leaked_recurrent_state_is_detected(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(module: nn.Module, hidden_states: Tensor, *args: Any, cu_seq_lens_q: Tensor, **others: Any) -> Any:
        return type(module).forward(module, hidden_states, *args, **others)

    monkeypatch.setattr(recurrence, "_each_sequence", leaking)
    model = hybrid(family)
    prepared = PreparedModel(model)
    expected = Expected.of(prepared)
    attention.choose(model, attention.NAME)
    recurrence.keep_apart(model)
    with pytest.raises(UnsupportedModelError, match="does not keep packed sequences apart"):
        expected.check(prepared)


@pytest.mark.parametrize("family", HYBRIDS)
def test_prompts_are_not_shared_in_recurrent_layers(family: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not prepare(hybrid(family), TrainConfig.of(model_name="m").compute).shares_prompts
    (note,) = caplog.messages
    assert "GatedDeltaNet carries a state from token to token" in note
