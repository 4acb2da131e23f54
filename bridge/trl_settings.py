"""Refuse what `bridge.for_trl` cannot use: unsupported TRL versions, settings without effect or that move weights."""

import dataclasses
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from transformers import PreTrainedTokenizerBase

from bridge.engine.peft_settings import lora_of
from bridge.engine.policy import Policy
from bridge.errors import IncompatibleVersionError, UsageError
from bridge.rollouts.distribution import filters

TESTED = "1.16"
"""The minor version of TRL that works."""
CONFIGS = (
    "GRPOConfig", "RLOOConfig", "DistillationConfig", "SDFTConfig", "SDPOConfig", "GOLDConfig", "IWOPDConfig",
)  # fmt: skip
"""Configs of the trainers that generate with TRL's `VLLMGeneration`."""
UNUSED: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,), "cache_implementation": (None,),
    "use_transformers_continuous_batching": (False,), "use_transformers_paged": (False, None),
    "transformers_continuous_batching_config": ({}, None),
}  # fmt: skip
"""Generation settings of TRL's configs that have no effect here -> the values that request nothing."""
FILTERS: dict[str, tuple[object, ...]] = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None)}
"""Generation settings that the server has, too -> the values that request nothing."""
SAMPLES = "do_sample", True
"""The entry of `generation_kwargs` that requests what the trainers do anyway."""
VLLM = "vllm_"
"""Prefix of the settings for TRL's own vLLM, which have no effect either."""
CORRECTION = "vllm_importance_sampling_"
"""Prefix of the settings that have an effect with `use_vllm=True`: TRL corrects for the mismatch with vLLM."""
UNUSED_BY_ADAMW: dict[str, tuple[object, ...]] = {
    "optim": ("adamw_torch", "adamw_torch_fused"), "optim_args": ("", None), "optim_target_modules": (None,),
}  # fmt: skip
"""Settings that have no effect with Bridge's AdamW -> the values that request nothing."""
MOVING: dict[str, str] = {
    "cast_lm_head_to_fp32": "moves the head out of the server's memory",
    "fp16": "scales gradients for the trainer's own step, but the step is taken in the fence",
    "fp16_full_eval": "copies the weights out of the server's memory",
    "deepspeed": "copies the weights out of the server's memory",
    "fsdp": "copies the weights out of the server's memory",
    "parallelism_config": "trains with several processes, but one process trains a server",
}
"""Settings that would train weights other than the server's -> why."""


