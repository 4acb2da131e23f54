"""What is wrong with a group that cannot be learnt from: the API checks types alone.

Not covered: groups without fault (`groups.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

from bridge.atropos.groups import logprob, number, sampled
from bridge.atropos.protocol import MASKED, Numbers, ScoredGroup

MAX_LOGPROB = 0.01
"""Nats: above it is no rounding."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a sequence has to fit into."""

    longest: int
    """Tokens of the longest sequence."""
    num_words: int
    """Token ids are below it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a group cannot be learnt from."""

    kind: str
    """The part that is at fault: what several groups may have in common."""
    found: str
    """What it is in this one, in a line."""


def find(group: ScoredGroup, bounds: Bounds) -> Fault | None:
    """Return the first thing that is wrong with a group, if there is any."""
    return next(_faults(group, bounds), None)


def _faults(group: ScoredGroup, bounds: Bounds) -> Iterator[Fault]:
    """Yield what is wrong; only the first is sure to make sense."""
    for kind, words in _of_all(group):
        yield Fault(kind=kind, found=words)
    for index in range(len(group.tokens)):
        for kind, words in _of_one(group, index, bounds):
            yield Fault(kind=kind, found=f"sequence {index + 1} of {len(group.tokens)} has {words}")


def _of_all(group: ScoredGroup) -> Iterator[tuple[str, str]]:
    if not group.tokens:
        yield "tokens", "it has no sequences"
    for name in ("masks", "scores", "advantages", "inference_logprobs", "overrides"):
        values = getattr(group, name) or ()
        if len(values) != len(group.tokens) and (values or name in {"masks", "scores"}):
            yield name, f"it has {len(group.tokens)} sequences and {len(values)} {name}"
    if group.images:
        yield "images", "its prompt has images, and only text is trained here"


def _of_one(group: ScoredGroup, index: int, bounds: Bounds) -> Iterator[tuple[str, str]]:
    tokens, mask, score = group.tokens[index], group.masks[index], number(group.scores[index])
    yield from _of_tokens(tokens, bounds)
    if len(mask) != len(tokens):
        yield "masks", f"{len(tokens)} tokens and a mask of {len(mask)}"
    elif any(place not in (MASKED, token) for place, token in zip(mask, tokens, strict=True)):
        yield "masks", f"a mask that is neither {MASKED} nor the token at its place"
    if not math.isfinite(score):
        yield "scores", f"the score {score}"
    yield from _of_advantages(group.advantages[index] if group.advantages else None, mask)
    yield from _of_logprobs(group.inference_logprobs[index] if group.inference_logprobs else None, mask)


def _of_tokens(tokens: tuple[int, ...], bounds: Bounds) -> Iterator[tuple[str, str]]:
    if not tokens:
        yield "tokens", "no tokens"
    elif len(tokens) > bounds.longest:
        yield "length", f"{len(tokens):,} tokens, expected at most {bounds.longest:,}"
    elif min(tokens) < 0 or max(tokens) >= bounds.num_words:
        odd = next(token for token in tokens if not 0 <= token < bounds.num_words)
        yield "vocabulary", f"the token {odd}, and the model has 0 to {bounds.num_words - 1}: another tokenizer"


def _of_advantages(given: Numbers | None, mask: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if given is None:
        return
    if len(given) not in (1, len(mask)):
        yield "advantages", f"{len(mask)} tokens and {len(given)} advantages"
        return
    used = given if len(given) == 1 else compress(given, sampled(mask))
    yield from (("advantages", f"the advantage {v}") for v in map(number, used) if not math.isfinite(v))


def _of_logprobs(given: Numbers | None, mask: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if given is None:
        return
    if len(given) != len(mask):
        yield "inference_logprobs", f"{len(mask)} tokens and {len(given)} log-probabilities"
        return
    used = map(logprob, compress(given, sampled(mask)))
    yield from (("inference_logprobs", f"the log-probability {v}") for v in used if v == -math.inf or v > MAX_LOGPROB)
