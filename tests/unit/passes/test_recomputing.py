"""Recomputed layers have the same gradients, also with attention's output kept or inputs in host memory."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from bridge.passes import activation_offload, attention, layers
from bridge.passes.layers import HOST_INPUTS, Kept
from bridge.passes.packing_proof import packed
from bridge.passes.prepared_model import PreparedModel
from tests.unit.passes.test_attention import FAMILIES, LENGTHS, gradients, tiny, tokens
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu

WAYS: dict[str, tuple[Callable[[PreTrainedModel], None], bool]] = {
    "called again": (layers.call_again, False),
    "called again, but for attention": (lambda model: layers.call_again(model, keeps_attention=True), False),
    "the inputs on the host": (layers.call_again, True),
    "both": (lambda model: layers.call_again(model, keeps_attention=True), True),
}
COMPILED: dict[str, tuple[dict[str, bool], bool]] = {
    "the inputs": ({"recomputed": True}, False),
    "attention, too": ({"recomputed": True, "keeps_attention": True}, False),
    "all on the host": ({"recomputed": True, "keeps_attention": True}, True),
}


class Forward(TorchDispatchMode):
    """Counts the calls of attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function in layers.OPERATORS
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def computed(prepared: PreparedModel) -> tuple[list[Tensor], int]:
    """Return the gradients, and how often the backward pass called attention's operator."""
    hidden = packed(prepared, tokens(), LENGTHS)
    with Forward() as counted:
        own = gradients(prepared.model, hidden)
    return own, counted.calls


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3", "mistral, by a window", "gemma 3", "mixtral"])
def test_recomputed_gradients_match_kept_activations(family: str, way: str) -> None:
    model = tiny(FAMILIES[family])
    model.set_attn_implementation(attention.NAME)
    prepared = PreparedModel(model)
    expected, _ = computed(prepared)
    recompute, on_host = WAYS[way]
    recompute(model)
    prepared.kept = Kept(on_host=on_host)
    own, _ = computed(prepared)
    assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))


def test_kept_attention_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    model = tiny(FAMILIES["qwen3"])
    model.set_attn_implementation(attention.NAME)
    prepared = PreparedModel(model)
    with kernel_on_the_cpu():
        layers.call_again(model)
        assert computed(prepared)[1] == len(layers.decoder_layers(model))
        layers.call_again(model, keeps_attention=True)
        assert computed(prepared)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kept", COMPILED)
def test_compiled_layers_that_recompute_have_the_same_gradients(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "aot_eager_decomp_partition")
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    model = tiny(FAMILIES["qwen3"])
    model.set_attn_implementation(attention.NAME)
    options, on_host = COMPILED[kept]
    prepared = PreparedModel(model)
    with kernel_on_the_cpu():
        expected, _ = computed(prepared)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        layers.compile_layers(model, **options)
        prepared.kept = Kept(on_host=on_host)
        own, calls = computed(prepared)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == breaks
    assert calls == (0 if "keeps_attention" in options else len(layers.decoder_layers(model)))
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_layer_inputs_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[torch.Size]()

    def to_host(_: object, tensor: Tensor) -> tuple[Tensor, None]:
        moved.append(tensor.shape)
        return tensor.clone(), None

    monkeypatch.setattr(activation_offload._Kept, "_to_host", to_host)
    model = tiny(FAMILIES["qwen3"])
    model.set_attn_implementation(attention.NAME)
    layers.call_again(model)
    prepared = PreparedModel(model)
    prepared.kept = HOST_INPUTS
    with torch.no_grad():
        packed(prepared, tokens(), LENGTHS)
    assert moved == []
    computed(prepared)
    hidden = torch.Size([1, sum(LENGTHS), model.config.hidden_size])
    assert set(moved) == {hidden}
    assert len(moved) <= len(layers.decoder_layers(model)) + 4  # plus inputs of the last norm, in float32 here


def on_gpu(name: str) -> Any:
    tensor = MagicMock(spec=Tensor, name=name, is_cuda=True, dtype=torch.float32, nbytes=4)
    tensor.numel.return_value = 1
    tensor.untyped_storage.return_value.nbytes.return_value = 4
    tensor.detach.return_value = tensor
    return tensor


def test_device_memory_is_independent_of_host_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is allocated and freed in the order of the computing stream, without `record_stream`."""
    cuda, inside, tensors = MagicMock(), list[bool](), [on_gpu(str(number)) for number in range(6)]
    computing = cuda.current_stream.return_value
    made = list[Any]()

    def empty_like(_: object, *, device: object, pin_memory: bool = False) -> Any:
        made.append(on_gpu("back"))
        if not pin_memory:
            inside.append(cuda.stream.return_value.__enter__.call_count > cuda.stream.return_value.__exit__.call_count)
        return made[-1]

    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    kept = activation_offload._Kept(set(), 1, torch.float32)
    packed = list[Any]()
    for number, tensor in enumerate(tensors, 1):
        packed.append(kept.pack(tensor))
        assert len(kept._here) == min(number, activation_offload.AHEAD)
        assert computing.wait_event.call_count == number - len(kept._here)
    for one in reversed(packed):
        kept.unpack(one)
        assert len(kept._here) <= activation_offload.AHEAD
    assert inside == [False] * (len(tensors) - activation_offload.AHEAD)
    assert not any(tensor.record_stream.called for tensor in (*tensors, *made))


@pytest.mark.parametrize(
    "kept", [torch.ones(4, 6)[:, :3], torch.ones(4, 1).expand(4, 3), torch.ones(6, 4)[:3].T, torch.ones(4, 3).T]
)
def test_offloaded_tensors_keep_their_strides(kept: Tensor) -> None:
    """Compiled code relies on strides."""
    keeper = activation_offload._Kept(set(), kept.numel(), kept.dtype)
    back = keeper.unpack(keeper.pack(kept))
    assert back.stride() == kept.stride()
    assert torch.equal(back, kept)
