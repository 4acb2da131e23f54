"""Turn groups into training samples: advantages, and each completion's share of the loss.

A completion that is left out because its advantages are zero still counts in every mean, so that a batch with few
useful groups takes a smaller step. A masked truncated completion counts as a completion, but its tokens do not count,
as in TRL. Tokens that were not sampled never count. If a completion has several sequences (an agent's run), they share
its advantage, and count as one completion.

A preference loss takes the two completions of each group as a pair: the one with the larger reward is preferred.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from bridge.config import AdvantageScale
from bridge.errors import UsageError
from bridge.learn.policy_loss import LossSpec
from bridge.passes.packing import Sample, of_sampled
from bridge.types import Completion, Group

STD_EPSILON = 1e-6
"""Added to standard deviations, so that rewards that differ only by rounding give almost no advantage."""
TRUNCATED = ("length", "abort")
"""Finish reasons of a truncated completion."""


def with_advantages(groups: Sequence[Group], scale: AdvantageScale) -> list[Group]:
    """Return the groups with advantages: (reward - mean of the group) / standard deviation, in the scope of `scale`.

    `leave_one_out` divides by 1 - 1 / N instead, for N completions in the group. That equals the reward minus the mean
    of the other completions' rewards.

    With rewards per turn, a turn's return, the sum of the rewards from that turn on, replaces the reward. It is
    compared with the returns of the same turn in the group's other completions. Each token has its turn's advantage.

    Advantages are exactly zero if all rewards of a group are equal, or if the group is marked as having no signal.
    Advantages that a group already has are kept. Standard deviations are of the population, so that the mean square of
    a group's advantages is one; the batch's covers the rewards of all groups that had no advantages. Pass the full
    batch, before it is cut into mini-batches.

    Source: group: DeepSeekMath (arXiv 2402.03300), section 4.1.2; batch: "Tricks or Traps?" (arXiv 2508.08221);
        none: Dr. GRPO (arXiv 2503.20783), section 3.2; leave_one_out: RLOO (arXiv 2402.14740), after Kool et al. 2019.
    """
    compared = [_compared(group) if group.advantages is None else [] for group in groups]
    of_batch = _divisor([list(chain(*chain(*compared)))])
    filled = []
    for number, (group, rewards) in enumerate(zip(groups, compared, strict=True), start=1):
        advantages = group.advantages
        if advantages is not None:
            _check(group, advantages, number)
        else:
            by_turn = []
            for compared_rewards in rewards:
                divisor = {
                    "group": _divisor(rewards),
                    "batch": of_batch,
                    "none": 1.0,
                    "leave_one_out": 1 - 1 / max(len(compared_rewards), 2),  # a single completion has no advantage
                }[scale]
                by_turn.append([value / divisor for value in _centered(compared_rewards)])
            advantages = _of_tokens(group, by_turn) if group.turn_rewards else tuple((value,) for value in by_turn[0])
        if any(group.zero_advantage):
            flags = zip(advantages, group.zero_advantage, strict=True)
            advantages = tuple((0.0,) if is_zero else own for own, is_zero in flags)
        filled.append(replace(group, advantages=advantages))
    return filled


def has_signal(group: Group) -> bool:
    """Whether any completion of a group has a nonzero advantage, whatever the scale."""
    return any(any(advantages) for filled in with_advantages([group], "none") for advantages in filled.advantages or ())


def mini_batches(
    groups: Sequence[Group], spec: LossSpec, *, num_updates: int, max_new_tokens: int
) -> list[tuple[list[Sample], list[Sample]]]:
    """Split a batch into updates whose sizes differ by at most one group; there are at most as many as groups.

    Return for each update the samples to train on, and the samples without a gradient whose tokens are only ranked for
    `spec.top_entropy`. Updates without any gradient are left out.
    """
    groups = with_advantages(groups, spec.advantage_scale)
    num_updates = max(1, min(num_updates, len(groups)))
    borders = [len(groups) * number // num_updates for number in range(num_updates + 1)]
    result = []
    for start, end in pairwise(borders):
        every = all_samples(groups[start:end], spec, max_new_tokens=max_new_tokens)
        trained = [sample for sample in every if has_gradient(sample, spec)]
        only_ranked = [sample for sample in every if not has_gradient(sample, spec)] if spec.top_entropy < 1 else []
        if trained:
            result.append((trained, only_ranked))
    return result


def samples(groups: Sequence[Group], spec: LossSpec, *, max_new_tokens: int) -> list[Sample]:
    """Return the samples of one update, in the order of `groups`: the completions that have a gradient.

    A completion has no gradient if it has no sampled token, if it is truncated and `spec` masks it, or if its
    advantages are all zero and there is neither a divergence, nor an entropy bonus, nor a custom loss.

    Source: token mean: DAPO (arXiv 2503.14476), equation 8, over the update instead of the group; sequence mean:
        DeepSeekMath (arXiv 2402.03300), equation 3; constant: the code of Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    return [sample for sample in all_samples(groups, spec, max_new_tokens=max_new_tokens) if has_gradient(sample, spec)]


def has_gradient(sample: Sample, spec: LossSpec) -> bool:
    if spec.objective == "supervised":
        return True
    terms_of_all = spec.kl_coef > 0 or spec.entropy_coef > 0 or spec.teacher_weight > 0 or spec.own is not None
    return terms_of_all or any(sample.advantages)


