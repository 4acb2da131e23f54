"""Which of the groups in flight a step trains on, so that none waits longer than the staleness allows."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.types import Group, Problem


@dataclass(eq=False, kw_only=True)
class InFlight:
    """A group from its first request until a step trains on it."""

    number: int
    """Index of the problem in the run's endless order."""
    problem: Problem
    prompt: tuple[int, ...]
    begun: int
    """The step that was next when its request was sent: its first token is not older than that."""
    in_order: bool = False
    """Whether it began at the same time as all others: a stream's first groups, and those that are restarted."""
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the request is on its way."""
    task: asyncio.Task[Group] = field(init=False)

    @property
    def is_sampled(self) -> bool:
        """Whether it is sampled and scored."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


def room(in_flight: Sequence[InFlight], count: int, *, num_steps: int, at_once: int) -> int:
    """Return how many groups may begin so that the next `num_steps` steps of `count` groups use up all there are.

    No more than `at_once` are sampled at a time.
    """
    num_waiting = sum(each.is_sampled for each in in_flight)
    return min(count * num_steps - len(in_flight), at_once + num_waiting - len(in_flight))


def next_of(in_flight: Sequence[InFlight], count: int, *, step: int, max_staleness: int) -> list[InFlight]:
    """Return the `count` groups that `step` trains on: those that began first of all that are sampled.

    Empty while there are fewer, or while a group must be waited for: one that would be left behind although the steps
    that may still train on it, up to `max_staleness` after the one that it began for, are taken by older groups.

    Groups that began at the same time are taken in their order. Taken as they finish, a stream's first steps would
    train on its shortest completions.
    """
    ordered = sorted(in_flight, key=lambda each: (each.begun, each.number))
    if any(each.in_order for each in ordered[:count]):
        return ordered[:count] if all(each.is_sampled for each in ordered[:count]) else []
    taken = [each for each in ordered if each.is_sampled][:count]
    left = [each for each in ordered if each not in taken]
    in_time = all(place < count * (each.begun + max_staleness - step) for place, each in enumerate(left))
    return taken if len(taken) == count and in_time else []
