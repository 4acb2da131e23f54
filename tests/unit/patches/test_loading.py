"""vLLM loads a model of toy layers: where weights go, and which are rewritten, derived or moved."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from bridge.errors import UnsupportedModelError
from bridge.server.manifest import View
from bridge.weights import shared_memory
from bridge.weights.layout import check_coverage
from bridge_patches import loading, placement, wrap
from bridge_patches.loading import RECORDS, Record, record_of, watched
from bridge_patches.worker import BridgeWorker

HIDDEN, HEAD = 8, 4
VOCABULARY, PADDED = 11, 16
SHAPES = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "attn.q_proj.weight": (4 * HEAD, HIDDEN), "attn.k_proj.weight": (HEAD, HIDDEN),
    "attn.v_proj.weight": (HEAD, HIDDEN),
    "attn.q_proj.bias": (4 * HEAD,), "attn.k_proj.bias": (HEAD,), "attn.v_proj.bias": (HEAD,),
    "mlp.gate_proj.weight": (12, HIDDEN), "mlp.up_proj.weight": (12, HIDDEN), "mlp.down_proj.weight": (HIDDEN, 12),
    "norm.weight": (HIDDEN,),
}  # fmt: skip


class Fused(nn.Module):
    """A fused linear layer whose parts have different numbers of rows."""

    def __init__(self, *rows: int, bias: bool = False) -> None:
        super().__init__()
        self.rows = rows
        self.weight = parameter(sum(rows), HIDDEN)
        self.bias = parameter(sum(rows)) if bias else None

    def load(self, leaf: str, part: int, loaded: Tensor) -> None:
        """Load one part, as vLLM's weight loaders do."""
        whole = self.get_parameter(leaf)
        start = sum(self.rows[:part])
        whole.data.narrow(0, start, self.rows[part]).copy_(loaded)


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(PADDED, HIDDEN)
        self.shard_indices = SimpleNamespace(num_org_elements=VOCABULARY)

    def load(self, loaded: Tensor) -> None:
        self.weight[: loaded.shape[0]].data.copy_(loaded)
        self.weight[loaded.shape[0] :].data.fill_(0)


class Plain(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = parameter(*shape)


class Model(nn.Module):
    """A vLLM model whose layers have their own weight loaders."""

    stacked: ClassVar = {
        "attn.q_proj": ("attn", "qkv_proj", 0), "attn.k_proj": ("attn", "qkv_proj", 1),
        "attn.v_proj": ("attn", "qkv_proj", 2),
        "mlp.gate_proj": ("mlp", "gate_up_proj", 0), "mlp.up_proj": ("mlp", "gate_up_proj", 1),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = VocabParallelEmbedding(), Plain(HIDDEN)
        self.attn = nn.ModuleDict({"qkv_proj": Fused(4 * HEAD, HEAD, HEAD, bias=True)})
        self.mlp = nn.ModuleDict({"gate_up_proj": Fused(12, 12), "down_proj": Plain(HIDDEN, 12)})
        self.head = self.embed  # tied

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            module, _, leaf = name.rpartition(".")
            if module in self.stacked:
                block, fused, part = self.stacked[module]
                self.get_submodule(f"{block}.{fused}").load(leaf, part, loaded)  # type: ignore[operator]
            elif module == "embed":
                self.embed.load(loaded)
            else:
                self.get_parameter(name).data.copy_(loaded)


def skeleton(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> Any:
    """A transformers model without weights, whose parameters have the same form as in its files."""
    root: Any = nn.Module()
    root._weight_conversions = []
    root.config = None
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    return root


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).bfloat16())


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the vLLM module that `bridge_patches.loading` imports."""
    vocabulary = ModuleType("vllm.model_executor.layers.vocab_parallel_embedding")
    vars(vocabulary).update(VocabParallelEmbedding=VocabParallelEmbedding)
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, vocabulary.__name__, vocabulary)


def laid_out(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, View]:
    return loading.views(model, skeleton(shapes))


def cut(model: nn.Module, view: View) -> Tensor:
    whole = model.get_parameter(view.parameter).detach()
    return whole.view(-1)[view.offset :].as_strided(view.shape, view.stride)


@pytest.mark.usefixtures("vllm")
def test_views_follow_vllms_own_layers() -> None:
    model: Any = Model()
    views = laid_out(model, SHAPES)
    check_coverage(
        SHAPES, {name: tuple(p.shape) for name, p in model.named_parameters()}, views, loading.padding(model)
    )
    qkv, gate_up = model.attn["qkv_proj"], model.mlp["gate_up_proj"]
    for name, expected in {
        "attn.q_proj.weight": qkv.weight[:16], "attn.k_proj.weight": qkv.weight[16:20],
        "attn.v_proj.weight": qkv.weight[20:], "attn.k_proj.bias": qkv.bias[16:20],
        "mlp.gate_proj.weight": gate_up.weight[:12], "mlp.up_proj.weight": gate_up.weight[12:],
        "embed.weight": model.embed.weight[:VOCABULARY], "norm.weight": model.norm.weight,
    }.items():  # fmt: skip
        assert torch.equal(cut(model, views[name]), expected), name


class Wrapped(nn.Module):
    """One of vLLM's LoRA layers around a layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def with_lora() -> Any:
    model: Any = Model()
    model.embed = model.head = Wrapped(model.embed)
    for block in (model.attn, model.mlp):
        for name in block:
            block[name] = Wrapped(block[name])
    return model


@pytest.mark.usefixtures("vllm")
def test_padding_is_the_part_without_tokens() -> None:
    model: Any = Model()
    assert loading.padding(model) == {"embed.weight": (PADDED - VOCABULARY) * HIDDEN}
    model.embed.shard_indices.num_org_elements = PADDED
    assert loading.padding(model) == {}


def test_recording_the_layout_does_not_change_weights() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    laid_out(model, SHAPES)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.usefixtures("vllm")
def test_names_resolve_to_layers_wrapped_by_lora() -> None:
    names = loading.plain_names(with_lora())
    assert names["attn.qkv_proj.weight"] == "attn.qkv_proj.base_layer.weight"
    assert names["norm.weight"] == "norm.weight"
    assert names.keys() == loading.plain_names(Model()).keys()
    assert loading.padding(with_lora()) == {"embed.base_layer.weight": (PADDED - VOCABULARY) * HIDDEN}


class Doubling(Model):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, 2 * loaded if name == "norm.weight" else loaded) for name, loaded in weights)


