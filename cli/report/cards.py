"""Some completions of a step as a page shows them: the best, the median and the worst, each within its bounds.

Not covered: which steps and problems are shown (`samples.py`), and how (`template/report.html.j2`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli.report.lines import number

LONGEST_TEXT = 12_000
"""Characters of one completion or message; a longer one is cut in its middle, since answers stand at the end."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One completion."""

    label: str
    """Why it is shown: best, median, worst, unscored."""
    text: str
    """What was sampled."""
    reward: float | None
    """Its reward; None without."""
    parts: Mapping[str, float]
    """Parts of the reward."""
    tokens: float | None
    """Its length."""
    finish_reason: str
    """Why it ended."""
    weight_version: float | None
    """Version of the weights that made it."""
    fault: str
    """What its score did, where it has no reward."""
    prompt: Sequence[tuple[str, str]]
    """Role and text of each message; a prompt that is plain text has one without a role."""
    answer: str
    """What the problem's answer is; empty where it has none."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What is shown of one step."""

    step: int
    """Which."""
    rewards: Sequence[float]
    """All rewards of the problem's group, or of the step; rising."""
    unscored: int
    """Completions without one."""
    cards: Sequence[Card]
    """Some completions."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Frames over time: of one problem, or of whole steps."""

    prompt: Sequence[tuple[str, str]]
    """The problem; empty where the strip is of steps."""
    answer: str
    """Its answer."""
    frames: Sequence[Frame]
    """In the order of the steps."""


def frame(step: int, rows: Sequence[Mapping[str, Any]]) -> Frame:
    """Return what is shown of the groups `rows` of one step."""
    scored = sorted(
        ((reward, each, row) for row in rows for each in _list(row, "completions")
         if (reward := number(each.get("reward"))) is not None),
        key=lambda item: item[0],
    )  # fmt: skip
    failed = [(each, row) for row in rows for each in _list(row, "unscored")]
    cards = [_card(label, *scored[place][1:]) for label, place in _picked([reward for reward, _, _ in scored]).items()]
    cards += [_card("unscored", each, row) for each, row in failed[:1]]
    return Frame(step=step, rewards=[reward for reward, _, _ in scored], unscored=len(failed), cards=cards)


def _picked(rewards: Sequence[float]) -> dict[str, int]:
    """Return which of the rising rewards are shown: why -> its place."""
    if not rewards or rewards[0] == rewards[-1]:
        return {"all alike": 0} if rewards else {}
    middle = {"median": len(rewards) // 2} if len(rewards) > 2 else {}
    return {"best": len(rewards) - 1, **middle, "worst": 0}


def _card(label: str, each: Mapping[str, Any], row: Mapping[str, Any]) -> Card:
    parts = each.get("parts")
    known = {str(name): number(part) for name, part in parts.items()} if isinstance(parts, dict) else {}
    problem = problem_of(row)
    return Card(
        label=label, text=plain(each.get("text")), reward=number(each.get("reward")),
        parts={name: part for name, part in known.items() if part is not None},
        tokens=number(each.get("tokens")), finish_reason=plain(each.get("finish_reason")),
        weight_version=number(each.get("weight_version")), fault=plain(each.get("fault")),
        prompt=messages(problem.get("prompt")), answer=plain(problem.get("answer")),
    )  # fmt: skip


def problem_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the problem of a group; empty where it has none."""
    problem = row.get("problem")
    return problem if isinstance(problem, dict) else {}


def _list(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = row.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def messages(prompt: object) -> list[tuple[str, str]]:
    """Return role and text of each message of a prompt, whatever its form."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return [(plain(message.get("role")), plain(message.get("content"))) for message in prompt]
    return [("", plain(prompt))] if prompt is not None else []


def plain(value: object) -> str:
    """Return a text as it is, and anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def longest_text(strips: Sequence[Strip], budget: float) -> int:
    """Return how long a text may be for all of them to fit into `budget`, which short ones leave to long ones."""
    lengths = sorted(len(text) for strip in strips for text in _texts(strip))
    for index, length in enumerate(lengths):
        each = budget / (len(lengths) - index)
        if length > each:
            return min(int(each), LONGEST_TEXT)
        budget -= length
    return LONGEST_TEXT


def num_cut(strips: Sequence[Strip], limit: int) -> int:
    """Return how many texts are longer than `limit`."""
    return sum(len(text) > limit for strip in strips for text in _texts(strip))


def cut(strip: Strip, limit: int) -> Strip:
    """Return `strip` with every text cut to `limit`."""
    frames = [replace(each, cards=[_cut_card(card, limit) for card in each.cards]) for each in strip.frames]
    return replace(
        strip, prompt=_cut_messages(strip.prompt, limit), answer=_middle_out(strip.answer, limit), frames=frames
    )


def _texts(strip: Strip) -> Iterator[str]:
    yield strip.answer
    yield from (text for _, text in strip.prompt)
    for card in (card for each in strip.frames for card in each.cards):
        yield from (card.text, card.fault, *(() if strip.prompt else (card.answer, *(text for _, text in card.prompt))))


def _cut_card(card: Card, limit: int) -> Card:
    return replace(
        card, text=_middle_out(card.text, limit), fault=_middle_out(card.fault, limit),
        prompt=_cut_messages(card.prompt, limit), answer=_middle_out(card.answer, limit),
    )  # fmt: skip


def _cut_messages(prompt: Sequence[tuple[str, str]], limit: int) -> list[tuple[str, str]]:
    return [(role[:40], _middle_out(text, limit)) for role, text in prompt]


def _middle_out(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    end = limit // 3
    left_out = f"\n[… {len(text) - limit:,} characters left out …]\n"
    return text[: limit - end] + left_out + text[len(text) - end :]
