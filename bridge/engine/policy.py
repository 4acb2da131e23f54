"""The model of a live server, and everything that trains it: sample, forward and backward, step, save and load.

    policy.sample(prompts)                       completions, with log-probabilities and versions
    policy.forward_backward(samples, loss)       add gradients; returns log-probs in the caller's order
    policy.optim_step()                          the fence: pause, write, publish
    policy.save_state(folder), load_state        weights, optimizer and random state

The parameters are the server's memory: nothing is copied, and the server generates with the new weights from the next
token on. `bridge run` is a loop over a policy; `bridge.attach` and `bridge.serve` return one. With several ranks, each
has a policy, and all ranks must call its methods.

Threads may share a policy: calls that compute with, change or copy the weights wait for each other, and so do calls of
`sample`. Such a call must not be nested in another, for example in an optimizer hook or a callback.

Not covered: how weights reach the server (`bridge/modes`), passes (`bridge/passes`), losses (`bridge/learn`).
"""

import asyncio
import difflib
import logging
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self, get_args

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bridge.checkpoints import checkpoint, optimizer_state
from bridge.checkpoints.checkpoint import Progress, SavedCheckpoint
from bridge.checks import Check, one_copy_proof
from bridge.config import OWN_WEIGHTS, LossConfig, SamplingConfig, TrainConfig
from bridge.config.optimizers import OptimizerName
from bridge.core import atomic_folder, paths
from bridge.core.concurrency import gather_or_cancel
from bridge.core.foreign_code import LONE_SURROGATE, described
from bridge.core.interrupt import deferred_interrupt, taken
from bridge.core.logs import warn_once
from bridge.engine.gradients import Given, Gradients, Loss, Passes, checked, refuse_other_logprobs
from bridge.engine.held_adapter import HeldAdapter, Kept, put_in, take_gradients
from bridge.engine.make_trainable import prepared_of, trainable_of
from bridge.engine.run_folder import RunFolder
from bridge.engine.sharing import shares_of
from bridge.engine.teacher import RemoteTeacher
from bridge.engine.trainable import Trainable
from bridge.errors import AttachError, GradientError, RewardError, UsageError
from bridge.modes import WAYS
from bridge.modes.lora import AdapterSnapshot, LoraDisk, LoraOnRequest
from bridge.modes.mode import Mode, RunContext
from bridge.modes.shared_vllm import PatchedServer
from bridge.optimizers import factory
from bridge.optimizers.in_place import EPS, InPlaceOptimizer, check_hyperparameters, clip_gradients
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.rollouts import chat_template, problems
from bridge.rollouts.distribution import filters
from bridge.rollouts.encoded_prompts import Encoded, Prompts
from bridge.rollouts.sampler import Sampler, fit_completions, seed_of
from bridge.rollouts.servers import Server
from bridge.rollouts.vocabulary import Vocabulary
from bridge.scoring.score import as_reward, limit_note
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update, Window
from bridge.server.protocol import InFlight
from bridge.types import Completion, Group, Message, Problem
from bridge.weights import skeleton
from bridge.weights.adapter import Adapter, AdapterShape
from bridge.weights.attach import OpenedModel

logger = logging.getLogger(__name__)

