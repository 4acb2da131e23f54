"""Batches of an Atropos API on several ranks: the first one talks to the API, and each rank checks its own server."""

from pathlib import Path
from typing import Any

import pytest

from bridge.errors import RewardError, ServerUnreachableError, UsageError
from bridge.ranks.world import Ranks
from bridge.types import Group
from tests.models import tiny
from tests.unit.atropos.atropos_api import FakeApi, FakeTime, pair, scored
from tests.unit.atropos.test_atropos_stream import OURS, running
from tests.unit.http_server import Answer
from tests.unit.several_ranks import on_ranks

BAD = scored(((5, 6), 1), ((5, 700), 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("model"))


def taken(ranks: Ranks, model: Path) -> tuple[list[list[Group]], list[str], list[str], str]:
    """Take two steps; return their groups, this rank's requests, its log, and the address of its server.

    The second batch comes late.
    """
    api, time = FakeApi(batches=[[pair(), BAD, pair(), pair()]]), FakeTime()
    time.happening = {12.0: lambda: api.batches.append([pair()])}
    with running(model, api, time, ranks, max_unscored_share=0.5) as run:
        steps = [run.step(1), run.step(2)]
        return steps, [request.path for request in run.server.requests], run.notes, run.server.url


@pytest.mark.parametrize("num_parts", [1, 2])
def test_all_ranks_get_the_first_ranks_batches(model: Path, num_parts: int) -> None:
    first, *others = on_ranks(2 * num_parts, taken, model, tp_size=num_parts)
    steps, paths, notes, url = first
    assert [len(groups) for groups in steps] == [4, 1]
    assert [len(group.completions) for group in steps[0]] == [2, 2, 2, 0]
    assert paths.count("/register") == 1
    assert all(other[0] == steps for other in others)
    speaking = [other for rank, other in enumerate(others, start=1) if rank % num_parts == 0]
    assert all({*other[1]} == ({"/health"} if other in speaking else set()) for other in others)
    assert notes[1] == f"environments can sample from all servers: bridge env --server-url {url},{speaking[0][3]}"
    assert [other[2] for other in others] == [[]] * len(others)


def outlived(ranks: Ranks, model: Path) -> tuple[list[Group], float]:
    """Lose the second rank's server while a batch arrives; return the groups after the server's restart."""
    api, time = FakeApi(), FakeTime()
    time.happening = {7.0: lambda: api.batches.append([pair()])}
    api.health = Answer("", 503 if ranks.rank == 1 else 200)
    with running(model, api, time, ranks) as run:
        run.fails(ServerUnreachableError)
        api.health = Answer("")
        return run.step(), time.at


def test_dead_server_of_any_rank_loses_no_batch(model: Path) -> None:
    (groups, seconds), (others, _) = on_ranks(2, outlived, model)
    assert groups == others
    assert len(groups) == 1
    assert seconds < 20


def refused(ranks: Ranks, model: Path, choices: dict[str, Any]) -> list[Group]:
    with running(model, FakeApi(**choices), None, ranks) as run:
        return run.step()


@pytest.mark.parametrize(
    ("choices", "kind", "words"),
    [
        ({"settings": {**OURS, "batch_size": 64}}, UsageError, "(batch_size 64, expected 8)"),
        ({"settings": {**OURS, "max_token_len": 99}}, UsageError, "(max_token_len 99, expected 1025)"),
        ({"batches": [[BAD]]}, RewardError, "has the token 700"),
    ],
)
def test_refusal_on_rank_zero_ends_all_ranks(
    model: Path, choices: dict[str, Any], kind: type[Exception], words: str
) -> None:
    for error in on_ranks(2, refused, model, choices):
        assert isinstance(error, kind)
        assert words in str(error)
