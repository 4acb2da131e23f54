"""TRL's trainers on one copy of the weights: four changed lines of a stock script, and no weight sync.

    with bridge.attach() as policy:
        trainer = GRPOTrainer(**bridge.for_trl(policy, args), args=args, reward_funcs=..., train_dataset=...)

TRL keeps its loss, rewards, tools, schedules, callbacks and logs. The model's parameters are vLLM's; the trainer
generates with `ServerGeneration`, which takes the place of TRL's `VLLMGeneration` and samples from that server; and the
weights change only inside the fence, in a step of the optimizer or when a checkpoint is loaded.

Not covered, and refused by name: trainers that do not generate with `VLLMGeneration`, several processes, images.
"""

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
from bridge.trl_settings import (
    check_version,
    filters_of,
    refuse_other_adapter,
    refuse_settings,
    second_model,
    tokenizer_of,
    trainer_of,
    use_vllm,
)
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
    """Return arguments for a TRL trainer: model, tokenizer, optimizer, and the callback with the fence.

    `args` is the trainer's config: `GRPOConfig`, `RLOOConfig`, `DistillationConfig`, `SDFTConfig`, `SDPOConfig`,
    `GOLDConfig`, `IWOPDConfig`, or one derived from them. Its learning rate, weight decay, betas and epsilon go to
    Bridge's AdamW, which loses no update to bf16, and `max_completion_length`, `temperature`, `top_p`, `top_k` and
    `min_p` to the server. The loss is TRL's, over the whole vocabulary, whatever filters the server samples with.

    `args.use_vllm` is set to True, so that the trainer generates with vLLM, which is the policy's server. If it was
    False, `GRPOConfig`'s `vllm_importance_sampling_correction` is set to False: it takes a third pass. With
    `use_vllm=True`, the settings of the correction have TRL's meaning.

    Pass your own `callbacks`, `optimizers` and `processing_class` here, not to the trainer, where Python would report
    "got multiple values for keyword argument": they are returned together with Bridge's. `optimizers` is a pair as in
    TRL: None as the optimizer means Bridge's AdamW, None as the scheduler means the one in `args`. Your own optimizer
    must have the parameters of `policy.parameters()`. A `peft_config` must be the one with which the policy was
    attached (`bridge.attach(lora=peft_config)`): only its adapter is trained, in the server's slot.

    Raises:
        UsageError: `args` is of a trainer that does not generate with `VLLMGeneration`, or has a setting that has no
            effect here, several processes or GPUs, or a different device; or `processing_class` has different tokens
            than the server's model.
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
    if policy.version and policy.opened.adapter is None and (second := second_model(args)):
        logger.warning(
            "the server's weights are at version %d, but TRL will load %s from %s, whose weights are of version 0",
            policy.version, second, policy.model_name,
        )  # fmt: skip
    use_vllm(args)
    fence = Fence(policy, args, ServerGeneration(policy, args))
    return {
        "model": policy.model if policy.opened.adapter is None else policy.opened.adapter.peft_model,
        "processing_class": tokenizer,
        "optimizers": (optimizer or _adamw(policy, args), scheduler),
        "callbacks": [*callbacks, fence],  # last, so that the others still see the gradients
    }


class Fence(TrainerCallback):  # type: ignore[misc]
    """Lets the trainer change the weights only inside the fence: in an optimizer step, or by loading a checkpoint."""

    def __init__(self, policy: Policy, args: Any, generation: "ServerGeneration") -> None:
        self._policy = policy
        self._args = args
        self._generation = generation
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

        Otherwise the trainer, which creates its `VLLMGeneration` right after this, gets the policy's server instead.

        Raises:
            UsageError: the settings or the model differ.
        """
        if args is not self._args:
            raise UsageError(
                "the trainer has different args than bridge.for_trl",
                hint=f"{trainer_of(self._args)}(**for_trl(policy, args), args=args)",
            )
        self._refuse_moved(model)
        self._use_one_scaling()
        self._generation.replace_next()

    def on_train_begin(self, _: Any, state: Any, *__: Any, model: Any = None, **___: Any) -> None:
        """Refuse a trainer that would train weights other than the server's, or sample elsewhere.

        Raises:
            UsageError: a checkpoint lacks weights, the trainer has parameters that are not the server's, or it did not
                create a `VLLMGeneration`.
        """
        self._refuse_partial()
        self._refuse_moved(model)
        self._generation.refuse_unused()
        self._generation.resume_at(state.global_step)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._use_one_scaling()  # of a teacher's adapter, which self-distillation adds when training begins

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

    def _use_one_scaling(self) -> None:
        """Let PEFT scale no adapter: B contains the scaling, also in copies as a reference's or a teacher's adapter."""
        if self._policy.opened.adapter is None:
            return
        for module in self._policy.model.modules():
            if isinstance(module, LoraLayer):
                module.scaling.update(dict.fromkeys(module.scaling, 1.0))

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
                hint=f"pass neither peft_config nor a different model or device to {trainer_of(self._args)}; for an"
                " adapter: bridge.attach(lora=peft_config)",
            )


