"""Requests to an OpenAI-compatible server, and completions from its answers.

A vLLM with Bridge in it has a route of its own, with no more in its answers than what is read here. Any other vLLM gets
fields of vLLM's: return token ids, and sample from the whole distribution. Any other server gets fields of the protocol
alone, because many reject the rest; its token ids come from `logprobs.tokens`: `token_id:123` stands for itself, any
other string is looked up in the tokenizer's vocabulary, where exactly one token must have this text. Text is never
tokenized again.

Such a server leaves the end token out of a completion that ended by itself: the tokens before it are trained by the
reward of the whole, the choice to end there is not.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, FiniteFloat

from bridge.errors import UsageError
from bridge.rollouts.connections import RequestFailed
from bridge.rollouts.distribution import PROTOCOL, WHOLE
from bridge.server import protocol
from bridge.types import Completion, FinishReason

IdsOf = Callable[[str], Sequence[int]]
"""The text of a token, as a server writes it -> the ids of all tokens that it may stand for."""
Dialect = Literal["openai", "vllm", "bridge"]
"""What a server understands: the protocol alone, vLLM's fields as well, or Bridge's own route."""
ROUTES = {"openai": "/v1/completions", "vllm": "/v1/completions", "bridge": protocol.COMPLETIONS}
TOKEN_ID = re.compile(r"token_id:(\d+)")
BEYOND_THE_PROTOCOL = {**WHOLE, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": True}
"""Fields that only vLLM gets."""
TAKE_ANOTHER = (
    "use vLLM, which supports `return_token_ids` (bridge serve-vllm, or any version in the supported range), or a "
    "server that writes its tokens as token_id:123"
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


class Vocabulary:
    """A tokenizer's tokens by their decoded text, decoded at the first lookup.

    Sentencepiece marks the start of a word by a sign: decoded alone, such a token reads like the one without the sign,
    so that a lookup finds both.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the ids of all tokens that read as `text`."""
        return self._ids.get(text, ())

    @cached_property
    def _ids(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = defaultdict(tuple)
        for token_id in range(len(self._tokenizer)):
            found[self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)] += (token_id,)
        return dict(found)


def request(dialect: Dialect, *, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """Return the fields that all requests to a server share."""
    fields: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": temperature}
    if dialect == "bridge":
        return fields
    fields |= {name: WHOLE[name] for name in PROTOCOL} | {"logprobs": 1}
    return fields | BEYOND_THE_PROTOCOL if dialect == "vllm" else fields


def in_order(answer: Completions, num_samples: int) -> list[Choice]:
    """Return the choices in the order of their indices.

    Raises:
        RequestFailed: they are not numbered from 0 to `num_samples` - 1.
    """
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if len(choices) != num_samples:
        raise RequestFailed(f"requested {num_samples} completions, got {len(choices)}", "once")
    if indices != list(range(num_samples)):
        raise RequestFailed(
            f"requested {num_samples} completions, got those numbered {', '.join(map(str, indices))}", "once"
        )
    return choices


def completion(url: str, choice: Choice, version: str, ids_of: IdsOf | None) -> Completion:
    """Return a choice as a completion; `version` is the server's version header.

    Raises:
        UsageError: the server returns no token ids, or text that stands for no token or several.
        RequestFailed: the answer contradicts itself.
    """
    if choice.logprobs is None:
        raise _without_token_ids(url)
    token_ids, logprobs = _token_ids(url, choice, choice.logprobs, ids_of), choice.logprobs.token_logprobs
    if len(token_ids) != len(logprobs):
        raise RequestFailed(f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities", "once")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=choice.text,
        finish_reason=choice.finish_reason,
        versions=versions(version, len(token_ids)),
    )


def versions(header: str, num_tokens: int) -> tuple[int | None, ...]:
    """Return the version of each token of a completion by the server's version header.

    A request that was in flight during a publication gets a range such as `3-4`, which says nothing of a single token.
    """
    return (int(header) if header.isdecimal() else None,) * num_tokens


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
            f"the server at {url} returns its tokens as text alone, and {token!r} is the text of"
            f" {len(found) or 'no'} tokens of this model, expected one",
            remedy=TAKE_ANOTHER,
        )
    return found[0]


def _without_token_ids(url: str) -> UsageError:
    return UsageError(f"the server at {url} returns no token ids with their log-probabilities", remedy=TAKE_ANOTHER)
