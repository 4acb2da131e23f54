"""TRL's `GRPOTrainer` on one copy of the weights: four changed lines of a stock script, and no weight sync.

    with bridge.attach() as policy:                                                         # instead of use_vllm=True
        trainer = GRPOTrainer(**bridge.for_trl(policy, args), args=args, reward_funcs=..., train_dataset=...)

TRL keeps its loss, rewards, schedules, callbacks and logs. The model's parameters are vLLM's; completions come from
that server; and the weights change only inside the fence, in a step of the optimizer or when a checkpoint is loaded.

Not covered, and refused by name: several processes, images.
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

from bridge.engine.measuring import MAX_SKIPS
from bridge.engine.policy import Policy
from bridge.errors import GradientError, UsageError
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.rollouts.vocabulary import Vocabulary
from bridge.trl_settings import check_version, filters_of, refuse_other_adapter, refuse_settings, tokenizer_of
from bridge.types import Group, Problem
from bridge.weights.model_folder import stored_buffers

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
    loss is TRL's, over the whole vocabulary, whatever filters the server samples with.

    Pass your own `callbacks`, `optimizers` and `processing_class` here, not to `GRPOTrainer`, where Python would report
    "got multiple values for keyword argument": they are returned together with Bridge's. `optimizers` is a pair as in
    `GRPOTrainer`: None as the optimizer means Bridge's AdamW, None as the scheduler means the one in `args`. Your own
    optimizer must have the parameters of `policy.parameters()`. A `peft_config` must be the one with which the policy
    was attached (`bridge.attach(lora=peft_config)`): only its adapter is trained, in the server's slot.

    Raises:
        UsageError: `args` has a setting that has no effect here, several processes or GPUs, or a different device; or
            `processing_class` has different tokens than the server's model.
        IncompatibleVersionError: TRL is not installed, or in an unsupported version.
    """
    check_version()
    optimizer, scheduler = optimizers
    refuse_settings(policy, args, own_optimizer=optimizer is not None)
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            "the scheduler was made for a different optimizer, and would have no effect",
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
        "callbacks": [*callbacks, Fence(policy, args)],  # last, so that the others still see the gradients
    }