def refuse_settings(policy: Policy, args: Any, *, own_optimizer: bool) -> None:
    """Refuse settings that have no effect here, or that would train weights other than the server's.

    Raises:
        UsageError: there is such a setting, or `args` is of a trainer that samples in another way.
    """
    name_of_config = type(args).__name__
    if not any(ancestor.__name__ in CONFIGS for ancestor in type(args).__mro__):
        raise UsageError(
            f"args is a {name_of_config}, whose trainer does not generate with TRL's VLLMGeneration: bridge.for_trl has"
            " no effect on how it samples",
            hint=f"use one of {', '.join(name.replace('Config', 'Trainer') for name in CONFIGS)}",
        )
    if getattr(args, "use_teacher_server", False) and hasattr(args, "teacher_model_kind"):
        raise UsageError(
            f"{name_of_config} has use_teacher_server=True, which requests the teacher's log-probabilities from a"
            " server of TRL's own",
            hint="leave use_teacher_server out: the trainer computes them from the same weights",
        )
    _refuse_unused(args, UNUSED if own_optimizer else {**UNUSED, **UNUSED_BY_ADAMW})
    if chosen := filters(policy.sampling):
        flags = ", ".join(f"{name}={value}" for name, value in chosen.items())
        raise UsageError(
            f"the policy samples with {', '.join(chosen)}, but {name_of_config} chooses how TRL's trainer samples",
            hint=f"attach without it, and {name_of_config}({flags})",
        )
    compares = f"{CORRECTION}correction" if args.use_vllm and getattr(args, f"{CORRECTION}correction", False) else None
    if getattr(args, "off_policy_mask_threshold", None) is not None:
        compares = "off_policy_mask_threshold"
    if compares is not None and (kept := filters_of(args)):
        raise UsageError(
            f"{name_of_config} has {compares}={getattr(args, compares)} and"
            f" {', '.join(f'{name}={value}' for name, value in kept.items())}: it would compare log-probabilities over"
            " the tokens that these keep with log-probabilities over all tokens",
            hint=f"leave {compares} out" if compares == "off_policy_mask_threshold" else f"set {compares}=False",
        )
    if args.world_size > 1:
        raise UsageError(
            f"{args.world_size} processes: one process trains a server", hint="start the script as a single process"
        )
    for name, reason in MOVING.items():
        if value := getattr(args, name, None):
            raise UsageError(f"{name_of_config} has {name}={value!r}, which {reason}", hint=f"leave {name} out")
    if getattr(args, "bf16_full_eval", False) and policy.model.dtype != torch.bfloat16:
        raise UsageError(
            f"{name_of_config} has bf16_full_eval=True, which copies the {policy.model.dtype} weights out of the"
            " server's memory",
            hint="leave bf16_full_eval out",
        )
    template = getattr(args, "chat_template_path", None)
    if template is not None and not template.endswith((".jinja", ".j2")):
        raise UsageError(
            f"{name_of_config} has chat_template_path={template!r}, for whose tokens TRL copies"
            " the embeddings out of the server's memory",
            hint="leave chat_template_path out, or name a .jinja file",
        )
    _check_device(policy, args)


def use_vllm(args: Any) -> None:
    """Let the trainer generate with vLLM; it corrects for vLLM's mismatch only if `args` requests vLLM itself."""
    if not args.use_vllm and hasattr(args, f"{CORRECTION}correction"):
        setattr(args, f"{CORRECTION}correction", False)
    args.use_vllm = True


def second_model(args: Any) -> str | None:
    """Return what the trainer loads by the name of the served model; None if it loads nothing."""
    if getattr(args, "teacher_model_kind", "live") != "live":
        return "the teacher"
    has_reference = any(ancestor.__name__ in ("GRPOConfig", "RLOOConfig") for ancestor in type(args).__mro__)
    return "the reference" if has_reference and args.beta != 0 else None


def trainer_of(args: Any) -> str:
    """Return the name of the trainer that `args` is for."""
    return type(args).__name__.replace("Config", "Trainer")


def filters_of(args: Any) -> dict[str, Any]:
    """Return the filters that `args` samples with; those of `generation_kwargs` replace its own, as in TRL.

    Raises:
        UsageError: `generation_kwargs` has unsupported entries.
    """
    given = dict(getattr(args, "generation_kwargs", None) or {})
    unused = {name: value for name, value in given.items() if name not in FILTERS and (name, value) != SAMPLES}
    if unused:
        raise UsageError(
            f"{type(args).__name__} has generation_kwargs={unused!r}, which has no effect on a Bridge server",
            hint=f"leave generation_kwargs out, or keep only {', '.join(FILTERS)} in it",
        )
    values = {name: given.get(name, getattr(args, name, None)) for name in FILTERS}
    return {name: value for name, value in values.items() if value not in FILTERS[name]}


def refuse_other_adapter(policy: Policy, peft_config: Any) -> None:
    """Refuse a `peft_config` that differs from the policy's adapter.

    Raises:
        UsageError: it differs, or the policy trains all weights.
    """
    if peft_config is None:
        return
    wanted = lora_of(peft_config, policy.config.model_name)
    if policy.config.mode != "lora_only":
        raise UsageError(
            "for_trl has a peft_config, but the policy trains all weights",
            hint="bridge.attach(lora=peft_config), or bridge.serve(MODEL, lora=peft_config)",
        )
    if wanted != policy.config.lora:
        raise UsageError(
            f"the policy's adapter is {policy.config.lora!r}, but peft_config is {wanted!r}",
            hint="attach with this peft_config: bridge.attach(lora=peft_config)",
        )


