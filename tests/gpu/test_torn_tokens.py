"""No torn token in a million on a GPU, with asynchronous scheduling and CUDA graphs.

Not covered: drained or aborted requests (`tests/cpu/test_torn_tokens.py`).
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests import torn_tokens
from tests.models import tiny
from tests.torn_tokens import Alternation, Load

LOAD = Load(
    num_tokens=int(os.environ.get("TORN_TOKENS", "1_000_000")), num_fences=100, num_requests=16, num_samples=16,
    max_tokens=256, prompt_tokens=96, fence_every_s=0.1, dtype="float16", tolerance=0.03,
)  # fmt: skip
"""Set TORN_TOKENS=10_000 for a shorter search."""
FEWER = replace(LOAD, num_tokens=20_000, num_fences=2)


@pytest.fixture(scope="module")
def alternation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alternation]:
    config = tiny.llama()
    config.head_dim = 64
    folder = tmp_path_factory.mktemp("torn_tokens")
    with torn_tokens.alternating(config, folder, LOAD, "--async-scheduling", std=0.06) as alternation:
        yield alternation


def test_async_scheduling_and_cuda_graphs_are_enabled(alternation: Alternation) -> None:
    log = alternation.server.child.log.read_text()
    assert "'async_scheduling': True" in log
    assert "CUDA graph" in log


def test_server_and_transformers_agree_without_updates(alternation: Alternation) -> None:
    torn_tokens.agrees_without_fences(alternation, FEWER)


def test_each_of_a_million_tokens_has_one_published_state(alternation: Alternation) -> None:
    verdict = torn_tokens.finds_no_torn_token(alternation, LOAD)
    assert verdict.spanning > 0


def test_a_million_tokens_report_their_versions(
    alternation: Alternation,
) -> None:
    torn_tokens.keeps_what_is_in_flight(alternation, LOAD)


def test_weights_written_without_the_fence_are_detected(alternation: Alternation) -> None:
    torn_tokens.finds_torn_tokens_without_the_fence(alternation, FEWER)
