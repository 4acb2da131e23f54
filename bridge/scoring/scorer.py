"""Score completions in processes of their own, so that a score may take its time, hang or crash and nothing else does.

Not covered: one process (`worker_process.py`), what becomes of faults (`faults.py`).
"""

import asyncio
import os
from collections.abc import Callable, Sequence

from bridge.core.foreign_code import foreign_code
from bridge.scoring.scoring import Fault, Origin, Score, Scores, score_one
from bridge.scoring.worker import framed
from bridge.scoring.worker_process import WorkerProcess
from bridge.types import Problem

MOST_PROCESSES = 4
"""Unless more are asked for: a trainer and a server need cores too."""


class Scorer:
    """Processes that score, or this one; used from one event loop, and closed by the thread that made it."""

    def __init__(self, recipe: Callable[[], Scores], *, processes: int | None, timeout_s: float) -> None:
        """Start the processes, and wait for none; each makes what scores by `recipe`, which can be pickled.

        `processes`: None: as many as there are cores, at most 4; 0: score in this process, without a time limit.

        Raises:
            RewardError: the recipe cannot be pickled, or fails in this process.
        """
        self._workers: list[WorkerProcess] = []
        self._pid = os.getpid()
        if processes == 0:
            with foreign_code("making what scores completions", ""):
                self._own = recipe()
                self._origin = Origin.of(self._own)
            return
        cores = len(os.sched_getaffinity(0))
        pickled = framed(recipe)
        for _ in range(processes or min(MOST_PROCESSES, cores)):
            self._workers.append(WorkerProcess(pickled, timeout_s=timeout_s))
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, problem: Problem, completions: Sequence[str]) -> list[Score | Fault]:
        """Score the completions of one problem, as many at once as there are processes; the result is in their order.

        Raises:
            RewardError: nothing can be scored: a process cannot make what scores, or the problem cannot be pickled.
        """
        if not self._workers:
            return [await self._here(problem, completion) for completion in completions]
        tasks = [asyncio.create_task(self._there(problem, completion)) for completion in completions]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.kill()

    async def _here(self, problem: Problem, completion: str) -> Score | Fault:
        await asyncio.sleep(0)  # whoever waits for a server goes on in between
        found = score_one(self._own, self._origin, problem, completion)
        if os.getpid() != self._pid:
            os._exit(0)  # a child that the score forked: it would be a second trainer
        return found

    async def _there(self, problem: Problem, completion: str) -> Score | Fault:
        worker = await self._idle.get()
        try:
            return await worker.score(problem, completion)
        finally:
            self._idle.put_nowait(worker)
