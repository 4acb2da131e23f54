"""TRL's `GRPOTrainer` on one copy of the weights: four changed lines of a stock script, and no weight sync.

    with bridge.attach() as policy:                                                         # instead of use_vllm=True
        trainer = GRPOTrainer(**bridge.for_trl(policy, args), args=args, reward_funcs=..., train_dataset=...)

TRL keeps its loss, rewards, schedules, callbacks and logs. The model's parameters are vLLM's; completions come from
that server; and the weights change inside the fence alone, in a step of the optimizer or when a checkpoint is loaded.

Not covered, and refused by name: several processes, adapters (`peft_config`), TRL's tools and environments, images.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count, groupby
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, Trainer, TrainerCallback

from bridge.config import SamplingConfig
from bridge.errors import IncompatibleVersionError, UsageError
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.policy import Policy
from bridge.rollouts import problems
from bridge.rollouts.distribution import filters
from bridge.rollouts.openai_api import Vocabulary
from bridge.rollouts.sampler import Sampler, seed_of
from bridge.server.endpoint import Endpoint

TESTED = "1.16", "1.17"
"""The first version of TRL that works, and the first that nobody has tried."""
UNUSED: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0,),
    "generation_kwargs": ({}, None), "cache_implementation": (None,), "use_vllm": (False,),
    "use_transformers_continuous_batching": (False,), "use_transformers_paged": (False, None),
    "transformers_continuous_batching_config": ({}, None),
}  # fmt: skip
"""Settings of TRL's `GRPOConfig` about generation that have no effect here -> the values that request nothing."""
VLLM = "vllm_"
"""Prefix of the settings of TRL's own vLLM, which have no effect either."""
UNUSED_BY_ADAMW: dict[str, tuple[object, ...]] = {
    "optim": ("adamw_torch", "adamw_torch_fused"), "optim_args": ("", None), "optim_target_modules": (None,),
}  # fmt: skip
"""The same for Bridge's AdamW, unless the script brings its own optimizer."""
MOVING: dict[str, str] = {
    "cast_lm_head_to_fp32": "moves the head out of the server's memory",
    "fp16": "scales gradients for a step of the trainer's own, and the step is taken in the fence",
    "fp16_full_eval": "copies the weights out of the server's memory",
    "deepspeed": "copies the weights out of the server's memory",
    "fsdp": "copies the weights out of the server's memory",
    "parallelism_config": "trains with several processes, and one process trains a server",
}
"""Settings of `GRPOConfig` that would train something else than the server's weights -> why."""


def for_trl(
    policy: Policy,
    args: Any,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
    processing_class: PreTrainedTokenizerBase | None = None,
) -> dict[str, Any]:
    """Return arguments for `trl.GRPOTrainer`: model, tokenizer, rollouts, optimizer, and the callback with the fence.

    `args` is the trainer's `GRPOConfig`. Its learning rate, weight decay, betas and epsilon go to Bridge's AdamW, which
    loses no update to bf16, and `max_completion_length` and `temperature` to the server.

    `callbacks`, `optimizers` and `processing_class` of your own belong here and not into the call of `GRPOTrainer`,
    where Python reports "got multiple values for keyword argument": they are returned with Bridge's. `optimizers` is a
    pair as `GRPOTrainer` takes it: None as the optimizer is Bridge's AdamW, None as the scheduler is that of `args`.
    An optimizer of your own has the parameters of `policy.parameters()`.

    Raises:
        UsageError: `args` has a setting that has no effect here, several processes or GPUs, or another device; or
            `processing_class` has other tokens than the server's model.
        IncompatibleVersionError: another version of TRL is installed, or none.
    """
    _check_version()
    optimizer, scheduler = optimizers
    _refuse_settings(policy, args, UNUSED if optimizer is not None else {**UNUSED, **UNUSED_BY_ADAMW})
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            "the scheduler was made for another optimizer, and would have no effect",
            remedy="for_trl(policy, args, optimizers=(OPTIMIZER, SCHEDULER)), the scheduler made for that optimizer",
        )
    tokenizer = _tokenizer(policy, processing_class)
    _end_as_the_server(policy)
    return {
        "model": policy.model,
        "processing_class": tokenizer,
        "rollout_func": _Rollouts(policy, args, tokenizer),
        "optimizers": (optimizer or _adamw(policy, args), scheduler),
        "callbacks": [*callbacks, Fence(policy, args)],  # the last: the others still see the gradients
    }


