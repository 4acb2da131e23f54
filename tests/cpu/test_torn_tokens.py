"""No torn token on the real vLLM on the CPU: 10,000 tokens under load while two states of the weights alternate.

The server runs with `--enforce-eager`, which only shortens its start: compiled code reads the same memory.

Not covered: asynchronous scheduling and CUDA graphs, over a million tokens (`tests/gpu/test_torn_tokens.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.server.protocol import InFlight
from tests import torn_tokens
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.torn_tokens import Alternation, Load

LOAD = Load(
    num_tokens=10_000, num_fences=10, num_requests=4, num_samples=8, max_tokens=96, prompt_tokens=150,
    fence_every_s=0.05, dtype="float32", tolerance=1e-4,
)  # fmt: skip
HALF = replace(LOAD, num_tokens=5_000, num_fences=5)
MANY = replace(LOAD, num_tokens=100_000, num_fences=100)
FEWER = replace(LOAD, num_tokens=2_000, num_fences=2)


@pytest.fixture(scope="module")
def alternation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alternation]:
    with torn_tokens.alternating(tiny.llama(), tmp_path_factory.mktemp("torn_tokens"), LOAD) as alternation:
        yield alternation


def test_server_and_transformers_agree_without_updates(alternation: Alternation) -> None:
    torn_tokens.agrees_without_fences(alternation, FEWER)


def test_10_000_tokens_each_come_from_one_published_state(alternation: Alternation) -> None:
    assert torn_tokens.finds_no_torn_token(alternation, LOAD).spanning > 0


@pytest.mark.parametrize("load", [HALF, pytest.param(MANY, marks=pytest.mark.slow)], ids=["5,000", "100,000"])
def test_tokens_with_a_kept_cache_have_the_reported_version(alternation: Alternation, load: Load) -> None:
    torn_tokens.keeps_what_is_in_flight(alternation, load)


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_drained_and_aborted_tokens_come_from_one_version(alternation: Alternation, in_flight: InFlight) -> None:
    assert torn_tokens.finds_no_torn_token(alternation, HALF, in_flight).spanning == 0


def test_weights_written_without_the_fence_are_detected(alternation: Alternation) -> None:
    torn_tokens.finds_torn_tokens_without_the_fence(alternation, FEWER)


def test_experts_of_a_token_have_its_reported_version(tmp_path: Path) -> None:
    config = FAMILIES["Qwen3-MoE"]()
    with torn_tokens.alternating(config, tmp_path, LOAD) as alternation:
        torn_tokens.names_the_experts_of_its_version(alternation, FEWER)
