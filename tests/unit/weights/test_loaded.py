"""A model with its own copy of the weights: what is loaded, and every refusal, with its reason in one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    GPT2Config,
    Llama4TextConfig,
    ModernBertDecoderConfig,
    MptConfig,
    OPTConfig,
    PretrainedConfig,
)

from bridge.errors import BridgeError, UnsupportedModelError, UsageError
from bridge.weights import loaded, skeleton
from bridge.weights.model_folder import stored_buffers
from tests.models import tiny
from tests.models.families import FAMILIES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tiny.llama(), tmp_path / "model")


def reconfigure(folder: Path, **changes: Any) -> None:
    """Change the model's configuration; a value of `...` removes the key."""
    path = folder / "config.json"
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def error_of(folder: Path, device: str = "cpu", dtype: torch.dtype | None = None) -> BridgeError:
    with pytest.raises(BridgeError) as caught:
        loaded.load(str(folder), device=device, dtype=dtype)
    assert "\n" not in caught.value.message
    assert "\n" not in caught.value.hint
    return caught.value


def test_loaded_weights_equal_the_files_and_can_be_trained(folder: Path) -> None:
    own = loaded.load(str(folder), device="cpu")
    stored = load_file(folder / "model.safetensors")
    parameters = dict(own.model.named_parameters())
    assert parameters.keys() == stored.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in stored.items())
    assert all(parameter.requires_grad for parameter in parameters.values())
    assert not own.model.training
    assert own.device == torch.device("cpu")
    assert own.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert own.open_s > 0


@pytest.mark.parametrize("family", ["DeepSeek-V3", "GLM-4.5"])
def test_stored_buffers_are_loaded_and_not_trained(family: str, tmp_path: Path) -> None:
    folder = tiny.write(FAMILIES[family](), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    model = loaded.load(str(folder), device="cpu").model
    buffers = stored_buffers(model)
    assert buffers
    assert all(torch.equal(buffer, stored[name]) for name, buffer in buffers.items())
    assert not buffers.keys() & dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("named", "requested", "expected"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("float32", None, torch.float32),
        (..., None, torch.float32),
        ("bfloat16", torch.float32, torch.float32),
        ("float32", torch.bfloat16, torch.bfloat16),
        ("float16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_defaults_to_the_configurations(
    folder: Path, named: Any, requested: torch.dtype | None, expected: torch.dtype
) -> None:
    reconfigure(folder, dtype=named)
    own = loaded.load(str(folder), device="cpu", dtype=requested)
    assert {parameter.dtype for parameter in own.model.parameters()} == {expected}
    assert own.weight_bytes == sum(parameter.nbytes for parameter in own.model.parameters())


def test_float16_is_refused_before_anything_is_loaded(folder: Path) -> None:
    reconfigure(folder, dtype="float16")
    (folder / "model.safetensors").unlink()
    error = error_of(folder)
    assert type(error) is UnsupportedModelError
    assert "is in float16, expected bfloat16 or float32" in error.message


def test_quantized_model_is_refused(folder: Path) -> None:
    reconfigure(folder, quantization_config={"quant_method": "fp8"})
    assert "quantized" in error_of(folder).message


def test_vision_language_model_is_refused(tmp_path: Path) -> None:
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    document = {"model_type": "gemma3", "text_config": text, "architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    error = error_of(tmp_path, dtype=torch.bfloat16)
    assert type(error) is UnsupportedModelError
    assert "gemma3, whose language model is one of several parts" in error.message


def test_too_little_memory_is_refused_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(loaded, "GIB", 2**20)  # the sizes of such a small model are in MiB
    monkeypatch.setattr(loaded, "free_bytes", lambda _: 2**20)
    error = error_of(folder, dtype=torch.float32)
    assert type(error) is UsageError
    assert "need 1.27 GiB on cpu, where 1 GiB are free" in error.message
    assert "--mode shared_vllm" in error.hint


def test_free_memory_is_the_smaller_of_host_and_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.core.host_memory.available_bytes", lambda: 7)
    for left, free in ((None, 7), (5, 5), (9, 7)):
        monkeypatch.setattr("bridge.core.host_memory.cgroup_left_bytes", lambda left=left: left)
        assert loaded.free_bytes(torch.device("cpu")) == free


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def drop_a_norm(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def take_another_size(folder: Path) -> None:
    reconfigure(folder, vocab_size=200)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "cannot be loaded: Error no file named model.safetensors"),
        (truncate, "cannot be loaded: "),
        (drop_a_norm, "lacks 1 of its parameters, the first: model.norm.weight"),
        (take_another_size, "tokens.weight has shape (301, 128) in its files, but its configuration expects (200"),
    ],
)
def test_missing_or_misfitting_weights_are_refused(folder: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(folder)
    error = error_of(folder)
    assert type(error) is UsageError
    assert words in error.message


def test_folder_without_a_model_is_reported(tmp_path: Path) -> None:
    assert "no usable model at" in error_of(tmp_path / "nothing").message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_missing_gpu_is_refused(folder: Path, device: str) -> None:
    error = error_of(folder, device)
    assert f"--trainer-device {device}: this process sees 0 GPUs" in error.message
    assert error.hint == "--trainer-device cpu"


def test_synchronizing_waits_for_the_chosen_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 2**30))
    assert "where 0 GiB are free" in error_of(folder, "cuda:1").message
    assert current == [torch.device("cuda:1")]
    error_of(folder, "auto")
    assert len(current) == 1, "the first GPU is current already, or another one of this rank"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_trainer_on_the_cpu_leaves_a_core_to_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        assert loaded.load(str(folder), device="auto").device.type == "cpu"
        assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) - 1)
    finally:
        torch.set_num_threads(before)


def test_loaded_copy_outlives_the_folder(folder: Path) -> None:
    own = loaded.load(str(folder), device="cpu")
    shutil.rmtree(folder)
    assert all(parameter.isfinite().all() for parameter in own.model.parameters())


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DECODER, NO_POSITIONS = "has no decoder that transformers can find", "does not accept position_ids"


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1), "MptForCausalLM", NO_POSITIONS),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2), "BloomForCausalLM", NO_POSITIONS),
        (
            Llama4TextConfig(
                **SIZES, num_local_experts=2, head_dim=16, intermediate_size_mlp=32, num_key_value_heads=2
            ),
            "Llama4ForCausalLM",
            NO_DECODER,
        ),
        (
            ModernBertDecoderConfig(**SIZES, cls_token_id=1, sep_token_id=2),
            "ModernBertDecoderForCausalLM",
            NO_DECODER,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_untrainable_model_class_is_refused_by_name(
    config: PretrainedConfig, name: str, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        skeleton.build(str(tmp_path), torch.bfloat16)
    assert caught.value.message.startswith(f"{tmp_path} cannot be trained: its {name} {reason}")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        ),
    ],
)
def test_older_language_model_structures_are_accepted(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    assert skeleton.shapes(skeleton.build(str(tmp_path), torch.bfloat16))


@pytest.mark.parametrize(
    "document",
    [
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 0}',
        '{"model_type": "no-such-type"}',
        '{"model_type": ["llama"]}',
    ],
)
def test_invalid_configuration_is_refused_in_one_line(document: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(document)
    with pytest.raises((UsageError, UnsupportedModelError)) as caught:
        skeleton.build(str(tmp_path), torch.bfloat16)
    assert "\n" not in caught.value.message
