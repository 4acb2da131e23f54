"""Attaching to a toy server: one copy, bit for bit, or a refusal before any handle is opened."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, BridgeError, ManifestError, UnsupportedModelError, UsageError
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.server.manifest import Manifest
from bridge.weights import shared_memory
from bridge.weights.attach import AttachedModel, attach, reattach
from bridge.weights.model_folder import save, state, stored_buffers
from tests.models import tiny
from tests.models.families import FAMILIES, ON_GPUS, WITH_BUFFERS
from tests.unit import toy_server
from tests.unit.toy_server import FILLER, ToyServer

TOKENS = torch.arange(3, 99).view(2, 48)
QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.fixture(params=[tiny.llama, tiny.qwen2], ids=["llama", "qwen2"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> ToyServer:
    """Serve a tied Llama with llama3 RoPE and grouped queries, and an untied Qwen2 with biases."""
    config: Callable[[], PretrainedConfig] = request.param
    return toy_server.serve(config(), tmp_path / "model")


@pytest.fixture
def llama(tmp_path: Path) -> ToyServer:
    return toy_server.serve(tiny.llama(), tmp_path / "model")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        values: Tensor = model(TOKENS).logits
    return values


def step(attached: AttachedModel) -> None:
    optimizer = SplitMasterAdamW(attached.model.parameters(), lr=1e-2)
    attached.model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()


def refused(manifest: Manifest, kind: type[BridgeError] = AttachError) -> str:
    with pytest.raises(kind) as caught:
        attach(manifest)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_forward_pass_equals_a_loaded_models_bitwise(server: ToyServer) -> None:
    attached = attach(server.manifest)
    assert torch.equal(logits(attached.model), logits(server.reference))
    assert not attached.model.training


def test_every_parameter_is_in_the_servers_memory(server: ToyServer) -> None:
    attached = attach(server.manifest)
    assert attached.unshared_parameters() == []
    assert attached.weight_bytes() == 0
    reference = dict(server.reference.named_parameters())
    for name, parameter in attached.model.named_parameters():
        assert parameter.requires_grad
        assert parameter.is_contiguous()
        assert torch.equal(parameter, reference.pop(name))
    assert not reference
    for name, tensor in attached.server_tensors.items():
        assert torch.equal(tensor, server.tensors[name])


def test_step_writes_to_the_server_but_not_its_padding(server: ToyServer) -> None:
    attached = attach(server.manifest)
    before = {name: tensor.clone() for name, tensor in server.tensors.items()}
    assert server.padding_rows()
    step(attached)
    unmoved = [name for name, tensor in server.tensors.items() if torch.equal(tensor, before[name])]
    assert unmoved == []
    for rows in server.padding_rows():
        assert (rows == FILLER).all()
    for name, parameter in attached.model.named_parameters():
        view = server.manifest.shards[0].param_mappings[name]
        start = view.offset
        theirs = server.tensors[view.parameter].view(-1)[start : start + parameter.numel()]
        assert torch.equal(parameter.detach().view(-1), theirs)
    assert attached.unshared_parameters() == []


def test_model_sees_the_servers_writes(server: ToyServer) -> None:
    attached = attach(server.manifest)
    before = logits(attached.model)
    server.tensors["model.norm.weight"].fill_(2.0)
    assert not torch.equal(logits(attached.model), before)


def test_tied_weights_share_one_parameter(llama: ToyServer) -> None:
    model: Any = attach(llama.manifest).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    assert sorted(names) == list(llama.manifest.param_names)


def test_untied_head_is_a_separate_parameter(tmp_path: Path) -> None:
    model: Any = attach(toy_server.serve(tiny.qwen2(), tmp_path / "model").manifest).model
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_replaced_parameter_is_reported_as_unshared(server: ToyServer) -> None:
    attached = attach(server.manifest)
    model: Any = attached.model
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    assert attached.unshared_parameters() == ["model.norm.weight"]
    assert attached.weight_bytes() == 2 * model.config.hidden_size


def test_buffers_are_real_and_rope_keeps_its_scaling(llama: ToyServer) -> None:
    model: Any = attach(llama.manifest).model
    buffers, expected = dict(model.named_buffers()), dict(llama.reference.named_buffers())
    assert buffers.keys() == expected.keys()
    assert buffers
    for name, buffer in buffers.items():
        assert not buffer.is_meta
        assert torch.equal(buffer, expected[name])
    plain = tiny.llama()
    plain.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    unscaled = type(llama.reference)(plain).model.rotary_emb.inv_freq
    assert not torch.equal(model.model.rotary_emb.inv_freq, unscaled)


@pytest.mark.parametrize("family", WITH_BUFFERS)
def test_stored_buffer_is_the_servers_and_is_never_trained(family: str, tmp_path: Path) -> None:
    server = toy_server.serve({**FAMILIES, **ON_GPUS}[family](), tmp_path / "model")
    attached = attach(server.manifest)
    expected = stored_buffers(server.reference)
    assert expected
    assert stored_buffers(attached.model).keys() == expected.keys()
    assert attached.unshared_parameters() == []
    assert torch.equal(logits(attached.model), logits(server.reference))
    before = {name: parameter.detach().clone() for name, parameter in attached.model.named_parameters()}
    assert before.keys() == dict(server.reference.named_parameters()).keys()
    step(attached)
    assert [name for name, old in before.items() if torch.equal(attached.model.get_parameter(name), old)] == []
    (tmp_path / "saved").mkdir()
    save(attached.model, tmp_path / "model", tmp_path / "saved")
    saved = state(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16))
    assert all(torch.equal(saved[name], tensor) for name, tensor in state(attached.model).items())
    for name, value in expected.items():
        assert torch.equal(saved[name], value)
        assert torch.equal(server.tensors[name], value)


def test_replaced_stored_buffer_is_reported_as_unshared(tmp_path: Path) -> None:
    attached = attach(toy_server.serve(FAMILIES["GLM-4.5"](), tmp_path / "model").manifest)
    ((name, bias),) = stored_buffers(attached.model).items()
    module, _, leaf = name.rpartition(".")
    setattr(attached.model.get_submodule(module), leaf, bias.clone())
    assert attached.unshared_parameters() == [name]
    assert attached.weight_bytes() == bias.nbytes


def test_stored_buffer_follows_a_restarted_server(tmp_path: Path) -> None:
    first, second = (toy_server.serve(FAMILIES["GLM-4.5"](), tmp_path / name) for name in ("first", "second"))
    attached = attach(first.manifest)
    ((name, bias),) = stored_buffers(attached.model).items()
    reattached = reattach(attached, second.manifest)
    second.tensors[name].fill_(3.0)
    assert stored_buffers(attached.model)[name] is bias
    assert (bias == 3.0).all()
    assert reattached.unshared_parameters() == []


def test_deep_copy_of_an_attached_model_copies_only_its_tensors(tmp_path: Path) -> None:
    attached = attach(toy_server.serve(FAMILIES["GLM-4.5"](), tmp_path / "model").manifest)
    tensors = state(copy.deepcopy(attached.model))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values())


def edited_handle(server: ToyServer, name: str, **changes: Any) -> Manifest:
    handles = {key: handle.model_dump() for key, handle in server.manifest.shards[0].ipc_handles.items()}
    handles[name].update(changes)
    return server.edited(ipc_handles=handles)


def edited_view(server: ToyServer, name: str, **changes: Any) -> Manifest:
    views = {key: view.model_dump() for key, view in server.manifest.shards[0].param_mappings.items()}
    views[name].update(changes)
    return server.edited(param_mappings=views)


@pytest.mark.parametrize("offset", [10**6, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 10**30])
def test_parameter_beyond_its_storage_is_refused(llama: ToyServer, offset: int) -> None:
    size = llama.manifest.shards[0].ipc_handles[QKV].storage_size
    assert QKV in refused(edited_handle(llama, QKV, tensor_offset=offset))
    assert llama.tensors[QKV].untyped_storage().nbytes() == size


def test_view_beyond_its_allocation_is_refused(llama: ToyServer) -> None:
    *_, last = llama.manifest.shards[0].ipc_handles
    handle = llama.manifest.shards[0].ipc_handles[last]
    fits = (handle.storage_size // 2) - llama.tensors[last].numel()
    assert attach(edited_handle(llama, last, tensor_offset=fits)).server_tensors[last].numel() > 0
    assert last in refused(edited_handle(llama, last, tensor_offset=fits + 1))


def test_overlapping_parameters_are_refused(llama: ToyServer) -> None:
    offset = llama.manifest.shards[0].ipc_handles[QKV].tensor_offset
    message = refused(edited_handle(llama, "model.layers.0.self_attn.o_proj.weight", tensor_offset=offset + 1))
    assert QKV in message
    assert "overlap" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"stride": (1, 256)},
        {"stride": (0, 0)},
        {"stride": (256, 1)},
        {"dtype": "float16"},
        {"shape": (255, 128)},
        {"shape": (-256, -128), "stride": (-128, 1)},
        {"storage_size": 10**30},
        {"storage_size": 100},
        {"path": "/proc/self/fd/99999"},
        {"path": "/etc/hostname"},
    ],
)
def test_edited_handle_is_refused(llama: ToyServer, changes: dict[str, Any]) -> None:
    refused(edited_handle(llama, QKV, **changes))


@pytest.mark.parametrize("changes", [{"offset": 1}, {"stride": (1, 128)}, {"shape": (64, 64)}, {"parameter": "x"}])
def test_edited_view_is_refused_before_anything_is_opened(
    llama: ToyServer, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "open_storage", lambda *_: pytest.fail("opened"))
    refused(edited_view(llama, "model.layers.0.self_attn.k_proj.weight", **changes), UnsupportedModelError)


def test_model_with_different_shapes_is_refused_by_name(llama: ToyServer, tmp_path: Path) -> None:
    config = tiny.llama()
    config.intermediate_size = 192
    tiny.write(config, tmp_path / "other")
    message = refused(llama.edited(model=str(tmp_path / "other")), UnsupportedModelError)
    assert "mlp.gate_proj.weight" in message
    assert "192" in message


def test_model_of_a_different_family_is_refused(llama: ToyServer, tmp_path: Path) -> None:
    tiny.write(tiny.qwen2(), tmp_path / "other")
    assert "lm_head.weight" in refused(llama.edited(model=str(tmp_path / "other")), UnsupportedModelError)


def test_missing_model_folder_is_refused(llama: ToyServer) -> None:
    assert "/nowhere" in refused(llama.edited(model="/nowhere/at/all"), UsageError)


def test_quantized_model_is_refused(llama: ToyServer, tmp_path: Path) -> None:
    config = tiny.llama()
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path / "quantized")
    assert "quantized" in refused(llama.edited(model=str(tmp_path / "quantized")), UnsupportedModelError)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_degree": 2},
        {"dp_shard_degree": 2},
        {"single_copy_enabled": False},
        {"shared_weights_enabled": False},
    ],
)
def test_manifest_of_an_unsupported_server_is_refused(llama: ToyServer, changes: dict[str, Any]) -> None:
    refused(llama.edited(**changes), ManifestError)


def test_invisible_gpu_is_refused(llama: ToyServer) -> None:
    assert "GPU-none" in refused(llama.edited(gpu_uuid="GPU-none"))


def test_attaching_twice_maps_the_same_memory(llama: ToyServer) -> None:
    one, other = attach(llama.manifest), attach(llama.manifest)
    step(one)
    assert torch.equal(logits(one.model), logits(other.model))
    assert ProcessIdentity.current() == llama.manifest.server
