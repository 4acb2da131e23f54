"""What an OpenAI-compatible server is asked for, and what is made of its answer.

A vLLM with Bridge in it has a route that tells what is read here and no more. Any other vLLM is asked for token ids and
for sampling without any cut. Any other server is asked by the protocol's own fields alone, since many refuse the rest;
its token ids come from `logprobs.tokens`: `token_id:123` as it stands, any other string by the tokenizer's vocabulary,
where it has to stand for one token. Text is never tokenised again.

Such a server leaves the end token out of a completion that ended by itself: the tokens before it are trained by the
reward of the whole, the choice to end there is not.

Not covered: sending it (`connections.py`), the vocabulary (`vocabulary.py`).
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat

from bridge.errors import UsageError
from bridge.rollouts.distribution import PROTOCOL, WHOLE
from bridge.rollouts.faults import Fault
from bridge.server import protocol
from bridge.types import Completion, FinishReason

IdsOf = Callable[[str], Sequence[int]]
"""The text of a token, as a server writes it -> the ids of all tokens that it may stand for."""
Dialect = Literal["openai", "vllm", "bridge"]
"""What a server understands: the protocol alone, vLLM's fields as well, or Bridge's own route."""
ROUTES = {"openai": "/v1/completions", "vllm": "/v1/completions", "bridge": protocol.COMPLETIONS}
VLLM = "vllm"
TOKEN_ID = re.compile(r"token_id:(\d+)")
BEYOND_THE_PROTOCOL = {**WHOLE, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": True}
"""What vLLM is told beside the protocol's fields."""
TAKE_ANOTHER = (
    "take vLLM, which knows `return_token_ids` (bridge serve-vllm, or any of the supported range), or a server that "
    "writes its tokens as token_id:123"
)


class Logprobs(BaseModel):
    """The sampled tokens with their log-probabilities."""

    token_logprobs: tuple[FiniteFloat, ...]
    tokens: tuple[str, ...] | None = None


class Choice(BaseModel):
    """One completion."""

    index: int
    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None


class Completions(BaseModel):
    """The answer to a request for completions, by any of the routes."""

    choices: tuple[Choice, ...]


class Model(BaseModel):
    """One model that a server lists."""

    id: str
    owned_by: str | None = None


class Models(BaseModel):
    """The answer of `GET /v1/models`."""

    data: Annotated[tuple[Model, ...], Field(min_length=1)]

    def are_of_vllm(self) -> bool:
        """Tell whether it is vLLM that lists them; a proxy in front of it answers for itself."""
        return any(model.owned_by == VLLM for model in self.data)


def request(dialect: Dialect, *, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """Return the fields that every request to one server has in common."""
    fields: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": temperature}
    if dialect == "bridge":
        return fields
    fields |= {name: WHOLE[name] for name in PROTOCOL} | {"logprobs": 1}
    return fields | BEYOND_THE_PROTOCOL if dialect == "vllm" else fields


def in_order(answer: Completions, num_samples: int) -> list[Choice]:
    """Return the choices in the order of their indices.

    Raises:
        Fault: they are not the `num_samples` that were asked for.
    """
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if len(choices) != num_samples:
        raise Fault(f"asked for {num_samples} completions, got {len(choices)}", "once")
    if indices != list(range(num_samples)):
        raise Fault(f"asked for {num_samples} completions, got those numbered {', '.join(map(str, indices))}", "once")
    return choices


def completion(url: str, choice: Choice, version: int | None, ids_of: IdsOf | None) -> Completion:
    """Return a choice as what training needs, made by the weights of `version`.

    Raises:
        UsageError: the server does not tell token ids, or not whose they are.
        Fault: the answer contradicts itself.
    """
    if choice.logprobs is None:
        raise _without_token_ids(url)
    token_ids, logprobs = _token_ids(url, choice, choice.logprobs, ids_of), choice.logprobs.token_logprobs
    if len(token_ids) != len(logprobs):
        raise Fault(f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities", "once")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=choice.text,
        finish_reason=choice.finish_reason,
        weight_version=version,
    )


def _token_ids(url: str, choice: Choice, logprobs: Logprobs, ids_of: IdsOf | None) -> tuple[int, ...]:
    if choice.token_ids is not None:
        return choice.token_ids
    if logprobs.tokens is None:
        raise _without_token_ids(url)
    return tuple(_token_id(url, token, ids_of) for token in logprobs.tokens)


def _token_id(url: str, token: str, ids_of: IdsOf | None) -> int:
    written = TOKEN_ID.fullmatch(token)
    if written:
        return int(written[1])
    if ids_of is None:
        raise _without_token_ids(url)
    found = ids_of(token)
    if len(found) != 1:
        raise UsageError(
            f"the server at {url} tells its tokens by their text alone, and {token!r} is the text of"
            f" {len(found) or 'no'} tokens of this model, expected one",
            remedy=TAKE_ANOTHER,
        )
    return found[0]


def _without_token_ids(url: str) -> UsageError:
    return UsageError(f"the server at {url} returns no token ids with their log-probabilities", remedy=TAKE_ANOTHER)