class Asking(Model):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, loaded) for name, loaded in weights if loaded.sum().item())


class Writing(Model):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, loaded.mul_(2)) for name, loaded in weights)


class Choosing(Model):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, loaded) for name, loaded in weights if name != "attn.k_proj.bias")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Doubling, "norm.weight: vLLM loads it into none of its parameters"),
        (Asking, "Asking does more than copy weights when it loads: RuntimeError"),
        (Writing, "attn.k_proj.bias: vLLM modifies it while loading it"),
        (Choosing, "attn.k_proj.bias: vLLM loads it into none of its parameters"),
    ],
)
def test_weights_not_copied_unchanged_are_refused_by_name(kind: type[Model], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        laid_out(kind(), SHAPES)
    assert "lora_only" in caught.value.hint


def test_parameter_missing_in_vllm_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="extra"):
        laid_out(Model(), {**SHAPES, "extra.weight": (3,)})


def test_moving_to_shared_memory_keeps_values_ties_and_views() -> None:
    model: Any = Model()
    storage = torch.arange(40, dtype=torch.bfloat16)
    model.one, model.other = nn.Parameter(storage[:8]), nn.Parameter(storage[8:40].view(4, 8))
    model.single = nn.Parameter(torch.randn(3))  # float32
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    placement._move_to_shared_memory(model)
    block = placement.shared_block(model)
    assert block is not None
    start = block.storage.data_ptr()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert start <= p.data_ptr() < start + block.storage.nbytes()
        assert p.dtype == before[name].dtype
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert model.other.data_ptr() - model.one.data_ptr() == 16
    starts = {p.data_ptr() for name, p in model.named_parameters() if name != "other"}
    assert all((address - start) % shared_memory.ALIGNMENT_BYTES == 0 for address in starts)
    mapped = torch.empty(0, dtype=torch.bfloat16).set_(shared_memory.open_storage(block.path, block.storage.nbytes()))
    model.norm.weight.data[:] = 3
    offset = (model.norm.weight.data_ptr() - start) // 2
    assert (mapped[offset : offset + HIDDEN] == 3).all()


def test_moved_or_deleted_parameter_is_detected() -> None:
    model: Any = Model()
    addresses = placement.Addresses(model)
    assert addresses.moved() == []
    model.norm.weight.data += 1
    assert addresses.moved() == []
    model.norm.weight.data = model.norm.weight.data.clone()
    assert addresses.moved() == ["norm.weight"]
    del model.mlp["gate_up_proj"].weight
    assert sorted(addresses.moved()) == ["mlp.gate_up_proj.weight", "norm.weight"]


