"""A stream with staleness: which groups a step takes, which continue, and what happens if a server is lost.

Not covered: a stream without staleness (`test_stream.py`), a real server (`tests/cpu/test_staleness.py`).
"""

import math
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.config import TrainConfig
from bridge.errors import ServerUnreachableError
from bridge.rollouts import staleness
from bridge.server.endpoint import Endpoint
from bridge.types import Group
from tests.unit.http_server import HttpRequest
from tests.unit.rollouts.test_stream import Sampled, Task, model, sampled, saying
from tests.unit.scores_sample import Several

__all__ = ["model"]  # the fixture
PATIENCE_S = 60.0


@dataclass(eq=False)
class Fake:
    """A group in flight with only the fields that the staleness rule reads."""

    number: int
    begun: int
    is_sampled: bool = False
    in_order: bool = False


@pytest.mark.parametrize("seed", range(40))
def test_every_group_is_trained_on_once_within_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    count, max_staleness = chance.randint(1, 5), chance.randint(0, 4)
    at_once = chance.randint(count, count * (max_staleness + 1))
    groups, begun, used, waited = list[Any](), 0, Counter[int](), 0
    for step in range(1, 120):
        while True:
            room = staleness.room(groups, count, num_steps=max_staleness + 1, most_in_flight=at_once)
            in_order = not groups or chance.random() < 0.01  # a stream's first groups, or restarted ones
            for _ in range(max(room, 0)):
                groups.append(Fake(begun, step, in_order=in_order))
                begun += 1
            assert sum(not group.is_sampled for group in groups) <= at_once
            taken = staleness.ready(groups, count, step=step, max_staleness=max_staleness)
            if taken:
                break
            waiting = [group for group in groups if not group.is_sampled]
            assert waiting, "nothing is in flight, and nothing may be taken"
            chance.choices(waiting, [1 + 50 * (group.number % 7 > 0) for group in waiting])[0].is_sampled = True
            waited += 1
        assert len(taken) == count
        assert all(step - group.begun <= max_staleness for group in taken)
        groups = [group for group in groups if group not in taken]
        used.update(group.number for group in taken)
    assert max(used.values()) == 1
    assert {*range(min(group.number for group in groups) if groups else begun)} <= used.keys()
    assert waited > 0


def test_groups_that_start_together_are_taken_in_order() -> None:
    groups = [Fake(number, 1, is_sampled=number != 1, in_order=True) for number in range(6)]
    later = Fake(6, 1, is_sampled=True)  # when there was room again
    given: Any = [later, *groups]
    assert staleness.ready(given, 2, step=1, max_staleness=2) == [], "the first to finish are the shortest"
    groups[1].is_sampled = True
    assert [group.number for group in staleness.ready(given, 2, step=1, max_staleness=2)] == [0, 1]


def length_of_first_steps(seed: int, *, in_order: bool, max_staleness: int = 8, count: int = 8) -> list[float]:
    """Return the mean length of the groups of each of the first steps; lengths have a long tail."""
    chance, groups, begun, lengths = random.Random(seed), dict[int, Any](), 0, list[float]()
    left = dict[int, float]()
    for step in range(1, max_staleness + 2):
        while True:
            at_once = count * (max_staleness + 1)
            room = staleness.room([*groups.values()], count, num_steps=max_staleness + 1, most_in_flight=at_once)
            starts = in_order and not groups
            for _ in range(max(room, 0)):
                groups[begun] = Fake(begun, step, in_order=starts)
                left[begun] = chance.lognormvariate(0, 0.6)
                begun += 1
            if taken := staleness.ready([*groups.values()], count, step=step, max_staleness=max_staleness):
                break
            waiting = [number for number, group in groups.items() if not group.is_sampled]
            groups[min(waiting, key=lambda number: left[number])].is_sampled = True  # the shortest finishes first
        lengths.append(statistics.fmean(left[group.number] for group in taken))
        for group in taken:
            del groups[group.number]
    return lengths


