"""Cost of the rollout client itself: CPU time per completion, and memory over a run.

    python -m benchmarks.rollouts --groups 2000 --samples 8 --tokens 256 --per-call 2000 64

A fake server in a separate process responds immediately (`_fast_server.py`). Groups are dropped as they arrive, and
resident memory is sampled. Its growth is the difference between the medians of the second and the third quarter; in the
last quarter no new requests start.

Runs on a CPU in a minute.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import psutil

from benchmarks import _results
from benchmarks._fast_server import PROMPT_TOKENS
from benchmarks._results import say
from bridge.config import SamplingConfig
from bridge.core.concurrency import gather_or_cancel
from bridge.rollouts.sampler import Sampler
from bridge.server.endpoint import Endpoint
from bridge.types import Completion

MIB = 2**20
CPU_AIM_MS = 1.0
"""Maximum CPU time per completion, in ms."""
GROWTH_AIM_MIB = 4.0
"""Maximum growth of resident memory per quarter, which an allocator may keep."""
READINGS = 48
"""Number of memory readings over all groups."""
COLUMNS = {
    "cpu_ms": "CPU ms a completion", "seconds": "seconds", "completions_per_s": "completions/s", "rss_mib": "MiB",
    "growth_mib": "growth MiB", "num_retries": "retries",
}  # fmt: skip

Row = dict[str, Any]


def main() -> None:
    """Measure each number of groups per call; write the results."""
    options = _flags().parse_args()
    with fast_server(options.samples, options.tokens) as url:
        rows = [measure(url, per_call, options) for per_call in options.per_call]
    path = _results.write("rollouts", {"rows": rows}, options.out)
    say(f"{path}\n{table(rows)}")


def _flags() -> argparse.ArgumentParser:
    flags = _results.parser(__doc__)
    flags.add_argument("--groups", type=int, default=2000, help="groups in all")
    flags.add_argument("--samples", type=int, default=8, help="completions of a group")
    flags.add_argument("--tokens", type=int, default=256, help="tokens of a completion")
    flags.add_argument("--per-call", type=int, nargs="+", default=[2000, 64], help="groups of a step")
    flags.add_argument("--concurrency", type=int, default=256, help="requests in flight")
    return flags


@contextmanager
def fast_server(num_samples: int, num_tokens: int) -> Iterator[str]:
    """Run the fake server in a process that ends with this one."""
    argv = [sys.executable, "-m", "benchmarks._fast_server", str(num_samples), str(num_tokens)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        with contextlib.closing(server.stdin):
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"


def measure(url: str, per_call: int, options: argparse.Namespace) -> Row:
    """Sample all groups, `per_call` per call, on the same connections."""
    memory = Memory(every=max(1, options.groups // READINGS))
    config = SamplingConfig(max_new_tokens=options.tokens, request_timeout_s=60, max_concurrency=options.concurrency)
    with Sampler(config) as sampler:
        cpu, begun = time.process_time(), time.perf_counter()
        for step, first in enumerate(range(0, options.groups, per_call)):
            count = min(per_call, options.groups - first)
            prompts = [tuple(range(100 + index, 100 + index + PROMPT_TOKENS)) for index in range(count)]
            servers = sampler.servers_at([Endpoint(url=url)])
            requests = (
                sampler.one(servers, prompt, num_samples=options.samples, seed=step, index=index)
                for index, prompt in enumerate(prompts)
            )
            sampler.loop.run(gather_or_cancel(map(memory.took, requests)))
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - begun
        num_retries = sampler.num_retries
    num_completions = options.groups * options.samples
    assert memory.num_completions == num_completions, memory.num_completions
    growth = memory.growth_mib()
    return {
        "groups_per_call": per_call, "groups": options.groups, "samples": options.samples, "tokens": options.tokens,
        "concurrency": options.concurrency, "cpu_ms": 1e3 * cpu / num_completions, "seconds": seconds,
        "completions_per_s": num_completions / seconds, "rss_mib": memory.mib[-1], "growth_mib": growth,
        "num_retries": num_retries, "is_quick_enough": 1e3 * cpu / num_completions < CPU_AIM_MS,
        "is_flat": growth < GROWTH_AIM_MIB, "groups_read_at": memory.groups, "rss_mib_read": memory.mib,
    }  # fmt: skip


class Memory:
    """Samples of this process's resident memory."""

    def __init__(self, *, every: int) -> None:
        self.num_completions, self._num_groups, self._every = 0, 0, every
        self.groups: list[int] = []
        self.mib: list[float] = []
        self._process = psutil.Process()

    async def took(self, request: Coroutine[Any, Any, Sequence[Completion]]) -> None:
        """Await one group, count it, and drop it."""
        group = await request
        self.num_completions += len(group)
        self._num_groups += 1
        if self._num_groups % self._every == 0:
            self.groups.append(self._num_groups)
            self.mib.append(self._process.memory_info().rss / MIB)

    def growth_mib(self) -> float:
        """Return the growth from the second to the third quarter, as medians, since memory in flight varies."""
        quarter = len(self.mib) // 4
        second, third = (self.mib[number * quarter : (number + 1) * quarter] for number in (1, 2))
        return median(third) - median(second)


def table(rows: list[Row]) -> str:
    cells = [["groups a call", *COLUMNS.values()]]
    cells += [[str(row["groups_per_call"]), *(f"{row[name]:.3g}" for name in COLUMNS)] for row in rows]
    return _results.table(cells)


if __name__ == "__main__":
    main()
