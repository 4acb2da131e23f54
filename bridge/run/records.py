"""What a line of `rollouts.jsonl` holds: one prompt, and everything that was sampled for it.

Not covered: how it gets into the file (`json_lines.py`).
"""

from typing import Any

from bridge.types import Completion, Group, Problem


def of_group(step: int, group: Group) -> dict[str, Any]:
    """Return the texts and rewards of one group, without its token ids."""
    return {
        "step": step,
        "problem": _of_problem(group.problem),
        "completions": [_of_completion(group, place) for place in range(len(group.completions))],
        "unscored": [{"text": each.completion.text, "fault": each.fault} for each in group.unscored],
    }


def _of_problem(problem: Problem) -> dict[str, Any]:
    """Return what was asked and, where there is one, the answer; an environment's further keys may be of any size."""
    answer = {"answer": problem["answer"]} if "answer" in problem else {}
    return {"prompt": problem["prompt"], **answer}


def _of_completion(group: Group, place: int) -> dict[str, Any]:
    completion: Completion = group.completions[place]
    return {
        "text": completion.text,
        "reward": group.rewards[place],
        "parts": {name: parts[place] for name, parts in group.reward_parts.items()},
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "weight_version": completion.weight_version,
    }
