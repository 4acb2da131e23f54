"""The staleness bound: choose the groups for each step so that no group becomes older than allowed."""

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
    """The next step at the time of the group's first request; its first token is not older than that."""
    in_order: bool = False
    """Whether the group started together with all others: a stream's first groups, and restarted ones."""
    task: asyncio.Task[Group] = field(init=False)

    @property
    def is_sampled(self) -> bool:
        """Whether the group is fully sampled and scored."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None


def room(in_flight: Sequence[InFlight], count: int, *, num_steps: int, most_in_flight: int) -> int:
    """Return how many more groups may start, so that the next `num_steps` steps of `count` groups use all of them.

    At most `most_in_flight` groups are sampled at a time.
    """
    num_waiting = sum(group.is_sampled for group in in_flight)
    return min(count * num_steps - len(in_flight), most_in_flight + num_waiting - len(in_flight))


def ready(in_flight: Sequence[InFlight], count: int, *, step: int, max_staleness: int) -> list[InFlight]:
    """Return the `count` groups that `step` trains on: the sampled groups that started first.

    Return an empty list while too few groups are sampled, or while an unfinished group must be waited for. That is the
    case if the steps that may still train on it, up to `max_staleness` after the step that it started for, would be
    filled by older groups.

    Groups that started together are taken in the order of their problems. In the order in which they finish, a stream's
    first steps would train on its shortest completions.
    """
    ordered = sorted(in_flight, key=lambda group: (group.begun, group.number))
    if any(group.in_order for group in ordered[:count]):
        return ordered[:count] if all(group.is_sampled for group in ordered[:count]) else []
    taken = [group for group in ordered if group.is_sampled][:count]
    left = [group for group in ordered if group not in taken]
    in_time = all(index < count * (group.begun + max_staleness - step) for index, group in enumerate(left))
    return taken if len(taken) == count and in_time else []
