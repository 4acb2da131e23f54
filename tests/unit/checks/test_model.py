"""Which modes can train a model, from its configuration."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MptConfig, PretrainedConfig

from bridge.checks import model, probe
from bridge.checks.model import LORA, MODES, NONE, SHARED
from bridge.checks.probe import Facts, Tokens
from bridge.config import ServeConfig
from bridge.core.python_child import Ended
from bridge.errors import UnsupportedModelError, UsageError
from bridge.planning import model_size
from bridge.planning.model_size import SEEING
from bridge.processes import start_checks
from bridge.weights import loaded, skeleton
from tests.models import chat, tiny
from tests.models.families import FAMILIES, INSIDE


def statuses(config: dict[str, Any]) -> dict[str, str]:
    return {check.name.rpartition(" ")[2]: check.status for check in model.modes("m", config)}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in INSIDE])
def test_proved_family_can_be_trained_by_every_mode(family: str) -> None:
    config = FAMILIES[family]()
    named = {**config.to_dict(), "architectures": [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]}
    assert statuses(named) == dict.fromkeys(MODES, "PASS")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}, "an encoder-decoder model"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM: not a causal"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal"),
        (
            {"model_type": "gemma3", "text_config": {}, "architectures": ["Gemma3ForConditionalGeneration"]},
            "not a causal",
        ),
        ({"text_config": {"kv_lora_rank": 512, "index_topk": 2048}}, "one of several parts"),
    ],
)
def test_untrainable_model_fails_with_the_reason(config: dict[str, Any], words: str) -> None:
    checks = list(model.modes("m", config))
    assert [check.status for check in checks] == ["FAIL"] * 3
    assert any(words in check.found for check in checks)
    assert checks[0].hint


def test_unshareable_model_names_other_modes() -> None:
    config = {"kv_lora_rank": 512, "index_topk": 2048, "architectures": ["DeepseekV32ForCausalLM"]}
    shared, *others = model.modes("m", config)
    assert shared.status == "WARN"
    assert "kv_b_proj" in shared.found
    assert LORA in (shared.hint or "")
    assert NONE in (shared.hint or "")
    assert [check.status for check in others] == ["PASS", "PASS"]


@pytest.mark.parametrize("family", sorted(INSIDE))
def test_vision_language_model_is_trained_only_in_place(family: str) -> None:
    config = FAMILIES[family]()
    named = {**config.to_dict(), "architectures": [f"{type(config).__name__.removesuffix('Config')}{model.INSIDE}"]}
    assert statuses(named) == {SHARED: "PASS", LORA: "WARN", NONE: "WARN"}


@pytest.mark.parametrize("family", sorted(INSIDE))
def test_doctor_names_models_that_take_images(family: str) -> None:
    config = FAMILIES[family]().to_dict()
    shared, *others = model.modes("a model", config)
    expected = "prompts may have images" if config["model_type"] in SEEING else "trained on text only, without images"
    assert f"its configuration allows it; {expected}" in shared.found
    assert not any("images" in check.found for check in others)


def test_known_model_types_match_the_docs_table() -> None:
    assert {FAMILIES[family]().model_type for family in FAMILIES} == model.PROVED


def test_class_that_cannot_be_trained_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_question: str, *, model: str) -> Facts:
        return Facts(unsupported=f"{model} cannot be trained: its OddForCausalLM does not accept position_ids")

    monkeypatch.setattr(probe, "ask", ask)
    checks = list(model.modes("m", {"model_type": "odd", "architectures": ["OddForCausalLM"]}))
    assert [check.status for check in checks] == ["FAIL"] * 3
    assert checks[0].found == "cannot be trained: its OddForCausalLM does not accept position_ids"
    proved = list(model.modes("m", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert [check.status for check in proved] == ["PASS"] * 3


@pytest.mark.parametrize("returncode", [0, 2, None, -9])
def test_failed_build_proves_nothing_about_the_model(returncode: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_child", lambda *_, **__: Ended(returncode=returncode))
    config = {"model_type": "odd", "architectures": ["OddForCausalLM"]}
    assert [check.status for check in model.modes("m", config)] == ["PASS"] * 3


def test_model_is_built_by_a_child_process(tmp_path: Path) -> None:
    MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1, architectures=["MptForCausalLM"]).save_pretrained(
        tmp_path
    )
    (obstacle,) = model.unbuildable(str(tmp_path), {"model_type": "mpt"})
    assert obstacle.modes == MODES
    assert obstacle.reason.startswith("cannot be trained: its MptForCausalLM does not accept position_ids")


@pytest.mark.parametrize("odd", [{"text_config": "llama"}, {"text_config": [1]}, {"dtype": {"": "float16"}}])
def test_unusual_config_values_do_not_rule_out_training(odd: dict[str, Any]) -> None:
    assert statuses({"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | odd) == dict.fromkeys(
        MODES, "PASS"
    )


def test_check_notes_name_a_modes_limits() -> None:
    checks = {
        check.name: check
        for check in model.modes(
            "m", {"dtype": "float16", "kv_lora_rank": 64, "n_routed_experts": 4, "output_router_logits": True}
        )
    }
    notes = {mode: checks[f"Model, {mode}"].found for mode in (SHARED, LORA)}
    assert "VLLM_MLA_DISABLE=1" in notes[SHARED]
    assert "VLLM_MLA_DISABLE" not in notes[LORA]
    assert "with --lora-target-modules all-linear,experts" in notes[LORA]
    assert all("--dtype bfloat16" in text for text in notes.values())
    assert all("auxiliary loss" in text for text in notes.values())
    own_copy = checks[f"Model, {NONE}"]
    assert own_copy.status == "WARN"
    assert own_copy.hint == "--mode shared_vllm --dtype bfloat16, or convert it to bfloat16"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", None])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_float16_is_refused_before_a_server_starts(
    dtype: str | None, key: str, is_nested: bool, tmp_path: Path
) -> None:
    part = {} if dtype is None else {key: dtype}
    config = {"architectures": ["LlamaForCausalLM"], **({"text_config": part} if is_nested else part)}
    (tmp_path / "config.json").write_text(json.dumps(config))

    refused = {"float16"} | ({"auto"} if dtype == "float16" else set())
    for chosen in ("auto", "float16", "bfloat16", "float32"):
        with pytest.raises(UsageError, match="gradients would overflow") if chosen in refused else nullcontext():
            start_checks.check_trained_dtype(ServeConfig.resolve({"model": str(tmp_path), "dtype": chosen}))
    found = [obstacle for obstacle in model.obstacles(config) if obstacle.modes == (NONE,)]
    assert any("in float16" in obstacle.reason for obstacle in found) == (dtype == "float16")


def test_float16_family_served_in_bfloat16_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", "dtype": "float16"}))
    start_checks.check_trained_dtype(ServeConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sliding_window": 4096, "max_position_embeddings": 32_768}, 4096),
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "max_position_embeddings": 4096}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "sliding_attention"]}, 4096),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"sliding_window": 4096, "model_type": "gemma2"}, None),
        ({"sliding_window": 4096, "sliding_window_pattern": 6}, None),
        (None, None),
    ],
)
def test_window_matters_only_if_sequences_may_exceed_it(config: dict[str, Any] | None, expected: int | None) -> None:
    assert model.window(config, None) == expected
    assert model.window(config, 4096) is None
    findings = [
        check.found for check in model.modes("m", config) if "unless --max-model-len is 4,096 or less" in check.found
    ]
    assert len(findings) == (len(model.MODES) if expected else 0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full_attention": {"factor": 8.0}}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({}, None),
        (None, None),
    ],
)
def test_longest_sequence_is_known_where_rope_is_not_scaled(
    config: dict[str, Any] | None, expected: int | None
) -> None:
    assert model.longest_sequence(config) == expected


def test_configuration_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_local_experts": 8}))
    assert model.has_experts(model.read(str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    assert model.read(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    assert model.read(str(tmp_path)) is None
    assert model.read(str(tmp_path / "none")) is None
    assert model.read("nobody/has-such-a-model") is None
    assert not model.has_experts(None)
    (check,) = model.modes("m", None)
    assert check.status == "SKIP"


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def sharded(folder: Path) -> Path:
    """Write a model of two files, and an index, into `folder`."""
    tensors = load_file(tiny.write(tiny.llama(), folder) / SINGLE)
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in halves.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return folder


def single(folder: Path) -> Path:
    return tiny.write(tiny.llama(), folder)


def add(folder: Path, file: str, *, scale: float, prefix: str = "") -> None:
    """Write a model's weights again, scaled, with the prefix added to their names."""
    tensors = {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}
    save_file({prefix + name: tensor * scale for name, tensor in tensors.items()}, folder / file, {"format": "pt"})