Score = Callable[[Problem, str], float]
"""Returns the reward of a completion's text."""
Prompt = str | Sequence[Message] | Sequence[int] | Problem
"""Text, chat messages, token ids, or a dictionary with text or messages as `prompt`."""
CHANGEABLE = {"group_size", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop"}
"""Fields of `SamplingConfig` that a call of `sample` may override."""
BEYOND_TRAINING = {"temperature": 0}
"""Values that a call of `sample` may use although no run trains with them: greedy tokens."""
PER_CALL = {"n": "group_size", "max_tokens": "max_new_tokens"}
"""vLLM's names of parameters that Bridge names differently."""
MOST_IDS = 2**31
"""Token ids must be smaller than this: no vocabulary is larger, and tokenizers fail on larger ids."""
NUM_REMARKED = 64
"""Number of prompts of a call of `sample` that are looked at for remarks."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of `optim_step`."""

    times: FenceTimes
    grad_norm: float
    """Global gradient norm before clipping."""
    changed_weight_share: float
    """Share of the trained weights whose stored value changed."""

    @property
    def version(self) -> int:
        """The version of the weights that this step published."""
        return self.times.version


@dataclass
class _Sleep:
    """A fence that is open between calls because passes use the memory of the server's KV cache."""

    fence: ExitStack
    preparing: ExitStack
    window: Window


class Policy:
    """A live server's model, attached to this process: one copy of the weights. Created by `attach` and `serve`.

    It is a context manager; on exit it returns the server to other trainers, with the weights published last.
    """

    model: PreTrainedModel
    """The transformers model, in evaluation mode. Its parameters are the server's: change them only inside the fence.

    The first pass gives it attention for packed sequences; from then on it refuses padding."""

    def __init__(
        self, config: TrainConfig, context: RunContext, *, run_dir: Path | None = None, held: ExitStack | None = None
    ) -> None:
        """Connect to the server that `config` names; call `open` next. The stack `held` is closed with the policy."""
        self._held = held or ExitStack()
        self._reads_only = context.reads_only
        self._run_dir = run_dir
        self.ranks = context.ranks
        self._num_calls = 0
        """Calls of `sample` that drew their own seed."""
        self._has_remarked = False
        """Whether a call of `sample` with chat messages has logged what is unusual about them and the tokenizer."""
        self._num_passes = 0
        """Calls of `forward_backward` since the last step."""
        self._closed = False
        self._pid = os.getpid()
        self._turn = threading.Lock()
        """Held by the call that computes with, changes or copies the weights."""
        self._current: tuple[int, str] | None = None
        """The thread and the name of that call."""
        self._failed = ""
        """The call that failed inside the fence and left the server paused; empty: none."""
        self._last_optimizer: torch.optim.Optimizer | None = None
        """The optimizer that `update` stepped last."""
        self._sleep: _Sleep | None = None
        """The fence that is open between two calls; None: there is none."""
        self._opened: OpenedModel | None = None
        self._adapter: HeldAdapter | None = None
        """The adapter in the model, if several take turns in it."""
        way: type[Mode] = LoraOnRequest if context.several_adapters else WAYS[config.way]
        self.mode = self.ranks.run_on_all(lambda: way(config, context))
        """The mode: how weights reach the server."""
        try:
            lengths = [length for length in self.ranks.all_gather_object(self.mode.max_model_len) if length is not None]
            sampling = fit_completions(config.sampling, min(lengths, default=None))
            self.config = config.model_copy(update={"sampling": sampling})
            """The choices, with completions that fit the server's sequences."""
        except BaseException:
            self.mode.close()
            raise
        if not self._reads_only and self.mode.is_paused_by_us:
            self._failed = "an earlier policy of this process"

    def open(self) -> Self:
        """Attach to the server's weights without copying them. Call it once.

        Raises:
            AttachError: the weights are half-written.
            UnsupportedModelError: the model cannot be trained in place.
        """
        try:
            self._opened = self.mode.open()
            self.model = self._opened.model
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None and self._pid == os.getpid() and self.ranks.is_rank_zero:
                self._run_folder.end()
        finally:
            self.close()

    def close(self) -> None:
        """Return the server to other trainers, and close the connections; a second call does nothing.

        It waits for another thread's call that computes with the weights, and cancels another thread's `sample`. In a
        forked process, it closes only that process's copies of the connections.
        """
        if self._closed:
            return
        if self._pid == os.getpid():
            with self._alone("close"):
                self._wake(UsageError("the policy was closed before optim_step", hint="call optim_step, or drop"))
                self._closed = True
        self._closed = True
        try:
            if "_sampler" in vars(self):
                self._sampler.close()
        finally:
            self.mode.close()
            if self._pid == os.getpid():
                self._held.close()

    # Properties.

    @property
    def opened(self) -> OpenedModel:
        """The model to train, and the location of its weights."""
        assert self._opened is not None, "call open first"
        return self._opened

    @property
    def device(self) -> torch.device:
        return self.opened.device

    @property
    def version(self) -> int:
        """Number of updates published since the server loaded its weights."""
        return self.mode.version

    @property
    def sampling(self) -> SamplingConfig:
        """Default parameters of `sample`: `group_size`, `max_new_tokens`, `temperature` and others."""
        return self.config.sampling

    @property
    def endpoint(self) -> Endpoint:
        """The server and model that completions are sampled from."""
        return self.mode.endpoint

    @property
    def model_name(self) -> str:
        """The model that the server was started with: a folder, or a name of the hub."""
        return self.config.model_name

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence that the server takes, in tokens; None: it does not report one."""
        return self.mode.max_model_len

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.endpoint.url

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return skeleton.tokenizer(self.config.model_name)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use a different tokenizer with the same tokens, for example one with a different chat template."""
        self.tokenizer = tokenizer
        if "_sampler" in vars(self):
            self._sampler.close()
        for name in ("_vocabulary", "_sampler"):
            vars(self).pop(name, None)
        self._has_remarked = False

    @cached_property
    def prepared(self) -> PreparedModel:
        """The model prepared for training passes; the first use prepares it, and checks that packing is exact.

        Raises:
            UnsupportedModelError: the model cannot be trained as configured; it is left unchanged.
        """
        made = prepared_of(
            self.config.compute, self.opened,
            max_model_len=self.mode.max_model_len, experts=self.mode.replayed_experts, ranks=self.ranks,
        )  # fmt: skip
        made.hooks.append(self.model.register_forward_pre_hook(_refuse_padding, with_kwargs=True))
        return made

    @cached_property
    def trainable(self) -> Trainable:
        """The model with the optimizer of `config` and its memory budget, created at the first use.

        Raises:
            UsageError: the optimizer does not fit into memory, or the policy is read-only.
            UnsupportedModelError: the model cannot be trained as configured.
        """
        self._refuse_to_write()
        config = self.config
        made = trainable_of(
            self.opened, self.prepared,
            compute=config.compute, optimizer=config.optimizer, lr=config.learning_rate, loss=config.loss,
            sampling=config.sampling, num_groups=config.groups_per_batch, replicas=config.replicas,
            hosts=config.hosts, seed=config.seed, has_adapter=config.mode == "lora_only", model_name=config.model_name,
            max_model_len=self.mode.max_model_len, ranks=self.ranks,
        )  # fmt: skip
        if isinstance(made.teacher, RemoteTeacher):
            self._held.callback(made.teacher.close)
        if isinstance(self.mode, LoraOnRequest) and self.opened.adapter is not None:
            made.rescale(self.opened.adapter.lr_factors())
        return made

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the trained parameters for an optimizer; tied parameters appear once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    # Several adapters.

    @property
    def adapter(self) -> HeldAdapter:
        """The adapter that calls of this policy sample, train, save and load. UsageError: there are not several."""
        self._adapters()
        assert self._adapter is not None
        return self._adapter

    def new_adapter(
        self, *, r: int | None = None, alpha: float | None = None, seed: int = 0, modules: Iterable[str] | None = None
    ) -> HeldAdapter:
        """Start another adapter on the base, and use it: A random from `seed`, B zero, and a new optimizer state.

        Its rank is at most that of the policy's `LoraConfig`, whose `r` and `alpha` are the defaults. `modules` are the
        names of the modules that it adapts; by default all that have an adapter.

        Raises:
            UsageError: the policy was not attached with `several_adapters`, the rank is too high, or a module has no
                adapter.
        """
        self._refuse_to_write()
        with self._alone("new_adapter"):
            mode, adapter = self._adapters()
            lora = self.config.lora
            shape = AdapterShape(
                r=lora.r if r is None else int(r),
                alpha=lora.alpha if alpha is None else float(alpha),
                modules=frozenset(adapter.modules if modules is None else modules),
            )
            _refuse_shape(shape, adapter)
            self._keep_adapter()
            adapter.fill(shape, seed=seed)
            self.trainable.optimizer.reset({})
            self.trainable.rescale(adapter.lr_factors())
            mode.served = None
            self._adapter = HeldAdapter(shape)
            return self._adapter

    def use(self, adapter: HeldAdapter) -> None:
        """Sample, train, save and load this adapter from now on. Gradients without a step stay with their adapter."""
        self._refuse_to_write()
        with self._alone("use"):
            mode, matrices = self._adapters()
            if adapter is self._adapter:
                return
            kept = adapter.kept
            if kept is None:
                raise UsageError("policy.use: this adapter belongs to a different policy", hint="policy.new_adapter()")
            self._keep_adapter()
            matrices.shape = adapter.shape
            put_in(kept, self.trainable)
            self.trainable.rescale(matrices.lr_factors())
            self._num_passes = kept.num_passes
            mode.served = kept.served if kept.starts == mode.num_starts else None
            mode.is_changed = kept.is_changed
            adapter.kept = None
            self._adapter = adapter

    def snapshot(self, name: str) -> AdapterSnapshot:
        """Copy the current state of the adapter in use, to be sampled later.

        A separate thread writes it to a temporary folder, without an fsync; the folder is removed with the policy.
        """
        with self._alone("snapshot"):
            mode, _ = self._adapters()
            return mode.snapshot(name)

    def serve_snapshot(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Let the server serve a snapshot as `name`, which must be new. Any thread may call this.

        It is written into a slot that no request uses, which this call waits for; what the slot held is not served any
        more.

        Raises:
            UsageError: the snapshot could not be saved, or does not fit into a slot.
            ServerUnreachableError: the server does not answer.
        """
        mode, _ = self._adapters()
        mode.serve_snapshot(name, snapshot)

    def unload_snapshot(self, name: str) -> None:
        """Stop serving a snapshot, if it is served. Any thread may call this."""
        mode, _ = self._adapters()
        mode.unload(name)

    def restart_server(self) -> None:
        """Start the server again after it has died. Adapters are not lost: they are in this process, unlike the base.

        Raises:
            UsageError: this process did not start the server, or all weights are trained, which the server held.
            ServerUnreachableError: it does not start.
        """
        with self._alone("restart_server"):
            mode, _ = self._adapters()
            mode.restart()

    def _adapters(self) -> tuple[LoraOnRequest, Adapter]:
        """Return the mode and the matrices of several adapters."""
        adapter = self.opened.adapter
        if not isinstance(self.mode, LoraOnRequest) or adapter is None:
            raise UsageError(
                "this policy does not train several adapters",
                hint="bridge.attach(lora=bridge.LoraConfig(...), several_adapters=True)",
            )
        if self._adapter is None:
            self._adapter = HeldAdapter(adapter.shape)
        return self.mode, adapter

    def _keep_adapter(self) -> None:
        """Copy the adapter in use out of the model, for another one to take its place."""
        mode, _ = self._adapters()
        assert self._adapter is not None
        parameters = [*self.trainable.weights.values()]
        self._adapter.kept = Kept(
            values=[parameter.detach().clone() for parameter in parameters],
            gradients=take_gradients(parameters),
            state=self.trainable.optimizer.kept_state(),
            num_passes=self._num_passes,
            served=mode.served,
            is_changed=mode.is_changed,
            starts=mode.num_starts,
        )
        self._num_passes = 0

    # Sampling.

    def sample(
        self,
        prompts: Sequence[Prompt],
        score: Score | None = None,
        *,
        seed: int | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        prompt_logprobs: bool = False,
        **parameters: Any,
    ) -> list[Group]:
        """Sample completions of each prompt, with log-probabilities and versions.

        A prompt is text, chat messages, token ids, or a dictionary with text or messages as `prompt` and any other
        fields that `score` needs. `score(problem, text)` runs in this process and returns a completion's reward; by
        default rewards are 0. The same `seed` samples the same completions from the same weights; by default each call
        uses a new seed. `chat_template_kwargs` are passed to the model's chat template.

        `parameters` override those of `sampling` for this call, under its names or vLLM's: `n`, `max_tokens`,
        `temperature`, `top_p`, `top_k`, `min_p`, `stop`. Training passes do not use these overrides: they compute with
        the temperature and the filters of `sampling`, so train only on completions that were sampled with those.

        With `prompt_logprobs` each completion has the log-probabilities of the prompt's tokens, at temperature 1. The
        server then recomputes the prompt for each completion, so use `n=1, max_tokens=1` to score a text.

        Raises:
            UsageError: `prompts` is a single prompt, a dictionary has no `prompt`, a parameter is unknown, the server
                rejects a request (for example because a prompt is too long), or the call is nested in one that changes
                the weights.
            AttachError: the weights are half-written.
            RewardError: a prompt cannot be encoded, or a reward is not a finite number.
            ServerUnreachableError: the server does not answer.
        """
        request = self._request(prompts, score, seed, chat_template_kwargs, prompt_logprobs, parameters)
        with self._run_folder.sampling():
            return request.joined(self.ranks.run_and_gather(lambda: self._sampled(request, score)))

    def _sampled(self, request: "_Request", score: Score | None) -> dict[int, Group]:
        """Sample and score this replica's prompts, and return their groups by index in the call."""
        try:
            sampled = self._sampler.loop.run(request.sampled(self._sampler))
        except asyncio.CancelledError:
            self._refuse_misplaced("sample")  # another thread may have closed the policy
            self._refuse_half_written("sample")  # another thread may have failed inside the fence
            raise
        return request.scored(sampled, score)

    async def sample_async(
        self,
        prompts: Sequence[Prompt],
        score: Score | None = None,
        *,
        seed: int | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        prompt_logprobs: bool = False,
        **parameters: Any,
    ) -> list[Group]:
        """Sample as `sample` does, without blocking the event loop; several calls may run concurrently.

        Cancelling it cancels its requests. `score` is called in the event loop's thread. Only for a single rank.
        """
        self._refuse_misplaced("sample_async")  # check in this thread; another one samples below
        self._refuse_several_ranks("sample_async", "policy.sample")
        request = await asyncio.to_thread(
            self._request, prompts, score, seed, chat_template_kwargs, prompt_logprobs, parameters
        )
        try:
            sampled = await self._sampler.loop.run_async(request.sampled(self._sampler))
        except asyncio.CancelledError:
            if not self._closed and not self._failed:
                raise
            self._refuse_misplaced("sample_async")
            self._refuse_half_written("sample_async")
            raise
        return request.joined([request.scored(sampled, score)])

    def _request(
        self,
        prompts: Sequence[Prompt],
        score: Score | None,
        seed: int | None,
        chat_template_kwargs: Mapping[str, Any],
        prompt_logprobs: bool,
        parameters: Mapping[str, Any],
    ) -> "_Request":
        _refuse_arguments(prompts, score, seed, chat_template_kwargs, prompt_logprobs)
        prompts = prompts if isinstance(prompts, str | Mapping) else [*prompts]  # any iterable, consumed once
        problems.check_prompts(prompts)
        if any(isinstance(prompt, Integral) for prompt in prompts):
            raise UsageError(
                f"prompts is a single prompt of token ids, {str(prompts)[:80]}, expected a list of prompts",
                hint="policy.sample([ids])",
            )
        whole = [self._problem(prompt) for prompt in prompts]
        source = chat_template.applied(self.tokenizer.chat_template, has_tools="tools" in chat_template_kwargs)
        if unused := ", ".join(chat_template.unused_arguments(chat_template_kwargs, source)):
            warn_once(logger, f"chat_template_kwargs has no effect: the model's chat template does not use {unused}")
        named = self.tokenizer.chat_template
        if unseen := ", ".join(chat_template.unseen_columns(named, whole, chat_template_kwargs)):
            warn_once(
                logger,
                f"the model does not see {unseen} of the prompts: expected a list of objects, chat messages, and a chat"
                " template that uses it",
            )
        encoder = Prompts(self.config.model_name, self.tokenizer, chat_template_kwargs, pass_size=self.ranks.pass_size)
        encoded = [
            Encoded(tuple(problem["prompt_token_ids"]), None)
            if "prompt_token_ids" in problem
            else encoder.encode(problem)
            for problem in whole
        ]
        taught = self._taught(whole, encoder)
        sampling = _changed(self.sampling, parameters)
        self._vocabulary.check_stop(sampling.stop)
        self._remark(whole, chat_template_kwargs)
        self._refuse_to_sample()
        if isinstance(self.mode, LoraOnRequest):
            with self._alone("sample"):  # a step of another thread would change what is saved
                self.mode.catch_up()
        first_seed = seed_of(0, self._num_calls) if seed is None else seed_of(int(seed) + 1, 0)
        self._num_calls += seed is None
        own = range(self.ranks.dp_rank, len(whole), self.ranks.dp_size) if self.ranks.is_tp_rank_zero else range(0)
        return _Request(whole, encoded, taught, sampling, first_seed, self.endpoint, own, prompt_logprobs, self.mode)

    def _taught(self, whole: Sequence[Problem], encoder: Prompts) -> list[tuple[int, ...]]:
        """Return each problem's prompt as the teacher sees it; empty for those without a hint, or without a teacher."""
        if self.config.loss.teacher is None:
            return [()] * len(whole)
        with_ids = next((one for one in whole if problems.has_hint(one) and "prompt_token_ids" in one), None)
        if with_ids is not None:
            raise UsageError(
                f"a problem has a hint, {described(with_ids['hint'])}, and its prompt as token ids, which no text can"
                " follow",
                hint="give the prompt as text or messages, or set teacher_prompt_token_ids of the samples",
            )
        return [encoder.encode(problems.hinted(one)).prompt if problems.has_hint(one) else () for one in whole]

    def _remark(self, problems: Sequence[Problem], template: Mapping[str, Any]) -> None:
        """Log what a run logs at its start about chat messages, for the first call that samples some."""
        chats = [
            problem
            for problem in problems
            if not isinstance(problem["prompt"], str) and "prompt_token_ids" not in problem
        ]
        if self._has_remarked or not chats:
            return
        self._has_remarked = True
        for line in self._vocabulary.remarks(self.tokenizer, self.config.model_name):
            logger.info(line)
        for line in chat_template.remarks(self.tokenizer, chats[:NUM_REMARKED], template):
            logger.info(line)

    def _problem(self, prompt: Prompt) -> Problem:
        problem: Any = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        has_ids = "prompt_token_ids" in problem
        given = problem["prompt_token_ids" if has_ids else "prompt"]
        entries = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
        is_text = isinstance(entries, str)
        is_list = isinstance(entries, Sequence) and not isinstance(entries, str | bytes)
        are_ids = is_list and all(isinstance(entry, Integral) and not isinstance(entry, bool) for entry in entries)
        if has_ids and not are_ids:
            raise UsageError(
                f"prompt_token_ids is {described(given)}, expected token ids",
                hint="leave it out, or give the ids of the model's tokenizer: [1, 2, 3]",
            )
        if not is_text and not is_list:
            raise UsageError(
                f"a prompt is {described(given)}, expected text, messages, token ids, or a dictionary with one of them",
                hint="policy.sample([text]), policy.sample([[1, 2, 3]])",
            )
        if is_text:
            return problem  # type: ignore[no-any-return]
        if not are_ids:  # messages: encoding refuses what they cannot be
            messages = [dict(entry) if isinstance(entry, Mapping) else entry for entry in entries]
            return problem | {"prompt": messages}  # type: ignore[no-any-return]
        ids = [int(entry) for entry in entries]
        if not ids:
            raise UsageError("a prompt has no token ids", hint="give it at least one")
        if min(ids) < 0 or max(ids) >= MOST_IDS:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise UsageError(f"a prompt has the token id {wrong}", hint="give it ids of the model's tokenizer")
        prompt = problem["prompt"] if has_ids else self.tokenizer.decode(ids)
        whole: Problem = problem | {"prompt": prompt, "prompt_token_ids": ids}
        return whole

    def encode(self, prompt: Prompt, completion: str, *, weight: float = 1.0) -> Sample:
        """Return a given text as a sample with an advantage of 1, for supervised training.

        The prompt is one for `sample`, without images. The completion ends like a sampled one: after chat messages with
        the token that ends a turn in the model's chat template, otherwise with the end-of-sequence token. Its
        log-probabilities are unknown (NaN).
        """
        self._refuse_closed("encode")
        _refuse_completion(completion)
        problems.check_prompts([prompt])
        problem = self._problem(prompt)
        ids = [*self.tokenizer(completion, add_special_tokens=False)["input_ids"]]
        end = self.tokenizer.eos_token_id
        if not isinstance(problem["prompt"], str) and self._vocabulary.end_id is not None:
            end = self._vocabulary.end_id
        ids += [end] if end is not None else []
        if not ids:
            raise UsageError(f"the completion {completion!r} has no tokens", hint="leave this completion out")
        prompt_ids = tuple(problem.get("prompt_token_ids") or problems.encode(self.tokenizer, problem))
        for name, given in (("prompt", prompt_ids), ("completion", ids)):
            self._vocabulary.check_ids(given, lambda name=name: f"the {name}")  # type: ignore[misc]
        return Sample(
            prompt_token_ids=prompt_ids,
            token_ids=tuple(ids),
            sampled_logprobs=(math.nan,) * len(ids),
            advantages=(1.0,) * len(ids),
            weight=weight,
        )

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.tokenizer, self.config.model_name)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.sampling, vocabulary=self._vocabulary)

    @cached_property
    def _run_folder(self) -> RunFolder:
        return RunFolder(self._run_dir, self.config.model_name, self.sampling)

    # Passes.

    def pack(self, samples: Sequence[Sample], *, max_tokens: int = 16_384) -> list[MicroBatch]:
        """Pack samples into micro-batches of at most `max_tokens`, without padding, with shared prompts if possible.

        A longer sample gets its own micro-batch. The first call checks that packing does not change what the model
        computes.

        Raises:
            UsageError: a sample is invalid.
            UnsupportedModelError: packing changes what the model computes.
        """
        self._refuse_closed("pack")
        samples = checked(samples, self.opened.model.get_input_embeddings())
        self.prepared.prove_images(samples)
        return packs(samples, max_tokens=max_tokens, device=self.device, share_prompts=self.prepared.shares_prompts)

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return this process's log-probabilities of the sampled tokens at the sampling temperature, and the entropies.

        Only the log-probabilities have a gradient. Both are in nats, and aligned with `batch.sampled_logprobs_N`. If
        this policy's `sampling` has `top_k`, `top_p` or `min_p`, both are over the tokens that these filters kept.

        Shapes: -> [N] float32, [N] float32.
        """
        self._refuse_closed("logprobs")
        if not filters(self.sampling):  # a teacher, for example, is not filtered as its student is
            batch = replace(batch, kept=None)
        return self.prepared.logprobs(batch, self.sampling.temperature)

    def forward(
        self, samples: Sequence[Sample], loss: Loss | LossConfig | None = None, *, are_own: bool = False
    ) -> Passes:
        """Compute the results of `forward_backward` without adding gradients; existing gradients stay.

        The server keeps the memory of its KV cache.

        Raises:
            UsageError: as `forward_backward`.
            UnsupportedModelError: as `forward_backward`.
        """
        self._refuse_to_write()
        with self._alone("forward"):
            self._refuse_half_written("forward")
            call = self._gradients(samples, loss, None, are_own=are_own)
            with deferred_interrupt():
                self.trainable.within_memory(call.measure, lambda: None)
                return call.passes(are_own=are_own)

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss: Loss | LossConfig | None = None,
        *,
        old_logprobs: Sequence[Tensor] | None = None,
        are_own: bool = False,
    ) -> Passes:
        """Add the gradients of a loss over these samples; `optim_step` takes the step.

        Passes are as large as memory allows. Gradients of many passes are summed in float32. Losses are summed, too;
        the weights of `samples` make the sum an average. `loss` is a function of the log-probabilities and their
        micro-batch, or a `LossConfig`, by default DAPO's. A `LossConfig` computes probability ratios relative to
        `old_logprobs`, one tensor per sample, in order; None: this is the batch's first update, and all ratios are 1.

        All ranks must call it: with the same samples, which are divided among them, or each with its own (`are_own`).

        Raises:
            UsageError: a sample is invalid, a sample does not fit into memory, the loss is not one number with a
                gradient, or the policy is read-only. A loss that is not finite is reported by `optim_step`.
            UnsupportedModelError: the model cannot be trained as configured.
        """
        self._refuse_to_write()
        with self._alone("forward_backward"):
            self._refuse_half_written("forward_backward")
            if self.trainable.choices.steps_in_backward:
                raise UsageError(
                    "with gradient_release each parameter is stepped in the backward pass",
                    hint="policy.train_step(samples, loss), or leave gradient_release out",
                )
            return self._add_gradients(self._gradients(samples, loss, old_logprobs, are_own=are_own), are_own=are_own)

    def _add_gradients(self, call: Gradients, *, are_own: bool, in_flight: InFlight | None = None) -> Passes:
        if self._num_passes and self.trainable.choices.gradient_release:
            raise UsageError(
                "with gradient_release the gradients of an update come from one call of forward_backward",
                hint="pass all samples in one call, or leave gradient_release out",
            )
        if self.trainable.choices.gradient_release:
            self._refuse_gradients_beside_release()
        try:
            # Keep this outside of the block that defers Ctrl-C, since it changes the handler until the step.
            self._sleep_if_short([one.sample for one in call.given], in_flight)
            with deferred_interrupt():
                is_first = not self._num_passes
                self.trainable.within_memory(lambda: call.add(is_first=is_first), self._forget)
                self._num_passes += 1
                return call.passes(are_own=are_own)
        except BaseException as error:
            self._drop_gradients()
            self._wake(error)
            raise

    def drop_gradients(self) -> None:
        """Drop the gradients that no step has used."""
        self._refuse_to_write()
        with self._alone("drop_gradients"):
            self._wake(UsageError("the gradients were dropped", hint="repeat the passes"))
            self._drop_gradients()

    def optim_step(
        self,
        *,
        lr: float | None = None,
        max_norm: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        in_flight: InFlight | None = None,
    ) -> Step:
        """Step the policy's optimizer with the gradients, inside the fence, publish the result, and drop the gradients.

        Gradients are first clipped to `max_norm`. `lr`, `betas`, `eps`, `weight_decay` and `max_norm` hold for this
        step, and default to the policy's `OptimizerConfig`. Requests in flight are kept, drained or aborted. Ctrl-C is
        deferred to the end of the step. An error also drops the gradients, unless it is about an argument; repeat the
        passes then.

        Raises:
            GradientError: the gradients' norm is not finite; nothing was changed.
            UsageError: there are no gradients, a number is out of range, or the policy is read-only.
            AttachError: the server refuses the fence, or the weights are half-written.
            ServerUnreachableError: the server does not answer.
        """
        self._refuse_to_write()
        with self._alone("optim_step"):
            self._refuse_half_written("optim_step")
            if not self._num_passes:
                raise UsageError(
                    "policy.optim_step: there are no gradients",
                    hint="call policy.forward_backward(samples) first",
                )
            _refuse_in_flight("optim_step", in_flight)
            if self._sleep is not None and in_flight is not None:
                raise UsageError(
                    f"in_flight={in_flight!r} has no effect: forward_backward has already paused the server, for the"
                    " memory of its KV cache",
                    hint="attach with publishing=bridge.PublishingConfig(in_flight=...), or call train_step",
                )
            self.trainable.set_step(lr, max_norm, betas, eps, weight_decay)
            return self._take_step("optim_step", in_flight)

    def _take_step(self, call: str, in_flight: InFlight | None) -> Step:
        with deferred_interrupt():  # else a loop that continues after Ctrl-C would add to applied gradients
            try:
                norm = self.trainable.exchange()
                self._refuse_infinite(norm)
                with self._window(call, Update(in_flight=in_flight)) as window:
                    self.trainable.step(norm)
            except BaseException as error:  # repeated passes would add the same gradients again
                self._drop_gradients()
                self._wake(error)
                raise
            return self._stepped(window, norm)

    def train_step(
        self,
        samples: Sequence[Sample],
        loss: Loss | LossConfig | None = None,
        *,
        old_logprobs: Sequence[Tensor] | None = None,
        are_own: bool = False,
        lr: float | None = None,
        max_norm: float | None = None,
        in_flight: InFlight | None = None,
    ) -> tuple[Passes, Step]:
        """Run `forward_backward` and `optim_step` as one call, with the same arguments and errors.

        No other thread's call can come between the two. With gradient release, both are one backward pass inside the
        fence.
        """
        self._refuse_to_write()
        with self._alone("train_step"):
            self._refuse_half_written("train_step")
            _refuse_in_flight("train_step", in_flight)
            trainable = self.trainable
            trainable.set_step(lr, max_norm)
            call = self._gradients(samples, loss, old_logprobs, are_own=are_own)
            if not trainable.choices.steps_in_backward:
                passes = self._add_gradients(call, are_own=are_own, in_flight=in_flight)
                return passes, self._take_step("train_step", in_flight)
            with deferred_interrupt():
                self._refuse_gradients_beside_release()
                sleeps = self._wants_sleep([one.sample for one in call.given])
                with self._window("train_step", Update(in_flight=in_flight, sleep=sleeps)) as window:
                    with window.preparing():  # the loss may raise before anything is written
                        self.ranks.run_on_all(call.pack_for_one_pass)
                        losses = call.losses()
                    norm = trainable.step_in_backward(lambda: losses)
                    if math.isfinite(norm):
                        trainable.step(norm)
                self._drop_gradients()
                self._refuse_infinite(norm)
                return call.passes(are_own=are_own), self._stepped(window, norm)

    def optimizer(
        self,
        name: OptimizerName = "adamw",
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] | None = None,
        eps: float = EPS,
        seed: int = 0,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    ) -> InPlaceOptimizer:
        """Return Bridge's AdamW for `update`: it updates bf16 weights in place, and loses no update to rounding.

        `adamw` stores the extra bits of a float32 master copy. torch's optimizers lose updates that are smaller than
        half a bf16 step, which at the learning rates of RL are most of them. The state is allocated in the first
        `update`, before the fence. `params` are the parameters to train, in the forms that torch's optimizers accept,
        for example groups with separate `weight_decay`; by default all parameters.

        Raises:
            UsageError: there is no optimizer of this name, or a number is out of range.
        """
        self._refuse_closed("optimizer")
        given = [*(self.parameters() if params is None else params)]
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        defaults = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        whole = [{**defaults, **group, "params": _parameters(group["params"])} for group in groups]
        chosen = factory.choices(name, lr, betas)
        if not any(group["params"] for group in whole):
            raise UsageError("the optimizer has no parameters", hint="pass policy.parameters() as params")
        check_hyperparameters(whole)
        return factory.make(chosen, factory.with_factors(whole, self._factors()), seed=seed)

    def update(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float = math.inf, in_flight: InFlight = "keep"
    ) -> FenceTimes:
        """Step your own optimizer with the gradients inside the fence, publish the result, and drop the gradients.

        Gradients are first clipped to a global norm of `max_norm`. Requests in flight are kept, drained or aborted.
        Ctrl-C is deferred to the end of the update. If the optimizer's step raises, the weights may be half-written:
        the server stops serving, and this policy refuses to sample, update and save until `resume` or `publish` has
        rewritten all weights. `bridge restore` loads a checkpoint once this process has ended.

        Raises:
            UsageError: the norm is not finite, `max_norm` is not a positive number, the optimizer needs a closure or
                has none of the server's parameters, the policy is read-only, or the call is nested in another one that
                changes the weights; nothing was changed.
            AttachError: the server refuses the fence, or the weights are half-written.
            ServerUnreachableError: the server does not answer.
        """
        self._refuse_to_write()
        with self._alone("update"):
            self._refuse_half_written("update")
            self._refuse_several_ranks("update", "policy.optim_step")
            _refuse_in_flight("update", in_flight)
            _refuse_no_optimizer("update", optimizer)
            norm = clip_gradients(optimizer, max_norm, self.parameters())
            if isinstance(optimizer, InPlaceOptimizer):
                optimizer.allocate()  # running out of memory inside the fence would leave the weights half-written
            with deferred_interrupt():  # else a loop that continues after Ctrl-C would add to applied gradients
                with self._window("update", Update(in_flight=in_flight)) as window:
                    if isinstance(optimizer, InPlaceOptimizer):
                        optimizer.step(grad_norm=norm, max_norm=max_norm)
                    else:
                        optimizer.step()
                self._last_optimizer = optimizer
                optimizer.zero_grad()
                self._num_passes = 0
            return window.times

    def publish(self, write: Callable[[], object], *, in_flight: InFlight = "keep") -> FenceTimes:
        """Call `write` inside the fence, and publish whatever it wrote into the parameters.

        Raises:
            UsageError: the policy is read-only, or the call is nested in another one that changes the weights.
            AttachError: the server refuses the fence.
            ServerUnreachableError: the server does not answer.
        """
        self._refuse_to_write()
        if not callable(write):
            raise UsageError(
                f"policy.publish: write is {described(write)}, expected a function",
                hint="policy.publish(lambda: None) publishes the parameters' current values",
            )
        _refuse_in_flight("publish", in_flight)
        with self._alone("publish"), self._window("publish", Update(in_flight=in_flight)) as window:
            write()
        return window.times

    @contextmanager
    def fence(self, update: Update) -> Iterator[Window]:
        """Let the block write the parameters, and publish the result; `bridge run` takes several updates in a block."""
        with self._alone("fence"), self._window("fence", update) as window:
            yield window

    @contextmanager
    def _window(self, call: str, update: Update) -> Iterator[Window]:
        """Open the fence, unless passes already did to get memory; an error may leave the weights half-written."""
        with deferred_interrupt():  # the new version is stored before an interrupt acts
            sleep = self._sleep
            self._sleep = None
            try:
                if sleep is None:
                    with self.mode.publish(update) as window:
                        yield window
                else:
                    window = sleep.window
                    with sleep.fence:
                        sleep.preparing.close()
                        yield window
            except BaseException:
                if self.mode.is_half_written:
                    self._failed = f"policy.{call}"
                    self._cancel_sampling()  # in other threads: the server would not answer
                raise
            if self._failed:
                self._drop_gradients()  # of the failed update
            self._failed = ""
            self._run_folder.add_fence(window.times)

    # Saving and loading.

    def save_state(self, folder: str | Path, *, step: int = 0, has_optimizer: bool = True) -> Path:
        """Write weights, tokenizer, the policy's optimizer state and torch's random state to a folder, atomically.

        The result is a checkpoint like those of `bridge run`: `bridge export`, `restore` and `serve-vllm` read it. An
        adapter is saved in PEFT's format. With `has_optimizer=False` only weights and tokenizer are saved. An older
        checkpoint at `folder` is replaced. All ranks must call it; the first one writes.

        Raises:
            UsageError: something that is not a checkpoint is at `folder`, or writing fails.
        """
        target = path_of("policy.save_state: folder", folder)
        _refuse_step("save_state", step)
        progress = self._progress(step, target.parent)
        with self._alone("save_state"):
            self._refuse_half_written("save_state")
            self.ranks.run_and_gather(lambda: self.write_state(target, progress, has_optimizer=has_optimizer))
        return target

    def load_state(self, folder: str | Path, *, has_optimizer: bool = True) -> SavedCheckpoint:
        """Load a checkpoint of `save_state` or `bridge run` into the server's memory, inside the fence.

        Every byte is checked first. Gradients are dropped; the seeds of `sample` continue. With `has_optimizer=False`
        only the weights are loaded. This also repairs half-written weights.

        Raises:
            CheckpointError: the checkpoint is damaged, or has no state for this optimizer; nothing was loaded.
            UsageError: the checkpoint belongs to a different model or optimizer, or the policy is read-only.
        """
        source = checkpoint.read(path_of("policy.load_state: folder", folder))
        self._refuse_other_kind(source.folder)
        with self._alone("load_state"):
            self.read_state(source, has_optimizer=has_optimizer)
        return source

    def load(self, folder: str | Path) -> None:
        """Load the weights of a Hugging Face folder, or of PEFT's for an adapter, into the server's memory.

        This is the counterpart of `save`; it also loads checkpoints and the model's own folder. The optimizer state is
        reset, and gradients are dropped. It also repairs half-written weights.

        Raises:
            UsageError: the folder belongs to a different model, or the policy is read-only; nothing was loaded.
        """
        self._refuse_to_write()
        source = path_of("policy.load: folder", folder)
        self._refuse_other_kind(source)
        with self._alone("load"):
            self._restore("load", source, 0, self._restart_optimizer)

    def _restart_optimizer(self) -> None:
        """Reset the optimizer's moments, and the extra bits that it keeps of each weight."""
        if "trainable" in vars(self):
            self.trainable.optimizer.reset({})

    def write_state(self, folder: Path, progress: Progress, *, has_optimizer: bool) -> Path | None:
        """Save a checkpoint on the first rank, and return its folder; other ranks send their parts and return None."""
        to_send: list[Callable[[], None]] = [self._send_weights]
        if has_optimizer:
            to_send.append(lambda: self._write_optimizer(None))

        def fill(scratch: Path) -> None:
            del to_send[0]
            self.mode.save(scratch)
            to_send.clear()
            if has_optimizer:
                self._write_optimizer(scratch)

        try:
            return checkpoint.save(folder, fill, progress) if self.ranks.is_rank_zero else None
        finally:
            for send in to_send:  # on other ranks, and after an error here: the others wait for these sends
                send()

    def read_state(self, source: SavedCheckpoint, *, has_optimizer: bool) -> None:
        """Load a verified checkpoint, for `load_state` and `bridge run --resume`."""
        self._refuse_to_write()
        trainable = self.trainable if has_optimizer else None
        if trainable is None:
            self._restore("load_state", source.folder, source.progress.weight_version)
        else:
            load = optimizer_state.checked(source.folder, trainable.weights, trainable.state)
            self._restore("load_state", source.folder, source.progress.weight_version, load)
        self._num_calls = source.progress.samples_drawn

    def _refuse_other_kind(self, folder: Path) -> None:
        """Raise UsageError if the policy trains an adapter and the checkpoint has all weights, or vice versa."""
        is_adapter = (folder / paths.ADAPTER_CONFIG).is_file()
        trains_adapter = self.opened.adapter is not None
        if is_adapter and not trains_adapter:
            raise UsageError(
                f"{folder} is a checkpoint of an adapter, but this policy trains all weights",
                hint="attach with the adapter's settings: bridge.attach(lora=bridge.LoraConfig(...))",
            )
        if trains_adapter and not is_adapter:
            raise UsageError(
                f"{folder} is a checkpoint of all weights, but this policy trains an adapter",
                hint=f"attach without lora, or serve it as the adapter's base: bridge serve-vllm --model {folder}",
            )

    def _restore(self, call: str, folder: Path, version: int, load_optimizer: Callable[[], None] | None = None) -> None:
        """Load the weights, then the optimizer's state; neither changes if the server is gone.

        The weights are published as `version`, or as the next one if that is later.
        """
        self._wake(UsageError("a checkpoint was loaded before optim_step", hint="repeat the passes"))
        self._drop_gradients()  # of the old weights
        with deferred_interrupt():
            try:
                self.mode.restore(folder, version=version)
            except BaseException:
                if self.mode.is_half_written:
                    self._failed = f"policy.{call}"
                raise
            self._failed = ""
            if load_optimizer is not None:
                load_optimizer()

    def _send_weights(self) -> None:
        """Send this part of the first replica's weights to the rank that saves them."""
        if self.ranks.tp_size > 1 and self.ranks.dp_rank == 0:
            self.mode.send_parts()

    def _write_optimizer(self, folder: Path | None) -> None:
        if folder is not None or self.ranks.world_size > 1:
            optimizer_state.write(folder, self.trainable.weights, self.trainable.state)

    def _progress(self, step: int, run_dir: Path) -> Progress:
        return Progress(
            step=step, weight_version=self.version, problems_drawn=0, samples_drawn=self._num_calls,
            run_dir=run_dir.absolute(),
        )  # fmt: skip

    def save(
        self,
        folder: str | Path | None = None,
        *,
        step: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Path:
        """Write weights and tokenizer to a folder that transformers can load, atomically; return the folder.

        With a `step` the folder is a checkpoint, by default `checkpoints/step_N` in the run directory, and `resume`
        loads it. It also has the state of `optimizer` (by default the policy's own if it has stepped, or that of the
        last `update`), torch's random state and a checksum of every file.

        Raises:
            UsageError: there is something at `folder`, neither a folder nor a step was given, or writing fails.
        """
        target = None if folder is None else path_of("policy.save: folder", folder)
        if step is not None:
            _refuse_step("save", step)
        if optimizer is not None:
            _refuse_no_optimizer("save", optimizer)
        if step is None and (target is None or optimizer is not None):
            raise UsageError(
                "policy.save has neither a folder nor a step"
                if optimizer is None
                else "policy.save has an optimizer, but no step",
                hint="policy.save(FOLDER), or policy.save(step=STEP, optimizer=...)",
            )
        with self._alone("save"):
            self._refuse_half_written("save")
            if step is None:
                assert target is not None
                self._save_model(target)
                return target
            run, prefix = self._run_folder, self.mode.checkpoint_prefix
            whole, run_dir = self.ranks.run_on_rank_zero(lambda: run.about_to_save(target, step, prefix))
            progress = self._progress(step, run_dir)
            has_own = "trainable" in vars(self)
            if optimizer is None and not has_own:
                optimizer = self._last_optimizer
            if optimizer is not None:
                self._refuse_several_ranks("save(optimizer=...)", "policy.save(step=STEP)")
                return run.save(whole, optimizer, self.mode.save, model=self.model, progress=progress)
            self.ranks.run_and_gather(lambda: self.write_state(whole, progress, has_optimizer=has_own))
            return whole.resolve()

    def _save_model(self, target: Path) -> None:
        def save() -> None:
            if not self.ranks.is_rank_zero:
                self._send_weights()
                return
            is_begun = False
            try:
                with atomic_folder.write(target, replaceable=lambda _: False, flag="policy.save(FOLDER)") as scratch:
                    is_begun = True
                    self.mode.save(scratch)
            finally:
                if not is_begun:  # the other ranks wait for this rank's weights
                    self._send_weights()

        self.ranks.run_and_gather(save)

    def resume(self, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Load the newest checkpoint of the run directory, and return its step; 0 if there is none.

        The weights are loaded into the server's memory inside the fence. The optimizer (by default the policy's own),
        torch's random state and the seeds of `sample` continue where they were. Lines of later steps are moved aside.
        Call it before the first step.

        Raises:
            UsageError: no `run_dir` was given, it is in use, or the checkpoint belongs to a different model.
            CheckpointError: the checkpoint has no state for this optimizer.
        """
        self._refuse_to_write()
        if optimizer is not None:
            _refuse_no_optimizer("resume", optimizer)
        with self._alone("resume"):
            prefix = self.mode.checkpoint_prefix
            newest = self.ranks.run_on_rank_zero(lambda: self._run_folder.newest(prefix))
            if newest is None:
                return 0
            if optimizer is None:
                self.read_state(newest, has_optimizer=True)
            else:
                self._refuse_several_ranks("resume(OPTIMIZER)", "policy.resume()")
                load = self._run_folder.checked(newest, optimizer, model=self.model)
                self._restore("resume", newest.folder, newest.progress.weight_version, load)
                self._num_calls = newest.progress.samples_drawn
            return newest.progress.step

    def log(self, step: int, groups: Sequence[Group] = (), **metrics: float | Tensor | Mapping[str, float]) -> None:
        """Write a line of metrics to the run directory; `bridge report` turns these lines into a page.

        `groups` are the step's groups: their rewards, lengths and texts are written, too. `metrics` are numbers, or
        mappings of names to numbers. A metric that Bridge also logs, such as `loss` or `grad_norm`, appears in Bridge's
        chart of it, any other in a new chart. The times of rollouts, fences and the rest of the step are added. If
        there are several ranks, the first one writes.

        Raises:
            UsageError: a value is not a number, the step is not after the last one, or the run directory cannot be
                used.
        """
        self._refuse_closed("log")
        if self.ranks.is_rank_zero:
            self._run_folder.log(step, groups, metrics, version=self.version, device=self.device.type)

    def verify(self) -> list[Check]:
        """Check from both processes that there is only one copy of the weights; a failed check has the status FAIL.

        Raises:
            UsageError: this way of publishing uses a second copy.
        """
        with self._alone("verify"):
            self._refuse_half_written("verify")  # verify would let the server serve half-written weights
            if self._sleep is not None:
                raise UsageError(
                    "policy.verify: the fence stays open for passes until policy.optim_step, and verify would close it",
                    hint="call verify after policy.optim_step",
                )
            return self.ranks.tp_group.run_on_rank_zero(self._checks)

    def _checks(self) -> list[Check]:
        mode, limit_s = self.mode, self.sampling.request_timeout_s
        shared = None
        if isinstance(mode, PatchedServer):
            shared = mode.attached, mode.client
        elif isinstance(mode, LoraDisk):
            shared = mode.shared
        if shared is None:
            raise UsageError(
                f"mode {self.config.mode} has a second copy of the weights: there is nothing to prove",
                hint="train in the server's memory: shared_vllm, or lora_only on a server of bridge serve-vllm",
            )
        if self.ranks.tp_size > 1:
            return [*one_copy_proof.verify(self.config.server.config_path, timeout_s=limit_s)]
        mode.catch_up()
        attached, client = shared
        prepared = self.prepared if "prepared" in vars(self) else PreparedModel(self.model)
        return [
            *one_copy_proof.proofs(
                [attached], client, prepared,
                timeout_s=limit_s, adapter=mode.endpoint.model, is_loaded=isinstance(mode, LoraDisk),
            )
        ]  # fmt: skip

    # Which calls may run now.

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Exclude other calls that compute with, change or copy the weights. UsageError: `call` may not run now."""
        self._refuse_misplaced(call)
        with taken(self._turn):
            self._refuse_misplaced(call)
            self._current = threading.get_ident(), call
            try:
                yield
            finally:
                self._current = None

    def _refuse_misplaced(self, call: str) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"policy.{call}: process {self._pid} created this policy, and process {os.getpid()} was forked from it",
                hint=f"call it in process {self._pid}, or attach in this one: bridge.attach(reads_only=True)",
            )
        self._refuse_closed(call)
        if self._current is not None and self._current[0] == threading.get_ident():
            raise UsageError(
                f"policy.{call} was called inside policy.{self._current[1]} of the same policy",
                hint=f"call it before or after policy.{self._current[1]}",
            )

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"policy.{call}: the policy is closed", hint="attach again: bridge.attach()")

    def _refuse_to_sample(self) -> None:
        """Raise unless the server can generate for this thread now: a paused server would let the request time out.

        Raises:
            UsageError: the call is nested in one that changes the weights, or the policy is closed or was forked.
            AttachError: the weights are half-written.
            ServerUnreachableError: the server does not answer.
        """
        self._refuse_misplaced("sample")
        self._refuse_half_written("sample")
        if self._sleep is not None:
            raise UsageError(
                "policy.sample: the server's KV cache sleeps until policy.optim_step",
                hint="sample before policy.forward_backward, or serve with more memory to spare",
            )
        self.mode.refuse_torn()

    def _refuse_half_written(self, call: str) -> None:
        if self._failed:
            raise AttachError(
                f"policy.{call}: an error inside {self._failed} may have left the weights half-written, so they are"
                " not served",
                hint="policy.load_state(FOLDER) or policy.resume(OPTIMIZER) loads a checkpoint; policy.publish(WRITE)"
                " publishes weights that WRITE has written, all of them",
            )

    def _refuse_to_write(self) -> None:
        if self._reads_only:
            raise UsageError("this policy is read-only", hint="attach without reads_only=True to update the weights")

    def _refuse_several_ranks(self, call: str, instead: str) -> None:
        if self.ranks.world_size > 1:
            raise UsageError(
                f"policy.{call}: {self.ranks.world_size} ranks train together, and their gradients add up in the"
                " policy's own optimizer",
                hint=instead,
            )

    # Helpers of the calls above.

    def _gradients(
        self,
        samples: Sequence[Sample],
        loss: Loss | LossConfig | None,
        old_logprobs: Sequence[Tensor] | None,
        *,
        are_own: bool,
    ) -> Gradients:
        """Check the arguments of `forward_backward`, and return the call with this rank's share of the samples."""
        self._refuse_to_write()
        samples = checked(samples, self.opened.model.get_input_embeddings())
        loss = self.config.loss if loss is None else loss
        if not (callable(loss) or isinstance(loss, LossConfig)):
            raise UsageError(
                f"loss is {described(loss)}, expected a function or a bridge.LossConfig",
                hint='bridge.LossConfig(name="grpo")',
            )
        if isinstance(loss, LossConfig):
            self._refuse_other_teacher(loss, samples)
        if old_logprobs is not None:
            refuse_other_logprobs(old_logprobs, samples, is_function=callable(loss))
        indices = [*range(len(samples))] if are_own else shares_of(samples, self.ranks.num_shares)[self.ranks.share]
        old = [None] * len(samples) if old_logprobs is None else old_logprobs
        given = [Given(index, samples[index], old[index]) for index in indices]
        return Gradients(self.trainable, loss, given)

    def _refuse_other_teacher(self, loss: LossConfig, samples: Sequence[Sample]) -> None:
        """Raise UsageError if the policy was attached with another teacher, or if its own weights teach nothing."""
        attached = self.config.loss
        if loss.teacher is None or attached.teacher is None:  # the latter is refused where the loss is computed
            return
        for key, can_differ in (("teacher", False), ("teacher_top_k", not loss.teacher_top_k)):
            if getattr(loss, key) != getattr(attached, key) and not can_differ:
                raise UsageError(
                    f"the loss has {key}={getattr(loss, key)!r}, but the policy was attached with"
                    f" {getattr(attached, key)!r}",
                    hint="pass the same teacher when attaching: bridge.attach(loss=loss)",
                )
        has_hints = any(sample.teacher_prompt_token_ids for sample in samples)
        if samples and self.trainable.lacks_hints(has_hints):
            raise UsageError(
                f"teacher {OWN_WEIGHTS!r} teaches nothing: no sample has teacher_prompt_token_ids, so that it predicts"
                " what the policy predicts",
                hint="give problems a key 'hint' with a text that only the teacher sees, or name another model",
            )

    def _wants_sleep(self, samples: Sequence[Sample]) -> bool:
        """Return whether passes over any rank's samples need the memory of the server's KV cache."""
        chosen, budget = self.config.publishing.kv_sleep, self.trainable.budget
        if chosen == "never" or not self.mode.can_sleep:
            return False
        if chosen == "always":
            return True
        return any(self.ranks.run_and_gather(lambda: bool(samples) and budget.is_short(samples)))

    def _sleep_if_short(self, samples: Sequence[Sample], in_flight: InFlight | None) -> None:
        """Open the fence if these passes need the memory of the server's KV cache and it is not open yet."""
        if self._sleep is not None or not self._wants_sleep(samples):
            return
        opened, preparing = ExitStack(), ExitStack()
        window = opened.enter_context(self.mode.publish(Update(sleep=True, in_flight=in_flight)))
        self._sleep = _Sleep(opened, preparing, window)  # stored before Ctrl-C acts again
        preparing.enter_context(window.preparing())

    def _wake(self, error: BaseException) -> None:
        """If the fence is open for passes that no step followed, let the server serve the same weights again."""
        sleep = self._sleep
        self._sleep = None
        if sleep is None:
            return
        self._drop_gradients()
        with suppress(type(error)), sleep.fence, sleep.preparing:
            raise error

    def _forget(self) -> None:
        """Drop the gradients of this update. UsageError: earlier calls computed some of them."""
        self.trainable.drop_gradients()
        if self._num_passes:
            calls = self._num_passes
            self._num_passes = 0
            raise UsageError(
                f"out of memory in call {calls + 1} of forward_backward since the last step: all gradients are dropped",
                hint="repeat the update, whose passes will be smaller, or pass all samples in one call",
            )

    def _refuse_infinite(self, norm: float) -> None:
        if math.isfinite(norm):
            return
        error = GradientError(
            f"the gradient norm is {norm}, expected a finite number: no weight changed, the gradients are dropped",
            hint="continue with the next batch; if it happens again, lower the learning rate",
        )
        raise error

    def _refuse_gradients_beside_release(self) -> None:
        """Refuse gradients of the caller's own backward pass: gradient release frees each gradient during this call."""
        if any(parameter.grad is not None for parameter in self.trainable.parameters):
            raise UsageError(
                "there are gradients of another backward pass: with gradient_release all must come from one call",
                hint="call policy.model.zero_grad() first, or leave gradient_release out",
            )

    def _drop_gradients(self) -> None:
        if "trainable" in vars(self):
            self.trainable.drop_gradients()
        self._num_passes = 0

    def _stepped(self, window: Window, norm: float) -> Step:
        self._drop_gradients()
        return Step(
            times=window.times, grad_norm=norm, changed_weight_share=self.trainable.optimizer.changed_weight_share
        )

    def _cancel_sampling(self) -> None:
        if "_sampler" in vars(self):
            self._sampler.loop.cancel()

    def _factors(self) -> Mapping[Tensor, float]:
        """Return the factor that each trained parameter's stored value is multiplied by."""
        return {self.model.get_parameter(name): factor for name, factor in self.opened.lr_factors.items()}


