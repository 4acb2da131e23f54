"""Models made of views: saved correctly and compactly; loaded in place, or refused without changing anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from bridge.errors import UnsupportedModelError, UsageError
from bridge.planning.model_size import ModelSize
from bridge.processes import start_checks
from bridge.weights import loaded, skeleton, stored_tensors
from bridge.weights.model_folder import (
    INDEX_NAME,
    SINGLE_NAME,
    check,
    load_into,
    save,
    stored_buffers,
)
from tests.models import tiny
from tests.models.families import FAMILIES, minimax_m2

PADDED_ROWS, VOCABULARY = 320, 301


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Create the folder of a source model: a tokenizer, generation defaults, and an unrelated file."""
    folder = tmp_path / "source"
    folder.mkdir()
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": true}')
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def shared_model(*, tied: bool, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Create a grouped-query Llama whose parameters are views into one storage, laid out as in an inference engine."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **changes,
    )
    model = LlamaForCausalLM(config).bfloat16()
    storage, start = torch.full((100_000,), 7.0).bfloat16(), 64
    for parameter in model.parameters():
        rows = PADDED_ROWS if len(parameter) == VOCABULARY else len(parameter)
        view = storage[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = view.copy_(parameter.data)
        start += rows * (parameter.numel() // len(parameter))
    return model


def pointers(model: LlamaForCausalLM) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def whole_storage(model: LlamaForCausalLM) -> bytes:
    """All of the model's memory, including the gaps between its parameters."""
    storage: torch.UntypedStorage = next(model.parameters()).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def check_equal(model: PreTrainedModel, other: PreTrainedModel) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name].view(torch.int16), tensor.view(torch.int16)), name


def with_a_head(folder: Path, *, differs: bool) -> None:
    """Also store the head of a tied model, as FSDP, DeepSpeed and adapter merging do."""
    tensors = load_file(folder / SINGLE_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][7] += 1 if differs else 0
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})


def test_tied_model_with_an_equal_stored_head_loads(source: Path, out: Path) -> None:
    save(shared_model(tied=True), str(source), out)
    with_a_head(out, differs=False)
    model = shared_model(tied=True, seed=1)
    check(model, out)
    load_into(model, out)
    assert model.lm_head.weight.equal(load_file(out / SINGLE_NAME)["lm_head.weight"])
    opened = loaded.load(str(out), device="cpu")
    assert opened.model.get_output_embeddings().weight is opened.model.get_input_embeddings().weight
    assert ModelSize.of(out).num_params == sum(parameter.numel() for parameter in model.parameters())
    start_checks.check_model(str(out))


def test_tied_model_with_a_different_stored_head_is_refused(source: Path, out: Path) -> None:
    save(shared_model(tied=True), str(source), out)
    with_a_head(out, differs=True)
    model = shared_model(tied=True, seed=1)
    before = model.lm_head.weight.clone()
    for refused in (
        lambda: check(model, out),
        lambda: load_into(model, out),
        lambda: loaded.load(str(out), device="cpu"),
        lambda: start_checks.check_model(str(out)),
        lambda: start_checks.check_model(str(out), shares_weights=False),
    ):
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs from model\.embed_tokens"):
            refused()
    assert model.lm_head.weight.equal(before)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    start_checks.check_model(str(out))
    assert loaded.load(str(out), device="cpu").model.get_output_embeddings().weight[7, 0] != before[7, 0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_model_of_views_reloads_bitwise_without_extra_bytes(
    tied: bool, shard_bytes: int, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "MAX_SHARD_BYTES", shard_bytes)
    model = shared_model(tied=tied)
    before = pointers(model)
    save(model, source, out)

    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 1) == (out / INDEX_NAME).exists() == (shard_bytes < 10**9)
    names = [name for file in files for name in load_file(file)]
    expected = set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert sorted(names) == sorted(expected)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes < sum(file.stat().st_size for file in files) < num_bytes + 3000 * len(files)

    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    check_equal(model, loaded)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert before == pointers(model)


