"""The frozen reference: a disabled adapter, or a second model; and every reason for a refusal."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bridge.config import TrainConfig
from bridge.engine.reference import Reference, adapter_off, check, open_reference
from bridge.errors import UnsupportedModelError, UsageError
from bridge.passes import preparation
from bridge.passes.packing import Kept, MicroBatch, Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.weights import loaded
from bridge.weights.adapter import Adapter
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.models.tiny import frozen_llama
from tests.unit.passes.test_preparation import mixture

CPU = torch.device("cpu")
IDS = torch.arange(3, 19).view(2, 8)
DTYPES = [torch.float32, torch.bfloat16]


def check_of(config: TrainConfig) -> None:
    check(config.model_name, config.loss)


def opened(config: TrainConfig, model: PreTrainedModel) -> Reference | None:
    has_adapter = config.mode == "lora_only"
    return open_reference(config.loss, config.compute, PreparedModel(model), CPU, has_adapter=has_adapter)


def config_of(**choices: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model_name": "tiny"} | choices)


def filled(model: PreTrainedModel, **choices: Any) -> Adapter:
    """Put an adapter into `model` that changes its output."""
    adapter = Adapter(model, config_of(mode="lora_only", lora_r=8, **choices).lora, seed=0, base_name="base")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrices in adapter.modules.values():
            for matrix in (matrices.lora_a, matrices.lora_b):
                matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.1)
    return adapter


def as_in_a_slot(adapter: Adapter) -> None:
    """Make the adapter's matrices views of larger tensors, as in vLLM's slots."""
    for matrices in adapter.modules.values():
        for matrix in (matrices.lora_a, matrices.lora_b):
            slots = torch.zeros(3, 1, *matrix.shape, dtype=matrix.dtype)
            slots[1, 0] = matrix.detach()
            matrix.data = slots[1, 0]


def trained(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def micro_batch() -> MicroBatch:
    rows = [
        Sample(
            prompt_token_ids=(3, 4, 5 + length),
            token_ids=tuple(range(10, 10 + length)),
            sampled_logprobs=(-1.0,) * length,
            advantages=(1.0,) * length,
            weight=1.0,
        )
        for length in (2, 5)
    ]
    (batch,) = packs(rows, max_tokens=100, device=CPU)
    return batch


def logprobs(model: PreTrainedModel) -> Tensor:
    return PreparedModel(model).logprobs(micro_batch(), 0.7)[0].detach()


@pytest.mark.parametrize("dtype", DTYPES)
def test_disabled_adapter_leaves_the_base_bit_for_bit(dtype: torch.dtype) -> None:
    model, alone = frozen_llama(dtype), frozen_llama(dtype)
    as_in_a_slot(filled(model, lora_dropout=0.5))
    with torch.no_grad():
        without, before = alone(IDS).logits, [parameter.clone() for parameter in model.parameters()]
        with adapter_off(model):
            assert torch.equal(model(IDS).logits, without)
        assert not torch.equal(model(IDS).logits, without)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_reference_logprobs_are_not_filtered() -> None:
    batch = micro_batch()
    kept = Kept(torch.full((len(batch.rows_N),), 1e9), torch.ones(len(batch.rows_N)))
    reference = Reference(prepared=PreparedModel(frozen_llama()))
    assert torch.equal(reference.logprobs(replace(batch, kept=kept), 0.7), reference.logprobs(batch, 0.7))


def test_reference_does_not_change_training() -> None:
    model = frozen_llama()
    as_in_a_slot(filled(model))
    before = trained(model)
    addresses = {name: parameter.data_ptr() for name, parameter in before.items()}
    modes = {name: module.training for name, module in model.named_modules()}
    calls: list[str] = []
    for name, parameter in before.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    with torch.no_grad(), adapter_off(model):
        model(IDS)
    after = trained(model)
    assert len(before) == 28
    assert after.keys() == before.keys()
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {name: parameter.data_ptr() for name, parameter in after.items()} == addresses
    assert {name: module.training for name, module in model.named_modules()} == modes
    model(IDS).logits.square().mean().backward()
    assert sorted(calls) == sorted(before)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in after.values())


def test_adapter_can_be_disabled_between_two_passes() -> None:
    gradients = []
    for toggles in (False, True):
        model = frozen_llama()
        filled(model)
        loss = model(IDS).logits.square().mean()
        if toggles:
            with torch.no_grad(), adapter_off(model):
                model(IDS)
        loss.backward()
        gradients.append([parameter.grad for parameter in trained(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True) if one is not None)
    assert all(one is not None and other is not None for one, other in zip(*gradients, strict=True))


@pytest.mark.slow
def test_compiled_layers_follow_the_adapters_switch() -> None:
    model = frozen_llama()
    without = model(IDS).logits
    filled(model)
    expected = model(IDS).logits.detach()
    counters = torch._dynamo.utils.counters["stats"]
    num_graphs = []
    try:
        for layer in model.model.layers:
            layer.compile(backend="eager")
        for _ in range(3):
            assert torch.equal(model(IDS).logits, expected)
            with torch.no_grad(), adapter_off(model):
                assert torch.equal(model(IDS).logits, without)
            num_graphs.append(counters["unique_graphs"])
    finally:
        torch.compiler.reset()
    assert num_graphs[0] > 0
    assert len(set(num_graphs)) == 1


def test_adapter_is_enabled_again_after_an_error() -> None:
    model = frozen_llama()
    filled(model)
    names, logits = trained(model).keys(), model(IDS).logits
    with pytest.raises(IndexError), adapter_off(model):
        model(torch.tensor([[10_000]]))
    assert trained(model).keys() == names
    assert torch.equal(model(IDS).logits, logits)


def test_reference_of_an_adapter_is_its_base() -> None:
    model = frozen_llama()
    alone = logprobs(model)
    filled(model)
    reference = opened(config_of(mode="lora_only", kl_coef=0.1), model)
    assert isinstance(reference, Reference)
    assert reference.prepared.model is model
    of_base = reference.logprobs(micro_batch(), 0.7)
    assert not of_base.requires_grad
    assert torch.equal(of_base, alone)
    assert (logprobs(model) - alone).abs().max() > 0.1
    assert not torch.allclose(reference.logprobs(micro_batch(), 1.0), alone)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tiny.llama(), tmp_path / "model")


def test_frozen_reference_stays_unchanged(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    reference = opened(config_of(model_name=str(folder), kl_coef=0.1, reference_model=str(folder)), model)
    assert reference is not None
    assert {parameter.dtype for parameter in reference.prepared.model.parameters()} == {model.dtype}
    preparation.prepare(model, config_of().compute)
    before = logprobs(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    of_reference = reference.logprobs(micro_batch(), 0.7)
    assert not of_reference.requires_grad
    assert torch.equal(of_reference, before)
    assert not torch.allclose(logprobs(model), before)


def test_mixture_of_experts_can_be_a_reference(tmp_path: Path) -> None:
    """It is checked with a fixed choice of experts, and ignores the trained model's experts in batches."""
    mixture().save_pretrained(tmp_path)
    config = config_of(model_name=str(tmp_path), kl_coef=0.1, reference_model=str(tmp_path))
    reference = opened(config, frozen_llama(torch.bfloat16))
    assert reference is not None
    plain = micro_batch()
    experts_TX = torch.zeros(len(plain.tokens_T), 2, dtype=torch.int16)
    of_own = reference.logprobs(plain, 1.0)
    assert reference.logprobs(replace(plain, experts_TX=experts_TX), 1.0).equal(of_own)