@dataclass(frozen=True)
class _Request:
    """One call of `sample`, the same on all ranks; each rank samples its share of the prompts."""

    problems: Sequence[Problem]
    prompts: Sequence[Encoded]
    taught: Sequence[tuple[int, ...]]
    """Each prompt as a teacher sees it; empty: it sees the same."""
    sampling: SamplingConfig
    seed: int
    endpoint: Endpoint
    own: Sequence[int]
    """Indices of this rank's prompts in the call."""
    prompt_logprobs: bool
    """Whether the log-probabilities of the prompts are requested, too."""
    mode: Mode

    async def sampled(self, sampler: Sampler) -> list[tuple[Completion, ...]]:
        servers = sampler.servers_at([self.endpoint])
        with self.mode.sampling(self.endpoint.model):
            return await gather_or_cancel(self._one(sampler, servers, index) for index in self.own)

    def _one(
        self, sampler: Sampler, servers: Sequence[Server], index: int
    ) -> Coroutine[Any, Any, tuple[Completion, ...]]:
        prompt, images = self.prompts[index]
        other: dict[str, Any] = {} if images is None else {"images": images}
        if self.prompt_logprobs:
            other["prompt_logprobs"] = True
        return sampler.one(
            servers, prompt, num_samples=self.sampling.group_size, seed=self.seed, index=index,
            is_chat=not isinstance(self.problems[index]["prompt"], str), config=self.sampling, **other,
        )  # fmt: skip

    def scored(self, sampled: Sequence[tuple[Completion, ...]], score: Score | None) -> dict[int, Group]:
        return {
            index: Group(
                problem=self.problems[index],
                prompt_token_ids=self.prompts[index].prompt,
                teacher_prompt_token_ids=self.taught[index],
                completions=completions,
                rewards=tuple(_reward(score, self.problems[index], completion.text) for completion in completions),
            )
            for index, completions in zip(self.own, sampled, strict=True)
        }

    def joined(self, of_ranks: Sequence[Mapping[int, Group]]) -> list[Group]:
        """Return all ranks' groups in the order of the call, each with the images of this rank's copy of its prompt."""
        groups = {index: group for of_rank in of_ranks for index, group in of_rank.items()}
        return [replace(groups[index], images=encoded.images) for index, encoded in enumerate(self.prompts)]