def test_saved_folder_has_the_sources_other_files(source: Path, out: Path) -> None:
    assert save(shared_model(tied=True), str(source), out) == []
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert AutoTokenizer.from_pretrained(out).encode("b") == [1]
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_no_tensor_is_copied_on_its_device(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, state = shared_model(tied=True), dict[str, Tensor]()

    def write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        state.update(tensors)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(stored_tensors, "save_file", write)
    save(model, source, out)
    for name, tensor in model.named_parameters():
        assert state[name].data_ptr() == tensor.data_ptr() == state[name].untyped_storage().data_ptr()
        assert state[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_files_equal_those_of_transformers(family: str, source: Path, out: Path, tmp_path: Path) -> None:
    config, theirs = FAMILIES[family](), tmp_path / "theirs"
    model = skeleton.auto_class(config).from_config(config).to(torch.bfloat16)
    model.save_pretrained(theirs)
    save(model, source, out)
    assert (out / SINGLE_NAME).read_bytes() == (theirs / SINGLE_NAME).read_bytes()
    saved, expected = (AutoConfig.from_pretrained(folder).to_dict() for folder in (out, theirs))
    differing = {name for name in saved | expected if saved.get(name) != expected.get(name)}
    assert differing <= {"_name_or_path", "partial_rotary_factor", "rope_parameters"}
    if "rope_parameters" in differing:  # Phi-3 in transformers 4 requires `type`
        assert saved["rope_parameters"] == expected["rope_parameters"] | {"type": "longrope"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_loading_in_place_is_bitwise_and_keeps_other_bytes(
    tied: bool, shard_bytes: int, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "MAX_SHARD_BYTES", shard_bytes)
    saved, model = shared_model(tied=tied), shared_model(tied=tied, seed=1)
    save(saved, source, out)
    before, parameters = pointers(model), list(model.parameters())
    check(model, out)
    assert whole_storage(model) != whole_storage(saved)
    load_into(model, out)
    check_equal(saved, model)
    assert whole_storage(model) == whole_storage(saved)  # including the filler between them
    assert before == pointers(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in parameters)


def test_tied_head_loads_under_either_name_or_both(source: Path, out: Path) -> None:
    saved = shared_model(tied=True)
    save(saved, source, out)
    weights = load_file(out / SINGLE_NAME)
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    rest = {name: tensor for name, tensor in weights.items() if name != "model.embed_tokens.weight"}
    for stored in (rest | head, weights | head):
        save_file(stored, out / SINGLE_NAME)
        model = shared_model(tied=True, seed=1)
        load_into(model, out)
        check_equal(saved, model)


def test_buffers_are_skipped_and_unknown_names_refused(source: Path, out: Path) -> None:
    saved, model = shared_model(tied=True), shared_model(tied=True, seed=1)
    save(saved, source, out)
    weights, frequencies = load_file(out / SINGLE_NAME), model.model.rotary_emb.inv_freq.clone()
    save_file(weights | {"model.rotary_emb.inv_freq": torch.zeros(1)}, out / SINGLE_NAME)
    load_into(model, out)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    check_equal(saved, model)
    save_file(weights | {"model.rotary_emb.inv_frequency": torch.zeros(1)}, out / SINGLE_NAME)
    with pytest.raises(UsageError, match=r"inv_frequency is F32 \(1,\), expected no such tensor"):
        check(model, out)


def with_a_bias(config: PretrainedConfig) -> PreTrainedModel:
    """Create a model with a router whose bias is a buffer."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for bias in stored_buffers(model).values():
        bias.uniform_()
    return model


def test_stored_buffer_is_saved_and_loaded(source: Path, out: Path) -> None:
    config = minimax_m2()
    saved, model = (with_a_bias(config) for _ in range(2))
    save(saved, source, out)
    assert "model.layers.1.block_sparse_moe.e_score_correction_bias" in load_file(out / SINGLE_NAME)
    assert not torch.equal(*(x.state_dict()["model.layers.1.mlp.e_score_correction_bias"] for x in (saved, model)))
    check_equal(saved, AutoModelForCausalLM.from_pretrained(out))
    load_into(model, out)
    check_equal(saved, model)


Edit = Callable[[dict[str, Tensor]], object]
NORM = "model.norm.weight"
MISFITS: dict[str, tuple[Edit, str]] = {
    "a shape": (lambda w: w.update({NORM: torch.ones(31).bfloat16()}), r"is BF16 \(31,\), expected BF16 \(32,\)"),
    "a dtype": (lambda w: w.update({NORM: torch.ones(32)}), r"is F32 \(32,\), expected BF16 \(32,\)"),
    "a name too few": (lambda w: w.pop(NORM), rf"{NORM} is absent, expected BF16 \(32,\)"),
    "a name too many": (lambda w: w.update({"x": torch.ones(2)}), r"x is F32 \(2,\), expected no such tensor"),
    "everything": (lambda w: w.clear(), r"is absent.*; .*is absent.*; .*is absent.*; and 17 more"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_mismatch_is_reported_before_any_write(case: str, source: Path, out: Path) -> None:
    edit, message = MISFITS[case]
    saved, model = shared_model(tied=True), shared_model(tied=True, seed=1)
    save(saved, source, out)
    weights = load_file(out / SINGLE_NAME)
    edit(weights)
    save_file(weights, out / SINGLE_NAME)
    before = whole_storage(model)
    for refuse in (check, load_into):
        with pytest.raises(UsageError, match=message) as caught:
            refuse(model, out)
        assert caught.value.message.startswith(f"{out} does not fit the model: ")
        assert whole_storage(model) == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [cut, Path.unlink, lambda path: path.write_text("{}")])
def test_unreadable_shard_is_named_before_any_write(
    damage: Callable[[Path], object], source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "MAX_SHARD_BYTES", 20_000)
    saved, model = shared_model(tied=True), shared_model(tied=True, seed=1)
    save(saved, source, out)
    last = sorted(out.glob("*.safetensors"))[-1]
    damage(last)
    before = whole_storage(model)
    with pytest.raises(UsageError, match=f"{last} cannot be read: ") as caught:
        load_into(model, out)
    assert "\n" not in caught.value.message
    assert whole_storage(model) == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_invalid_index_is_refused(text: str, source: Path, out: Path) -> None:
    save(shared_model(tied=True), source, out)
    (out / INDEX_NAME).write_text(text)
    with pytest.raises(UsageError, match="is not a valid weight index"):
        check(shared_model(tied=True), out)


def test_folder_without_weights_is_refused(out: Path) -> None:
    with pytest.raises(UsageError, match=f"{out}/{SINGLE_NAME} cannot be read"):
        check(shared_model(tied=True), out)


def test_files_ignored_by_transformers_are_ignored(source: Path, out: Path) -> None:
    """For example, the multi-token prediction layers with which Qwen3.5 and Qwen3-Next are published."""
    model = AutoModelForCausalLM.from_config(FAMILIES["Qwen3.5 (text)"]()).to(torch.bfloat16)
    save(model, source, out)
    tensors = load_file(out / SINGLE_NAME)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 4).bfloat16()}, out / SINGLE_NAME)
    expected = model.lm_head.weight.detach().clone()
    model.lm_head.weight.data.zero_()
    load_into(model, out)
    assert torch.equal(model.lm_head.weight, expected)
    save_file(tensors | {"ntp.fc.weight": torch.zeros(2, 4).bfloat16()}, out / SINGLE_NAME)
    with pytest.raises(UsageError, match="ntp"):
        check(model, out)


PREDICTING = {"Qwen3-Next": "mtp.layers.0.fc.weight", "GLM-4.5": "model.layers.2.eh_proj.weight"}
"""Family -> a tensor for multi-token prediction, as its files name it behind two layers."""


@pytest.mark.parametrize("family", PREDICTING)
def test_layers_for_multi_token_prediction_are_kept(family: str, source: Path, out: Path) -> None:
    model = tiny.write(FAMILIES[family](), source)
    name = PREDICTING[family]
    tensors = load_file(source / SINGLE_NAME)
    tensors |= {name: torch.arange(6, dtype=torch.bfloat16).view(2, 3), "vision.layers.7.weight": torch.ones(2)}
    (source / SINGLE_NAME).unlink()  # its tensors are still mapped
    save_file(tensors, source / SINGLE_NAME, {"format": "pt"})
    trained = loaded.from_pretrained(str(model), "auto")
    with torch.no_grad():
        trained.get_output_embeddings().weight.zero_()
    assert save(trained, source, out) == []
    written = load_file(out / SINGLE_NAME)
    assert written.keys() == tensors.keys() - {"vision.layers.7.weight"}
    assert torch.equal(written[name], tensors[name])
    other = loaded.from_pretrained(str(model), "auto")
    load_into(other, out)
    check_equal(other, trained)


def test_unreadable_layers_of_prediction_do_not_cost_the_weights(source: Path, out: Path) -> None:
    tiny.write(FAMILIES["Qwen3-Next"](), source)
    trained = loaded.from_pretrained(str(source), "auto")
    (source / SINGLE_NAME).unlink()  # the model reads its weights from the mapped file
    (source / SINGLE_NAME).write_bytes(b"cut")
    (line,) = save(trained, source, out)
    assert line.startswith(f"the layers for multi-token prediction of {source} (")
    check(trained, out)


def test_experts_are_saved_separately_and_loaded_stacked(source: Path, out: Path) -> None:
    """In memory, the experts of a layer are one parameter; files store them separately."""
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, dtype="bfloat16",
    )  # fmt: skip
    model, other = (MixtralForCausalLM(config).bfloat16() for _ in range(2))
    save(model, source, out)
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in load_file(out / SINGLE_NAME)
    before = [parameter.data_ptr() for parameter in other.parameters()]
    check(other, out)
    load_into(other, out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter)
        assert torch.equal(loaded.get_parameter(name), parameter)
    assert [parameter.data_ptr() for parameter in other.parameters()] == before
