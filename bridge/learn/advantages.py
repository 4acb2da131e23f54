"""From groups to samples: advantages from rewards, and each completion's share of the loss.

A completion that is left out because its advantages are zero counts in every mean as if it were there: a batch with few
useful groups takes a smaller step, not a steeper one. One that is masked because it was cut off counts among the
completions, but its tokens do not count among the tokens, as in TRL. A token that was not sampled counts nowhere.

Not covered: packing (`bridge/passes/packing.py`), the loss itself (`policy_loss.py`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Literal

from bridge.errors import UsageError
from bridge.learn.policy_loss import LossSpec
from bridge.passes.packing import Sample
from bridge.types import Completion, Group

STD_EPSILON = 1e-6
"""Added to a standard deviation: rewards that differ by rounding alone get next to no advantage."""
CUT_OFF = ("length", "abort")
"""Finish reasons of a completion that would have gone on."""


def with_advantages(groups: Sequence[Group], scale: Literal["group", "batch", "none"]) -> list[Group]:
    """Return the groups with advantages: reward - mean of the group, over the standard deviation of `scale`.

    Exactly zero where all rewards of a group are equal, or there is one, or the group says so; a group without
    completions stays without. Advantages from outside are taken as they are. Standard deviations are the population's,
    so that the mean square of a group's advantages is one; the batch's is of all the rewards that advantages are made
    from. A batch that is cut into several updates comes here as a whole first.

    Raises:
        UsageError: advantages from outside do not fit their completions, or are no finite numbers.

    Source: group: DeepSeekMath (arXiv 2402.03300), section 4.1.2; batch: "Tricks or Traps?" (arXiv 2508.08221);
        none: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    of_batch = _divisor(reward for group in groups if group.advantages is None for reward in group.rewards)
    filled = []
    for number, group in enumerate(groups, start=1):
        advantages = group.advantages
        if advantages is not None:
            _check(group, advantages, number)
        else:
            divisor = {"group": _divisor(group.rewards), "batch": of_batch, "none": 1.0}[scale]
            advantages = tuple((value / divisor,) for value in _centred(group.rewards))
        filled.append(replace(group, advantages=_with_zeros(advantages, group.zero_advantage)))
    return filled


def has_signal(group: Group) -> bool:
    """Return whether any completion of a group has an advantage, by whatever scale."""
    return any(any(advantages) for filled in with_advantages([group], "none") for advantages in filled.advantages or ())


def samples(groups: Sequence[Group], spec: LossSpec, *, max_new_tokens: int) -> list[Sample]:
    """Return what one update is trained on: the completions of `groups` that have a gradient, in their order.

    Those without a token have none, nor have those whose advantages are all zero, unless there is a KL divergence, nor
    have those that were cut off, where `spec` masks them.

    Raises:
        UsageError: as `with_advantages` does.

    Source: token mean: DAPO (arXiv 2503.14476), equation 8, over the update instead of the group; sequence mean:
        DeepSeekMath (arXiv 2402.03300), equation 3; constant: the code of Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    kept = [row for row in _rows(groups, spec) if not (spec.mask_truncated and row[1].finish_reason in CUT_OFF)]
    num_completions = sum(len(group.completions) for group in groups)
    num_tokens = sum(completion.num_sampled for _, completion, _ in kept)
    result = []
    for prompt, completion, advantages in kept:
        length = completion.num_sampled
        if not length or not (any(advantages) or spec.kl_coef > 0):
            continue
        divisor = {
            "token_mean": num_tokens,
            "sequence_mean": num_completions * length,
            "constant": num_completions * max_new_tokens,
        }[spec.aggregation]
        result.append(_sample(prompt, completion, advantages, 1 / divisor))
    return result


def _rows(groups: Sequence[Group], spec: LossSpec) -> Iterator[tuple[tuple[int, ...], Completion, tuple[float, ...]]]:
    """Yield every completion with its prompt and one advantage per sampled token."""
    for group in with_advantages(groups, spec.advantage_scale):
        assert group.advantages is not None
        for completion, given in zip(group.completions, group.advantages, strict=True):
            yield group.prompt_token_ids, completion, _per_token(given, completion)


def _per_token(given: tuple[float, ...], completion: Completion) -> tuple[float, ...]:
    length = len(completion.token_ids)
    return _of_sampled(given if len(given) == length else given * length, completion)


def _of_sampled(values: tuple[float, ...], completion: Completion) -> tuple[float, ...]:
    return values if completion.sampled is None else tuple(compress(values, completion.sampled))


def _sample(prompt: tuple[int, ...], completion: Completion, advantages: tuple[float, ...], weight: float) -> Sample:
    assert len(completion.token_ids) == len(completion.logprobs), (completion.token_ids, completion.logprobs)
    sample = Sample(
        prompt_token_ids=prompt,
        token_ids=completion.token_ids,
        sampled_logprobs=_of_sampled(completion.logprobs, completion),
        advantages=advantages,
        weight=weight,
    )
    return sample if completion.sampled is None else _with_mask(sample, completion.sampled)


def _with_mask(sample: Sample, sampled: tuple[bool, ...]) -> Sample:
    """Return the sample with a mask if it needs one: what comes before its first sampled token becomes prompt."""
    first = sampled.index(True)
    return replace(
        sample,
        prompt_token_ids=sample.prompt_token_ids + sample.token_ids[:first],
        token_ids=sample.token_ids[first:],
        sampled=None if all(sampled[first:]) else sampled[first:],
    )


def _centred(rewards: Sequence[float]) -> list[float]:
    if not rewards or max(rewards) == min(rewards):  # their mean may differ from them by a rounding
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _divisor(rewards: Iterable[float]) -> float:
    """Return the standard deviation, with the epsilon that keeps it from being zero."""
    squares = [value * value for value in _centred(list(rewards))]
    return math.sqrt(math.fsum(squares) / max(len(squares), 1)) + STD_EPSILON


def _with_zeros(advantages: tuple[tuple[float, ...], ...], flags: tuple[bool, ...]) -> tuple[tuple[float, ...], ...]:
    if not any(flags):
        return advantages
    return tuple((0.0,) if is_zero else own for own, is_zero in zip(advantages, flags, strict=True))


def _check(group: Group, advantages: tuple[tuple[float, ...], ...], number: int) -> None:
    lengths = [len(completion.token_ids) for completion in group.completions]
    fault = _fault(lengths, advantages)
    if fault:
        raise UsageError(
            f"the advantages of group {number} (prompt {str(group.problem['prompt'])[:80]!r}) cannot be used: {fault}",
            remedy="give each completion one finite advantage, or one for each of its sampled tokens",
        )


def _fault(lengths: Sequence[int], advantages: tuple[tuple[float, ...], ...]) -> str | None:
    if len(advantages) != len(lengths):
        return f"they are of {len(advantages)} completions, and the group has {len(lengths)}"
    for index, (length, given) in enumerate(zip(lengths, advantages, strict=True), start=1):
        if len(given) not in (1, length):
            return f"completion {index} has {length} tokens and {len(given)} advantages"
        odd = [value for value in given if not math.isfinite(value)]
        if odd:
            return f"one of completion {index} is {odd[0]}"
    return None
