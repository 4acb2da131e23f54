"""The teacher of a distillation: a frozen model in this process, the trained weights with a hint, or a server.

A teacher in this process predicts the whole vocabulary at each row, which `bridge/passes/logprobs.py` compares with the
policy's own prediction. A server tells the log-probabilities of few tokens. They become targets of each sample: the
sampled token, and the server's likeliest ones, weighted by their probabilities.

Shape suffixes: N rows (positions that predict a sampled token), K listed words.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, FiniteFloat
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.config import OWN_WEIGHTS, ComputeConfig, LossConfig, SamplingConfig
from bridge.core.concurrency import gather_or_cancel
from bridge.core.logs import info_once
from bridge.engine import reference
from bridge.engine.reference import Reference
from bridge.errors import RejectedRequestError, UsageError
from bridge.passes.logprobs import Prediction
from bridge.passes.packing import MicroBatch, Sample
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.event_loop import EventLoop
from bridge.rollouts.openai_api import RequestFailed
from bridge.rollouts.sampler import wait_s
from bridge.rollouts.servers import Connections
from bridge.server.client import ServedModels
from bridge.weights import skeleton

logger = logging.getLogger(__name__)

ROUTE = "/v1/completions"
TOKENIZE = "/tokenize"
PROBE = "def f(x):\n    return 12 + 345 * x  # Zürich, naïve, 你好, ½ 🙂\n\nThe quick brown fox's 7th jump."
"""A text that tokenizers of different families encode differently."""
CHECK_LIMIT_S = 60.0
MOST_REQUESTS = 64
"""Requests to a teacher's server at the same time."""
LEAST_LOGPROB = -60.0
"""Least log-probability of a target: its probability is a float32, which is 0 below a log-probability of -104."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A frozen model in this process."""

    frozen: Reference
    is_policy: bool = False
    """Whether it is the trained model itself, which learns only from prompts with a hint."""

    def prediction(self, batch: MicroBatch, temperature: float) -> Prediction:
        """Return what the teacher predicts at this rank's rows, without gradient."""
        return self.frozen.prediction(batch.taught or batch, temperature, like=batch if batch.taught else None)

    def logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Return the teacher's log-probabilities of the sampled tokens, without gradient: [N] float32."""
        return self.frozen.logprobs(batch.taught or batch, temperature)


def open_teacher(
    loss: LossConfig,
    compute: ComputeConfig,
    prepared: PreparedModel,
    device: torch.device,
    *,
    model_name: str,
    has_adapter: bool,
    max_model_len: int | None = None,
    ranks: Ranks = ALONE,
) -> Teacher | None:
    """Return the teacher in this process that the loss needs, for the `prepared` model; None if there is none.

    An adapter's base is its own teacher if it is the teacher's model: it is not loaded a second time.

    Raises:
        UsageError: the teacher cannot be loaded, or does not fit.
        UnsupportedModelError: it is not a standard causal language model of transformers, or cannot be packed.
    """
    name = loss.teacher
    if name is None or loss.has_remote_teacher:
        return None
    if name == OWN_WEIGHTS:
        return Teacher(frozen=Reference(prepared=prepared), is_policy=True)
    if has_adapter and skeleton.absolute(name) == skeleton.absolute(model_name):
        return Teacher(frozen=reference.without_adapter(prepared))
    frozen = reference.loaded_beside(
        name, compute, prepared, device,
        max_model_len=max_model_len, ranks=ranks,
        hint=f"lower --gpu-memory-utilization{'' if loss.offload_teacher else ', or --offload-teacher'}",
    )  # fmt: skip
    if loss.offload_teacher:
        frozen = replace(frozen, frozen=Offloaded(frozen.prepared.model, device).on_device)
    return Teacher(frozen=frozen)


