"""What an environment tells that training does without, or would have to know, a sentence each.

Not covered: what makes a group useless (`faults.py`).
"""

from collections.abc import Iterator

from bridge.atropos.groups import ZERO
from bridge.atropos.protocol import ScoredGroup
from bridge.rollouts.distribution import changes, in_words

UNUSED = ("ref_logprobs", "distill_token_ids", "distill_logprobs")
KNOWN_OVERRIDES = {ZERO, "temperature", "group_size"}


def ignored(group: ScoredGroup, *, temperature: float) -> Iterator[str]:
    """Yield what is to be told of a group that is trained on at `temperature`; many groups have the same to tell."""
    if not group.inference_logprobs:
        yield (
            "an environment sends no log-probabilities: its tokens have an importance weight of one, and are in no"
            " figure of how far vLLM and the trainer differ"
        )
    for name in UNUSED:
        if getattr(group, name):
            yield f"an environment sends {name}, which nothing here uses"
    overrides = [*(group.overrides or ()), group.group_overrides or {}]
    for told in [group.generation_params or {}, *overrides]:
        if told.get("temperature", temperature) != temperature:
            yield (
                f"an environment samples at temperature {told['temperature']}, and --temperature is {temperature}:"
                " log-probabilities of different distributions are compared"
            )
        if changed := changes(told):
            yield f"an environment samples with {in_words(changed)}"
    for name in sorted({name for each in overrides for name in each} - KNOWN_OVERRIDES):
        yield f"an environment overrides {name}, which means nothing here"
