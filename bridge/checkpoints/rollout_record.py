"""A line of `rollouts.jsonl`: the problem, the completions and the rewards of one group, without its token ids.

The length of every value is bounded; a truncated value has a note. docs/looking.md documents the fields.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, repeat
from typing import Any

from bridge.core import json_lines
from bridge.types import Completion, Group

LONGEST_TEXT = 100_000
"""Maximum length of a text in characters."""
LONGEST_COLUMN = 2_000
"""Maximum length of a problem's column as JSON, in characters."""
BESIDE_COLUMNS = ("prompt", "answer")
"""Keys of a problem with the same limit as texts."""


def record(step: int, group: Group, version: int | None) -> dict[str, Any]:
    """Return the record of a group of `step`; `version`: of the weights before the update, None if unknown."""
    return {
        "step": step,
        "number": group.number,
        "problem": {str(name): _column(str(name), value) for name, value in group.problem.items()},
        "completions": [_scored(group, index, version) for index in range(len(group.completions))],
        "unscored": [{**_texts(unscored.completion, ()), "fault": unscored.fault} for unscored in group.unscored],
    }


def cut(value: Any, longest: int) -> Any:
    """Return a JSON value with the middle of every long text left out, because answers tend to be at the end."""
    if isinstance(value, str) and len(value) > longest:
        end = longest // 3
        return f"{value[: longest - end]}\n[… {len(value) - longest:,} characters left out …]\n{value[-end:]}"
    if isinstance(value, dict):
        return {name: cut(item, longest) for name, item in value.items()}
    return [cut(item, longest) for item in value] if isinstance(value, list) else value


def _column(name: str, value: Any) -> Any:
    """Return a problem's value if its JSON is short, otherwise the beginning of the JSON."""
    longest = LONGEST_TEXT if name in BESIDE_COLUMNS else LONGEST_COLUMN
    if isinstance(value, str):
        return cut(value, longest)
    size = 0
    pieces = list[str]()
    try:
        for piece in json.JSONEncoder(default=repr, skipkeys=True).iterencode(value):
            pieces.append(piece)
            size += len(piece)
            if size > longest:
                return f"{''.join(pieces)[:longest]} [… the rest is left out …]"
        return json_lines.plain(value)
    except Exception as error:  # noqa: BLE001  the value is the environment's, and its `repr` may raise anything
        return f"(a {type(value).__name__} that cannot be written: {type(error).__name__})"


def _scored(group: Group, index: int, version: int | None) -> dict[str, Any]:
    completion = group.completions[index]
    rewards = group.turn_rewards[index] if group.turn_rewards else ()
    versions = _versions(completion)
    return {
        **_texts(completion, rewards),
        "reward": group.rewards[index],
        "parts": {name: parts[index] for name, parts in group.reward_parts.items()},
        **({"turn_rewards": rewards} if rewards else {}),
        "tokens": sum(len(sequence.token_ids) for sequence in completion.sequences),
        "finish_reason": completion.finish_reason,
        "truncated": completion.finish_reason == "length",
        "weight_version": _shown(versions),
        "staleness": version - versions[0] if versions and version is not None else None,
    }


def _texts(completion: Completion, rewards: Sequence[float]) -> dict[str, Any]:
    """Return the text of a completion; with tools or an agent, the text of the last turn, and all turns."""
    turns = cut(json_lines.plain(list(_turns(completion, rewards))), LONGEST_TEXT)
    if not turns:
        return {"text": cut(completion.text, LONGEST_TEXT)}
    sampled = [turn["text"] for turn in turns if "tokens" in turn]
    return {"text": sampled[-1] if sampled else "", "turns": turns}


def _turns(completion: Completion, rewards: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the messages of each sequence; those shared with the previous sequence are replaced by their number."""
    before: Sequence[Mapping[str, Any]] = ()
    left = iter(rewards)
    for number, sequence in enumerate(completion.sequences):
        which = {"sequence": number} if completion.others else {}
        num_shared = _num_shared(before, sequence.transcript)
        before = sequence.transcript
        if num_shared:
            yield {**which, "role": "repeated", "text": "", "messages": num_shared}
        for message in sequence.transcript[num_shared:]:
            reward = next(left, None) if message.get("tokens") else None
            yield {**which, **message, **({} if reward is None else {"reward": reward})}


def _num_shared(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of messages that both transcripts begin with, before the first one sampled in `after`."""
    count = 0
    for earlier, later in zip(before, after, strict=False):
        if "tokens" in later or {**earlier, "tokens": 0} != {**later, "tokens": 0}:
            break
        count += 1
    return count


def _versions(completion: Completion) -> list[int]:
    """Return the versions of the weights that sampled a completion, oldest first; empty if any is unknown."""
    versions: set[int] = set()
    for sequence in completion.sequences:
        sampled = repeat(True) if sequence.sampled is None else sequence.sampled
        for version in compress(sequence.versions, sampled):
            if version is None:
                return []
            versions.add(version)
    return sorted(versions)


def _shown(versions: Sequence[int]) -> int | str | None:
    """Return the version, a range such as "3-4" if there are several, or None for unknown versions."""
    if not versions:
        return None
    return versions[0] if len(versions) == 1 else f"{versions[0]}-{versions[-1]}"
