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
UNUSED: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,), "cache_implementation": (None,), "use_vllm": (False,),
    "use_transformers_continuous_batching": (False,), "use_transformers_paged": (False, None),
    "transformers_continuous_batching_config": ({}, None),
}  # fmt: skip
"""Generation settings of TRL's `GRPOConfig` that have no effect here -> the values that request nothing."""
FILTERS: dict[str, tuple[object, ...]] = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None)}
"""Generation settings that the server has, too -> the values that request nothing."""
SAMPLES = "do_sample", True
"""The entry of `generation_kwargs` that requests what `GRPOTrainer` does anyway."""
VLLM = "vllm_"
"""Prefix of the settings for TRL's own vLLM, which have no effect either."""
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
"""Settings of `GRPOConfig` that would train weights other than the server's -> why."""


def refuse_settings(policy: Policy, args: Any, *, own_optimizer: bool) -> None:
    """Refuse settings that have no effect here, or that would train weights other than the server's.

    Raises:
        UsageError: there is such a setting.
    """
    _refuse_unused(args, UNUSED if own_optimizer else {**UNUSED, **UNUSED_BY_ADAMW})
    if chosen := filters(policy.sampling):
        raise UsageError(
            f"the policy samples with {', '.join(chosen)}, but GRPOConfig chooses how TRL's trainer samples",
            hint=f"attach without it, and GRPOConfig({', '.join(f'{name}={value}' for name, value in chosen.items())})",
        )
    if (kept := filters_of(args)) and args.off_policy_mask_threshold is not None:
        raise UsageError(
            f"GRPOConfig has off_policy_mask_threshold={args.off_policy_mask_threshold} and"
            f" {', '.join(f'{name}={value}' for name, value in kept.items())}: it would compare log-probabilities over"
            " the tokens that these keep with log-probabilities over all tokens",
            hint="leave off_policy_mask_threshold out",
        )
    if args.world_size > 1:
        raise UsageError(
            f"{args.world_size} processes: one process trains a server", hint="start the script as a single process"
        )
    for name, reason in MOVING.items():
        if value := getattr(args, name, None):
            raise UsageError(f"GRPOConfig has {name}={value!r}, which {reason}", hint=f"leave {name} out")
    if getattr(args, "bf16_full_eval", False) and policy.model.dtype != torch.bfloat16:
        raise UsageError(
            f"GRPOConfig has bf16_full_eval=True, which copies the {policy.model.dtype} weights out of the server's"
            " memory",
            hint="leave bf16_full_eval out",
        )
    _check_device(policy, args)


def filters_of(args: Any) -> dict[str, Any]:
    """Return the filters that `args` samples with; those of `generation_kwargs` replace its own, as in TRL.

    Raises:
        UsageError: `generation_kwargs` has unsupported entries.
    """
    given = dict(getattr(args, "generation_kwargs", None) or {})
    unused = {name: value for name, value in given.items() if name not in FILTERS and (name, value) != SAMPLES}
    if unused:
        raise UsageError(
            f"GRPOConfig has generation_kwargs={unused!r}, which has no effect on a Bridge server",
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
    neutral = {field.name: (field.default,) for field in fields if field.name.startswith(VLLM)} | dict(unused)
    values = {name: getattr(args, name, allowed[0]) for name, allowed in neutral.items()}
    made = {name: value for name, value in values.items() if value not in neutral[name]}
    if not made:
        return
    hint = f"leave {' and '.join(made)} out"
    if made.keys() <= UNUSED_BY_ADAMW.keys():
        hint += ", or pass your own optimizer: for_trl(policy, args, optimizers=(OPTIMIZER, None)), for example"
        hint += " policy.optimizer('adamw-8bit', lr=args.learning_rate)"
    raise UsageError(
        f"GRPOConfig has {', '.join(f'{name}={value!r}' for name, value in made.items())}, which has no effect on"
        f" {'the optimizer of bridge.for_trl' if made.keys() <= UNUSED_BY_ADAMW.keys() else 'a Bridge server'}",
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
    hint = "GRPOConfig(use_cpu=True)"
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