def test_first_steps_train_on_groups_of_every_length() -> None:
    def relative(in_order: bool) -> list[float]:
        runs = [length_of_first_steps(seed, in_order=in_order) for seed in range(40)]
        return [statistics.fmean(of_step) / math.exp(0.6**2 / 2) - 1 for of_step in zip(*runs, strict=True)]

    assert relative(in_order=False)[0] < -0.5, "taken as they finish, the first are the shortest"
    assert max(map(abs, relative(in_order=True))) < 0.15


class Gate:
    """Holds back responses while closed, to some prompts or to all."""

    def __init__(self, *problems: int) -> None:
        self._opened, self._problems = threading.Event(), problems
        self.num_passed = 0

    def __call__(self, document: dict[str, Any], request: HttpRequest) -> dict[str, Any]:
        if not self._problems or problem_of(request) in self._problems:
            assert self._opened.wait(PATIENCE_S)
        self.num_passed += 1
        return document

    def open(self) -> None:
        self._opened.set()

    def closes_after(self, num_answers: int) -> None:
        """Wait until so many answers were given, and close."""
        deadline = time.monotonic() + PATIENCE_S
        while self.num_passed < num_answers and time.monotonic() < deadline:
            time.sleep(0.01)
        self._opened.clear()

    def opens_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.open).start()


def problem_of(request: HttpRequest) -> int:
    """Return the problem's number modulo 3, derived from the prompt's length."""
    return len(request.body["prompt"]) - 3


def numbers(groups: list[Group]) -> list[int | None]:
    return [group.number for group in groups]


def posted(ours: Sampled) -> int:
    return sum(request.method == "POST" for request in ours.requests)


def streaming(model: Path, bend: Callable[..., Any], *, task: Task | None = None, **choices: Any) -> Any:
    fixed: dict[str, Any] = {"batch_size": 16, "group_size": 8, "max_staleness": 1}  # two groups a step
    return sampled(model, task or Task(), saying(bend), **(fixed | choices))


def test_step_waits_for_groups_that_would_be_too_old(model: Path) -> None:
    gate = Gate()
    gate.open()
    with streaming(model, gate) as ours:
        assert numbers(ours.groups(1, 2)) == [0, 1]
        assert ours.stream.num_in_flight == 2
        gate.closes_after(4)
        assert numbers(ours.groups(2, 2)) == [2, 3], "two others are held back"
        began = time.monotonic()
        gate.opens_after(0.3)
        assert numbers(ours.groups(3, 2)) == [4, 5], "a version more, and they would be older than the bound"
        assert time.monotonic() - began > 0.2


def test_first_step_waits_for_the_first_groups(model: Path) -> None:
    with streaming(model, lambda document, _: document) as ours:
        order = [len(group.prompt_token_ids) - 3 for group in ours.groups(1, 2)]
    gate = Gate(order[0])
    with streaming(model, gate) as ours:
        gate.opens_after(0.3)
        assert numbers(ours.groups(1, 2)) == [0, 1], "taken as they finish, it would be the shortest ones"


def test_requests_are_in_flight_while_a_step_is_computed(model: Path) -> None:
    with streaming(model, lambda document, _: document, max_staleness=3) as ours:
        ours.groups(1, 2)
        deadline = time.monotonic() + PATIENCE_S
        while posted(ours) < 2 + 6 and time.monotonic() < deadline:
            time.sleep(0.01)  # nothing runs in this process meanwhile
        assert (posted(ours), ours.stream.num_in_flight) == (8, 6)


