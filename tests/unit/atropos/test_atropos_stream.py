"""Batches of a fake Atropos API: registration, the guards that the protocol lacks, and every timeout."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from bridge.atropos.atropos_stream import AtroposStream
from bridge.config import TrainConfig
from bridge.errors import AtroposError, BridgeError, RewardError, ServerUnreachableError, UsageError
from bridge.learn.samples import with_advantages
from bridge.ranks.world import ALONE, Ranks
from bridge.server.endpoint import Endpoint
from bridge.types import Group
from tests.logged import logged
from tests.models import tiny
from tests.streams import atropos_stream
from tests.unit.atropos.atropos_api import LOST, FakeApi, FakeTime, pair, scored
from tests.unit.http_server import Answer, HttpRequest, HttpServer, serving

Scale = Literal["group", "batch", "none"]
LONGEST = 1024
"""The fake server's limit; the model could take twice as much."""
OURS = {"batch_size": 8, "max_token_len": LONGEST + 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("model"))


@dataclass
class Run:
    """A stream under test, and its log."""

    stream: AtroposStream
    server: HttpServer
    time: FakeTime
    notes: list[str] = field(default_factory=list)

    def step(self, number: int = 1) -> list[Group]:
        return self.stream.take(4, step=number)

    def fails(self, kind: type[BridgeError] = AtroposError) -> BridgeError:
        with pytest.raises(kind) as caught:
            self.step()
        assert "\n" not in caught.value.message
        return caught.value

    def requests(self, path: str) -> list[HttpRequest]:
        return [request for request in self.server.requests if request.path == path]


@contextmanager
def running(
    model: Path, api: FakeApi, time: FakeTime | None = None, ranks: Ranks = ALONE, **choices: Any
) -> Iterator[Run]:
    time = time or FakeTime()
    with serving(api) as server, time.passing():
        fixed = {"model_name": str(model), "rollouts": "atropos", "atropos_url": server.url}
        sizes = {"batch_size": 8, "group_size": 2, "training_steps": 20, "save_path": "saved", "save_interval": 5}
        config = TrainConfig.of(**(fixed | sizes | choices))
        with logged() as notes, closing(atropos_stream(config, run_name="saved", ranks=ranks)) as stream:
            stream.served(Endpoint(url=server.url), 3)
            yield Run(stream, server, time, notes)


# Registration


def test_trainer_registers_once_at_its_first_step(model: Path) -> None:
    api = FakeApi(batches=[[pair()], [pair()]])
    with running(model, api) as run:
        assert run.requests("/register") == []
        run.step(7)
        run.step(8)
        (request,) = run.requests("/register")
    assert request.body == OURS | {
        "wandb_group": "saved",
        "wandb_project": "bridge",
        "checkpoint_dir": str(Path("saved").absolute()),
        "save_checkpoint_interval": 5,
        "starting_step": 6,
        "num_steps": 20,
    }
    (line,) = run.notes
    assert "registered this trainer: batches of 8 sequences, each of at most 1,024 tokens (the server's limit)" in line


def test_length_limit_defaults_to_the_models(model: Path) -> None:
    api = FakeApi(models={"data": [{"id": "tiny"}]}, batches=[[pair()]])
    with running(model, api) as run:
        run.step()
    assert api.settings is not None
    assert api.settings["max_token_len"] == 2048 + 1
    assert "at most 2,048 tokens (the model's max_position_embeddings limit)" in run.notes[0]


def test_api_with_the_same_settings_is_accepted(model: Path) -> None:
    api = FakeApi(settings=dict(OURS), batches=[[pair()]])
    with running(model, api) as run:
        assert len(run.step()) == 1
        assert run.requests("/register") == []
    assert "already has a trainer with the same settings" in run.notes[0]