def _refuse_arguments(
    prompts: object, score: object, seed: object, chat_template_kwargs: object, prompt_logprobs: object
) -> None:
    """Raise UsageError for arguments that would fail only after sampling, or change what is sampled."""

    def refuse(name: str, value: object, expected: str) -> NoReturn:
        raise UsageError(
            f"policy.sample: {name} is {described(value)}, expected {expected}",
            hint="policy.sample(prompts, score, seed=1)",
        )

    if not isinstance(prompts, Iterable):
        refuse("prompts", prompts, "a list of prompts")
    if score is not None and not callable(score):
        refuse("score", score, "a function of a problem and a completion's text")
    if seed is not None and not isinstance(seed, Integral):
        refuse("seed", seed, "an integer")
    if not isinstance(chat_template_kwargs, Mapping):
        refuse("chat_template_kwargs", chat_template_kwargs, "a dictionary")
    if not isinstance(prompt_logprobs, bool):
        refuse("prompt_logprobs", prompt_logprobs, "True or False")


def _refuse_completion(completion: object) -> None:
    if not isinstance(completion, str) or LONE_SURROGATE.search(completion):
        raise UsageError(
            f"policy.encode: completion is {described(completion)}, expected text of valid characters",
            hint="policy.encode(prompt, text)",
        )