class Offloaded:
    """A frozen model whose layers are in host memory, except while it computes; its head stays on the device."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        """Move the layers to host memory, which is pinned if the device is a GPU."""
        self._device = device
        head: nn.Module = model.get_output_embeddings()
        kept = {id(tensor) for tensor in head.parameters()}
        self._parameters = [parameter for parameter in model.parameters() if id(parameter) not in kept]
        self._on_host = [self._moved(parameter) for parameter in self._parameters]
        self._return()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Copy the layers to the device inside the block."""
        try:
            for parameter, on_host in zip(self._parameters, self._on_host, strict=True):
                parameter.data = on_host.to(self._device, non_blocking=True)
            yield
        finally:
            self._return()

    def _moved(self, parameter: nn.Parameter) -> Tensor:
        on_host = parameter.data.cpu()
        return on_host.pin_memory() if self._device.type == "cuda" else on_host

    def _return(self) -> None:
        for parameter, on_host in zip(self._parameters, self._on_host, strict=True):
            parameter.data = on_host


class _Known(BaseModel):
    logprob: FiniteFloat


class _Choice(BaseModel):
    prompt_logprobs: list[Mapping[int, _Known] | None]


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


class _Tokens(BaseModel):
    tokens: list[int]


def check_server(model: str, loss: LossConfig, sampling: SamplingConfig) -> None:
    """Check a teacher behind a URL before anything starts: that it answers, and has the tokenizer of `model`.

    Raises:
        UsageError: it cannot be reached, is not vLLM, or encodes a text differently; or the temperature is not 1.
    """
    if not loss.has_remote_teacher:
        return
    text_ids = skeleton.tokenizer(model)(PROBE, add_special_tokens=False)["input_ids"]
    at_once = {"max_retries": 0, "request_timeout_s": min(CHECK_LIMIT_S, sampling.request_timeout_s)}
    teacher = RemoteTeacher(loss, sampling.model_copy(update=at_once), num_words=0)
    try:
        teacher.check(text_ids)
    finally:
        teacher.close()


