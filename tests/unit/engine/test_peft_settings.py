"""PEFT's settings of an adapter: taken as they are, or refused by the name of what Bridge does not train."""

from typing import Any

import peft
import pytest

import bridge
from bridge.engine.peft_settings import lora_of
from bridge.errors import UsageError


def test_supported_peft_settings_are_taken() -> None:
    given = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM"
    )
    assert lora_of(given) == bridge.LoraConfig(r=8, alpha=16, dropout=0.1, target_modules="q_proj,v_proj")
    assert lora_of(peft.LoraConfig(target_modules="all-linear")).target_modules == "all-linear"
    own = bridge.LoraConfig(r=4)
    assert lora_of(own) is own


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
        ({"target_modules": None}, "target_modules=None"),
        ({"lora_dropout": 1.5}, "dropout must be less than 1"),
    ],
)
def test_unsupported_peft_settings_are_refused_by_name(choices: dict[str, Any], words: str) -> None:
    settings = peft.LoraConfig(**{"target_modules": ["q_proj"], **choices})
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        lora_of(settings)


def test_other_objects_are_not_adapters() -> None:
    with pytest.raises(UsageError, match="lora is a dict, expected a"):
        lora_of({"r": 8})
    with pytest.raises(UsageError, match="lora is a IA3Config"):
        lora_of(peft.IA3Config())