class Fence(TrainerCallback):  # type: ignore[misc]
    """Lets the trainer change the weights inside the fence alone: by an optimizer's step or by a checkpoint."""

    def __init__(self, policy: Policy, args: Any) -> None:
        self._policy = policy
        self._args = args
        self._places = {parameter.data_ptr() for parameter in policy.model.parameters()}
        self._load = type(policy.model).load_state_dict
        self._pending: dict[str, Tensor] = {}
        """Weights of a checkpoint in several files, until the last one is read."""
        policy.model.load_state_dict = self._load_inside

    def on_init_end(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        """Refuse a trainer that was made with other settings or another model than `for_trl` got.

        Raises:
            UsageError: it was.
        """
        if args is not self._args:
            raise UsageError(
                "GRPOTrainer has other args than bridge.for_trl",
                remedy="GRPOTrainer(**for_trl(policy, args), args=args)",
            )
        self._refuse_moved(model)

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Refuse what would train something else than the server's weights.

        Raises:
            UsageError: a checkpoint lacks weights, or the trainer has parameters that are not the server's.
        """
        self._refuse_partial()
        self._refuse_moved(model)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Refuse a best checkpoint that lacks weights; UsageError."""
        self._refuse_partial()

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Take the step here: the trainer's own call of `step`, right after this, then finds no gradients.

        One call and not two, before and after the trainer's: an error in the middle cannot leave the fence open.
        """
        self._policy.update(getattr(optimizer, "optimizer", optimizer))

    def _load_inside(self, state_dict: Mapping[str, Tensor], *_: Any, **__: Any) -> Any:
        """Stand in for the model's `load_state_dict`, by which the trainer resumes and loads its best checkpoint.

        A checkpoint in several files is loaded once all are read, since weights of two steps must not be served.
        """
        model = self._policy.model
        own = model.state_dict()
        misfit = next(
            (name for name, weight in state_dict.items() if name in own and weight.shape != own[name].shape), None
        )
        if misfit:
            self._pending.clear()
            raise UsageError(
                f"the checkpoint is of another model: {misfit} has shape {tuple(state_dict[misfit].shape)}, expected"
                f" {tuple(own[misfit].shape)}",
                remedy="resume from a checkpoint of the served model",
            )
        self._pending |= state_dict
        if not self._missing():
            self._policy.publish(lambda: self._load(model, self._pending, strict=False))
            self._pending = {}
        return nn.modules.module._IncompatibleKeys([], [name for name in state_dict if name not in own])

    def _missing(self) -> list[str]:
        """Return the parameters that no file had so far, a tied one only if none of its names was found."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._policy.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [tied[0] for tied in names.values() if not self._pending.keys() & tied]

    def _refuse_partial(self) -> None:
        if not self._pending:
            return
        missing, self._pending = self._missing(), {}
        raise UsageError(
            f"the checkpoint lacks {len(missing)} of the model's parameters, the first: {missing[0]}; none was loaded",
            remedy="resume from a checkpoint of the served model",
        )

    def _refuse_moved(self, model: Any) -> None:
        named = model.named_parameters() if model is not None else ()
        moved = [name for name, p in named if p.requires_grad and p.data_ptr() not in self._places]
        if moved:
            raise UsageError(
                f"{len(moved)} of the trainer's parameters are outside the server's memory, the first: {moved[0]}",
                remedy="pass neither peft_config nor another model or device to GRPOTrainer; for an adapter:"
                " bridge run --mode lora_only",
            )


class _Rollouts:
    """TRL's `rollout_func`: samples from the policy's server."""

    def __init__(self, policy: Policy, args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._calls: count[int] | None = None
        self._seed = args.seed
        self._template = args.chat_template_kwargs or {}
        self._config = SamplingConfig(
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            request_timeout_s=policy.sampling.request_timeout_s,
        )

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[list[Any]]]:
        """Return one completion for each prompt; TRL repeats a prompt for every completion that it wants.

        Shapes: lists of one list of token ids or log-probabilities per prompt.

        Raises:
            UsageError: the trainer has tools or environments, or a prompt has an image.
        """
        _refuse_uncovered(trainer, prompts)
        self._calls = self._calls or count(trainer.state.global_step)  # a resumed trainer samples what it would have
        runs = [(prompt, len([*same])) for prompt, same in groupby(prompts)]
        if len({length for _, length in runs}) > 1:
            runs = [(prompt, 1) for prompt in prompts]
        ids = [problems.encode(self._tokenizer, {"prompt": prompt}, **self._template) for prompt, _ in runs]
        length = runs[0][1]
        with Sampler(self._config, ids_of=Vocabulary(self._policy.tokenizer)) as sampler:
            sampled = sampler.sample(
                [Endpoint(url=self._policy.url)], ids, num_samples=length, seed=seed_of(self._seed, next(self._calls))
            )
        completions = [*chain.from_iterable(sampled)]
        return {
            "prompt_ids": [[*prompt] for prompt in ids for _ in range(length)],
            "completion_ids": [[*completion.token_ids] for completion in completions],
            "logprobs": [[*completion.logprobs] for completion in completions],
        }


def _refuse_uncovered(trainer: Any, prompts: Sequence[Any]) -> None:
    """Refuse tools, environments and images, without which the server would sample; no callback sees them.

    Raises:
        UsageError: the trainer has tools or environments, or a prompt has an image.
    """
    given = {"environment_factory": getattr(trainer, "environment_factories", None)}
    given["tools"] = getattr(trainer, "_standalone_tools", None) or getattr(trainer, "tools", None)
    if name := next((name for name, value in given.items() if value), None):
        raise UsageError(
            f"GRPOTrainer has {name}, and bridge.for_trl samples without tools: the model would not see them",
            remedy="write the tools as a task of Bridge (docs/environments.md), or train with use_vllm and no Bridge",
        )
    messages = chain.from_iterable(prompt for prompt in prompts if not isinstance(prompt, str))
    contents = (message.get("content") for message in messages)
    parts = chain.from_iterable(content for content in contents if isinstance(content, list))
    if kind := next((part.get("type") for part in parts if part.get("type") != "text"), None):
        raise UsageError(
            f"a prompt has a part of the type {kind!r}, and bridge.for_trl samples from text alone",
            remedy="leave images and other media out of the data set",
        )


def _refuse_settings(policy: Policy, args: Any, unused: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse what has no effect here, and what would train something else than the server's weights.

    Raises:
        UsageError: a setting is one of these.
    """
    _refuse_unused(args, unused)
    if chosen := filters(policy.sampling):
        raise UsageError(
            f"the policy samples with {', '.join(chosen)}, and TRL computes its loss over the whole vocabulary",
            remedy="attach the policy without them",
        )
    if args.world_size > 1:
        raise UsageError(f"{args.world_size} processes: one process trains a server", remedy="start the script alone")
    for name, reason in MOVING.items():
        if value := getattr(args, name, None):
            raise UsageError(f"GRPOConfig has {name}={value!r}, which {reason}", remedy=f"leave {name} out")
    if getattr(args, "bf16_full_eval", False) and policy.model.dtype != torch.bfloat16:
        raise UsageError(
            f"GRPOConfig has bf16_full_eval=True, which copies the {policy.model.dtype} weights out of the server's"
            " memory",
            remedy="leave bf16_full_eval out",
        )
    _check_device(policy, args)


def _refuse_unused(args: Any, unused: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse every setting that the user made and that has no effect here, all at once.

    Raises:
        UsageError: there is one.
    """
    fields = dataclasses.fields(args) if dataclasses.is_dataclass(args) else ()
    neutral = {field.name: (field.default,) for field in fields if field.name.startswith(VLLM)} | dict(unused)
    values = {name: getattr(args, name, allowed[0]) for name, allowed in neutral.items()}
    made = {name: value for name, value in values.items() if value not in neutral[name]}
    if not made:
        return
    remedy = f"leave {' and '.join(made)} out"
    if made.keys() <= UNUSED_BY_ADAMW.keys():
        remedy += ", or make the optimizer: for_trl(policy, args, optimizers=(OPTIMIZER, None)), for example"
        remedy += " policy.optimizer('adamw-8bit', lr=args.learning_rate)"
    raise UsageError(
        f"GRPOConfig has {', '.join(f'{name}={value!r}' for name, value in made.items())}, which has no effect on"
        f" {'the optimizer of bridge.for_trl' if made.keys() <= UNUSED_BY_ADAMW.keys() else 'a Bridge server'}",
        remedy=remedy,
    )


def _adamw(policy: Policy, args: Any) -> InPlaceOptimizer:
    """Return Bridge's AdamW with the settings of `args`; as in TRL, biases and norms do not decay."""
    groups: list[dict[str, Any]] = [{"params": [*policy.parameters()], "weight_decay": args.weight_decay}]
    if args.weight_decay:
        decaying = {*Trainer.get_decay_parameter_names(None, policy.model)}
        named = [(name, parameter) for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for name, p in named if (name in decaying) is decays], "weight_decay": weight_decay}
            for decays, weight_decay in ((True, args.weight_decay), (False, 0.0))
        ]
    betas = args.adam_beta1, args.adam_beta2
    return policy.optimizer("adamw", params=groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def _tokenizer(policy: Policy, chosen: Any) -> PreTrainedTokenizerBase:
    """Return `chosen`, which must mean the same token by an id as the server, or the policy's own.

    Raises:
        UsageError: it does not, or is no tokenizer.
    """
    if chosen is None:
        return policy.tokenizer
    if not isinstance(chosen, PreTrainedTokenizerBase):
        raise UsageError(
            f"processing_class is a {type(chosen).__name__}, expected a tokenizer: images are not covered",
            remedy="leave processing_class out, or pass its tokenizer",
        )
    theirs = chosen.get_vocab()
    others = [token for token, index in policy.tokenizer.get_vocab().items() if theirs.get(token) != index]
    if others:
        raise UsageError(
            f"processing_class has other ids than the server's model for {len(others)} tokens, such as {others[0]!r}",
            remedy=f"use the tokenizer of {policy.tokenizer.name_or_path}, or leave processing_class out",
        )
    return chosen


def _end_as_the_server(policy: Policy) -> None:
    """Give the model the tokens that end a completion on the server: TRL takes other completions for truncated.

    Some models have their end of a turn in `generation_config.json` alone.
    """
    try:
        served = GenerationConfig.from_pretrained(policy.tokenizer.name_or_path)
    except OSError:  # the model has none
        return
    if served.eos_token_id is not None:
        policy.model.generation_config.eos_token_id = served.eos_token_id


def _check_device(policy: Policy, args: Any) -> None:
    """Refuse a device to which the trainer would copy the weights, and several GPUs, which it would copy them to.

    Raises:
        UsageError: the trainer's devices are not the server's.
    """
    here, there = policy.device, args.device
    same = here.type == there.type and (here.index or 0) == (there.index or 0)
    if same and args.n_gpu <= 1:
        return
    devices = f"{args.n_gpu} GPUs" if same else str(there)
    remedy = "GRPOConfig(use_cpu=True)"
    if here.type == "cuda":
        remedy = f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(here).uuid} in front of the command"
    raise UsageError(f"the trainer would use {devices}, and the server's weights are on {here}", remedy=remedy)


def _check_version() -> None:
    try:
        installed = version("trl")
    except PackageNotFoundError as error:
        raise IncompatibleVersionError("TRL is not installed", remedy=f"pip install 'trl~={TESTED[0]}.0'") from error
    if not Version(TESTED[0]) <= Version(installed) < Version(TESTED[1]):
        raise IncompatibleVersionError(
            f"TRL {installed} is installed, expected {TESTED[0]}", remedy=f"pip install 'trl~={TESTED[0]}.0'"
        )