class RemoteTeacher:
    """A teacher behind the URL of a vLLM, patched or not."""

    def __init__(self, loss: LossConfig, sampling: SamplingConfig, *, num_words: int) -> None:
        """Prepare for the server that `loss` names, without connecting; `num_words` are in the policy's head.

        Raises:
            UsageError: the sampling temperature is not 1, the only one at which servers grade tokens.
        """
        assert loss.teacher is not None, "named by the configuration"
        if sampling.temperature != 1:
            raise UsageError(
                f"--temperature {sampling.temperature:g}: the teacher at {loss.teacher} grades tokens at temperature 1",
                hint="--temperature 1, or name the teacher's model instead of a URL",
            )
        self._url = loss.teacher.rstrip("/").removesuffix("/v1")
        self._top_k = loss.teacher_top_k
        self._num_words = num_words
        self._limit_s = sampling.request_timeout_s
        self._max_retries = sampling.max_retries
        self._model = ""
        self._loop = EventLoop()
        self._connections = Connections()

    def close(self) -> None:
        self._loop.close(self._connections.aclose())

    def check(self, probe_ids: Sequence[int]) -> None:
        """Check that the server answers, and that its tokens of `PROBE` are `probe_ids`, if it has such a route.

        Raises:
            UsageError: it does not answer, or its tokens are different.
        """
        tokens = self._loop.run(self._probed())
        if tokens is not None and tokens != [*probe_ids]:
            odd = next((pair for pair in zip(tokens, probe_ids, strict=False) if pair[0] != pair[1]), None)
            what = f"the first different one is {odd[0]} instead of {odd[1]}" if odd else "one of them stops earlier"
            raise UsageError(
                f"the teacher at {self._url} has a different tokenizer: it encodes a text as {len(tokens)} tokens,"
                f" expected {len(probe_ids)}; {what}",
                hint="serve a model of the same family, with the same vocabulary",
            )

    async def _probed(self) -> list[int] | None:
        """Return the server's tokens of `PROBE`; None: it has no route that encodes text."""
        self._model = await self._name()
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        try:
            async with asyncio.timeout(self._limit_s):
                answer, _ = await self._connections.send("POST", self._url, TOKENIZE, body, _Tokens)
        except (RequestFailed, RejectedRequestError, TimeoutError):
            return None
        return answer.tokens

    def graded(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with targets: each sampled token and, with `top_k`, the teacher's likeliest tokens.

        The weight of a target is the teacher's probability of it.

        Raises:
            UsageError: the server does not answer, or refuses a request.
        """
        turns = asyncio.Semaphore(MOST_REQUESTS)

        async def graded(sample: Sample) -> Sample:
            async with turns:
                return self._with_targets(sample, await self._scored(sample))

        async def every() -> list[Sample]:
            self._model = self._model or await self._name()
            return await gather_or_cancel(graded(sample) for sample in samples)

        return self._loop.run(every())

    async def _name(self) -> str:
        models: ServedModels = await self._answer("GET", "/v1/models", None, ServedModels)
        return models.data[0].id

    async def _scored(self, sample: Sample) -> list[Mapping[int, float]]:
        """Return what the server knows of each token of the completion: token id -> log-probability."""
        if sample.images is not None:
            raise UsageError(
                f"the prompts have images, which the teacher at {self._url} would not see",
                hint="--teacher self with hints, or leave the images out",
            )
        taught = sample.as_taught
        body = {
            "model": self._model, "prompt": [*taught.prompt_token_ids, *taught.token_ids], "max_tokens": 1,
            "prompt_logprobs": self._top_k, "temperature": 1.0, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        answer: _Answer = await self._answer("POST", ROUTE, body, _Answer)
        positions = answer.choices[0].prompt_logprobs[len(taught.prompt_token_ids) :]
        if len(positions) != len(sample.token_ids):
            raise UsageError(
                f"the teacher at {self._url} scored {len(positions)} tokens of a completion of {len(sample.token_ids)}",
                hint="serve the teacher with vLLM 0.26 or later",
            )
        return [{word: known.logprob for word, known in (position or {}).items()} for position in positions]

    def _with_targets(self, sample: Sample, positions: Sequence[Mapping[int, float]]) -> Sample:
        """Return the sample with each sampled token, and the likeliest words that the policy has, as targets."""
        top_k = self._top_k
        targets = []
        weights = []
        flags = sample.sampled or (True,) * len(sample.token_ids)
        for token, known, is_sampled in zip(sample.token_ids, positions, flags, strict=True):
            if not is_sampled:
                continue
            words = [word for word in known if word < self._num_words]
            listed = (token, *sorted(words, key=lambda word: (-known[word], word))[:top_k])
            if token not in known or len(listed) <= top_k:
                raise UsageError(
                    f"the teacher at {self._url} tells {len(known)} log-probabilities of a token, expected the token's"
                    f" own and {top_k} more",
                    hint=f"serve it with --max-logprobs {max(20, top_k)} or more, and the policy's tokenizer",
                )
            targets.append(listed)
            weights.append(tuple(math.exp(max(known[word], LEAST_LOGPROB)) for word in listed))
        return replace(sample, targets=tuple(targets), target_weights=tuple(weights))

    async def _answer(self, method: str, route: str, body: Mapping[str, Any] | None, kind: Any) -> Any:
        for num_failed in range(1, self._max_retries + 2):
            try:
                async with asyncio.timeout(self._limit_s):
                    answer, _ = await self._connections.send(method, self._url, route, body, kind)
                return answer
            except (RequestFailed, RejectedRequestError, TimeoutError) as error:
                reason = str(error) or f"no answer within {self._limit_s:g} s"
                is_final = isinstance(error, RejectedRequestError) or getattr(error, "retry", "") == "never"
                if is_final or num_failed > self._max_retries:
                    raise UsageError(
                        f"the teacher at {self._url} does not grade completions: {reason}",
                        hint=f"check that it runs, with --max-logprobs {max(20, self._top_k)} or more, and a"
                        " --max-model-len for the longest prompt with its completion",
                    ) from error
                info_once(logger, f"the teacher at {self._url} failed, retrying: {reason}")
                requested_s: float = getattr(error, "retry_after_s", 0.0)
            await asyncio.sleep(requested_s + wait_s(num_failed))
        raise AssertionError("unreachable")
