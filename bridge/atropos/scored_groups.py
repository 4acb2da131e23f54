"""Convert groups to and from the scored sequences of an Atropos API, and find flaws in received ones.

The API itself only checks types.

The prompt of a group is the common prefix of its sequences before their first sampled token. A completion is the rest
of a sequence, with a mask if it also holds tokens that were not sampled. The first token of a sequence is never trained
on, even if it is marked as sampled, because no token precedes it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, groupby
from typing import Any

from bridge.atropos.api import MASKED, UNKNOWN_LOGPROB, WEIGHT_VERSIONS, Numbers, ScoredGroup
from bridge.rollouts.distribution import changes, in_words
from bridge.scoring.score import LARGEST, limit_note
from bridge.types import Completion, Group, Message, Problem, Unscored

Decode = Callable[[Sequence[int]], str]
ZERO = "set_advantage_to_zero"
MAX_LOGPROB = 0.01
"""Highest log-probability in nats that rounding can explain."""
UNUSED = ("ref_logprobs", "distill_token_ids", "distill_logprobs")
KNOWN_OVERRIDES = {ZERO, WEIGHT_VERSIONS, "temperature", "group_size"}


def to_train_on(group: ScoredGroup, decode: Decode) -> Group:
    """Convert a usable group to the form that training needs."""
    flags = [_sampled(mask) for mask in group.masks]
    prefixes = []
    for tokens, own in zip(group.tokens, flags, strict=True):
        end = own.index(True) if True in own else len(tokens)
        prefixes.append(tokens[:end])
    first, last = min(prefixes), max(prefixes)  # in sorted order, the common prefix of these two is that of all
    pairs = enumerate(zip(first, last, strict=False))
    start = next((index for index, (low, high) in pairs if low != high), min(len(first), len(last)))
    prompt = group.tokens[0][:start]
    return Group(
        problem={"prompt": decode(prompt)},
        prompt_token_ids=prompt,
        completions=tuple(_completion(group, index, start, own[start:], decode) for index, own in enumerate(flags)),
        rewards=tuple(map(_number, group.scores)),
        advantages=_advantages(group.advantages, flags, start) if group.advantages else None,
        zero_advantage=tuple(bool(override.get(ZERO)) for override in group.overrides or ()),
    )


def left_out(group: ScoredGroup, why: str) -> Group:
    """Return an empty group in place of an unusable one."""
    empty = Completion(token_ids=(), logprobs=(), text="", finish_reason="abort")
    unscored = (Unscored(completion=empty, fault=why),) * max(len(group.tokens), 1)
    return Group(problem={"prompt": ""}, prompt_token_ids=(), completions=(), rewards=(), unscored=unscored)


def _completion(group: ScoredGroup, index: int, start: int, flags: tuple[bool, ...], decode: Decode) -> Completion:
    token_ids = group.tokens[index][start:]
    given = group.inference_logprobs[index][start:] if group.inference_logprobs else (None,) * len(token_ids)
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(_logprob(value) if own else math.nan for value, own in zip(given, flags, strict=True)),
        text=decode(token_ids),
        finish_reason="stop",  # Atropos's protocol has no finish reason
        versions=_versions(group, index, flags),
        sampled=None if all(flags) else flags,
    )


def _versions(group: ScoredGroup, index: int, flags: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the version of the weights that sampled each token; empty if the environment does not send versions."""
    runs = _override(group, index, WEIGHT_VERSIONS)
    if not runs:
        return ()
    of_sampled = (version for version, count in runs for _ in range(count))
    return tuple(next(of_sampled) if own else None for own in flags)


def _override(group: ScoredGroup, index: int, name: str) -> Any:
    return group.overrides[index].get(name) if group.overrides else None


def _advantages(
    advantages: Sequence[Numbers], flags: Sequence[tuple[bool, ...]], start: int
) -> tuple[tuple[float, ...], ...]:
    read = []
    for given, row in zip(advantages, flags, strict=True):
        if len(given) == len(row):
            of_tokens = [_number(value) if own else 0.0 for value, own in zip(given, row, strict=True)]
            read.append(tuple(of_tokens[start:]))
        else:
            read.append((_number(given[0]),))
    return tuple(read)


def _sampled(mask: tuple[int, ...]) -> tuple[bool, ...]:
    """Return for each token of a sequence whether it can be trained on."""
    return (False, *(entry != MASKED for entry in mask[1:]))


def _logprob(value: float | None) -> float:
    return math.nan if value is None or value == UNKNOWN_LOGPROB else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def scored_group(
    problem: Problem,
    prompt: tuple[int, ...],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    env_id: int,
    generation_params: dict[str, Any],
) -> ScoredGroup:
    """Convert a group to the form that the API accepts, without NaN, which would cost a whole batch."""
    question = problem["prompt"]
    before: list[Message] = [{"role": "user", "content": question}] if isinstance(question, str) else question
    of_prompt = (UNKNOWN_LOGPROB,) * len(prompt)
    logprobs = []
    for completion in completions:
        known = [value if math.isfinite(value) else UNKNOWN_LOGPROB for value in completion.logprobs]
        logprobs.append((*of_prompt, *known))
    return ScoredGroup(
        tokens=tuple(prompt + completion.token_ids for completion in completions),
        masks=tuple((MASKED,) * len(prompt) + completion.token_ids for completion in completions),
        scores=tuple(rewards),
        inference_logprobs=tuple(logprobs),
        overrides=tuple(map(_version_runs, completions)),
        messages=[[*before, {"role": "assistant", "content": completion.text}] for completion in completions],
        generation_params=generation_params,
        env_id=env_id,
    )