def _refuse_unused(args: Any, unused: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse the settings that the user made but that have no effect here, all in one error.

    Raises:
        UsageError: there is such a setting.
    """
    fields = dataclasses.fields(args) if dataclasses.is_dataclass(args) else ()
    of_vllm = [field for field in fields if field.name.startswith(VLLM)]
    if args.use_vllm:
        of_vllm = [field for field in of_vllm if not field.name.startswith(CORRECTION)]
    neutral = {field.name: (field.default,) for field in of_vllm} | dict(unused)
    values = {name: getattr(args, name, allowed[0]) for name, allowed in neutral.items()}
    made = {name: value for name, value in values.items() if value not in neutral[name]}
    if not made:
        return
    hint = f"leave {' and '.join(made)} out"
    if any(name.startswith(CORRECTION) for name in made):
        hint += f", or correct for the mismatch with vLLM: {type(args).__name__}(use_vllm=True)"
    if made.keys() <= UNUSED_BY_ADAMW.keys():
        hint += ", or pass your own optimizer: for_trl(policy, args, optimizers=(OPTIMIZER, None)), for example"
        hint += " policy.optimizer('adamw-8bit', lr=args.learning_rate)"
    settings = ", ".join(f"{name}={value!r}" for name, value in made.items())
    where = "the optimizer of bridge.for_trl" if made.keys() <= UNUSED_BY_ADAMW.keys() else "a Bridge server"
    raise UsageError(
        f"{type(args).__name__} has {settings}, which has no effect on {where}",
        hint=hint,
    )


def tokenizer_of(policy: Policy, chosen: Any) -> PreTrainedTokenizerBase:
    """Return `chosen`, whose token ids must be the server's, or the policy's own tokenizer if it is None.

    Raises:
        UsageError: the token ids differ, or `chosen` is not a tokenizer.
    """
    if chosen is None:
        return policy.tokenizer
    if not isinstance(chosen, PreTrainedTokenizerBase):
        raise UsageError(
            f"processing_class is a {type(chosen).__name__}, expected a tokenizer: images are not supported",
            hint="leave processing_class out, or pass its tokenizer",
        )
    theirs = chosen.get_vocab()
    others = [token for token, index in policy.tokenizer.get_vocab().items() if theirs.get(token) != index]
    if others:
        raise UsageError(
            f"processing_class has different ids than the server's model for {len(others)} tokens, such as"
            f" {others[0]!r}",
            hint=f"use the tokenizer of {policy.tokenizer.name_or_path}, or leave processing_class out",
        )
    return chosen


def _check_device(policy: Policy, args: Any) -> None:
    """Refuse several GPUs, or a device other than the server's: the trainer would copy the weights there.

    Raises:
        UsageError: the trainer's devices are not the server's.
    """
    here, there = policy.device, args.device
    same = here.type == there.type and (here.index or 0) == (there.index or 0)
    if same and args.n_gpu <= 1:
        return
    devices = f"{args.n_gpu} GPUs" if same else str(there)
    hint = f"{type(args).__name__}(use_cpu=True)"
    if here.type == "cuda":
        hint = f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(here).uuid} in front of the command"
    raise UsageError(f"the trainer would use {devices}, but the server's weights are on {here}", hint=hint)


def check_version() -> None:
    try:
        installed = version("trl")
    except PackageNotFoundError as error:
        raise IncompatibleVersionError("TRL is not installed", hint=f"pip install 'trl~={TESTED}.0'") from error
    found, tested = Version(installed), Version(TESTED)
    if found < tested or found.release[:2] != tested.release:  # 1.17.0.dev0, TRL's main branch, is below 1.17
        raise IncompatibleVersionError(
            f"TRL {installed} is installed, expected {TESTED}", hint=f"pip install 'trl~={TESTED}.0'"
        )
