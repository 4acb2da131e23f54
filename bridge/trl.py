"""TRL's `GRPOTrainer` on one copy of the weights: four changed lines of a stock script, and no weight sync.

    with bridge.attach() as policy:                                                         # instead of use_vllm=True
        trainer = GRPOTrainer(**bridge.for_trl(policy, args), args=args, reward_funcs=..., train_dataset=...)

TRL keeps its loss, rewards, schedules, callbacks and logs. The model's parameters are vLLM's; completions come from
that server; and the weights change inside the fence alone, in a step of the optimizer or when a checkpoint is loaded.

Not covered, and refused by name: several processes, TRL's tools and environments, images.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, Trainer, TrainerCallback

from bridge.engine.measuring import SKIPS_IN_A_ROW
from bridge.engine.policy import Policy
from bridge.errors import GradientError, UsageError
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.rollouts.vocabulary import Vocabulary
from bridge.trl_settings import check_version, filters_of, refuse_other_adapter, refuse_settings, tokenizer_of

logger = logging.getLogger(__name__)


def for_trl(
    policy: Policy,
    args: Any,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
    processing_class: PreTrainedTokenizerBase | None = None,
    peft_config: Any = None,
) -> dict[str, Any]:
    """Return arguments for `trl.GRPOTrainer`: model, tokenizer, rollouts, optimizer, and the callback with the fence.

    `args` is the trainer's `GRPOConfig`. Its learning rate, weight decay, betas and epsilon go to Bridge's AdamW, which
    loses no update to bf16, and `max_completion_length`, `temperature`, `top_p`, `top_k` and `min_p` to the server. The
    loss is TRL's, over the whole vocabulary, whatever was sampled with.

    `callbacks`, `optimizers` and `processing_class` of your own belong here and not into the call of `GRPOTrainer`,
    where Python reports "got multiple values for keyword argument": they are returned with Bridge's. `optimizers` is a
    pair as `GRPOTrainer` takes it: None as the optimizer is Bridge's AdamW, None as the scheduler is that of `args`.
    An optimizer of your own has the parameters of `policy.parameters()`. A `peft_config` is that with which the policy
    was attached (`bridge.attach(lora=peft_config)`): its adapter is trained, in the server's slot, and no other one.

    Raises:
        UsageError: `args` has a setting that has no effect here, several processes or GPUs, or another device; or
            `processing_class` has other tokens than the server's model.
        IncompatibleVersionError: another version of TRL is installed, or none.
    """
    check_version()
    optimizer, scheduler = optimizers
    refuse_settings(policy, args, own_optimizer=optimizer is not None)
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            "the scheduler was made for another optimizer, and would have no effect",
            hint="for_trl(policy, args, optimizers=(OPTIMIZER, SCHEDULER)), the scheduler made for that optimizer",
        )
    refuse_other_adapter(policy, peft_config)
    tokenizer = tokenizer_of(policy, processing_class)
    policy.use_tokenizer(tokenizer)
    _use_server_eos_tokens(policy, Vocabulary.of(tokenizer, policy.config.model_name))
    return {
        "model": policy.model if policy.opened.adapter is None else policy.opened.adapter.peft_model,
        "processing_class": tokenizer,
        "rollout_func": _Rollouts(policy, args),
        "optimizers": (optimizer or _adamw(policy, args), scheduler),
        "callbacks": [*callbacks, Fence(policy, args)],  # the last: the others still see the gradients
    }


class Fence(TrainerCallback):  # type: ignore[misc]
    """Lets the trainer change the weights inside the fence alone: by an optimizer's step or by a checkpoint."""

    def __init__(self, policy: Policy, args: Any) -> None:
        self._policy = policy
        self._args = args
        self._addresses = {parameter.data_ptr() for parameter in policy.model.parameters()}
        self._load = type(policy.model).load_state_dict
        self._pending: dict[str, Tensor] = {}
        """Weights of a checkpoint in several files, until the last one is read."""
        self._skipped = 0
        """Steps in a row whose gradient was not finite."""
        policy.model.load_state_dict = self._load_inside
        if (adapter := policy.opened.adapter) is not None:
            adapter.peft_model.save_pretrained = self._save_adapter
            adapter.peft_model.load_adapter = self._load_adapter

    def on_init_end(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        """Refuse a trainer that was made with other settings or another model than `for_trl` got.

        Raises:
            UsageError: it was.
        """
        if args is not self._args:
            raise UsageError(
                "GRPOTrainer has other args than bridge.for_trl",
                hint="GRPOTrainer(**for_trl(policy, args), args=args)",
            )
        self._refuse_moved(model)
        for module in self._policy.model.modules():
            if isinstance(module, LoraLayer):  # a reference adapter, a copy of one whose B holds the scaling already
                module.scaling.update(dict.fromkeys(module.scaling, 1.0))

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

        One call and not two, before and after the trainer's: an error in the middle cannot leave the fence open. A step
        whose gradient is not finite is skipped, as by `bridge run`: one batch does not end training.

        Raises:
            GradientError: too many in a row are not finite.
        """
        try:
            self._policy.update(getattr(optimizer, "optimizer", optimizer))
        except GradientError as error:
            self._skipped += 1
            if self._skipped >= SKIPS_IN_A_ROW:
                raise GradientError(
                    f"the gradients of {self._skipped} steps in a row were not finite; no weight was changed in them",
                    hint="lower learning_rate, and train(resume_from_checkpoint=...)",
                ) from error
            optimizer.zero_grad()
            logger.warning(
                "a gradient was not finite, and its step was skipped: no weight was changed (%d in a row; training ends"
                " after %d)", self._skipped, SKIPS_IN_A_ROW,
            )  # fmt: skip
        else:
            self._skipped = 0

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
                hint="resume from a checkpoint of the served model",
            )
        self._pending |= state_dict
        if not self._missing():
            self._policy.publish(lambda: self._load(model, self._pending, strict=False))
            self._pending = {}
        return nn.modules.module._IncompatibleKeys([], [name for name in state_dict if name not in own])

    def _save_adapter(self, save_directory: str | Path, **_: Any) -> None:
        """Stand in for `save_pretrained` of PEFT's model, whose B would be multiplied by the scaling twice."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._policy.mode.save(folder)

    def _load_adapter(self, model_id: str | Path, *_: Any, **__: Any) -> Any:
        """Stand in for `load_adapter` of PEFT's model, by which the trainer resumes and loads its best checkpoint."""
        adapter = self._policy.opened.adapter
        assert adapter is not None, "this stands in for a method of an adapter's model"
        adapter.check(Path(model_id))  # before the server pauses
        self._policy.publish(lambda: adapter.load(Path(model_id)))
        return nn.modules.module._IncompatibleKeys([], [])

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
            hint="resume from a checkpoint of the served model",
        )

    def _refuse_moved(self, model: Any) -> None:
        named = model.named_parameters() if model is not None else ()
        moved = [name for name, p in named if p.requires_grad and p.data_ptr() not in self._addresses]
        if moved:
            raise UsageError(
                f"{len(moved)} of the trainer's parameters are outside the server's memory, the first: {moved[0]}",
                hint="pass neither peft_config nor another model or device to GRPOTrainer; for an adapter:"
                " bridge.attach(lora=peft_config)",
            )