def _refuse_in_flight(call: str, in_flight: object) -> None:
    if in_flight is not None and in_flight not in get_args(InFlight):
        raise UsageError(
            f"policy.{call}: in_flight is {in_flight!r}, expected one of {', '.join(get_args(InFlight))}",
            hint='in_flight="keep" lets requests continue with the new weights',
        )


def _refuse_step(call: str, step: object) -> None:
    if type(step) is not int or step < 0:
        raise UsageError(f"policy.{call}: step is {step!r}, expected an integer from 0", hint=f"policy.{call}(step=8)")


def _refuse_no_optimizer(call: str, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"policy.{call}: optimizer is {described(optimizer)}, expected an optimizer of torch or of Bridge",
            hint="policy.optimizer(lr=1e-6)",
        )


def _refuse_shape(shape: AdapterShape, adapter: Adapter) -> None:
    if not 1 <= shape.r <= adapter.max_rank:
        raise UsageError(
            f"policy.new_adapter: r is {shape.r}, expected 1 to {adapter.max_rank}, the rank of the policy's lora",
            hint="attach with lora=bridge.LoraConfig(r=...) of the highest rank",
        )
    if not 0 < shape.alpha < math.inf:
        raise UsageError(
            f"policy.new_adapter: alpha is {shape.alpha}, expected a number above 0", hint="leave alpha out"
        )
    unknown = sorted(shape.modules - adapter.modules.keys())
    if unknown or not shape.modules:
        raise UsageError(
            f"policy.new_adapter: {f'the module {unknown[0]} has no adapter' if unknown else 'modules is empty'}",
            hint=f"names such as {min(adapter.modules)}",
        )