def _version_runs(completion: Completion) -> dict[str, Any]:
    """Return the versions that sampled a completion as overrides; empty if the version of any token is unknown."""
    runs = [[version, len(list(run))] for version, run in groupby(completion.versions)]
    return {} if any(version is None for version, _ in runs) or not runs else {WEIGHT_VERSIONS: runs}


def flaws(group: ScoredGroup, *, longest: int, num_words: int) -> Iterator[tuple[str, str]]:
    """Yield each flaw that makes a group unusable, as the name of the field and a one-line description.

    A sequence may have at most `longest` tokens, with ids below `num_words`.

    Only use the first flaw: asking for more may raise, because each check relies on the previous ones.
    """
    num_sequences = len(group.tokens)
    if not group.tokens:
        yield "tokens", "it has no sequences"
    for name in ("masks", "scores", "advantages", "inference_logprobs", "overrides"):
        values = getattr(group, name) or ()
        if len(values) != num_sequences and (values or name in {"masks", "scores"}):
            yield name, f"it has {num_sequences} sequences and {len(values)} {name}"
    if group.images:
        yield "images", "its prompt has images, but only text can be trained on"
    for index, (tokens, mask) in enumerate(zip(group.tokens, group.masks, strict=True)):
        for kind, fault in chain(_of_tokens(tokens, mask, longest, num_words), _of_values(group, index)):
            yield kind, f"sequence {index + 1} of {num_sequences} has {fault}"


def _of_tokens(
    tokens: tuple[int, ...], mask: tuple[int, ...], longest: int, num_words: int
) -> Iterator[tuple[str, str]]:
    if not tokens:
        yield "tokens", "no tokens"
    if len(tokens) > longest:
        yield "length", f"{len(tokens):,} tokens, expected at most {longest:,}"
    if min(tokens) < 0 or max(tokens) >= num_words:
        odd = next(token for token in tokens if not 0 <= token < num_words)
        yield "vocabulary", f"the token {odd}, expected 0 to {num_words - 1}: a different tokenizer?"
    if len(mask) != len(tokens):
        yield "masks", f"{len(tokens)} tokens and a mask of {len(mask)}"
    if any(entry not in (MASKED, token) for entry, token in zip(mask, tokens, strict=True)):
        yield "masks", f"a mask value that is neither {MASKED} nor the token at that position"


def _of_values(group: ScoredGroup, index: int) -> Iterator[tuple[str, str]]:
    num_tokens = len(group.tokens[index])
    sampled = _sampled(group.masks[index])
    if not abs(score := _number(group.scores[index])) <= LARGEST:
        yield "scores", f"the score {score}, expected a finite number{limit_note(score)}"
    if group.advantages:
        given = group.advantages[index]
        if len(given) not in (1, num_tokens):
            yield "advantages", f"{num_tokens} tokens and {len(given)} advantages"
        used = map(_number, given if len(given) == 1 else compress(given, sampled))
        yield from (("advantages", f"the advantage {value}") for value in used if not abs(value) <= LARGEST)
    if (runs := _override(group, index, WEIGHT_VERSIONS)) is not None and not _are_runs(runs, sum(sampled)):
        yield "overrides", f"invalid {WEIGHT_VERSIONS}, expected [version, count] pairs for {sum(sampled)} tokens"
    if group.inference_logprobs:
        given = group.inference_logprobs[index]
        if len(given) != num_tokens:
            yield "inference_logprobs", f"{num_tokens} tokens and {len(given)} log-probabilities"
        odd = (value for value in map(_logprob, compress(given, sampled)) if value == -math.inf or value > MAX_LOGPROB)
        yield from (("inference_logprobs", f"the log-probability {value}") for value in odd)


def _are_runs(runs: Any, num_tokens: int) -> bool:
    try:
        pairs = [(version, count) for version, count in runs]
    except (TypeError, ValueError):
        return False
    is_whole = all(type(number) is int and number >= 0 for pair in pairs for number in pair)
    return is_whole and sum(count for _, count in pairs) == num_tokens


def ignored(group: ScoredGroup, *, temperature: float) -> Iterator[str]:
    """Yield one sentence for each thing that a usable group lacks, or that training at `temperature` ignores."""
    if not group.inference_logprobs:
        yield (
            "an environment sends no log-probabilities: its tokens get an importance weight of one, and do not count in"
            " the log-probability difference between vLLM and the trainer"
        )
    for name in UNUSED:
        if getattr(group, name):
            yield f"an environment sends {name}, which is ignored"
    overrides = [*(group.overrides or ()), group.group_overrides or {}]
    for params in [group.generation_params or {}, *overrides]:
        if params.get("temperature", temperature) != temperature:
            yield (
                f"an environment samples at temperature {params['temperature']}, but --temperature is {temperature}:"
                " log-probabilities of different distributions are compared"
            )
        if changed := changes(params):
            yield f"an environment samples with {in_words(changed)}"
    for name in sorted(set().union(*overrides) - KNOWN_OVERRIDES):
        yield f"an environment overrides {name}, which is ignored"