def test_groups_in_flight_respect_the_chosen_limit(model: Path) -> None:
    with streaming(model, lambda document, _: document, max_staleness=3, groups_in_flight=3) as ours:
        ours.groups(1, 2)
        assert sum(not group.is_sampled for group in ours.stream._in_flight) <= 3
    with streaming(model, lambda document, _: document, max_staleness=3) as ours:
        ours.stream.served(Endpoint(url=ours.endpoint.url, kv_tokens=3 * 8 * 8 // 2), 3)  # of half the longest
        ours.groups(1, 2)
        assert "up to 3 groups in flight (--groups-in-flight)" in ours.notes
    with pytest.raises(
        ValueError, match="--groups-in-flight 9 must be at least the 2 groups of a batch, and at most 8"
    ):
        TrainConfig.of(model_name="m", batch_size=16, group_size=8, max_staleness=3, groups_in_flight=9)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_problem_is_used_once_over_many_steps(model: Path, max_staleness: int) -> None:
    chance = random.Random(0)

    def slowly(document: dict[str, Any], _: HttpRequest) -> dict[str, Any]:
        time.sleep(chance.choice([0.0, 0.0, 0.02, 0.1]))
        return document

    with streaming(model, slowly, max_staleness=max_staleness) as ours:
        used = [number for step in range(1, 31) for number in numbers(ours.groups(step, 2))]
        assert len(set(used)) == len(used) == 60
        assert max(number for number in used if number is not None) < 60 + 2 * max_staleness
        assert len(set(ours.seeds)) == len(ours.seeds)


def test_lost_server_loses_only_in_flight_groups(model: Path) -> None:
    dead, answered = threading.Event(), list[HttpRequest]()

    def bend(document: dict[str, Any], request: HttpRequest) -> Any:
        if dead.is_set():
            return None
        answered.append(request)
        return document

    with streaming(model, bend) as ours:
        used = numbers(ours.groups(1, 2))
        while len(answered) < 4:
            time.sleep(0.01)
        dead.set()
        errors = 0
        for step in range(2, 6):
            try:
                groups = ours.groups(step, 2)
            except ServerUnreachableError:
                errors += 1
                dead.clear()
                ours.stream.served(Endpoint(url=ours.endpoint.url, starts=1), 4)
                groups = ours.groups(step, 2)
            used += numbers(groups)
    assert errors == 1
    assert len(set(used)) == len(used) == 2 * 5


def test_groups_in_flight_at_a_server_restart_are_requeued(model: Path) -> None:
    gate = Gate()
    gate.open()
    with streaming(model, gate) as ours:
        ours.groups(1, 2)
        gate.closes_after(4)
        assert numbers(ours.groups(2, 2)) == [2, 3]
        ours.stream.served(Endpoint(url=ours.endpoint.url, starts=1, version=9), 9)
        gate.open()
        resampled = ours.groups(3, 2)
        assert numbers(resampled) == [4, 5]
        assert {version for group in resampled for one in group.completions for version in one.versions} == {9}


def test_groups_without_signal_are_replaced_within_the_bound(model: Path) -> None:
    task = Task(lambda problem, text: float(len(text)) if problem["prompt"] == "say!" else 1.0)
    choices = {"max_staleness": 0, "skip_without_signal": True, "max_oversampling": 2.0}
    with streaming(model, lambda document, _: document, task=task, **choices) as ours:
        groups = ours.groups(1, 2)
        skipped = ours.stream.skipped
        assert len(groups) == 2
        assert 1 <= len(skipped) <= 2
        assert all(len(set(group.rewards)) == 1 for group in skipped)
        assert not {*numbers(groups)} & {*numbers(skipped)}
        ours.groups(2, 2)
        assert not {*numbers(groups), *numbers(skipped)} & {*numbers(ours.stream.skipped)}


def test_time_between_steps_does_not_count_as_a_timeout(model: Path) -> None:
    gate = Gate()
    gate.open()
    with streaming(model, gate, request_timeout_s=2.0) as ours:
        ours.groups(1, 2)
        gate.closes_after(4)
        ours.groups(2, 2)
        gate.opens_after(3.0)
        time.sleep(2.5)  # the trainer computes, and the server pauses
        assert len(ours.groups(3, 2)) == 2


def test_groups_are_scored_while_a_step_is_computed(model: Path) -> None:
    with streaming(model, lambda document, _: document, recipe=Several) as ours:
        ours.groups(1, 2)
        deadline = time.monotonic() + PATIENCE_S
        while not all(group.is_sampled for group in ours.stream._in_flight):
            assert time.monotonic() < deadline, "they wait for the trainer"
            time.sleep(0.01)
        assert len(ours.stream._in_flight) == 2