def test_weights_of_a_runner_are_watched_after_loading() -> None:
    class Runner:
        bridge_addresses: placement.Addresses

        def load_model(self, load_dummy_weights: bool = False) -> None:
            self.model = Model()

        def get_model(self) -> nn.Module:
            return self.model

    wrap(Runner, "load_model")(placement._load_model)
    runner = Runner()
    runner.load_model()
    block = placement.shared_block(runner.model)
    assert block is not None, "on the CPU the weights are moved"
    assert {p.untyped_storage().data_ptr() for p in runner.model.parameters()} == {block.storage.data_ptr()}
    assert runner.bridge_addresses.moved() == []


def worker(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a vLLM worker that has loaded `model`, whose layers LoRA may have wrapped afterward."""
    record = Record(expected=dict(SHAPES), views=loading.views(Model(), skeleton(SHAPES)))
    monkeypatch.setitem(RECORDS, model, record)
    made: Any = BridgeWorker()
    made.rank = 0
    config = SimpleNamespace(model="m", dtype=torch.bfloat16, trust_remote_code=False)
    made.vllm_config = SimpleNamespace(model_config=config, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    made.model_runner = SimpleNamespace(get_model=lambda: model, bridge_addresses=placement.Addresses(model))
    return made


@pytest.mark.usefixtures("vllm")
def test_worker_exports_handles_that_others_can_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    placement._move_to_shared_memory(model)
    shard = json.loads(worker(model, monkeypatch).bridge_export())
    assert shard["param_mappings"].keys() == SHAPES.keys()
    assert shard["gpu_uuid"] is None
    handle = shard["ipc_handles"]["norm.weight"]
    storage = shared_memory.open_storage(handle["path"], handle["storage_size"])
    tensor = torch.empty(0, dtype=torch.bfloat16).set_(storage, handle["tensor_offset"], handle["shape"], (1,))
    assert torch.equal(tensor, model.norm.weight)


def test_worker_refuses_weights_of_a_different_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    model.norm.weight = nn.Parameter(torch.ones(HIDDEN, dtype=torch.int8), requires_grad=False)
    answer = json.loads(worker(model, monkeypatch).bridge_export())
    assert "norm.weight (torch.int8)" in answer["error"]
    assert answer["hint"]


@pytest.mark.usefixtures("vllm")
def test_worker_refuses_a_parameter_without_counterpart(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    model.k_scale = parameter(1)
    placement._move_to_shared_memory(model)
    assert "k_scale" in json.loads(worker(model, monkeypatch).bridge_export())["error"]


def test_worker_reads_writes_digests_and_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    made = worker(model, monkeypatch)
    element = {"parameter": "mlp.down_proj.weight", "index": 13, "part": made.rank}
    other = {**element, "part": made.rank + 1}
    before = made.bridge_digests()
    assert made.bridge_read([other, element]) == [model.mlp["down_proj"].weight[1, 1].item()]
    made.bridge_write([element, other], [2.5, 3.5])
    assert model.mlp["down_proj"].weight[1, 1] == 2.5
    after = made.bridge_digests()
    assert {name for name in before if before[name] != after[name]} == {"mlp.down_proj.weight"}
    assert made.bridge_synchronize() == []
    assert made.bridge_finiteness() == (len(before), [])
    made.bridge_write([element], [float("nan")])
    assert made.bridge_finiteness() == (len(before), ["mlp.down_proj.weight"])
    model.norm.weight.data = model.norm.weight.data.clone()
    assert made.bridge_synchronize() == ["norm.weight"]


CONFIG = SimpleNamespace(model="m", dtype=torch.bfloat16, trust_remote_code=False)


class Loader:
    """vLLM's `BaseModelLoader`, which post-processes the loaded weights."""

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


def loaded(process: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, empty: Any = None) -> Record:
    monkeypatch.setattr("bridge.weights.skeleton.build", lambda *_, **__: empty or skeleton(SHAPES))
    loader = Loader(process)
    model = watched(lambda: loader.load_model(CONFIG), loader, CONFIG)
    assert loader.order == ["load"]
    assert "load_weights" not in vars(loader)
    return RECORDS.pop(model)


def test_model_unchanged_after_loading_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(model: Any) -> None:
        model.norm.scale = torch.tensor(1.0)  # a scalar is not a weight
        model.norm.weight = nn.Parameter(model.norm.weight.data)  # a different object at the same address

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
def test_tensors_that_updates_would_miss_are_refused(
    process: Callable[[Any], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = loaded(process, monkeypatch)
    model = Model()
    monkeypatch.setitem(RECORDS, model, record)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        record_of(model)
    assert "lora_only" in caught.value.hint
    assert "\n" not in caught.value.message


class Untied(Model):
    """A model whose configuration ties the head that its files also contain: vLLM loads both and compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = VocabParallelEmbedding()


def _tie(model: Any) -> None:
    model.head.weight = model.embed.weight


def tied_record(process: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setattr(sys.modules[__name__], "Model", Untied)
    empty = skeleton({**SHAPES, "head.weight": (VOCABULARY, HIDDEN)})
    empty.head.weight = empty.embed.weight
    empty.get_input_embeddings, empty.get_output_embeddings = lambda: empty.embed, lambda: empty.head
    return loaded(process, monkeypatch, empty)


def test_head_that_vllm_ties_after_loading_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, Qwen3-0.6B, whose files contain the embedding twice."""
    record = tied_record(_tie, monkeypatch)
    assert record.refusal is None
    assert record.views.keys() == SHAPES.keys()


def test_tied_head_with_different_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(model: Any) -> None:
        pass

    refusal = tied_record(differ, monkeypatch).refusal
    assert refusal is not None
    assert "head.weight differs from embed.weight, but the configuration ties them" in refusal.message
    assert '"tie_word_embeddings": false' in refusal.hint


def test_parameter_replaced_with_other_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def tie_to_others(model: Any) -> None:
        model.embed.weight.data.neg_()
        _tie(model)

    refusal = tied_record(tie_to_others, monkeypatch).refusal
    assert refusal is not None
    assert "embed.weight, head.weight: rewritten" in refusal.message


class Scaled(Model):
    """A model with a buffer in its files, and one that vLLM creates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.register_buffer("scalar", torch.ones(1).bfloat16())
        self.norm.register_buffer("made", torch.ones(2).bfloat16())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        named = dict(weights)
        self.norm.get_buffer("scalar").copy_(named.pop("norm.scalar"))
        super().load_weights(named.items())


def test_buffer_that_a_weight_is_loaded_into_becomes_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, Gemma 4's `layer_scalar`, which the trainer would otherwise keep at 1."""
    monkeypatch.setattr(sys.modules[__name__], "Model", Scaled)
    monkeypatch.setattr("bridge.weights.skeleton.build", lambda *_, **__: skeleton({**SHAPES, "norm.scalar": (1,)}))
    loader = Loader(lambda _: None)
    model = watched(lambda: loader.load_model(CONFIG), loader, CONFIG)
    record = RECORDS.pop(model)
    assert record.refusal is None
    assert record.views["norm.scalar"].parameter == "norm.scalar"
    assert not model.get_parameter("norm.scalar").requires_grad
    assert [name for name, _ in model.named_buffers()] == ["norm.made"]


def test_first_refusal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "load_weights", lambda *_: None)
    refusal = loaded(_derive, monkeypatch).refusal
    assert refusal is not None
    assert "none of its parameters" in refusal.message


def test_model_from_an_unwatched_loader_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot watch"):
        record_of(nn.Linear(2, 2))


def test_weight_that_vllm_keeps_in_float32_is_shared() -> None:
    """For example, GatedDeltaNet's A_log: values are exact, and the trainer's parameter adopts the server's dtype."""
    server = nn.Module()
    server.decay = nn.Parameter(torch.zeros(3))
    server.load_weights = lambda weights: server.decay.data.copy_(dict(weights)["decay"])  # type: ignore[assignment]
    views = loading.views(server, skeleton({"decay": (3,)}))
    assert (views["decay"].parameter, views["decay"].shape) == ("decay", (3,))
    server.decay.data = server.decay.data.half()
    with pytest.raises(UnsupportedModelError, match="decay: vLLM loads it into none"):
        loading.views(server, skeleton({"decay": (3,)}))


def test_weight_that_the_loader_converts_to_float32_is_shared() -> None:
    """For example, the router bias of MiniMax-M2."""
    server = nn.Module()
    server.bias = nn.Parameter(torch.zeros(3))
    server.load_weights = lambda weights: server.bias.data.copy_(dict(weights)["bias"].float())  # type: ignore[assignment]
    views = loading.views(server, skeleton({"bias": (3,)}))
    assert (views["bias"].parameter, views["bias"].shape) == ("bias", (3,))
    server.load_weights = lambda weights: server.bias.data.copy_(dict(weights)["bias"].half())  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="bias: vLLM loads it into none"):
        loading.views(server, skeleton({"bias": (3,)}))