class Fence(TrainerCallback):  # type: ignore[misc]
    """Lets the trainer change the weights only inside the fence: in an optimizer step, or by loading a checkpoint."""

    def __init__(self, policy: Policy, args: Any) -> None:
        self._policy = policy
        self._args = args
        self._addresses = {parameter.data_ptr() for parameter in policy.model.parameters()}
        self._load = type(policy.model).load_state_dict
        self._pending: dict[str, Tensor] = {}
        """Weights of a checkpoint in several files, until the last file is read."""
        self._skipped = 0
        """Consecutive steps whose gradient was not finite."""
        policy.model.load_state_dict = self._load_inside
        if (adapter := policy.opened.adapter) is not None:
            adapter.peft_model.save_pretrained = self._save_adapter
            adapter.peft_model.load_adapter = self._load_adapter

    def on_init_end(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        """Refuse a trainer that was created with other settings, or with another model, than `for_trl` was.

        Raises:
            UsageError: the settings or the model differ.
        """
        if args is not self._args:
            raise UsageError(
                "GRPOTrainer has different args than bridge.for_trl",
                hint="GRPOTrainer(**for_trl(policy, args), args=args)",
            )
        self._refuse_moved(model)
        for module in self._policy.model.modules():
            if isinstance(module, LoraLayer):  # a reference adapter: its B is a copy that already contains the scaling
                module.scaling.update(dict.fromkeys(module.scaling, 1.0))

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Refuse a trainer that would train weights other than the server's.

        Raises:
            UsageError: a checkpoint lacks weights, or the trainer has parameters that are not the server's.
        """
        self._refuse_partial()
        self._refuse_moved(model)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Raise UsageError if the best checkpoint lacks weights."""
        self._refuse_partial()

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Take the step here, so that the trainer's own call of `step`, right after this, finds no gradients.

        With one call, instead of two before and after the trainer's, an error in between cannot leave the fence open. A
        step whose gradient is not finite is skipped, as in `bridge run`, so that one batch does not end training.

        Raises:
            GradientError: too many consecutive gradients are not finite.
        """
        try:
            self._policy.update(getattr(optimizer, "optimizer", optimizer))
        except GradientError as error:
            self._skipped += 1
            if self._skipped >= MAX_SKIPS:
                raise GradientError(
                    f"the gradients of {self._skipped} consecutive steps were not finite; they changed no weight",
                    hint="lower learning_rate, and train(resume_from_checkpoint=...)",
                ) from error
            optimizer.zero_grad()
            logger.warning(
                "a gradient was not finite, and its step was skipped: no weight was changed (%d consecutive; training"
                " ends after %d)", self._skipped, MAX_SKIPS,
            )  # fmt: skip
        else:
            self._skipped = 0

    def _load_inside(self, state_dict: Mapping[str, Tensor], *_: Any, **__: Any) -> Any:
        """Replace the model's `load_state_dict`, with which the trainer resumes and loads its best checkpoint.

        A checkpoint in several files is loaded once all are read, so that the server never mixes weights of two steps.
        """
        model = self._policy.model
        own = model.state_dict()
        misfit = next(
            (name for name, weight in state_dict.items() if name in own and weight.shape != own[name].shape), None
        )
        if misfit:
            self._pending.clear()
            raise UsageError(
                f"the checkpoint does not fit the model: {misfit} has shape {tuple(state_dict[misfit].shape)}, expected"
                f" {tuple(own[misfit].shape)}",
                hint="resume from a checkpoint of the served model",
            )
        self._pending |= state_dict
        if not self._missing():
            self._policy.publish(lambda: self._load(model, self._pending, strict=False))
            self._pending = {}
        return nn.modules.module._IncompatibleKeys([], [name for name in state_dict if name not in own])

    def _save_adapter(self, save_directory: str | Path, **_: Any) -> None:
        """Replace `save_pretrained` of the PEFT model, which would multiply B by the scaling a second time."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._policy.mode.save(folder)

    def _load_adapter(self, model_id: str | Path, *_: Any, **__: Any) -> Any:
        """Replace `load_adapter` of the PEFT model, with which the trainer resumes and loads its best checkpoint."""
        adapter = self._policy.opened.adapter
        assert adapter is not None, "this stands in for a method of an adapter's model"
        adapter.check(Path(model_id))  # before the server pauses
        self._policy.publish(lambda: adapter.load(Path(model_id)))
        return nn.modules.module._IncompatibleKeys([], [])

    def _missing(self) -> list[str]:
        """Return the weights that no file has contained so far, by the first name of tied ones."""
        model = self._policy.model
        names: dict[int, list[str]] = {}
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *stored_buffers(model).items()):
            names.setdefault(id(tensor), []).append(name)
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
                hint="pass neither peft_config nor a different model or device to GRPOTrainer; for an adapter:"
                " bridge.attach(lora=peft_config)",
            )


CALLS_OF_A_SEED = 2**24
"""Distance between the server's seeds for two consecutive seeds of TRL: more than any run has calls."""
CALLS_OF_A_TURN = 2**20
"""Distance between the seeds of two consecutive turns of a call."""
CHAT = [{"role": "user", "content": ""}]
"""Placeholder for the messages of a prompt that TRL renders itself, so that completions end as in a chat."""


