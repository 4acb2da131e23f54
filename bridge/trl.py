"""TRL's `GRPOTrainer` on one copy of the weights: four changed lines of a stock script, and no weight sync.

    with bridge.attach() as policy:                                                         # instead of use_vllm=True
        trainer = GRPOTrainer(**bridge.for_trl(policy, args), args=args, reward_funcs=..., train_dataset=...)

TRL keeps its loss, rewards, schedules, callbacks and logs. The model's parameters are vLLM's; completions come from
that server; and each optimizer step is taken inside the fence.

Not covered: several processes, adapters (TRL's `peft_config`), tools and environments of TRL.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count, groupby, repeat
from typing import Any

import torch
from packaging.version import Version
from transformers import TrainerCallback

from bridge.config import SamplingConfig
from bridge.errors import IncompatibleVersionError, UsageError
from bridge.policy import Policy
from bridge.rollouts import problems
from bridge.rollouts.distribution import filters
from bridge.rollouts.openai_api import Vocabulary
from bridge.rollouts.sampler import Sampler, seed_of
from bridge.server.endpoint import Endpoint

TESTED = "1.16", "1.17"
"""The first version of TRL that works, and the first that nobody has tried."""
UNSET: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0,),
    "generation_kwargs": ({}, None),
    "use_vllm": (False,), "use_transformers_continuous_batching": (False,),
}  # fmt: skip
"""Choices of TRL's `GRPOConfig` about generation that have no effect here -> their values that ask for nothing."""
MOVING: dict[str, str] = {
    "cast_lm_head_to_fp32": "moves the head out of the server's memory",
    "fp16": "scales gradients for a step of the trainer's own, and the step is taken in the fence",
}
"""Choices of `GRPOConfig` that would train something else than the server's weights -> why."""


def for_trl(policy: Policy, args: Any) -> dict[str, Any]:
    """Return arguments for `trl.GRPOTrainer`: model, tokenizer, rollouts, optimizer, and the callback with the fence.

    `args` is the trainer's `GRPOConfig`: learning rate, weight decay and betas go to Bridge's AdamW, which loses no
    update to bf16, and `max_completion_length` and `temperature` to the server. Add callbacks of your own with
    `trainer.add_callback`. Replace `optimizers` by your own, if you like.

    Raises:
        UsageError: `args` chooses something that has no effect here, several processes or GPUs, or another device.
        IncompatibleVersionError: another version of TRL is installed, or none.
    """
    _check_version()
    for name, values in UNSET.items():
        if (chosen := getattr(args, name, values[0])) not in values:
            raise UsageError(
                f"GRPOConfig has {name}={chosen!r}, which has no effect on completions from a Bridge server",
                remedy=f"leave {name} out",
            )
    if chosen := filters(policy.sampling):
        raise UsageError(
            f"the policy samples with {', '.join(chosen)}, and TRL computes its loss over the whole vocabulary",
            remedy="attach the policy without them",
        )
    if args.world_size > 1:
        raise UsageError(f"{args.world_size} processes: one process trains a server", remedy="start the script alone")
    for name, reason in MOVING.items():
        if getattr(args, name, False):
            raise UsageError(f"GRPOConfig has {name}=True, which {reason}", remedy=f"leave {name} out")
    _check_device(policy, args)
    optimizer = policy.optimizer(
        "adamw", lr=args.learning_rate, weight_decay=args.weight_decay, betas=(args.adam_beta1, args.adam_beta2)
    )
    return {
        "model": policy.model,
        "processing_class": policy.tokenizer,
        "rollout_func": _Rollouts(policy, args),
        "optimizers": (optimizer, None),
        "callbacks": [Fence(policy)],
    }


class Fence(TrainerCallback):  # type: ignore[misc]
    """Takes each optimizer step inside the fence of a policy's server, whatever the optimizer."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._places = {parameter.data_ptr() for parameter in policy.model.parameters()}

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Publish what is in memory: a resumed trainer has just loaded its checkpoint into it.

        Raises:
            UsageError: the trainer would train parameters that are not the server's.
        """
        named = model.named_parameters() if model is not None else ()
        moved = [name for name, each in named if each.requires_grad and each.data_ptr() not in self._places]
        if moved:
            raise UsageError(
                f"{len(moved)} of the trainer's parameters are outside the server's memory, the first: {moved[0]}",
                remedy="pass neither peft_config nor another model or device to GRPOTrainer",
            )
        self._policy.publish(lambda: None)

    def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Publish the best checkpoint, if the trainer has just loaded it into the server's memory."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._policy.publish(lambda: None)

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Take the step here: the trainer's own call of `step`, right after this, then finds no gradients.

        One call and not two, before and after the trainer's: an error in the middle cannot leave the fence open.
        """
        self._policy.update(getattr(optimizer, "optimizer", optimizer))


class _Rollouts:
    """TRL's `rollout_func`: samples from the policy's server."""

    def __init__(self, policy: Policy, args: Any) -> None:
        self._policy = policy
        self._calls: count[int] | None = None
        self._seed, self._template = args.seed, args.chat_template_kwargs or {}
        self._config = SamplingConfig(
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            request_timeout_s=policy.sampling.request_timeout_s,
        )

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[list[Any]]]:
        """Return one completion for each prompt; TRL repeats a prompt for every completion that it wants.

        Shapes: lists of one list of token ids or log-probabilities per prompt.
        """
        self._calls = self._calls or count(trainer.state.global_step)  # a resumed trainer samples what it would have
        runs = [(prompt, len([*same])) for prompt, same in groupby(prompts)]
        if len({length for _, length in runs}) > 1:
            runs = [(prompt, 1) for prompt in prompts]
        ids = [problems.encode(self._policy.tokenizer, {"prompt": prompt}, **self._template) for prompt, _ in runs]
        length = runs[0][1]
        with Sampler(self._config, ids_of=Vocabulary(self._policy.tokenizer)) as sampler:
            found = sampler.sample(
                [Endpoint(url=self._policy.url)], ids, num_samples=length, seed=seed_of(self._seed, next(self._calls))
            )
        completions = [*chain.from_iterable(found)]
        return {
            "prompt_ids": [[*each] for each in chain.from_iterable(repeat(prompt, length) for prompt in ids)],
            "completion_ids": [[*each.token_ids] for each in completions],
            "logprobs": [[*each.logprobs] for each in completions],
        }


def _check_device(policy: Policy, args: Any) -> None:
    """Refuse a device to which the trainer would copy the weights, and several GPUs, which it would copy them to.

    Raises:
        UsageError: the trainer's devices are not the server's.
    """
    here, there = policy.device, args.device
    same = here.type == there.type and (here.index or 0) == (there.index or 0)
    if same and args.n_gpu <= 1:
        return
    found = f"{args.n_gpu} GPUs" if same else str(there)
    remedy = "GRPOConfig(use_cpu=True)"
    if here.type == "cuda":
        remedy = f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(here).uuid} in front of the command"
    raise UsageError(f"the trainer would use {found}, and the server's weights are on {here}", remedy=remedy)


def _check_version() -> None:
    try:
        found = version("trl")
    except PackageNotFoundError as error:
        raise IncompatibleVersionError("TRL is not installed", remedy=f"pip install 'trl~={TESTED[0]}.0'") from error
    if not Version(TESTED[0]) <= Version(found) < Version(TESTED[1]):
        raise IncompatibleVersionError(
            f"TRL {found} is installed, expected {TESTED[0]}", remedy=f"pip install 'trl~={TESTED[0]}.0'"
        )
