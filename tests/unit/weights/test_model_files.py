"""The files next to the weights of a saved model: the source's configuration and other files, whatever they contain."""

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bridge.errors import UsageError
from bridge.weights import loaded, model_files, model_folder, skeleton
from tests.models import tiny
from tests.models.families import FAMILIES

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EARLIER: dict[str, dict[str, Any]] = {
    "a base alone": {"rope_theta": 1_000_000.0},
    "scaling": {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "no base": {},
}
"""RoPE settings in the format of transformers 4."""
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "no padding token": ("config.json", {"pad_token_id": -1}),
    "a temperature": ("config.json", {"temperature": 0.6, "top_p": 0.9}),
    "a temperature, and greedy": ("config.json", {"temperature": 0.6, "do_sample": False}),
    "limits of a generation": ("config.json", {"max_length": 4096, "min_length": 2, "no_repeat_ngram_size": 3}),
    "attentions as outputs": ("config.json", {"output_attentions": True}),
    "a head width that does not fit": ("config.json", {"embed_dim": 7, "num_heads": 3}),
    "odd ids of tokens": ("config.json", {"eos_token_id": [2, 100_000], "image_token_id": 10**6}),
    "sampling without do_sample": ("generation_config.json", {"temperature": 0.9, "top_p": 0.6}),
    "beams": ("generation_config.json", {"num_beams": 1, "length_penalty": 0.8, "early_stopping": True}),
    "a negative temperature": ("generation_config.json", {"temperature": -1.0, "do_sample": True}),
}
"""Values that published models contain, but that transformers' `save_pretrained` refuses, or once refused."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny.write(tiny.llama(), tmp_path / "source")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def change(folder: Path, name: str = "config.json", *, without: tuple[str, ...] = (), **values: Any) -> dict[str, Any]:
    path = folder / name
    held = json.loads(path.read_text()) if path.is_file() else {}
    held = {key: value for key, value in held.items() if key not in without} | values
    path.write_text(json.dumps(held))
    return held


def config_of(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return held


def in_memory(source: Path, *, is_attached: bool) -> Any:
    if not is_attached:
        return loaded.from_pretrained(str(source), torch.bfloat16)
    return skeleton.build(str(source), torch.bfloat16).to_empty(device="cpu")


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("case", ODD)
def test_unusual_configuration_values_are_saved(case: str, is_attached: bool, source: Path, out: Path) -> None:
    name, lines = ODD[case]
    change(source, name, **lines)
    assert model_folder.save(in_memory(source, is_attached=is_attached), source, out) == []
    assert lines.items() <= json.loads((out / name).read_text()).items()
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == tiny.VOCABULARY


@pytest.mark.parametrize("case", EARLIER)
def test_transformers_4_format_is_kept(case: str, source: Path, out: Path) -> None:
    held = change(source, without=("rope_parameters", "dtype"), torch_dtype="bfloat16", **EARLIER[case])
    model_folder.save(loaded.from_pretrained(str(source), torch.bfloat16), source, out)
    assert config_of(out) == held | {"dtype": "bfloat16"}
    assert AutoConfig.from_pretrained(out).rope_parameters == AutoConfig.from_pretrained(source).rope_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_of_transformers_5_is_written_in_both_forms(family: str, tmp_path: Path, out: Path) -> None:
    source = tiny.write(FAMILIES[family](), tmp_path / "source")
    config = AutoConfig.from_pretrained(source)
    written = model_files.document(config, source, architecture=config.architectures[0], dtype="bfloat16")
    (out / "config.json").write_text(json.dumps(written))
    read, whole = AutoConfig.from_pretrained(out).get_text_config(), written.get("text_config", written)
    parameters = config.get_text_config().rope_parameters
    if family == "Gemma 4 (text)":  # unknown to transformers 4, and its two forms would contradict each other
        assert "rope_theta" not in whole
        assert read.rope_parameters == parameters
        return
    everywhere = parameters.get("full_attention", parameters)
    assert whole["rope_theta"] == everywhere["rope_theta"]
    plain = {"rope_theta", "partial_rotary_factor", "rope_type"}
    scaling = {name: value for name, value in everywhere.items() if name not in plain}
    written_scaling = whole.get("rope_scaling", {})
    moved = {name: whole[name] for name in ("original_max_position_embeddings",) if name in scaling and name in whole}
    assert {name: value for name, value in (written_scaling | moved).items() if "type" not in name} == scaling
    kind = written_scaling.get("rope_type", written_scaling.get("type", "default"))
    assert kind == everywhere["rope_type"]
    compared = {name: value for name, value in read.rope_parameters.items() if name != "type"}
    assert compared == parameters


def test_renamed_expert_counts_have_both_names(tmp_path: Path) -> None:
    source = tiny.write(FAMILIES["Qwen3-MoE"](), tmp_path / "source")
    config = AutoConfig.from_pretrained(source)
    written = model_files.document(config, source, architecture=config.architectures[0], dtype="bfloat16")
    assert (written["num_local_experts"], written["num_experts"]) == (4, 4)
    assert type(config).from_dict(written).to_dict() == config.to_dict() | {"_name_or_path": ""}


def test_config_keeps_all_unchanged_keys(source: Path, out: Path) -> None:
    change(source, torch_dtype="float16", extra={"of": "others"}, num_hidden_layers=2)
    model = loaded.from_pretrained(str(source), torch.float32)
    model.resize_token_embeddings(tiny.VOCABULARY + 3)
    model_folder.save(model, source, out)
    before, after = config_of(source), config_of(out)
    differing = {name for name in before | after if before.get(name) != after.get(name)}
    assert differing <= {"vocab_size", "dtype", "torch_dtype", "rope_theta", "rope_scaling"}
    assert (after["vocab_size"], after["dtype"], after["torch_dtype"]) == (tiny.VOCABULARY + 3, "float32", "float32")


def test_changed_rope_replaces_both_forms(source: Path) -> None:
    change(source, without=("rope_parameters",), rope_theta=500_000.0, rope_scaling=LLAMA3)
    config = AutoConfig.from_pretrained(source)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 7_000.0, "factor": 2.0}
    written = model_files.document(config, source, architecture="LlamaForCausalLM", dtype="bfloat16")
    assert written["rope_parameters"] == config.rope_parameters
    assert (written["rope_theta"], written["rope_scaling"]) == (7_000.0, {"rope_type": "linear", "factor": 2.0})


def test_other_files_are_copied_or_reported(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_BYTES", 100_000)
    model = loaded.from_pretrained(str(source), torch.bfloat16)
    copied = {
        "tekken.json": "{}", "modeling_own.py": "x = 1", "chat_template.jinja": "{{ messages }}",
        "preprocessor_config.json": "{}", "LICENSE": "free", "config_sentence_transformers.json": "{}",
    }  # fmt: skip
    for name, text in copied.items():
        (source / name).write_text(text)
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("tools")
    (source / "linked.json").symlink_to(source / "LICENSE")  # as in the hub's cache, where every file is a link
    left_out = ("huge.json", "original", "broken.json", "pipe")
    (source / "huge.json").write_text(" " * 200_000)
    (source / "original").mkdir()
    (source / "broken.json").symlink_to(source / "nothing")
    os.mkfifo(source / "pipe")
    weights = ("pytorch_model.bin", "model-00001-of-00002.safetensors", "model.gguf", "training_args.bin")
    for name in (*weights, "bridge_checkpoint.json", ".gitattributes", "adapter_config.json"):
        (source / name).write_text("not the trained ones")
    model_folder.save(model, source, out)
    for name, text in (copied | {"linked.json": "free", "additional_chat_templates/tools.jinja": "tools"}).items():
        assert (out / name).read_text() == text
    assert not (out / "linked.json").is_symlink()
    names = {path.name for path in out.iterdir()}
    assert not names & {*left_out, *weights, "bridge_checkpoint.json", ".gitattributes", "adapter_config.json"}
    note = model_files.source_files(source).note()
    assert all(name in note for name in left_out), note
    assert not any(name in note for name in weights)


def test_mistral_tokenizer_file_is_sufficient(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    assert [*model_files.source_files(tmp_path).paths] == ["tekken.json"]


def test_unreadable_file_is_refused_at_the_start(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refusing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read, but every checkpoint needs it: Permission"):
        model_files.source_files(source)


@pytest.mark.parametrize("has_all_code", [True, False])
def test_auto_map_is_kept_only_with_its_code(has_all_code: bool, source: Path, out: Path) -> None:
    change(
        source,
        auto_map={"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
        architectures=["OwnForCausalLM"],
    )
    for name in ("configuration_own.py", "modeling_own.py")[: 1 + has_all_code]:
        (source / name).write_text("pass")
    model_folder.save(loaded.from_pretrained(str(source), torch.bfloat16), source, out)
    written = config_of(out)
    assert ("auto_map" in written) == has_all_code == (out / "modeling_own.py").is_file()
    assert written["architectures"] == ["LlamaForCausalLM"]


def test_auto_map_to_a_different_repository_is_kept(source: Path, out: Path) -> None:
    change(source, auto_map={"AutoModelForCausalLM": "someone/code--modeling_own.OwnForCausalLM"})
    model_folder.save(loaded.from_pretrained(str(source), torch.bfloat16), source, out)
    assert "auto_map" in config_of(out)


def test_weights_are_saved_if_the_source_is_deleted(source: Path, out: Path) -> None:
    model = loaded.from_pretrained(str(source), torch.bfloat16)
    for path in source.iterdir():
        path.unlink()
    missing = model_folder.save(model, source, out)
    assert any("tokenizer" in line for line in missing)
    again: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_weights_are_saved_if_the_configuration_fails(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded.from_pretrained(str(source), torch.bfloat16)

    def refuse(_: object) -> None:
        raise ValueError("an invalid value\nin a second line")

    monkeypatch.setattr(LlamaConfig, "to_dict", refuse)
    assert model_folder.save(model, source, out) == ["the changes to config.json (an invalid value)"]
    monkeypatch.undo()
    assert config_of(out) == config_of(source)
    model_folder.check(model, out)


def test_deleted_file_is_reported_as_missing(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model_files.source_files(source)
    (source / "tokenizer_config.json").unlink()
    (missing,) = model_files.copy(files, out)
    assert missing.startswith("tokenizer_config.json (")
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize("at_start", [True, False])
def test_unreachable_hub_name_is_refused(at_start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def offline(name: str, *, ignore_patterns: list[str], local_files_only: bool) -> str:
        assert "*.safetensors" in ignore_patterns
        calls.append((name, local_files_only))
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UsageError, match="someone/model has no tokenizer files"):
        model_files.source_files("someone/model", download=at_start)
    first = [("someone/model", False)] if at_start else []  # the cache may hold part of the model
    assert calls == [*first, ("someone/model", True), ("someone/model", False)]


def test_missing_tokenizer_is_refused_at_the_start(source: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    with pytest.raises(UsageError, match="has no tokenizer files"):
        model_files.source_files(source)


def test_tokenizer_of_transformers_5_is_written_for_both(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.write_tokenizer(source, tiny.VOCABULARY, ["<image>"])
    before = json.loads((source / "tokenizer_config.json").read_text())
    assert (before["tokenizer_class"], before["extra_special_tokens"]) == ("TokenizersBackend", ["<image>"])
    (out := tmp_path / "out").mkdir()
    assert model_files.copy(model_files.found(source), out) == []
    after = json.loads((out / "tokenizer_config.json").read_text())
    assert after["tokenizer_class"] == "PreTrainedTokenizerFast", "transformers 4 has no TokenizersBackend"
    assert after["additional_special_tokens"] == ["<image>"], "transformers 4 expects an object of the other name"
    assert "extra_special_tokens" not in after
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours("2<image>3")["input_ids"] == theirs("2<image>3")["input_ids"]


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": []}'])
def test_other_tokenizer_configurations_are_copied_unchanged(tmp_path: Path, content: bytes) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "tokenizer_config.json").write_bytes(content)
    (out := tmp_path / "out").mkdir()
    model_files.copy(model_files.found(source), out)
    assert (out / "tokenizer_config.json").read_bytes() == content