def test_reference_has_the_trained_models_dtype(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = opened(config_of(kl_coef=0.1, reference_model=str(folder)), model)
    assert reference is not None
    assert {parameter.dtype for parameter in reference.prepared.model.parameters()} == {model.dtype}
    assert all(parameter.requires_grad for parameter in model.parameters())  # the original stays unchanged


def test_no_reference_without_a_kl_term() -> None:
    for mode in ("shared_vllm", "lora_only", "none"):
        check_of(config_of(mode=mode))
        assert opened(config_of(mode=mode), frozen_llama()) is None


def test_adapter_needs_no_reference_model() -> None:
    check_of(config_of(mode="lora_only", kl_coef=0.1))


@pytest.mark.parametrize("mode", ["shared_vllm", "none"])
def test_model_trained_in_place_needs_a_second_model(mode: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config_of(mode=mode, kl_coef=0.1)
    assert "overwrites the only copy" in str(caught.value)
    assert "name one with --reference-model, or use --mode lora_only" in str(caught.value)


def test_reference_model_without_a_kl_term_is_refused() -> None:
    with pytest.raises(ValidationError, match="--kl-in-reward has no effect: --kl-coef, its weight, is 0"):
        config_of(mode="lora_only", kl_in_reward=True)
    with pytest.raises(ValidationError, match="--kl-coef is 0"):
        config_of(reference_model="tiny")


@pytest.mark.parametrize("given", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_kl_in_reward_refuses_filters(given: dict[str, float]) -> None:
    (key, value), *_ = given.items()
    message = f"--kl-in-reward cannot be combined with --{key.replace('_', '-')} {value:g}: the reference is not"
    with pytest.raises(ValidationError, match=message):
        config_of(mode="lora_only", kl_coef=0.1, kl_in_reward=True, **given)
    config_of(mode="lora_only", kl_coef=0.1, **given)


def refusal(**choices: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_of(config_of(kl_coef=0.1, **choices))
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def test_reference_with_the_same_vocabulary_is_accepted(folder: Path, tmp_path: Path) -> None:
    other = tiny.write(tiny.qwen2(), tmp_path / "other")
    check_of(config_of(model_name=str(folder), kl_coef=0.1, reference_model=str(other)))


def test_reference_with_a_different_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    longer = tiny.write(tiny.llama(302), tmp_path / "longer")
    error = refusal(model_name=str(folder), reference_model=str(longer))
    assert "different vocabulary" in error.message
    assert "1 tokens differ, the first: " in error.message


def test_reference_inside_a_multimodal_model_is_refused(folder: Path, tmp_path: Path) -> None:
    larger = tiny.write(FAMILIES["Qwen3-VL"](), tmp_path / "larger")
    with pytest.raises(UnsupportedModelError, match="a qwen3_vl, whose language model is one of several parts"):
        check_of(config_of(model_name=str(folder), kl_coef=0.1, reference_model=str(larger)))


def test_reference_with_different_token_ids_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    path = other / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    path.write_text(json.dumps(document))
    error = refusal(model_name=str(folder), reference_model=str(other))
    assert "2 tokens differ, the first: '0'" in error.message


def test_missing_reference_model_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "absent" in refusal(model_name=str(folder), reference_model=str(tmp_path / "absent")).message


def test_too_large_reference_is_refused_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(loaded, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError, match="GiB are free") as caught:
        opened(config_of(kl_coef=0.1, reference_model=str(folder)), frozen_llama())
    assert str(folder) in caught.value.message
    assert "--mode lora_only" in caught.value.hint