class _Rollouts:
    """TRL's `rollout_func`: samples from the policy's server, also for TRL's loop that calls tools."""

    def __init__(self, policy: Policy, args: Any) -> None:
        self._policy = policy
        self._calls: count[int] | None = None
        self._turns = count(1)
        """Numbers the turns after tool results in the last call, each of which has its own seed."""
        self._first_seed = args.seed * CALLS_OF_A_SEED
        self._seed = self._first_seed
        """Seed of the last call."""
        self._template = args.chat_template_kwargs or {}
        self._max_tokens = args.max_completion_length
        self._parameters = {"temperature": args.temperature, **filters_of(args)}

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[list[Any]]]:
        """Return one completion for each prompt; TRL repeats a prompt once per requested completion.

        Shapes: lists of one list of token ids or log-probabilities per prompt.

        Raises:
            UsageError: a prompt has an image.
        """
        _refuse_media(prompts)
        self._calls = self._calls or count(trainer.state.global_step)  # a resumed trainer continues the count
        self._seed = self._first_seed + next(self._calls)
        self._turns = count(1)
        if trainer.tools:  # TRL renders and calls tools itself, and samples each next turn with this method
            prompts = [_rendered(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
            trainer._generate_single_turn = self._next_turn
        groups = self._sampled(prompts, self._seed, self._max_tokens)
        completions = [completion for group in groups for completion in group.completions]
        return {
            "prompt_ids": [[*group.prompt_token_ids] for group in groups for _ in group.completions],
            "completion_ids": [[*completion.token_ids] for completion in completions],
            "logprobs": [[*completion.logprobs] for completion in completions],
        }

    def _next_turn(
        self, prompt_ids: Sequence[Sequence[int]], images: Any = None, *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Replace `_generate_single_turn` of TRL's trainer, which samples the turn after tool results.

        A sequence close to the server's maximum length is sampled separately, and limited to its remaining tokens; TRL
        would truncate it.

        Raises:
            UsageError: a tool returned an image.
        """
        if images:
            raise _image_error("a tool returned an image")
        longest = self._policy.mode.max_model_len
        rooms = [
            self._max_tokens if longest is None else min(self._max_tokens, longest - len(ids)) for ids in prompt_ids
        ]
        token_ids: list[list[int]] = [[] for _ in prompt_ids]
        logprobs: list[list[float]] = [[] for _ in prompt_ids]
        for room in sorted({room for room in rooms if room > 0}):
            places = [place for place, own in enumerate(rooms) if own == room]
            seed = self._seed + next(self._turns) * CALLS_OF_A_TURN
            groups = self._sampled([_rendered(prompt_ids[place]) for place in places], seed, room)
            completions = [completion for group in groups for completion in group.completions]
            for place, completion in zip(places, completions, strict=True):
                token_ids[place], logprobs[place] = [*completion.token_ids], [*completion.logprobs]
        return token_ids, logprobs

    def _sampled(self, prompts: Sequence[Any], seed: int, max_tokens: int) -> list[Group]:
        """Return one completion for each prompt, with consecutive equal prompts in one group."""
        runs = [(prompt, len([*same])) for prompt, same in groupby(prompts)]
        if len({length for _, length in runs}) > 1:
            runs = [(prompt, 1) for prompt in prompts]
        length = runs[0][1]
        return self._policy.sample(
            [prompt for prompt, _ in runs], n=length, seed=seed, chat_template_kwargs=self._template,
            max_tokens=max_tokens, **self._parameters,
        )  # fmt: skip


def _rendered(ids: Sequence[int]) -> Problem:
    """Return a chat prompt whose messages are already rendered as these token ids."""
    return {"prompt": CHAT, "prompt_token_ids": [*ids]}


def _refuse_media(prompts: Sequence[Any]) -> None:
    """Refuse images, which the server would not get; no callback could refuse them.

    Raises:
        UsageError: a prompt has an image.
    """
    messages = chain.from_iterable(prompt for prompt in prompts if not isinstance(prompt, str))
    contents = (message.get("content") for message in messages)
    parts = chain.from_iterable(content for content in contents if isinstance(content, list))
    if kind := next((part.get("type") for part in parts if part.get("type") != "text"), None):
        raise _image_error(f"a prompt has a part of the type {kind!r}")


def _image_error(what: str) -> UsageError:
    return UsageError(
        f"{what}, but bridge.for_trl samples from text only",
        hint="leave images and other media out of the data set and of what tools return",
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
    """Set the model's EOS tokens to those that end completions: TRL counts any other completion as truncated.

    Some models list the end-of-turn token only in `generation_config.json`, and base models only in the chat template.
    """
    own = policy.model.generation_config
    with suppress(OSError):  # the model has no generation_config.json
        served = GenerationConfig.from_pretrained(policy.config.model_name)
        own.eos_token_id = own.eos_token_id if served.eos_token_id is None else served.eos_token_id
    if vocabulary.end_ids:
        known = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        own.eos_token_id = [*(token for token in known if token is not None), *vocabulary.end_ids]
