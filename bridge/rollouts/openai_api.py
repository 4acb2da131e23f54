"""Requests to an OpenAI-compatible server, and completions from its responses.

A vLLM patched by Bridge has its own route, whose responses hold only what is read here. An unpatched vLLM gets vLLM's
extra fields: to return token ids, and to sample from the unfiltered distribution. Any other server gets only the
protocol's fields, because many servers reject others. Its token ids come from `logprobs.tokens`: `token_id:123` is an
id, and any other string must be the text of exactly one token in the vocabulary. Text is never tokenized again. Such a
server leaves out the end token of a completion that ended by itself, so the choice to end there is not trained.
"""

import base64
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np
from pydantic import Base64Bytes, BaseModel, FiniteFloat

from bridge.config import SamplingConfig
from bridge.errors import ServerUnreachableError, UsageError
from bridge.rollouts.distribution import PROTOCOL, WHOLE, filters
from bridge.server import protocol
from bridge.server.client import unreachable
from bridge.types import Completion, FinishReason, Images

Retry = Literal["anywhere", "elsewhere", "once", "never"]
"""Where to retry a failed request: at any server; at a different one, because this one would take as long again; at any
server, but only once, because a second unusable response is not a coincidence; nowhere."""
IdsOf = Callable[[str], Sequence[int]]
"""A token's text, as a server writes it -> the ids of all tokens with this text."""
Dialect = Literal["openai", "vllm", "bridge"]
"""API of a server: OpenAI's protocol, the same with vLLM's extra fields, or Bridge's own route."""
ROUTES = {"openai": "/v1/completions", "vllm": "/v1/completions", "bridge": protocol.COMPLETIONS}
TOKEN_ID = re.compile(r"token_id:(\d+)")
BEYOND_THE_PROTOCOL = {**WHOLE, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": True}
"""Fields that only vLLM gets."""
TAKE_ANOTHER = (
    "use vLLM, which supports `return_token_ids` (bridge serve-vllm, or any version in the supported range), or a "
    "server that writes its tokens as token_id:123"
)


class RequestFailed(Exception):  # noqa: N818  not an error yet: a retry may succeed
    """A request that failed because of the server."""

    def __init__(self, reason: str, retry: Retry, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry
        self.retry_after_s = retry_after_s

    def final(self, url: str, num_tries: int) -> ServerUnreachableError:
        """Return the error to raise once no retries are left."""
        error = unreachable(url, f"{self.reason}; tried {'once' if num_tries == 1 else f'{num_tries} times'}")
        if self.retry == "elsewhere":
            error.hint += "; or raise --request-timeout-s, or lower --max-new-tokens"
        return error


class Logprobs(BaseModel):
    """The sampled tokens with their log-probabilities."""

    token_logprobs: tuple[FiniteFloat, ...]
    tokens: tuple[str, ...] | None = None


class Experts(BaseModel):
    """The experts that tokens were routed to, from the first requested token to the second-to-last one."""

    kind: Literal["uint8", "int16"]
    """The data type of the expert indices."""
    content: Base64Bytes
    """The expert indices in little-endian order, token by token, and layer by layer within a token."""

    def widened(self) -> bytes:
        """Return the expert indices as int16."""
        return np.frombuffer(self.content, np.dtype(self.kind).newbyteorder("<")).astype("<i2").tobytes()


class Choice(BaseModel):
    """One completion."""

    index: int
    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    versions: tuple[tuple[int, int], ...] | None = None
    """On Bridge's own route: each version of the weights, with the number of consecutive tokens that it sampled."""
    kept: tuple[tuple[FiniteFloat, int], ...] = ()
    """The part of the vocabulary that filters kept for each token, as in `Completion`; empty if not requested."""
    experts: Experts | None = None
    """The experts of each token; None if not requested."""
    prompt_logprobs: tuple[FiniteFloat | None, ...] | None = None
    """Log-probabilities of the prompt's tokens, none for the first; None if not requested."""


class Completions(BaseModel):
    """The response of any of the routes."""

    choices: tuple[Choice, ...]


def ids_by_text(tokenizer: Any) -> IdsOf:
    """Return a function from a text to the ids of all tokens with this text; its first call decodes the vocabulary.

    Sentencepiece marks the start of a word with a special character. Decoded on its own, such a token has the same text
    as the token without this character, so a lookup finds both.
    """

    @cache
    def vocabulary() -> Mapping[str, tuple[int, ...]]:
        ids: dict[str, tuple[int, ...]] = defaultdict(tuple)
        for token_id in range(len(tokenizer)):
            ids[tokenizer.decode([token_id], clean_up_tokenization_spaces=False)] += (token_id,)
        return dict(ids)

    return lambda text: vocabulary().get(text, ())


def request(dialect: Dialect, config: SamplingConfig, *, has_stop: bool = False) -> dict[str, Any]:
    """Return the fields that all requests to a server share, with or without a `stop`.

    Only Bridge's own route gets filters.
    """
    fields: dict[str, Any] = {"max_tokens": config.longest, "temperature": config.temperature}
    if dialect == "bridge":
        return fields | filters(config)
    fields |= {name: WHOLE[name] for name in PROTOCOL} | {"logprobs": 1}
    if dialect == "openai":
        return fields
    return fields | BEYOND_THE_PROTOCOL | ({"include_stop_str_in_output": True} if has_stop else {})


def sent(images: Images) -> dict[str, Any]:
    """Return the images of a prompt in the form that Bridge's own route accepts."""
    arrays = images.arrays
    return {array.name: (array.dtype, array.shape, base64.b64encode(array.content).decode()) for array in arrays}


def in_order(answer: Completions, num_samples: int) -> list[Choice]:
    """Return the choices in the order of their indices."""
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if indices != list(range(num_samples)):
        numbered = f"completions with the indices {', '.join(map(str, indices))}"
        received = numbered if len(choices) == num_samples else len(choices)
        raise RequestFailed(f"requested {num_samples} completions, got {received}", "once")
    return choices


def completion(url: str, choice: Choice, version: str, ids_of: IdsOf | None, num_prompt: int) -> Completion:
    """Return a choice as a completion; `version` is the server's version header.

    Experts, if there are any, belong to the last `num_prompt` tokens of the prompt and to the completion.

    A header such as `3-4` comes from a request that was in flight during a publication. Unless the response has
    versions per token, each token's version is then unknown.
    """
    written = choice.logprobs
    token_ids = choice.token_ids
    if written is None or (token_ids is None and written.tokens is None):
        raise _without_token_ids(url)
    if token_ids is None:
        token_ids = tuple(_token_id(url, token, ids_of) for token in written.tokens or ())
    if len(token_ids) != len(written.token_logprobs):
        raise RequestFailed(f"{len(token_ids)} tokens with {len(written.token_logprobs)} log-probabilities", "once")
    versions: tuple[int | None, ...] = (int(version) if version.isdecimal() else None,) * len(token_ids)
    if choice.versions is not None:
        versions = tuple(chain.from_iterable(repeat(number, count) for number, count in choice.versions))
        if len(versions) != len(token_ids):
            raise RequestFailed(f"{len(token_ids)} tokens with {len(versions)} versions", "once")
    if choice.kept and len(choice.kept) != len(token_ids):
        raise RequestFailed(f"{len(token_ids)} tokens with {len(choice.kept)} thresholds", "once")
    experts = b"" if choice.experts is None else choice.experts.widened()
    if experts and len(experts) % (2 * (num_prompt + len(token_ids) - 1)):
        raise RequestFailed(f"{len(experts) // 2} experts for {num_prompt + len(token_ids)} tokens", "once")
    return Completion(
        token_ids=token_ids,
        logprobs=written.token_logprobs,
        text=choice.text,
        finish_reason=choice.finish_reason,
        versions=versions,
        kept=choice.kept,
        experts=experts,
        prompt_logprobs=tuple(math.nan if value is None else value for value in choice.prompt_logprobs or ()),
    )


def _token_id(url: str, token: str, ids_of: IdsOf | None) -> int:
    if written := TOKEN_ID.fullmatch(token):
        return int(written[1])
    if ids_of is None:
        raise _without_token_ids(url)
    ids = ids_of(token)
    if len(ids) != 1:
        raise UsageError(
            f"the server at {url} returns tokens only as text, and {token!r} matches {len(ids) or 'no'} tokens of this"
            " model's vocabulary, expected one",
            hint=TAKE_ANOTHER,
        )
    return ids[0]


def _without_token_ids(url: str) -> UsageError:
    return UsageError(f"the server at {url} does not return token ids with log-probabilities", hint=TAKE_ANOTHER)
