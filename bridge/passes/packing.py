"""Which samples go into one micro-batch: as many as a bounded number of tokens holds.

Not covered: the bound (`budget.py`), what a micro-batch is (`batch.py`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from bridge.passes.batch import MicroBatch, Tokens, lay_out
from bridge.passes.samples import Sample


def num_tokens(samples: Iterable[Sample], *, share_prompts: bool) -> int:
    """Return how many tokens a single micro-batch of all samples would have."""
    bin_ = _Bin(share_prompts=share_prompts)
    for sample in samples:
        bin_.add(sample)
    return bin_.num_tokens


def packs(
    samples: Sequence[Sample], *, max_tokens: int, device: torch.device, share_prompts: bool = False
) -> list[MicroBatch]:
    """Pack the samples into as few micro-batches of at most `max_tokens` as first-fit decreasing finds.

    With `share_prompts` a prompt is in each micro-batch once, whatever the number of its completions there. A sample
    longer than `max_tokens` gets a micro-batch of its own. The longest come first, so that what does not fit in memory
    fails at once. The result does not depend on the order of the samples.
    """
    ordered = sorted(samples, key=_order, reverse=True)
    if share_prompts:
        ranks: dict[Tokens, int] = {}
        for sample in ordered:
            ranks.setdefault(sample.prompt_token_ids, len(ranks))
        ordered.sort(key=lambda sample: ranks[sample.prompt_token_ids])
    bins: list[_Bin] = []
    for sample in ordered:
        chosen = next((each for each in bins if each.num_tokens + each.cost(sample) <= max_tokens), None)
        if chosen is None:
            chosen = _Bin(share_prompts=share_prompts)
            bins.append(chosen)
        chosen.add(sample)
    return lay_out([each.groups() for each in bins], device)


@dataclass
class _Bin:
    """What is to be one micro-batch."""

    share_prompts: bool
    num_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    prompts: set[Tokens] = field(default_factory=set)

    def cost(self, sample: Sample) -> int:
        """Return how many tokens it would add."""
        is_shared = self.share_prompts and sample.prompt_token_ids in self.prompts
        return len(sample.token_ids) if is_shared else sample.num_tokens

    def add(self, sample: Sample) -> None:
        self.num_tokens += self.cost(sample)
        self.prompts.add(sample.prompt_token_ids)
        self.samples.append(sample)

    def groups(self) -> list[list[Sample]]:
        """Return the samples, those together that share a prompt."""
        if not self.share_prompts:
            return [[sample] for sample in self.samples]
        groups: dict[Tokens, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.prompt_token_ids, []).append(sample)
        return list(groups.values())


def _order(sample: Sample) -> tuple[object, ...]:
    """Order by length, and by everything else that is trained on, so that no tie is left to the order of arrival."""
    tokens = sample.prompt_token_ids, sample.token_ids, sample.sampled or ()
    known = sample.sampled_logprobs
    if math.isnan(sum(known)):  # one of them is, and has no order
        known = tuple(0.0 if math.isnan(value) else value for value in known)
    return sample.num_tokens, *tokens, known, sample.advantages, sample.weight
