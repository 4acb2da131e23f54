"""Pick completions from `rollouts.jsonl`: of problems that recur during the run, else of steps spread over it."""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from bridge.run.rollout_record import cut
from bridge_cli.report.record import has_step, json_object, json_objects

NUM_PROBLEMS, NUM_STEPS = 3, 12
"""How many recurring problems to follow, and how many steps to show."""
FEWEST_STEPS = 4
"""A problem that occurs in fewer steps is not followed."""
LONGEST_TEXT = 12_000
"""Characters; longer texts are cut in the middle, because answers are at the end."""

SHORTEST_TURN = 300
"""Characters of a turn that are shown, however many there are."""


class Step(NamedTuple):
    """What is shown of one step."""

    number: int
    rewards: Sequence[float]
    num_unscored: int
    completions: Sequence[Mapping[str, Any]]
    """The best, the median, the worst and one without a reward, each with its `label` and `problem`."""


class Series(NamedTuple):
    """One problem over time; or, with an empty `problem`, the steps of a run."""

    problem: Mapping[str, Any]
    steps: Sequence[Step]


class Samples(NamedTuple):
    """Completions of one run."""

    series: Sequence[Series] = ()
    num_groups: int = 0
    num_steps: int = 0


def read(path: Path, notes: list[str], *, longest: int = LONGEST_TEXT) -> Samples:
    """Pick completions from the file `path`, without loading all of it; note damaged lines."""
    groups: list[tuple[int, int, int]] = []
    for offset, row in json_objects(path, notes, _is_group):
        if groups and row["step"] < groups[-1][0]:  # the run resumed from a checkpoint and repeated these steps
            del groups[bisect_left(groups, (row["step"],)) :]
        groups.append((row["step"], offset, hash(json.dumps(row["problem"].get("prompt")))))
    if not groups:
        return Samples()
    problems: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    every_step: dict[int, list[int]] = defaultdict(list)
    for step, offset, problem in groups:
        problems[problem][step].append(offset)
        every_step[step].append(offset)
    half = (groups[-1][0] - groups[0][0]) / 2
    recurring = [each for each in problems.values() if len(each) >= FEWEST_STEPS and max(each) - min(each) >= half]
    followed = sorted(recurring, key=len, reverse=True)[:NUM_PROBLEMS]
    with path.open("rb") as file:
        series = [_series(file, each, longest) for each in followed or [every_step]]
    if not followed:
        series = [Series({}, each.steps) for each in series]
    return Samples(series, len(groups), len(every_step))


def _is_group(row: Mapping[str, Any]) -> bool:
    """Return whether a line has what the page shows of a group, in the right types."""
    parts = [row.get("completions"), row.get("unscored", [])]  # runs of earlier versions have none
    are_lists = all(isinstance(part, list) and all(isinstance(each, dict) for each in part) for part in parts)
    if not (are_lists and has_step(row) and isinstance(row.get("problem"), dict)):
        return False
    return all(isinstance(each.get("reward"), int | float | None) for each in row["completions"])


def _series(file: BinaryIO, places: Mapping[int, list[int]], longest: int) -> Series:
    numbers = list(places)
    if len(numbers) > NUM_STEPS:
        numbers = [numbers[round(index * (len(numbers) - 1) / (NUM_STEPS - 1))] for index in range(NUM_STEPS)]
    steps = []
    for number in numbers:
        rows = []
        for offset in places[number]:
            file.seek(offset)
            rows.append(_bounded(json_object(file.readline()), longest))
        steps.append(_step(number, rows))
    return Series(rows[-1]["problem"], steps)


def _step(number: int, rows: Sequence[Mapping[str, Any]]) -> Step:
    every = [each | {"problem": row["problem"]} for row in rows for each in row["completions"]]
    unscored = [
        each | {"problem": row["problem"], "label": "unscored"} for row in rows for each in row.get("unscored", [])
    ]
    scored = sorted((each for each in every if each.get("reward") is not None), key=lambda each: each["reward"])
    rewards = [each["reward"] for each in scored]
    picked = {"best": -1, "median": len(scored) // 2, "worst": 0}
    if len(scored) < 3:
        del picked["median"]
    if len(set(rewards)) < 2:
        picked = {"all rewards equal": 0} if scored else {}
    shown = [scored[place] | {"label": label} for label, place in picked.items()]
    return Step(number, rewards, len(unscored), shown + unscored[:1])


def _bounded(row: Any, longest: int) -> Any:
    """Return a group whose texts are cut; the turns of a completion share the limit of one text."""
    for each in (*row["completions"], *row.get("unscored", ())):
        if (turns := each.get("turns")) and isinstance(turns, list):
            each["turns"] = cut(turns, max(longest // len(turns), SHORTEST_TURN))
    return cut(row, longest)
