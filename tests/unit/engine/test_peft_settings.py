"""PEFT's adapter settings are translated, or refused by the name of the setting that Bridge does not train."""

from pathlib import Path
from typing import Any

import peft
import pytest

import bridge
from bridge.engine.peft_settings import lora_of
from bridge.errors import UsageError
from bridge.weights import skeleton
from tests.models import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.llama().save_pretrained(folder)
    return folder


def test_supported_peft_settings_are_translated(model: Path) -> None:
    given = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM"
    )
    assert lora_of(given, model) == bridge.LoraConfig(r=8, alpha=16, dropout=0.1, target_modules="q_proj,v_proj")
    assert lora_of(peft.LoraConfig(target_modules="all-linear"), model).target_modules == "all-linear"
    own = bridge.LoraConfig(r=4)
    assert lora_of(own, model) is own


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights='gaussian'"),
        ({"target_modules": r".*\.q_proj"}, "target_modules"),
        ({"lora_dropout": 1.5}, "dropout must be less than 1"),
    ],
)
def test_unsupported_peft_settings_are_refused_by_name(model: Path, choices: dict[str, Any], words: str) -> None:
    settings = peft.LoraConfig(**{"target_modules": ["q_proj"], **choices})
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        lora_of(settings, model)


def test_objects_that_are_not_lora_configs_are_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="lora is a dict, expected a"):
        lora_of({"r": 8}, model)
    with pytest.raises(UsageError, match="lora is a IA3Config"):
        lora_of(peft.IA3Config(), model)


def test_default_target_modules_are_pefts(model: Path) -> None:
    assert lora_of(peft.LoraConfig(), model).target_modules == "q_proj,v_proj"


@pytest.mark.parametrize("model_type", ["unknown to peft", ""])
def test_model_type_without_peft_targets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    if model_type:
        tiny.llama().save_pretrained(tmp_path)
        monkeypatch.setattr(type(tiny.llama()), "model_type", model_type)
        monkeypatch.setattr(skeleton, "configuration", lambda _: tiny.llama())
    with pytest.raises(UsageError, match="target_modules=None, expected a list"):
        lora_of(peft.LoraConfig(), tmp_path)