def refusal(folder: Path) -> UnsupportedModelError | None:
    """Return why no server is started for a model; `doctor` reports the same for every mode."""
    config = model.read(str(folder))
    assert config is not None
    found = {check.found for check in model.modes(str(folder), config) if check.status != "PASS"}
    refused = None
    try:
        start_checks.check_model(str(folder))
    except UnsupportedModelError as error:
        refused = error
    assert found == (set() if refused is None else {refused.message.removeprefix(f"--model {folder}: ")})
    return refused


@pytest.mark.parametrize(
    ("write", "file", "of_vllm"),
    [
        (sharded, SINGLE, "model-00001-of-00002.safetensors"),
        (single, "old.safetensors", "old.safetensors"),
        (single, "consolidated.safetensors", "consolidated.safetensors"),
        (sharded, "consolidated-00001-of-00001.safetensors", "consolidated-00001-of-00001.safetensors"),
    ],
)
def test_two_sets_of_weights_are_refused_unless_equal(
    write: Callable[[Path], Path], file: str, of_vllm: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m")
    assert refusal(folder) is None
    add(folder, file, scale=1)
    assert refusal(folder) is None
    add(folder, file, scale=2)
    error = refusal(folder)
    assert error is not None
    assert re.search(r"two sets of weights: model\.\S+ in model\S*, which transformers loads", error.message)
    assert error.message.endswith(f"differs from that in {of_vllm}, which vLLM loads")


@pytest.mark.parametrize(
    ("write", "file", "prefix"),
    [
        (sharded, "old.safetensors", ""),  # the index names the files
        (single, "consolidated.safetensors", "other."),  # Mistral's names for the same tensors
        (single, "heads.safetensors", "other."),
    ],
)
def test_unused_extra_weights_are_not_a_second_set(
    write: Callable[[Path], Path], file: str, prefix: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m")
    add(folder, file, scale=2, prefix=prefix)
    assert refusal(folder) is None


def test_compared_files_are_those_that_transformers_loads(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    before = load_file(folder / "model-00001-of-00002.safetensors")
    name = "model.embed_tokens.weight"
    assert torch.equal(loaded.from_pretrained(str(folder), "auto").get_parameter(name), before[name])
    add(folder, SINGLE, scale=2)
    assert torch.equal(loaded.from_pretrained(str(folder), "auto").get_parameter(name), before[name] * 2)


@pytest.mark.parametrize("write", [single, sharded])
def test_adapter_beside_a_full_model_is_refused(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    base = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(folder)
    error = refusal(folder)
    assert error is not None
    assert "it holds a full model and an adapter (adapter_config.json)" in error.message
    with pytest.raises(UnsupportedModelError, match="it holds a full model and an adapter") as caught:
        loaded.load(str(folder), device="cpu")  # a reference or a trainer's own copy is not checked before
    assert caught.value.hint == error.hint


@pytest.mark.parametrize("config", [tiny.llama(), tiny.qwen2()])
@pytest.mark.parametrize("vocabulary", [tiny.VOCABULARY - 1, tiny.VOCABULARY + 19])
def test_embedding_of_a_different_size_is_refused(config: PretrainedConfig, vocabulary: int, tmp_path: Path) -> None:
    folder = tiny.write(config, tmp_path / "m")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "vocab_size": vocabulary}))
    error = refusal(folder)
    assert error is not None
    assert f"has 301 rows in its files, but its config.json says vocab_size {vocabulary}" in error.message
    assert error.hint.startswith('set "vocab_size": 301 in its config.json')


def test_files_without_embedding_or_head_are_not_read(tmp_path: Path) -> None:
    """Reading the hundreds of files of a large model would delay a start by seconds."""
    folder = sharded(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"damaged")
    assert model_size.other_rows(folder, 5) == ("model.embed_tokens.weight", tiny.VOCABULARY)
    assert model_size.lone_head(folder) is None
    assert model_size.own_head(folder) is None


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_model_without_its_embedding_is_refused(is_tied: bool, tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": is_tied}))
    error = refusal(folder)
    assert (error is not None) == is_tied  # vLLM and transformers report that an untied one lacks a tensor
    if error is not None:
        assert "stored only under the name of its head (lm_head.weight)" in error.message


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud83d", "a/" * 3000, "o/" + "x" * 300], ids=range(5))
def test_impossible_model_name_is_refused(name: str) -> None:
    assert model.read(name) is None
    assert skeleton.absolute(name) == name
    with pytest.raises(UsageError):
        start_checks.check_model(name)
    with pytest.raises(UsageError):
        model_size.folder_of(name)


@pytest.mark.parametrize("error", [ImportError, AttributeError, KeyError, RuntimeError, AssertionError])
def test_any_tokenizer_error_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("sentencepiece is missing")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(UsageError, match=r"'m' has no usable tokenizer: .*sentencepiece is missing"):
        skeleton.tokenizer("m")


def test_saving_check_reads_a_models_folder(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (check,) = model.saving(str(tmp_path))
    assert (check.status, "has no tokenizer files" in check.found) == ("FAIL", True)
    (tmp_path / "tekken.json").write_text("{}")
    (check,) = model.saving(str(tmp_path))
    assert (check.status, "original/ (a folder)" in check.found) == ("PASS", True)
    assert [*model.saving("someone/model")] == []


def model_folder(folder: Path, *, missing: int = 0) -> str:
    """Write a base model whose template ends a turn with a token that is not an EOS token."""
    tokenizer = chat.tokenizer(folder, "qwen2_5")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    tiny.qwen2(len(tokenizer) - missing).save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return str(folder)


def test_tokens_are_read_by_a_child_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = probe.ask("tokens", model=model_folder(tmp_path / "base"))
    turn, rows = model.tokens(facts)
    assert facts.tokens is not None
    end_id = facts.tokens.end_id
    assert (turn.status, rows.status) == ("WARN", "PASS")
    assert turn.found.startswith(f"<|im_end|> ({end_id}) ends a turn, but is not an eos_token_id")
    assert turn.hint == f"add {end_id} to eos_token_id in its generation_config.json"
    probe.answer(model_folder(tmp_path / "few", missing=2), "tokens")
    few = [*model.tokens(probe.parse(Ended(returncode=0, stdout=capsys.readouterr().out)))]
    assert "2 tokens of the tokenizer are beyond the model's" in few[1].found
    unknown = [*model.tokens(probe.ask("tokens", model=str(tmp_path / "nothing")))]
    assert [check.status for check in unknown] == ["SKIP", "SKIP"]
    assert "nothing" in unknown[0].found


CASES: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "as models ship": ({}, ("PASS", "PASS")),
    "no template": ({"has_template": False, "end_of_turn": "", "end_id": None}, ("SKIP", "PASS")),
    "no end of a turn": ({"end_of_turn": "", "end_id": None}, ("WARN", "PASS")),
    "no EOS": ({"stops_there": False}, ("WARN", "PASS")),
    "some tokens beyond": ({"beyond": "4 tokens"}, ("PASS", "WARN")),
    "chat beyond": ({"beyond": "4 tokens", "chat_is_beyond": True}, ("PASS", "FAIL")),
    "no vocab_size": ({"num_embeddings": None}, ("PASS", "SKIP")),
}


@pytest.mark.parametrize("case", CASES)
def test_token_check_gives_the_expected_verdict(case: str) -> None:
    fields, statuses = CASES[case]
    known: dict[str, Any] = {
        "num_tokens": 340, "num_embeddings": 400, "beyond": "", "chat_is_beyond": False, "has_template": True,
        "end_of_turn": "<|im_end|>", "end_id": 316, "stops_there": True,
    }  # fmt: skip
    checks = [*model.tokens(Facts(tokens=Tokens(**known | fields)))]
    assert tuple(check.status for check in checks) == statuses
    unread = Facts(trouble="no answer within the time limit")
    turn, rows = model.tokens(unread)
    assert (turn.status, rows.status) == ("SKIP", "SKIP")
    assert [check.found.count("time limit") for check in (turn, rows)] == [1, 0]
