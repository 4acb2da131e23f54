"""What becomes of completions whose score failed: counted, told once per kind, and past a share the end of the run.

Not covered: what a fault is (`scoring.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable

from bridge.errors import RewardError
from bridge.scoring.scoring import Fault, Score


class Faults:
    """The faults of one batch."""

    def __init__(self, batch: str, *, num_completions: int, max_share: float) -> None:
        """`batch` names it to a person; more than `max_share` of its `num_completions` may not fail."""
        self._batch, self._num_completions, self._max_share = batch, num_completions, max_share
        self._counts: Counter[str] = Counter()
        """How often each kind was found."""
        self._examples: dict[str, str] = {}
        """The first line of each kind."""

    def add(self, results: Iterable[Score | Fault]) -> None:
        """Count those among the results.

        Raises:
            RewardError: too many of the batch failed.
        """
        for result in results:
            if isinstance(result, Fault):
                self._counts[result.kind] += 1
                self._examples.setdefault(result.kind, result.line)
        if self._counts.total() > self._max_share * self._num_completions:
            raise self._too_many()

    def tell(self, tell: Callable[[str], None], told: set[str]) -> None:
        """Tell of each kind that is not among the `told`, and add it to them."""
        for kind, count in self._counts.items():
            if kind not in told:
                told.add(kind)
                tell(
                    f"{self._batch}: {_completions(count)} without a reward, left out: {self._examples[kind]}"
                    " (told once; all are counted)"
                )

    def _too_many(self) -> RewardError:
        kind, count = self._counts.most_common(1)[0]
        return RewardError(
            f"{self._batch}: at least {self._counts.total()} of {_completions(self._num_completions)} without a reward,"
            f" more than a share of {self._max_share:g}; {count} of them: {self._examples[kind]}",
            remedy="mend what scores, then run the same command again; --reward-timeout-s gives a score more time, and"
            " --max-unscored-share lets more completions pass",
        )


def _completions(count: int) -> str:
    return f"{count} completion{'' if count == 1 else 's'}"
