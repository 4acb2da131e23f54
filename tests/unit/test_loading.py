"""vLLM loads a model, and what it does to the weights afterwards is seen: nothing, rewriting, deriving."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bridge.errors import UnsupportedModelError
from patches.loading import RECORDS, Record, record_of, watching
from tests.unit.test_layers import SHAPES, Model, parameter, skeleton

CONFIG = SimpleNamespace(model="m", dtype=torch.bfloat16, trust_remote_code=False)


class Loader:
    """vLLM's `BaseModelLoader`, which processes what `load_weights` has loaded."""

    def __init__(self, process: Callable[[Any], None]) -> None:
        self._process = process
        self.order: list[str] = []

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        self.order.append("load")
        for weight in model.parameters():
            weight.data.fill_(1)

    def load_model(self, config: Any) -> nn.Module:
        model = Model()
        self.load_weights(model, config)
        self._process(model)
        return model


def loaded(process: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setattr("bridge.weights.skeleton.build", lambda *_, **__: skeleton(SHAPES))
    loader = Loader(process)
    with watching(loader, CONFIG) as watch:
        model = loader.load_model(CONFIG)
    assert loader.order == ["load"]
    assert "load_weights" not in vars(loader)
    return watch.finish(model)


def test_a_model_that_stays_as_it_was_loaded_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(model: Any) -> None:
        model.norm.scale = torch.tensor(1.0)  # a single number is no weight
        model.norm.weight = nn.Parameter(model.norm.weight.data)  # another object in the same place

    record = loaded(process, monkeypatch)
    assert record.refusal is None
    assert record.views.keys() == record.expected.keys() == SHAPES.keys()


def _negate(model: Any) -> None:
    model.norm.weight.data.neg_()


def _pack(model: Any) -> None:
    model.mlp["down_proj"].weight = parameter(12, 8)


def _drop(model: Any) -> None:
    del model.mlp["down_proj"].weight


def _derive(model: Any) -> None:
    model.attn["qkv_proj"].W_UV = model.attn["qkv_proj"].weight.detach()[4:].clone()


def _derive_two(model: Any) -> None:
    model.norm.packed = [model.norm.weight.detach().clone()]
    model.norm.register_buffer("copy", model.norm.weight.detach().clone())


def _derive_a_parameter(model: Any) -> None:
    model.attn["qkv_proj"].W_UK_T = nn.Parameter(model.attn["qkv_proj"].weight.detach().t().contiguous())


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (_derive_a_parameter, "^attn.qkv_proj.W_UK_T: derived"),
        (_negate, "^norm.weight: rewritten"),
        (_pack, "^mlp.down_proj.weight: rewritten"),
        (_drop, "^mlp.down_proj.weight: rewritten"),
        (_derive, "^attn.qkv_proj.W_UV: derived"),
        (_derive_two, "^norm.copy, norm.packed: derived"),
    ],
)
def test_what_a_step_would_not_reach_is_refused_by_name(
    process: Callable[[Any], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = loaded(process, monkeypatch)
    model = Model()
    monkeypatch.setitem(RECORDS, model, record)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        record_of(model)
    assert "lora_only" in caught.value.remedy
    assert "\n" not in caught.value.message


def test_the_first_refusal_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "load_weights", lambda *_: None)
    refusal = loaded(_derive, monkeypatch).refusal
    assert refusal is not None
    assert "none of its parameters" in refusal.message


def test_a_model_that_no_loader_of_ours_saw_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot watch"):
        record_of(nn.Linear(2, 2))
