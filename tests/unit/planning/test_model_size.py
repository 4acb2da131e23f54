"""The number of parameters in a folder, counted without loading any."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import UsageError
from bridge.planning.model_size import Dimensions, ModelSize, layer_types
from tests.models.families import FAMILIES
from tests.models.sizes import PARAMETERS, folder_of, qwen2

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
QWEN15_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
    "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "vocab_size": 151936,
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def weights(path: Path, *shapes: tuple[int, ...]) -> None:
    """Write the header of a safetensors file, without its tensors."""
    header = {
        f"{path.stem}.{index}": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
        for index, shape in enumerate(shapes)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize("size", PARAMETERS)
def test_dense_model_is_counted_exactly(size: str, tmp_path: Path) -> None:
    counted = ModelSize.of(folder_of(qwen2(size), tmp_path / "m"))
    assert (counted.num_params, counted.exact, counted.max_tokens) == (PARAMETERS[size], False, 32768)


@pytest.mark.parametrize(
    ("config", "num_params", "active"),
    [
        (QWEN3_30B_A3B, 30_532_122_624, 8 * 768),
        (MIXTRAL_8X7B, 46_702_792_704, 2 * 14336),
        (QWEN15_MOE, 14_315_784_192, 4 * 1408 + 5632),
    ],
)
def test_all_experts_are_counted_and_some_are_active(config: dict[str, Any], num_params: int, active: int) -> None:
    dimensions = Dimensions.of(config)
    assert dimensions.num_params == pytest.approx(num_params, rel=1e-4)
    assert dimensions.active == active


def test_layers_without_experts_are_dense() -> None:
    none = Dimensions.of({**QWEN3_30B_A3B, "mlp_only_layers": list(range(48))})
    half = Dimensions.of({**QWEN3_30B_A3B, "decoder_sparse_step": 2})
    first = Dimensions.of({**QWEN3_30B_A3B, "first_k_dense_replace": 3})
    assert [dimensions.num_dense_layers for dimensions in (none, half, first)] == [48, 24, 3]
    assert none.num_params < half.num_params < first.num_params < Dimensions.of(QWEN3_30B_A3B).num_params


def test_count_equals_that_of_the_transformers_model() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    dimensions = Dimensions.of(config.to_dict())
    assert dimensions.num_params == Qwen2ForCausalLM(config).num_parameters()


@pytest.mark.parametrize("family", ["Qwen3.5 (text)", "Qwen3-Next", "GLM-4.5"])
def test_count_of_unusual_layers_lacks_only_small_norms(family: str) -> None:
    """Exact except for the small norms of heads and states."""
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family]()
    counted = AutoModelForCausalLM.from_config(config).num_parameters()
    assert 0 <= counted - Dimensions.of(config.to_dict()).num_params < 1_000


def test_layer_types_follow_from_the_attention_interval() -> None:
    """As in the configuration of Qwen3-Next."""
    kinds = layer_types({"full_attention_interval": 4, "num_hidden_layers": 8})
    assert kinds == (["linear_attention"] * 3 + ["full_attention"]) * 2


def test_adapter_parameter_count_matches_peft() -> None:
    assert 16 * Dimensions.of(qwen2("7B")).adaptable == 40_370_176


def test_expert_adapter_parameters_are_counted() -> None:
    """Qwen3-30B-A3B: 1.5 GiB in bf16 at rank 16."""
    widths = Dimensions.of({
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 48,
        "head_dim": 128, "num_key_value_heads": 4, "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144,
    })  # fmt: skip
    of_experts = 16 * (widths.adapted(experts=True) - widths.adaptable)
    assert of_experts == 48 * 128 * 3 * 16 * (2048 + 768)
    assert 2 * of_experts / 2**30 == pytest.approx(1.55, abs=0.01)
    assert widths.adapted(experts=False) == widths.adaptable
    assert Dimensions.of(qwen2("7B")).adapted(experts=True) == Dimensions.of(qwen2("7B")).adaptable


def test_weights_in_the_folder_are_counted_exactly(tmp_path: Path) -> None:
    folder = folder_of({**qwen2("7B"), "model_type": "of-tomorrow"}, tmp_path / "m")
    weights(folder / "model.safetensors", (10, 20), (7,), ())
    size = ModelSize.of(folder)
    assert (size.num_params, size.exact) == (208, True)


def test_missing_weight_file_leads_to_an_estimate(tmp_path: Path) -> None:
    folder = folder_of(qwen2("7B"), tmp_path / "m")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights(folder / "1.safetensors", (3,))
    assert not ModelSize.of(folder).exact
    weights(folder / "2.safetensors", (4,), (5,))
    assert ModelSize.of(folder).num_params == 12


def test_language_model_inside_a_larger_model_is_planned(tmp_path: Path) -> None:
    document = {"model_type": "sees", "text_config": qwen2("7B"), "vision_config": {}, "tie_word_embeddings": True}
    folder = folder_of(document, tmp_path / "m")
    assert ModelSize.of(folder).num_params == Dimensions.of(qwen2("7B") | {"tie_word_embeddings": True}).num_params
    alone = ModelSize.of(folder)
    weights(folder / "model.safetensors", (9,))
    assert ModelSize.of(folder).dimensions.hidden == 3584
    weights(folder / "model.safetensors", (alone.num_params,), (1000, 5))
    whole = ModelSize.of(folder)
    assert (whole.num_params, whole.num_untrained) == (alone.num_params, 5000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox' model cannot be derived"),
        ({"hidden_size": None}, "dimensions are not numbers"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"global_head_dim": 512}, "heads of several sizes"),
        ({"layer_types": ["full_attention", "mamba"]}, "layers of mamba"),
        ({"layer_types": 28}, "dimensions are not numbers"),
        ({"layer_types": [["full_attention"]]}, "dimensions are not numbers"),
        ({"layer_types": [None, "full_attention"]}, "layers of None"),
        ({"full_attention_interval": "4"}, "dimensions are not numbers"),
        ({"full_attention_interval": 4}, "linear_num_key_heads"),
        ({"full_attention_interval": 4, "num_hidden_layers": None}, "dimensions are not numbers"),
        ({"vocab_size": None}, "dimensions are not numbers"),
        ({"text_config": "qwen2", "hidden_size": None}, "dimensions are not numbers"),
    ],
)
def test_uncountable_model_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        ModelSize.of(folder_of({**qwen2("7B"), **change}, tmp_path / "m"))


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"])
def test_missing_dimension_is_named(key: str, tmp_path: Path) -> None:
    config = {name: value for name, value in qwen2("7B").items() if name != key}
    with pytest.raises(UsageError, match=key):
        ModelSize.of(folder_of(config, tmp_path / "m"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("model.safetensors", content) for content in (b"", b"short", b"\xff" * 20, b"\3" + bytes(7) + b"[1]")),
        *(("config.json", content) for content in (b"", b"[]", b"{")),
    ],
)
def test_damaged_file_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    folder = folder_of(qwen2("7B"), tmp_path / "m")
    (folder / file).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(file)):
        ModelSize.of(folder)


@pytest.mark.parametrize("name", ["org/no-such-model-anywhere", "/no/such/folder", "./folder", "not a name!"])
def test_missing_model_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="and no model of that name in the hub's cache") as caught:
        ModelSize.of(name)
    assert ("hf download" in caught.value.hint) == name.startswith("org/")  # neither for a path nor with a space