CALLS_OF_A_SEED = 2**24
"""Distance between the server's seeds for two consecutive seeds of TRL: more than any run has calls."""
CALLS_OF_A_TURN = 2**20
"""Distance between the seeds of two consecutive calls with the same weights, such as the turns of a conversation."""
CHAT = [{"role": "user", "content": ""}]
"""Placeholder for the messages of a prompt that TRL renders itself, so that completions end as in a chat."""
GENERATION = "trl.generation.vllm_generation"
STAND_IN_FOR = "VLLMGeneration"


class ServerGeneration:
    """Stands in for TRL's `VLLMGeneration`: samples from the policy's server, which already has the newest weights.

    Token ids go in and come out, so that TRL trains on exactly what the server sampled.
    """

    def __init__(self, policy: Policy, args: Any) -> None:
        self._policy = policy
        self._args = args
        self._first_seed = args.seed * CALLS_OF_A_SEED
        self._round = -1
        """Number of times that the trainer has asked for new weights, from the step at which training began."""
        self._turns = 0
        """Calls in this round, each of which has its own seed."""
        self._max_tokens = args.max_completion_length
        self._parameters = {"temperature": args.temperature, **filters_of(args)}
        self._replaced: tuple[list[ModuleType], Any] | None = None
        """TRL's modules that hold its class, while this object takes its place, and the class."""
        self._is_used = False
        adapter = policy.opened.adapter
        self._model = policy.model if adapter is None else adapter.peft_model
        self._longest = sys.maxsize if policy.max_model_len is None else policy.max_model_len
        model_config = SimpleNamespace(max_model_len=self._longest)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))
        """What the trainers read of vLLM's `LLM`: the longest sequence, beyond which tool results are dropped."""

    def replace_next(self) -> None:
        """Let TRL's modules create this object instead of the next `VLLMGeneration`."""
        original = getattr(importlib.import_module(GENERATION), STAND_IN_FOR)
        modules = [*sys.modules.values()]
        holders = [module for module in modules if getattr(module, "__dict__", {}).get(STAND_IN_FOR) is original]

        def created(model: Any, **settings: Any) -> Any:
            self._restore()
            if model is not self._model:  # another trainer's, after this one's constructor failed
                return original(model=model, **settings)
            self._is_used = True
            return self

        for module in holders:
            setattr(module, STAND_IN_FOR, created)
        self._replaced = holders, original

    def _restore(self) -> None:
        if self._replaced is not None:
            holders, original = self._replaced
            for module in holders:
                setattr(module, STAND_IN_FOR, original)
            self._replaced = None

    def refuse_unused(self) -> None:
        """Refuse a trainer that did not create its `VLLMGeneration`, and would generate in another way.

        Raises:
            UsageError: it did not.
        """
        self._restore()
        if not self._is_used:
            raise UsageError(
                "the trainer does not generate with TRL's VLLMGeneration, so that it would not sample from the server",
                hint=f"use TRL's {trainer_of(self._args)}, without changes to how it generates",
            )

    def resume_at(self, step: int) -> None:
        """Continue the seeds at `step`, so that a resumed run samples what an uninterrupted one samples."""
        self._round = max(self._round, step - 1)

    def sync_weights(self) -> None:
        """Copy nothing: the fence published the last step's weights, in the memory that the server generates from."""
        self._round += 1
        self._turns = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int = 1,  # noqa: ARG002 - TRL repeats a prompt that often
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Return prompts, completions, and log-probabilities and ids of the sampled tokens, one entry for each prompt.

        A completion ends at the server's maximum length.

        Raises:
            UsageError: there are images, or a prompt is too long for the server.
        """
        if images is not None and any(images):
            raise UsageError(
                "a prompt or a tool's result has an image, but bridge.for_trl samples from text only",
                hint="leave images and other media out of the data set and of what tools return",
            )
        ids = [[*prompt] for prompt in prompts]
        rooms = [max(1, min(self._max_tokens, self._longest - len(prompt))) for prompt in ids]
        completions: dict[int, Any] = {}
        with profiler or nullcontext():
            for room in sorted({*rooms}):
                places = [place for place, own in enumerate(rooms) if own == room]
                seed = self._first_seed + max(self._round, 0) + self._turns * CALLS_OF_A_TURN
                self._turns += 1
                groups = self._sampled([ids[place] for place in places], seed, room)
                sampled = [completion for group in groups for completion in group.completions]
                completions |= zip(places, sampled, strict=True)
        ordered = [completions[place] for place in range(len(ids))]
        return (
            ids,
            [[*completion.token_ids] for completion in ordered],
            [[[logprob] for logprob in completion.logprobs] for completion in ordered],
            [[[token] for token in completion.token_ids] for completion in ordered],
        )

    def _sampled(self, prompts: Sequence[list[int]], seed: int, max_tokens: int) -> list[Group]:
        """Return one completion for each prompt, with consecutive equal prompts in one group."""
        runs = [(prompt, len([*same])) for prompt, same in groupby(prompts)]
        if len({length for _, length in runs}) > 1:
            runs = [(prompt, 1) for prompt in prompts]
        problems: list[Problem] = [{"prompt": CHAT, "prompt_token_ids": prompt} for prompt, _ in runs]
        length = runs[0][1]
        return self._policy.sample(problems, n=length, seed=seed, max_tokens=max_tokens, **self._parameters)


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
