"""The staleness bound: which of the groups in flight a step trains on, so that none becomes older than allowed."""

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
    begun: int
    """The step that was next when its request was sent: its first token is not older than that."""
    in_order: bool = False
    """Whether it began at the same time as all others: a stream's first groups, and those that are restarted."""
    task: asyncio.Task[Group] = field(init=False)

    @property
    def is_sampled(self) -> bool:
        """Whether it is sampled and scored."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


def room(in_flight: Sequence[InFlight], count: int, *, num_steps: int, most_in_flight: int) -> int:
    """Return how many groups may begin so that the next `num_steps` steps of `count` groups use up all there are.

    No more than `most_in_flight` are sampled at a time.
    """
    num_waiting = sum(group.is_sampled for group in in_flight)
    return min(count * num_steps - len(in_flight), most_in_flight + num_waiting - len(in_flight))


def ready(in_flight: Sequence[InFlight], count: int, *, step: int, max_staleness: int) -> list[InFlight]:
    """Return the `count` groups that `step` trains on: those that began first of all that are sampled.

    Empty while there are fewer, or while a group must be waited for: one that would be left behind although the steps
    that may still train on it, up to `max_staleness` after the one that it began for, are taken by older groups.

    Groups that began at the same time are taken in their order. Taken as they finish, a stream's first steps would
    train on its shortest completions.
    """
    ordered = sorted(in_flight, key=lambda group: (group.begun, group.number))
    if any(group.in_order for group in ordered[:count]):
        return ordered[:count] if all(group.is_sampled for group in ordered[:count]) else []
    taken = [group for group in ordered if group.is_sampled][:count]
    left = [group for group in ordered if group not in taken]
    in_time = all(index < count * (group.begun + max_staleness - step) for index, group in enumerate(left))
    return taken if len(taken) == count and in_time else []
