"""Waiting for a batch that does not come: what is said meanwhile, what is watched, and when it ends.

Not covered: what a batch is (`experience.py`), why none comes (`diagnosis.py`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from bridge.atropos.client import AtroposApi
from bridge.atropos.diagnosis import Diagnosis, diagnose
from bridge.errors import AtroposError
from bridge.server.client import VllmClient

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Seconds between two questions for a batch; each time half as long again."""
HEALTH_INTERVAL_S = 5.0
"""Seconds between two looks at the server that samples: environments wait for ever for one that died."""
FIRST_WORD_S = 30.0
"""Seconds without a batch until it is said why; then each time after twice as long."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Time, which tests make pass."""

    now: Callable[[], float] = time.monotonic
    """Seconds from some moment on."""
    sleep: Callable[[float], None] = time.sleep
    """Wait so many seconds."""


class Waiting:
    """One wait for a batch; `pause` comes after each question that found none."""

    def __init__(
        self,
        api: AtroposApi,
        *,
        server_url: str,
        batch_size: int,
        limit_s: float,
        tell: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._api, self._server_url, self._batch_size = api, server_url, batch_size
        self._limit_s, self._tell, self._clock = limit_s, tell, clock
        self._begun = self._looked = clock.now()
        self._pause_s, self._word_s = SHORTEST_PAUSE_S, FIRST_WORD_S

    def pause(self) -> None:
        """Wait a while, longer each time.

        Raises:
            ServerUnreachableError: the server that samples is gone.
            AtroposError: it took too long, or the API is gone.
        """
        now = self._clock.now()
        if now - self._looked >= HEALTH_INTERVAL_S:
            self._looked = now
            with VllmClient(self._server_url) as server:
                server.check_health()
        if now - self._begun >= self._limit_s:
            raise self._too_long()
        if now - self._begun >= self._word_s:
            self._word_s *= 2
            self._tell(f"no batch from the Atropos API for {now - self._begun:.0f} s: {self._diagnosis().found}")
        self._clock.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)

    def _diagnosis(self) -> Diagnosis:
        return diagnose(self._api, self._batch_size)

    def _too_long(self) -> AtroposError:
        why = self._diagnosis()
        return AtroposError(
            f"the Atropos API at {self._api.url} gave no batch for {self._limit_s:.0f} s: {why.found}",
            remedy=why.remedy,
        )