def test_batch_size_of_another_trainer_is_refused_first(model: Path) -> None:
    with pytest.raises(UsageError) as caught, running(model, FakeApi(settings={**OURS, "batch_size": 64})):
        pass
    assert caught.value.message.endswith("keeps the settings of a different trainer (batch_size 64, expected 8)")
    assert "/reset_data" in caught.value.hint
    assert "run-api" in caught.value.hint


def test_length_of_another_trainer_is_refused_once_known(model: Path) -> None:
    with running(model, FakeApi(settings={**OURS, "max_token_len": 99})) as run:
        assert "(max_token_len 99, expected 1025)" in run.fails(UsageError).message
        assert run.requests("/batch") == []


def test_api_with_groups_but_no_trainer_is_refused(model: Path) -> None:
    with running(model, FakeApi(has_strays=True)) as run:
        assert "received groups before a trainer registered" in run.fails(UsageError).message


@pytest.mark.parametrize("was_reset", [False, True])
def test_trainer_reregisters_after_an_api_restart_or_reset(model: Path, was_reset: bool) -> None:
    api = FakeApi(batches=[[pair()], [pair()]], was_reset=was_reset)
    with running(model, api) as run:
        run.step(1)
        api.settings = None
        assert len(run.step(2)) == 1
        assert [request.body["starting_step"] for request in run.requests("/register")] == [0, 1]
    assert "has lost its trainer's registration" in run.notes[1]
    assert len(run.notes) == 3


# Waiting


def test_one_batch_is_fetched_per_step_with_growing_waits(model: Path) -> None:
    api, time = FakeApi(), FakeTime()
    time.happening = {20.0: lambda: api.batches.extend([[pair()], [pair()]])}
    with running(model, api, time) as run:
        run.step()
        assert len(run.requests("/batch")) == len(time.waits) + 1
        assert time.waits == sorted(time.waits)
        assert (time.waits[0], time.waits[-1]) == (0.05, 1.0)
        assert len(api.batches) == 1
        run.step(2)
        assert len(run.requests("/batch")) == len(time.waits) + 2
    assert len(run.notes) == 1


@pytest.mark.parametrize(
    ("state", "message", "hint"),
    [
        ({"is_connected": False}, "no environment is connected", "--env.rollout_server_url http"),
        ({"is_connected": False, "num_waiting": 3}, "no environment is connected", "start one"),
        ({}, "environments have registered, but no groups are queued", "scores are all equal"),
        ({}, "environments have registered, but no groups are queued", "may poll ports 9004 to 9007 regardless"),
        (
            {"num_waiting": 40, "largest": 3},
            "40 groups of up to 3 sequences are queued, but do not form a batch of 8, which is not a multiple of 3",
            "--batch-size 9 --group-size 3",
        ),
        (
            {"num_waiting": 1, "largest": 4},
            "1 groups of up to 4 sequences are queued, but do not form a batch of 8",
            "min_batch_allocation",
        ),
    ],
)
def test_api_without_batches_is_diagnosed_and_ends_the_run(
    model: Path, state: dict[str, Any], message: str, hint: str
) -> None:
    with running(model, FakeApi(**state), atropos_timeout_s=200) as run:
        error = run.fails()
    assert message in error.message
    assert "had no batch for 200 s" in error.message
    assert hint in error.hint
    assert error.exit_code == 5
    words = [line for line in run.notes if line.startswith("no batch from the Atropos API for ")]
    assert [line.partition(" for ")[2].partition(" s:")[0] for line in words] == ["30", "60", "120"]
    assert all(message in line and hint in line for line in words)


def test_time_limit_applies_to_each_step(model: Path) -> None:
    api, time = FakeApi(), FakeTime()
    with running(model, api, time, atropos_timeout_s=100) as run:
        for step in range(1, 4):
            time.happening = {time.at + 90: lambda: api.batches.append([pair()])}
            run.step(step)


# Failures