CALLS_OF_A_SEED = 2**24
"""Between the first call of a seed of TRL's and that of the next: more than any run has."""


class _Rollouts:
    """TRL's `rollout_func`: samples from the policy's server."""

    def __init__(self, policy: Policy, args: Any) -> None:
        self._policy = policy
        self._calls: count[int] | None = None
        self._seed = args.seed
        self._template = args.chat_template_kwargs or {}
        self._parameters = {"max_tokens": args.max_completion_length, "temperature": args.temperature}
        self._parameters |= filters_of(args)

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
        length = runs[0][1]
        groups = self._policy.sample(
            [prompt for prompt, _ in runs], n=length, seed=self._seed * CALLS_OF_A_SEED + next(self._calls),
            chat_template_kwargs=self._template, **self._parameters,
        )  # fmt: skip
        completions = [completion for group in groups for completion in group.completions]
        return {
            "prompt_ids": [[*group.prompt_token_ids] for group in groups for _ in group.completions],
            "completion_ids": [[*completion.token_ids] for completion in completions],
            "logprobs": [[*completion.logprobs] for completion in completions],
        }


def _refuse_uncovered(trainer: Any, prompts: Sequence[Any]) -> None:
    """Refuse tools, environments and images, without which the server would sample; no callback sees them.

    Raises:
        UsageError: the trainer has tools or environments, or a prompt has an image.
    """
    given = {
        "environment_factory": getattr(trainer, "environment_factories", None),
        "tools": getattr(trainer, "_standalone_tools", None) or getattr(trainer, "tools", None),
    }
    if name := next((name for name, value in given.items() if value), None):
        raise UsageError(
            f"GRPOTrainer has {name}, and bridge.for_trl samples without tools: the model would not see them",
            hint="write the tools as a task of Bridge (docs/environments.md), or train with use_vllm and no Bridge",
        )
    messages = chain.from_iterable(prompt for prompt in prompts if not isinstance(prompt, str))
    contents = (message.get("content") for message in messages)
    parts = chain.from_iterable(content for content in contents if isinstance(content, list))
    if kind := next((part.get("type") for part in parts if part.get("type") != "text"), None):
        raise UsageError(
            f"a prompt has a part of the type {kind!r}, and bridge.for_trl samples from text alone",
            hint="leave images and other media out of the data set",
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


def _use_server_eos_tokens(policy: Policy, vocabulary: Vocabulary) -> None:
    """Set the model's EOS tokens to those that end completions: TRL takes any that end otherwise for truncated.

    Some models list the end-of-turn token only in `generation_config.json`, and base models only in the chat template.
    """
    own = policy.model.generation_config
    with suppress(OSError):  # the model has none
        served = GenerationConfig.from_pretrained(policy.config.model_name)
        own.eos_token_id = own.eos_token_id if served.eos_token_id is None else served.eos_token_id
    if vocabulary.end_ids:
        known = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        own.eos_token_id = [*(token for token in known if token is not None), *vocabulary.end_ids]
