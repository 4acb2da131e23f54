"""Completions over time, out of `rollouts.jsonl`: the same few problems where they come up again, else of some steps.

The file is gone through twice: first for what is where, then for what is shown; only that is ever held.

Not covered: how they are shown (`template/report.html.j2`).
"""

import json
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cli.report import cards
from cli.report.cards import Frame, Strip
from cli.report.lines import objects_at, parsed

MOST_STRIPS = 3
"""Problems that are followed."""
MOST_FRAMES = 12
"""Steps that are shown of each, or of the run."""
FEWEST_FRAMES = 4
"""A problem that comes up in fewer steps is not worth following."""
TEXT_BUDGET = 300_000
"""Characters of completions and prompts on a page, about."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a run's file of completions came to."""

    strips: Sequence[Strip]
    """What is shown."""
    num_groups: int
    """Groups in the file."""
    num_steps: int
    """Steps that have some."""
    notes: Sequence[str]
    """What is broken, one line each."""


@dataclass(frozen=True)
class _Index:
    """Where each group is; three numbers a group, whatever its length."""

    steps: "array[int]"
    offsets: "array[int]"
    problems: "array[int]"

    def add(self, step: int, offset: int, problem: int) -> None:
        """Add a group; one of an earlier step drops what was there from that step on: the run went on from before."""
        if self.steps and step < self.steps[-1]:
            begin = bisect_left(self.steps, step)
            for column in (self.steps, self.offsets, self.problems):
                del column[begin:]
        for column, value in zip((self.steps, self.offsets, self.problems), (step, offset, problem), strict=True):
            column.append(value)

    def of_problem(self, problem: int) -> dict[int, list[int]]:
        """Return step -> where the groups of one problem are."""
        rows = zip(self.steps, self.offsets, self.problems, strict=True)
        return _by_step((step, offset) for step, offset, other in rows if other == problem)

    def of_all(self) -> dict[int, list[int]]:
        """Return step -> where its groups are."""
        return _by_step(zip(self.steps, self.offsets, strict=True))


def read(path: Path, *, share: float = 1.0) -> Samples:
    """Pick what is shown of the file `path`, in a share of the page's budget; nothing where there is no file."""
    notes: list[str] = []
    index = _indexed(path, notes)
    if not index.steps:
        return Samples(strips=(), num_groups=0, num_steps=0, notes=notes)
    with path.open("rb") as file:
        followed = [index.of_problem(problem) for problem in _recurring(index)]
        strips = [_strip(file, _spread(places), is_problem=True) for places in followed]
        strips = strips or [_strip(file, _spread(index.of_all()), is_problem=False)]
    limit = cards.longest_text(strips, TEXT_BUDGET * share)
    if num_cut := cards.num_cut(strips, limit):
        notes.append(f"{num_cut} texts are longer than {limit:,} characters, and cut in their middle")
    return Samples(
        strips=[cards.cut(strip, limit) for strip in strips],
        num_groups=len(index.steps),
        num_steps=len(set(index.steps)),
        notes=notes,
    )


def _indexed(path: Path, notes: list[str]) -> _Index:
    index = _Index(array("q"), array("q"), array("q"))
    for offset, row in objects_at(path, notes):
        step = row.get("step")
        if isinstance(step, int) and 0 <= step < 1 << 53:
            index.add(step, offset, hash(json.dumps(cards.problem_of(row).get("prompt"))))
    return index


def _by_step(places: Iterator[tuple[int, int]]) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for step, offset in places:
        steps.setdefault(step, []).append(offset)
    return steps


def _recurring(index: _Index) -> list[int]:
    """Return the problems that come up in most steps, where that is often enough and over most of the run."""
    seen: Counter[int] = Counter()
    first: dict[int, int] = {}
    latest: dict[int, int] = {}
    for step, problem in zip(index.steps, index.problems, strict=True):
        seen[problem] += latest.get(problem) != step
        first.setdefault(problem, step)
        latest[problem] = step
    half = (index.steps[-1] - index.steps[0]) / 2
    often = [(problem, count) for problem, count in seen.most_common() if latest[problem] - first[problem] >= half]
    return [problem for problem, count in often[:MOST_STRIPS] if count >= FEWEST_FRAMES]


def _spread(places: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Return at most `MOST_FRAMES` of the steps, the first and the last among them."""
    steps = list(places)
    if len(steps) > MOST_FRAMES:
        steps = [steps[round(index * (len(steps) - 1) / (MOST_FRAMES - 1))] for index in range(MOST_FRAMES)]
    return {step: places[step] for step in steps}


def _strip(file: BinaryIO, places: Mapping[int, list[int]], *, is_problem: bool) -> Strip:
    frames: list[Frame] = []
    problem: Mapping[str, Any] = {}
    for step, offsets in places.items():
        rows = [row for row in (_row_at(file, offset) for offset in offsets) if row]
        problem = cards.problem_of(rows[-1]) if is_problem and rows else problem
        frames.append(cards.frame(step, rows))
    return Strip(prompt=cards.messages(problem.get("prompt")), answer=cards.plain(problem.get("answer")), frames=frames)


def _row_at(file: BinaryIO, offset: int) -> dict[str, Any] | None:
    file.seek(offset)
    return parsed(file.readline())
