"""From completions of ours and their rewards to the group that an Atropos API is sent.

Not covered: sending it (`feeder.py`), what is learnt from a group (`groups.py`).
"""

import math
from collections.abc import Sequence
from typing import Any

from bridge.atropos.protocol import MASKED, UNKNOWN_LOGPROB, ScoredGroup
from bridge.types import Completion, Message, Problem


def scored(
    problem: Problem,
    prompt: tuple[int, ...],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    *,
    env_id: int,
    generation_params: dict[str, Any],
) -> ScoredGroup:
    """Return one group; `prompt` is the problem's as the server was sent it."""
    return ScoredGroup(
        tokens=tuple(prompt + completion.token_ids for completion in completions),
        masks=tuple((MASKED,) * len(prompt) + completion.token_ids for completion in completions),
        scores=tuple(rewards),
        inference_logprobs=tuple(
            (UNKNOWN_LOGPROB,) * len(prompt) + _known(completion.logprobs) for completion in completions
        ),
        messages=[_conversation(problem, completion) for completion in completions],
        generation_params=generation_params,
        env_id=env_id,
    )


def _known(logprobs: tuple[float, ...]) -> tuple[float, ...]:
    """Return the log-probabilities as JSON can tell them: one that is no number would cost a whole batch."""
    return tuple(value if math.isfinite(value) else UNKNOWN_LOGPROB for value in logprobs)


def _conversation(problem: Problem, completion: Completion) -> list[Message]:
    prompt = problem["prompt"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*before, {"role": "assistant", "content": completion.text}]