def test_missing_api_is_reported_before_the_model_is_read() -> None:
    with serving(FakeApi(is_gone=lambda _: True)) as server:
        choices = {"model_name": "/nowhere", "rollouts": "atropos", "atropos_url": server.url, "max_retries": 2}
        config = TrainConfig.of(**(choices))
        time = FakeTime()
        with time.passing(), pytest.raises(AtroposError) as caught:
            atropos_stream(config, run_name="saved")
        assert len(server.requests) == 3
        assert server.url in caught.value.message
    assert time.waits == [0.25, 0.5]
    assert "run-api" in caught.value.hint
    assert not isinstance(caught.value, ServerUnreachableError)  # which would restart vLLM


def test_unreadable_model_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = list[httpx.Client]()
    opened = httpx.Client.__init__

    def noted(client: httpx.Client, **options: Any) -> None:
        clients.append(client)
        opened(client, **options)

    monkeypatch.setattr(httpx.Client, "__init__", noted)
    with serving(FakeApi()) as server:
        config = TrainConfig.of(model_name="/nowhere", rollouts="atropos", atropos_url=server.url)
        with pytest.raises(UsageError):
            atropos_stream(config, run_name="saved")
    assert clients
    assert all(client.is_closed for client in clients)


def test_api_that_dies_during_the_wait_ends_the_run(model: Path) -> None:
    api, time = FakeApi(), FakeTime()
    time.happening = {5.0: lambda: setattr(api, "is_gone", lambda request: request.path != "/health")}
    with running(model, api, time) as run:
        assert "does not answer" in run.fails().message


def test_dropped_connections_are_counted_as_retries(model: Path) -> None:
    drops = iter([True, False, True])
    api = FakeApi(batches=[[pair()]], is_gone=lambda request: request.path == "/batch" and next(drops, False))
    with running(model, api) as run:
        assert len(run.step()) == 1
        assert run.stream.num_retries == 1
        api.batches.append([pair()])
        run.step(2)
        assert run.stream.num_retries == 1
        api.batches.append([pair()])
        run.step(3)
        assert run.stream.num_retries == 0


def test_batch_lost_by_the_api_is_reported_once(model: Path) -> None:
    api = FakeApi(batches=[[pair()], LOST, LOST])
    with running(model, api) as run:
        assert len(run.step()) == 1
        assert run.stream.num_retries == 2
    assert sum("lost a whole batch" in line and "NaN" in line for line in run.notes) == 1
    assert run.notes[-1] == "2 batches were lost in the Atropos API"


@pytest.mark.parametrize("fault", ["gone", "unwell"])
def test_dead_server_is_reported_to_the_training_loop(model: Path, fault: str) -> None:
    api, time = FakeApi(), FakeTime()

    def die() -> None:
        api.health = Answer("", 503)
        api.is_gone = lambda request: fault == "gone" and request.path == "/health"

    time.happening = {12.0: die}
    with running(model, api, time) as run:
        run.fails(ServerUnreachableError)
        assert time.at < 20
        api.health, api.is_gone = Answer(""), lambda _: False
        api.batches.append([pair()])
        assert len(run.step()) == 1  # it was restarted
        assert len(run.requests("/register")) == 1


def test_server_without_a_health_route_counts_as_healthy(model: Path) -> None:
    api, time = FakeApi(health=Answer("", 404)), FakeTime()
    time.happening = {12.0: lambda: api.batches.append([pair()])}
    with running(model, api, time) as run:
        assert len(run.step()) == 1
        assert len(run.requests("/health")) == 2


# Groups that cannot be trained on


