"""The benchmark of the sampling client: its fake server is parsed like vLLM, and its figures cover all groups."""

import argparse

from benchmarks import rollouts
from bridge.config import SamplingConfig
from bridge.rollouts.sampler import Sampler
from bridge.server.endpoint import Endpoint


def test_benchmark_measures_every_complete_group() -> None:
    options = argparse.Namespace(groups=12, samples=2, tokens=5, concurrency=4)
    with rollouts.fast_server(2, 5) as url:
        row = rollouts.measure(url, 5, options)
        with Sampler(SamplingConfig(max_new_tokens=5, request_timeout_s=60)) as sampler:
            ((one, other),) = sampler.sample([Endpoint(url=url)], [(1,)], num_samples=2, seed=0)
            assert sampler.lacks == ()
    assert one.versions == (3,) * 5
    assert one.token_ids != other.token_ids
    assert len(row["rss_mib_read"]) == 12
    assert row["num_retries"] == 0
    assert row["cpu_ms"] > 0
    assert "CPU ms" in rollouts.table([row])


def test_rising_memory_is_distinguished_from_spikes() -> None:
    memory = rollouts.Memory(every=1)
    memory.mib = [100.0] * 10 + [200.0] * 4 + [999.0] + [200.0] * 10 + [999.0] + [200.0] * 4 + [300.0] * 10
    assert memory.growth_mib() == 0
    memory.mib = [float(reading) for reading in range(40)]
    assert memory.growth_mib() == 10
