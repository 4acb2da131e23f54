"""Translate PEFT's `LoraConfig` into Bridge's, or raise UsageError about settings that Bridge does not train."""

from pathlib import Path
from typing import Any

from bridge.config import LoraConfig
from bridge.errors import UsageError
from bridge.weights import skeleton

DESCRIPTIVE = {"task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"}
"""PEFT fields that do not change what is trained."""
TAKEN = {"r", "lora_alpha", "lora_dropout", "target_modules"}


def lora_of(settings: Any, model: str | Path) -> LoraConfig:
    """Convert an adapter's settings to Bridge's `LoraConfig`; a `LoraConfig` of Bridge is returned unchanged.

    The default `target_modules` are PEFT's for models of this type.

    Raises:
        UsageError: these are not LoRA settings, or they include something that Bridge does not train.
    """
    if isinstance(settings, LoraConfig):
        return settings
    import peft

    if not isinstance(settings, peft.LoraConfig):
        raise UsageError(
            f"lora is a {type(settings).__name__}, expected a bridge.LoraConfig or a peft.LoraConfig",
            hint="bridge.LoraConfig(r=16)",
        )
    plain = peft.LoraConfig(target_modules=settings.target_modules)
    theirs = settings.to_dict()
    defaults = plain.to_dict()
    odd = {name: value for name, value in theirs.items() if name not in TAKEN | DESCRIPTIVE and value != defaults[name]}
    if odd:
        raise UsageError(
            f"peft.LoraConfig has {', '.join(f'{name}={value!r}' for name, value in odd.items())}, which Bridge does"
            " not train",
            hint="leave it out, or train this adapter with PEFT instead of Bridge",
        )
    targets = _default_targets(str(model)) if settings.target_modules is None else settings.target_modules
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        raise UsageError(
            f"peft.LoraConfig has target_modules={targets!r}, expected a list of names or 'all-linear'",
            hint="target_modules=['q_proj', 'v_proj']",
        )
    names = targets if isinstance(targets, str) else ",".join(sorted(targets))
    return LoraConfig(r=settings.r, alpha=settings.lora_alpha, dropout=settings.lora_dropout, target_modules=names)


def _default_targets(model: str) -> list[str] | None:
    """Return PEFT's default target modules for models of this type; None: there are none, or the model is missing."""
    from peft.tuners.lora import LoraModel

    try:
        model_type = skeleton.configuration(model).model_type
    except (OSError, *skeleton.MISBUILT):  # loading or serving the model reports this error
        return None
    targets: list[str] | None = LoraModel.target_module_mapping.get(model_type)
    return targets
