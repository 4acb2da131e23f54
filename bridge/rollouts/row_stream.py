"""The stream of a file's rows: given completions instead of sampled ones, in an order that depends on seed and step.

The server is not needed for these steps, but it serves the weights that they train: an environment's stream beside the
rows samples its held-out problems from them. In a warm-up, that stream also takes over after the last step on rows.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

from bridge.rollouts.groups import Stream
from bridge.rollouts.training_rows import TrainingRow
from bridge.server.endpoint import Endpoint
from bridge.types import Group, TrainedProblems


class RowStream:
    """Takes the batches of the first steps from the rows of a file, and those of later steps from another stream."""

    def __init__(self, rows: Sequence[TrainingRow], *, seed: int, num_steps: int, other: Stream | None) -> None:
        """Use `rows` for steps 1 to `num_steps`; `other` evaluates and has the later steps. None: there are none."""
        self.num_retries = 0
        self.num_in_flight = 0
        self.skipped: Sequence[Group] = ()
        self._rows = rows
        self._num_steps = num_steps
        self._other = other
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._shuffled)

    def served(self, endpoint: Endpoint, version: int) -> None:
        if self._other is not None:
            self._other.served(endpoint, version)

    def resume(self, trained: TrainedProblems) -> None:
        """Resume the other stream; the position in the rows follows from the step."""
        if self._other is not None:
            self._other.resume(trained)

    def take(self, count: int, *, step: int) -> list[Group]:
        """Return the `count` rows of this step as groups, the same on every rank."""
        if step <= self._num_steps:
            begin = (step - 1) * count
            return [self._row(index).group() for index in range(begin, begin + count)]
        assert self._other is not None, f"step {step} of {self._num_steps}"
        groups = self._other.take(count, step=step)
        self.num_retries = self._other.num_retries
        self.num_in_flight = self._other.num_in_flight
        self.skipped = self._other.skipped
        return groups

    def evaluate(self, *, step: int) -> list[Group] | None:
        return None if self._other is None else self._other.evaluate(step=step)

    def close(self) -> None:
        if self._other is not None:
            self._other.close()

    def _row(self, index: int) -> TrainingRow:
        """Return the row with this index in the endless order, which is reshuffled in each pass."""
        number, place = divmod(index, len(self._rows))
        return self._rows[self._permutation(number)[place]]

    def _shuffled(self, number: int) -> list[int]:
        order = [*range(len(self._rows))]
        random.Random(f"{self._seed}/{number}").shuffle(order)  # noqa: S311  an order, not a secret
        return order
