"""A live server as a library loop uses it: its lease, its tokenizer, and the completions that it samples.

Threads may share one: calls that change or copy the weights wait for each other, and so do calls of `sample`. Inside
such a call no other is possible, neither from a hook of an optimizer nor from a callback.

Not covered: the model whose parameters are the server's memory (`policy.py`).
"""

import asyncio
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from bridge.config import SamplingConfig
from bridge.core.foreign_code import described
from bridge.core.interrupt import taken
from bridge.errors import AttachError, RewardError, UsageError
from bridge.passes.packing import Sample
from bridge.rollouts import problems
from bridge.rollouts.sampler import Sampler, fitting, seed_of
from bridge.rollouts.vocabulary import Vocabulary
from bridge.run.loop import Loop
from bridge.scoring.score import as_reward, limit_note
from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.manifest import Manifest
from bridge.server.protocol import Holder
from bridge.types import Group, Message, Problem
from bridge.weights import skeleton

Score = Callable[[Problem, str], float]
"""Returns the reward of a completion's text."""
note, warning = logging.getLogger("bridge").info, logging.getLogger("bridge").warning


class ServedModel:
    """The model of a live server, to sample from. A context manager; leaving it returns the server to others."""

    tokenizer: PreTrainedTokenizerBase
    version: int
    """Number of updates that were published since the server loaded its weights."""

    def __init__(self, manifest: Manifest, *, sampling: SamplingConfig, reads_only: bool, run_dir: Path | None) -> None:
        self._manifest = manifest
        self._sampling = fitting(sampling, manifest.max_model_len, note)
        self._reads_only = reads_only
        self.tokenizer = skeleton.tokenizer(manifest.model)
        self._num_calls = 0
        """Calls of `sample` that drew their own seed."""
        self._closed = False
        self._pid = os.getpid()
        self._turn = threading.Lock()
        """Held by a call that changes or copies the weights."""
        self._current: tuple[int, str] | None = None
        """The thread and the name of that call."""
        self._failed = ""
        """What failed inside the fence, which left the server paused; empty: nothing did."""
        self._client = BridgeClient(manifest, timeout_s=self._sampling.request_timeout_s)
        self._vocabulary = Vocabulary.of(self.tokenizer, manifest.model)
        self._sampler = Sampler(self._sampling, vocabulary=self._vocabulary)
        self._loop = Loop(run_dir, manifest.model, self._sampling, note)
        program = f"{Path(sys.argv[0]).name or 'python'} (pid {os.getpid()})"
        try:
            status = self._client.status() if reads_only else fence.when_free(lambda: self._client.take_lease(program))
            status.refuse_torn()
            self.version = status.version
            if self.version and not reads_only:
                warning(
                    "the server was trained before: this loop starts from its weights, version %d, not those of %s",
                    self.version, manifest.model,
                )  # fmt: skip
            if status.holder == Holder.current() and not reads_only:
                self._failed = "an earlier policy of this process"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None and self._pid == os.getpid():
                self._loop.end()
        finally:
            self.close()

    def close(self) -> None:
        """Return the server to other trainers, and close the connections; a second time does nothing.

        A call of another thread that changes the weights is waited for, one of `sample` is cancelled. In a process that
        was forked from this one, only that process's copies of the connections are closed.
        """
        if self._closed:
            return
        if self._pid == os.getpid():
            with self._alone("close"):
                self._closed = True
        self._closed = True
        try:
            self._sampler.close()
        finally:
            self._client.close()

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Let no other call change or copy the weights inside the block; UsageError if `call` is impossible now."""
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
                f"policy.{call}: process {self._pid} made this policy, and process {os.getpid()} was forked from it",
                remedy=f"call it in process {self._pid}, or attach in this one: bridge.attach(reads_only=True)",
            )
        if self._closed:
            raise UsageError(f"policy.{call}: the policy is closed", remedy="attach again: bridge.attach()")
        if self._current is not None and self._current[0] == threading.get_ident():
            raise UsageError(
                f"policy.{call} was called inside policy.{self._current[1]} of the same policy",
                remedy=f"call it before or after policy.{self._current[1]}",
            )

    def _refuse_to_sample(self) -> None:
        """Raise unless the server may generate for this thread: a request to a paused server would wait for its limit.

        Raises:
            UsageError: this is inside a call that changes the weights, or the policy is closed or was forked.
            AttachError: the weights are half-written.
            ServerUnreachableError: the server does not answer.
        """
        self._refuse_misplaced("sample")
        self._refuse_half_written("sample")
        self._client.status().refuse_torn()

    def _refuse_half_written(self, call: str) -> None:
        if self._failed:
            raise AttachError(
                f"policy.{call}: an error inside {self._failed} may have left the weights half-written, so they are"
                " not served",
                remedy="policy.resume(OPTIMIZER) loads the newest checkpoint of the run_dir; policy.publish(WRITE)"
                " publishes weights that WRITE has written, all of them",
            )

    @property
    def sampling(self) -> SamplingConfig:
        """How `sample` samples: `group_size`, `max_new_tokens`, `temperature` and so on; fixed when it was attached."""
        return self._sampling

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._client.url

    def sample(
        self,
        prompts: Sequence[str | list[Message] | Problem],
        score: Score | None = None,
        *,
        seed: int | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Group]:
        """Sample `sampling.group_size` completions of each prompt, with log-probabilities and versions.

        A prompt is text, chat messages, or a dictionary with one of them as `prompt` and what `score` needs beside it.
        `score(problem, text)` returns a completion's reward, in this process; without it rewards are 0. The same `seed`
        samples the same completions from the same weights; by default each call has another one. The model's chat
        template gets `chat_template_kwargs`.

        Raises:
            UsageError: `prompts` is a single prompt, a dictionary has no `prompt`, or the server rejects a request, for
                example because a prompt is too long; or the call is inside one that changes the weights.
            AttachError: the weights are half-written.
            RewardError: a prompt cannot be encoded, or a reward is not a finite number.
            ServerUnreachableError: the server does not answer.
        """
        problems.check_prompts(prompts)
        whole: list[Problem] = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in prompts]
        ids = [problems.encode(self.tokenizer, problem, **chat_template_kwargs) for problem in whole]
        self._refuse_to_sample()
        first_seed = seed_of(0, self._num_calls) if seed is None else seed_of(seed + 1, 0)
        self._num_calls += seed is None
        with self._loop.sampling():
            try:
                sampled = self._sampler.sample(
                    [Endpoint(url=self.url)], ids, num_samples=self.sampling.group_size, seed=first_seed,
                    are_chat=[not isinstance(problem["prompt"], str) for problem in whole],
                )  # fmt: skip
            except asyncio.CancelledError:
                self._refuse_misplaced("sample")  # another thread closed it
                self._refuse_half_written("sample")  # or failed inside the fence
                raise
            return [
                Group(
                    problem=problem,
                    prompt_token_ids=prompt,
                    completions=completions,
                    rewards=tuple(_reward(score, problem, completion.text) for completion in completions),
                )
                for problem, prompt, completions in zip(whole, ids, sampled, strict=True)
            ]

    def encode(self, prompt: str | list[Message], completion: str, *, weight: float = 1.0) -> Sample:
        """Return a sample of a given text, as if it had been sampled with an advantage of 1: supervised training.

        The completion ends as a sampled one does: after chat messages by the token that ends a turn in the model's chat
        template, else by the end-of-sequence token. Its log-probabilities are unknown (NaN).
        """
        ids = [*self.tokenizer(completion, add_special_tokens=False)["input_ids"]]
        end = self.tokenizer.eos_token_id
        if not isinstance(prompt, str) and self._vocabulary.end_id is not None:
            end = self._vocabulary.end_id
        ids += [end] if end is not None else []
        if not ids:
            raise UsageError(f"the completion {completion!r} has no tokens", remedy="leave it out")
        return Sample(
            prompt_token_ids=problems.encode(self.tokenizer, {"prompt": prompt}),
            token_ids=tuple(ids),
            sampled_logprobs=(math.nan,) * len(ids),
            advantages=(1.0,) * len(ids),
            weight=weight,
        )


def _reward(score: Score | None, problem: Problem, text: str) -> float:
    value = 0.0 if score is None else score(problem, text)
    reward = as_reward(value)
    if reward is None:
        raise RewardError(
            f"the reward of {text[:80]!r} is {described(value)}, expected a finite number{limit_note(value)}",
            remedy="return a finite number from score",
        )
    return reward