def test_faulty_group_is_left_out_and_reported_once(model: Path) -> None:
    bad, other = pair(scores=[None, 1.0]), pair(masks=[[1], [2]])
    api = FakeApi(batches=[[bad, other, *[pair() for _ in range(8)]], [bad, *[pair() for _ in range(9)]]])
    with running(model, api) as run:
        for step in (1, 2):
            groups = run.step(step)
            assert len(groups) == 10
            assert [len(group.completions) for group in groups[:8]] == [2] * 8
            assert sum(len(group.unscored) for group in groups) == 2 * step
    left_out = [line for line in run.notes if "is left out" in line]
    assert len(left_out) == 2
    assert "a group of environment 0 is left out: sequence 1 of 2 has the score nan" in left_out[0]
    assert "sequence 1 of 2 has 4 tokens and a mask of 1" in left_out[1]
    assert run.notes[-1] == "3 groups of Atropos environments were left out (scores: 2, masks: 1)"


def test_too_many_faulty_groups_end_the_run(model: Path) -> None:
    bad = scored(((5, 6), 1), ((5, 700), 1))
    with running(model, FakeApi(batches=[[bad, *[pair() for _ in range(3)]]])) as run:
        error = run.fails(RewardError)
    assert "2 of the 8 sequences" in error.message
    assert "has the token 700, expected 0 to 300" in error.message
    assert "--max-unscored-share" in error.hint


def test_sequence_that_is_too_long_is_left_out(model: Path) -> None:
    long = scored(((5,) * (LONGEST + 1), 2), ((5,) * LONGEST, 2))
    with running(model, FakeApi(batches=[[pair() for _ in range(9)] + [long]])) as run:
        groups = run.step()
    assert groups[-1].unscored[0].fault == "sequence 1 of 2 has 1,025 tokens, expected at most 1,024"


# Lines logged once


def test_unused_and_missing_fields_are_reported_once(model: Path) -> None:
    odd = pair(
        inference_logprobs=None,
        ref_logprobs=[[0.0], [0.0]],
        distill_token_ids=[[[1]], [[1]]],
        generation_params={"temperature": 0.5, "top_p": 0.9, "top_k": -1, "presence_penalty": 0.0, "stop": ["x"]},
        overrides=[{"color": "red"}, {"set_advantage_to_zero": False}],
    )
    with running(model, FakeApi(batches=[[odd, odd], [odd]]), eval_samples=2, mask_truncated=True) as run:
        assert len(run.step()) == 1
        assert len(run.step(2)) == 2
        assert run.stream.evaluate(step=2) is None  # type: ignore[func-returns-value]
    parts = [
        "--eval-samples",
        "--mask-truncated",
        "sends no log-probabilities",
        "sends ref_logprobs",
        "sends distill_token_ids",
        "at temperature 0.5, but --temperature is 1.0",
        "samples with top_p=0.9; ",
        "overrides color",
    ]
    assert [sum(part in line for line in run.notes) for part in parts] == [1] * len(parts)
    assert len(run.notes) == len(parts) + 1
    assert "staleness is known only for sequences from `bridge env`" in run.notes[2]


def test_empty_lists_count_as_absent(model: Path) -> None:
    plain = pair(advantages=[], ref_logprobs=[], messages=[], overrides=[], images=[], group_overrides={})
    with running(model, FakeApi(batches=[[plain]])) as run:
        (group,) = run.step()
    assert group.advantages is None
    assert len(run.notes) == 1


@pytest.mark.parametrize(("scale", "expected"), [("none", 0.5), ("batch", 0.5 / 0.5), ("group", 0.5 / 0.5)])
def test_completion_with_zero_advantage_keeps_its_reward(model: Path, scale: Scale, expected: float) -> None:
    first = pair(overrides=[{"set_advantage_to_zero": True}, {}])
    with running(model, FakeApi(batches=[[first, pair()]]), advantage_scale=scale) as run:
        zeroed, other = with_advantages(run.step(), scale)
    assert zeroed.rewards == other.rewards == (0.0, 1.0)
    assert [value for (value,) in zeroed.advantages or ()] == [0.0, pytest.approx(expected, rel=1e-4)]
    assert [value for (value,) in other.advantages or ()] == pytest.approx([-expected, expected], rel=1e-4)