def path_of(name: str, given: object) -> Path:
    """Return an argument as a path. UsageError: it is not a path."""
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"{name} is {described(given)}, expected a path", hint="pass a str or a pathlib.Path")
    return paths.expanded(Path(given))


def _changed(sampling: SamplingConfig, parameters: Mapping[str, Any]) -> SamplingConfig:
    """Return `sampling` with the parameters of one call. UsageError: one is unknown or out of range."""
    written = {PER_CALL.get(name, name): name for name in parameters}
    named = {name: parameters[own] for name, own in written.items()}
    if twice := sorted(parameters.keys() - written.values()):
        raise UsageError(
            f"policy.sample got {twice[0]} and {written[PER_CALL.get(twice[0], twice[0])]}, which mean the same",
            hint="leave one of them out",
        )
    if unknown := sorted(named.keys() - CHANGEABLE):
        known = sorted({*CHANGEABLE, *PER_CALL})
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
        raise UsageError(f"policy.sample has no parameter {unknown[0]!r}", hint=hint)
    if not named:
        return sampling
    unchecked = {}
    for name, value in BEYOND_TRAINING.items():
        given = named.get(name)
        if isinstance(given, Real) and given == value:
            unchecked[name] = value
    checked = {name: value for name, value in named.items() if name not in unchecked}
    try:
        return SamplingConfig.model_validate(sampling.model_dump() | checked).model_copy(update=unchecked)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][-1])
        expected = first["msg"].lower()
        if key in BEYOND_TRAINING:
            expected = f"expected {BEYOND_TRAINING[key]}, or {expected.removeprefix('input should be ')}"
        raise UsageError(
            f"policy.sample: {written.get(key, key)} is {first['input']!r}: {expected}",
            hint="policy.sample(prompts, n=8, max_tokens=256, temperature=1.0)",
        ) from error


def _parameters(given: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else [*given]


def _reward(score: Score | None, problem: Problem, text: str) -> float:
    value = 0.0 if score is None else score(problem, text)
    reward = as_reward(value)
    if reward is None:
        raise RewardError(
            f"the reward of {text[:80]!r} is {described(value)}, expected a finite number{limit_note(value)}",
            hint="return a finite number from score",
        )
    return reward


def _refuse_padding(_: nn.Module, positional: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuse a padded batch: attention for packed sequences uses no mask, and would attend to the padding."""
    mask = given.get("attention_mask", positional[1] if len(positional) > 1 else None)  # the second one in transformers
    if mask is not None and not bool(mask.all()):
        raise UsageError(
            "the batch has padding, but this model now uses attention for packed sequences, which ignores masks",
            hint="use policy.pack and policy.logprobs, or attach another policy for passes with padding",
        )
