"""The client of an Atropos API: what is retried, and bad answers reported in one line."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from pydantic import ValidationError

from bridge.atropos.api import AtroposApi, ScoredGroup
from bridge.config import FeedConfig
from bridge.errors import AtroposError, UsageError
from tests.unit.atropos.atropos_api import FakeTime, pair
from tests.unit.http_server import Answer, Answers, HttpRequest, as_json, serving

Call = Callable[[AtroposApi], Any]


def error_of(answers: Answers, call: Call) -> tuple[AtroposError, list[HttpRequest]]:
    with serving(answers) as server, FakeTime().passing(), closing(AtroposApi(server.url, max_retries=2)) as api:
        with pytest.raises(AtroposError) as caught:
            call(api)
        assert server.url in caught.value.message
        assert "\n" not in caught.value.message
        return caught.value, list(server.requests)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "", " , ", "http://a:port"])
def test_malformed_address_is_refused(url: str) -> None:
    for flag in ("atropos_url", "server_url"):
        with pytest.raises(ValidationError, match="must be a URL"):
            FeedConfig.of(model_name="m", **{flag: url})


@pytest.mark.parametrize(("name", "value"), [("top_k", 20), ("top_p", 0.9), ("min_p", 0.05)])
def test_top_k_top_p_and_min_p_are_refused_with_atropos(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=f"--{name.replace('_', '-')} {value:g} cannot be trained on"):
        FeedConfig.of(model_name="m", **{name: value})


def test_groups_of_one_completion_are_refused() -> None:
    with pytest.raises(ValidationError, match="--group-size 1: rewards are compared within a group"):
        FeedConfig.of(model_name="m", group_size=1)


def test_several_addresses_are_refused() -> None:
    with pytest.raises(UsageError, match="is not the address of an Atropos API"):
        AtroposApi("http://a:1,http://b:2")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer("gone\nfor lunch", 404), "/info answered 404: gone for lunch"),
        (Answer("[]"), "/info sent an invalid response: body: "),
        (as_json({"batch_size": "many", "max_token_len": 1}), "/info sent an invalid response: batch_size: "),
        (as_json({"batch_size": 1}), "/info sent an invalid response: max_token_len: "),
    ],
)
def test_bad_answer_is_reported_in_one_line(answer: Answer, message: str) -> None:
    error, requests = error_of(lambda _: answer, lambda api: api.info())
    assert message in error.message
    assert len(requests) == 1


def test_unanswered_read_request_is_retried() -> None:
    error, requests = error_of(lambda _: None, lambda api: api.info())
    assert len(requests) == 3
    assert "RemoteProtocolError" in error.message


@pytest.mark.parametrize(
    "call",
    [
        lambda api: api.send([ScoredGroup.model_validate(pair())]),
        lambda api: api.register_environment("a", group_size=2, max_token_length=9),
    ],
)
def test_request_that_may_be_accepted_is_not_resent(call: Call) -> None:
    _, requests = error_of(lambda _: None, call)
    assert len(requests) == 1


def test_groups_are_sent_as_the_api_reads_them() -> None:
    group = pair(messages=None)
    with serving(lambda _: as_json({"status": "received", "groups_processed": 1})) as server:
        with closing(AtroposApi(server.url)) as api:
            api.send([ScoredGroup.model_validate(group)])
        (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/scored_data_list")
    assert request.body == [{name: value for name, value in group.items() if value is not None}]


def test_unknown_fields_of_an_answer_are_ignored() -> None:
    answer = {"batch": [{**pair(), "novelty": [1]}], "server_time": 3}
    with serving(lambda _: as_json(answer)) as server, closing(AtroposApi(server.url)) as api:
        batch = api.batch()
    assert batch is not None
    assert batch.batch is not None
    assert batch.batch[0].tokens == ((5, 6, 7, 8), (5, 6, 9))
