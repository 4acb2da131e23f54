"""A request that samples from another distribution than the trainer computes is logged once and passed on."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.rollouts.distribution import NO_DEFAULT, WHOLE, changes
from bridge_patches import generate
from bridge_patches.engine_outputs import FILTERED

NEUTRAL = {**WHOLE, **dict.fromkeys(NO_DEFAULT), "temperature": 1.0}


class Engine:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def add_request(self, request_id: str, prompt: str, params: Any, *, lora_request: Any = None) -> str:
        self.asked.append((request_id, prompt, params, lora_request))
        return "queue"


def logged(caplog: pytest.LogCaptureFixture, *requests: dict[str, Any], name: str = "1") -> list[str]:
    engine = Engine()
    generate.watch_sampling(engine)
    with caplog.at_level(logging.WARNING, logger="vllm.bridge"):
        for request in requests:
            params = SimpleNamespace(**{**NEUTRAL, **request})
            asyncio.run(engine.add_request(name, prompt="p", params=params, lora_request="adapter"))
            assert engine.asked.pop() == (name, "p", params, "adapter")
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_p": 0.9}, "top_p=0.9;"),
        ({"top_k": 20, "min_p": 0.1}, "top_k=20, min_p=0.1;"),
        ({"presence_penalty": 1.5}, "presence_penalty=1.5;"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1;"),
        ({"logit_bias": {5: -100.0}}, "samples with logit_bias;"),
    ],
)
def test_what_shapes_the_distribution_is_named_once(
    caplog: pytest.LogCaptureFixture, params: dict[str, Any], words: str
) -> None:
    (line,) = logged(caplog, params, params, {})
    assert words in line
    assert "generation_config.json" in line


def test_a_rollout_whose_trainer_knows_what_was_kept_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, {"top_p": 0.9}, name=f"0_{FILTERED}7") == []


def test_each_set_of_fields_is_named_whatever_their_values(caplog: pytest.LogCaptureFixture) -> None:
    assert len(logged(caplog, {"top_p": 0.9}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 5, "top_p": 0.8})) == 3


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 0}, {"top_k": -1, "min_tokens": 0, "bad_words": []}, {"temperature": 0.0, "presence_penalty": 1.0}],
)
def test_the_whole_distribution_and_a_greedy_request_are_not(
    caplog: pytest.LogCaptureFixture, params: dict[str, Any]
) -> None:
    assert logged(caplog, params) == []


def test_a_request_that_samples_nothing_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    generate.watch_sampling(engine)
    assert asyncio.run(engine.add_request("1", "p", SimpleNamespace(task="embed"))) == "queue"
    assert caplog.records == []


def test_what_is_left_out_changes_nothing() -> None:
    assert changes({"top_p": None, "temperature": 0.3}) == changes({}) == changes(WHOLE) == {}
