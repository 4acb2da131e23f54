"""From an environment's sequences to a group that is learnt from.

The prompt of a group is what all of its sequences begin with before their first sampled token, and a completion all the
rest of a sequence, with a mask where that is more than sampled tokens. The first token of a sequence is read even where
it is marked as sampled: nothing predicts it.

Not covered: what may be wrong with a group (`faults.py`), advantages from scores (`bridge/learn/advantages.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from bridge.atropos.protocol import MASKED, UNKNOWN_LOGPROB, ScoredGroup
from bridge.learn.advantages import with_advantages
from bridge.types import Completion, Group, Unscored

Decode = Callable[[Sequence[int]], str]
ZERO = "set_advantage_to_zero"


def learnt_from(group: ScoredGroup, decode: Decode) -> Group:
    """Return a group without fault as training needs it."""
    flags = [sampled(mask) for mask in group.masks]
    start = _num_common([tokens[: _first(own)] for tokens, own in zip(group.tokens, flags, strict=True)])
    prompt = group.tokens[0][:start]
    return Group(
        problem={"prompt": decode(prompt)},
        prompt_token_ids=prompt,
        completions=tuple(_completion(group, index, start, own[start:], decode) for index, own in enumerate(flags)),
        rewards=tuple(map(number, group.scores)),
        advantages=_advantages(group, flags, start) if group.advantages else None,
    )


def left_out(group: ScoredGroup, why: str) -> Group:
    """Return what is counted of a group that cannot be learnt from."""
    empty = Completion(token_ids=(), logprobs=(), text="", finish_reason="abort", weight_version=None)
    unscored = (Unscored(completion=empty, fault=why),) * max(len(group.tokens), 1)
    return Group(problem={"prompt": ""}, prompt_token_ids=(), completions=(), rewards=(), unscored=unscored)


def with_zeros(
    groups: Sequence[Group], scored: Sequence[ScoredGroup], scale: Literal["group", "batch", "none"]
) -> list[Group]:
    """Return the groups of a whole batch, with advantages of zero where environments want them to be.

    The rewards of such sequences count for the others' as ever.
    """
    wanted = [[bool(override.get(ZERO)) for override in given.overrides or ()] for given in scored]
    if not any(map(any, wanted)):
        return list(groups)
    filled = with_advantages(groups, scale)
    return [_zeroed(group, zeros) if any(zeros) else group for group, zeros in zip(filled, wanted, strict=True)]


def sampled(mask: tuple[int, ...]) -> tuple[bool, ...]:
    """Tell which tokens of a sequence can be trained on."""
    return (False, *(place != MASKED for place in mask[1:]))


def logprob(value: float | None) -> float:
    """Return a log-probability, not a number where it is unknown."""
    return math.nan if value is None or value == UNKNOWN_LOGPROB else value


def number(value: float | None) -> float:
    """Return `value`, not a number where the API wrote null."""
    return math.nan if value is None else value


def _completion(group: ScoredGroup, index: int, start: int, flags: tuple[bool, ...], decode: Decode) -> Completion:
    token_ids = group.tokens[index][start:]
    told = group.inference_logprobs[index][start:] if group.inference_logprobs else (None,) * len(token_ids)
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(logprob(value) if own else math.nan for value, own in zip(told, flags, strict=True)),
        text=decode(token_ids),
        finish_reason="stop",  # the protocol does not tell
        weight_version=None,
        sampled=None if all(flags) else flags,
    )


def _advantages(group: ScoredGroup, flags: Sequence[tuple[bool, ...]], start: int) -> tuple[tuple[float, ...], ...]:
    assert group.advantages is not None
    return tuple(
        tuple(number(value) if own else 0.0 for value, own in zip(given, row, strict=True))[start:]
        if len(given) == len(row)
        else (number(given[0]),)
        for given, row in zip(group.advantages, flags, strict=True)
    )


def _zeroed(group: Group, zeros: Sequence[bool]) -> Group:
    assert group.advantages is not None
    return replace(
        group,
        advantages=tuple((0.0,) if zero else own for own, zero in zip(group.advantages, zeros, strict=True)),
    )


def _first(flags: tuple[bool, ...]) -> int:
    return flags.index(True) if True in flags else len(flags)


def _num_common(prefixes: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all of them begin with: as many as the first and the last in order do."""
    first, last = min(prefixes), max(prefixes)
    pairs = enumerate(zip(first, last, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))