def all_samples(groups: Sequence[Group], spec: LossSpec, *, max_new_tokens: int) -> list[Sample]:
    """Return the samples of one update like `samples`, including those whose advantages are all zero."""
    if spec.objective == "preference":
        return _pairs(groups)
    kept = [
        (group, completion, advantages)
        for group in with_advantages(groups, spec.advantage_scale)
        for completion, advantages in zip(group.completions, group.advantages or (), strict=True)
        if not (spec.mask_truncated and completion.finish_reason in TRUNCATED)
    ]
    num_completions = sum(len(group.completions) for group in groups)
    num_tokens = sum(completion.num_sampled for _, completion, _ in kept)
    result = []
    for group, completion, given in kept:
        divisor = {
            "token_mean": num_tokens,
            "sequence_mean": num_completions * completion.num_sampled,
            "constant": num_completions * max_new_tokens,
        }[spec.aggregation]
        for sequence in completion.sequences:
            num_given = len(sequence.token_ids)
            advantages = of_sampled(given if len(given) == num_given else given * num_given, sequence.sampled)
            if advantages:
                result.append(_sample(group, sequence, advantages, 1 / divisor))
    return result


def _pairs(groups: Sequence[Group]) -> list[Sample]:
    """Return two samples for each group; a group without a preference is left out, but counts in the mean over pairs.

    So is a group in which a completion has no sampled token.

    Raises:
        UsageError: a group is not a pair of completions with a token sequence each.
    """
    result = []
    for number, group in enumerate(with_advantages(groups, "none")):
        sequences = [sequence for completion in group.completions for sequence in completion.sequences]
        if not len(group.completions) == len(sequences) == 2:
            raise UsageError(
                f"group {number + 1} (prompt {str(group.problem['prompt'])[:80]!r}) has {len(group.completions)}"
                f" completions of {len(sequences)} token sequences, but loss dpo compares two of one sequence each",
                hint="keep two completions of each group, such as the one with the highest and the one with the lowest"
                " reward",
            )
        advantages = [of_completion[0] for of_completion in group.advantages or ()]
        if not min(advantages) < 0 < max(advantages) or not all(sequence.num_sampled for sequence in sequences):
            continue
        for sequence, advantage in zip(sequences, advantages, strict=True):
            of_tokens = (advantage,) * sequence.num_sampled
            result.append(replace(_sample(group, sequence, of_tokens, 1 / len(groups)), pair=number))
    return result


def _sample(group: Group, completion: Completion, advantages: tuple[float, ...], weight: float) -> Sample:
    tokens = completion.token_ids
    sampled = completion.sampled
    assert len(tokens) == len(completion.logprobs), (tokens, completion.logprobs)
    first = 0 if sampled is None else sampled.index(True)  # earlier tokens are treated like the prompt
    taught = group.teacher_prompt_token_ids
    return Sample(
        prompt_token_ids=group.prompt_token_ids + tokens[:first],
        teacher_prompt_token_ids=taught + tokens[:first] if taught else (),
        images=group.images,
        token_ids=tokens[first:],
        sampled_logprobs=of_sampled(completion.logprobs, sampled),
        advantages=advantages,
        weight=weight,
        sampled=None if sampled is None or all(sampled[first:]) else sampled[first:],
        kept=of_sampled(completion.kept, sampled) if completion.kept else (),
        experts=completion.experts,
    )


def _centered(rewards: Sequence[float]) -> list[float]:
    if not rewards or max(rewards) == min(rewards):  # rounding may make the mean differ from equal rewards
        return [0.0] * len(rewards)
    middle = mean(rewards)
    return [reward - middle for reward in rewards]


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value, even if their sum overflows."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _divisor(compared: Iterable[Sequence[float]]) -> float:
    squares = [value * value for rewards in compared for value in _centered(rewards)]
    return math.sqrt(math.fsum(squares) / max(len(squares), 1)) + STD_EPSILON


def _compared(group: Group) -> list[list[float]]:
    """Return the lists of values to compare: a group's rewards or, with rewards per turn, the returns of each turn."""
    if not group.turn_rewards:
        return [list(group.rewards)]
    num_turns = max(map(len, group.turn_rewards))
    return [
        [math.fsum(rewards[turn:]) for rewards in group.turn_rewards if len(rewards) > turn]
        for turn in range(num_turns)
    ]


def _of_tokens(group: Group, by_turn: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Return an advantage per token, given the advantages for the lists from `_compared`."""
    turns = [iter(advantages) for advantages in by_turn]
    each_own = [[next(turns[turn]) for turn in range(len(rewards))] for rewards in group.turn_rewards]
    return tuple(
        tuple(0.0 if turn is None else own[turn] for turn in completion.turns)
        for completion, own in zip(group.completions, each_own, strict=True)
    )


def _check(group: Group, advantages: tuple[tuple[float, ...], ...], number: int) -> None:
    faults = []
    if len(advantages) != len(group.completions):
        faults = [f"they are for {len(advantages)} completions, but the group has {len(group.completions)}"]
    for index, (completion, given) in enumerate(zip(group.completions, advantages, strict=False), start=1):
        length = len(completion.token_ids)
        if len(given) not in (1, length):
            faults.append(f"completion {index} has {length} tokens but {len(given)} advantages")
        faults += [f"one of completion {index} is {value}" for value in given if not math.isfinite(value)]
    if faults:
        raise UsageError(
            f"the advantages of group {number} (prompt {str(group.problem['prompt'])[:80]!r}) are invalid: {faults[0]}",
            hint="give each completion one finite advantage, or one per token",
        )
