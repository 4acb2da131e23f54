"""Sampling from a real HTTP server: the request, the parsed answer, and every bad answer in one line."""

import base64
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest

from bridge.config import SamplingConfig
from bridge.errors import AttachError, BridgeError, RejectedRequestError, ServerUnreachableError, UsageError
from bridge.rollouts.openai_api import IdsOf
from bridge.rollouts.sampler import CALL_SEEDS, NUM_CALLS, Sampler, seed_of
from bridge.rollouts.vocabulary import Vocabulary
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import COMPLETIONS, CompletionsRequest, Refusal
from bridge.types import Array, Completion, FinishReason, Images
from tests.unit import openai_server
from tests.unit.http_server import Answer, Answers, HttpRequest, HttpServer, as_json, serving
from tests.unit.openai_server import Bend, openai, plain

PROMPTS = [(5, 6), (7,), (8, 9, 10)]


async def no_wait(_: float) -> None:
    """Do not wait."""


def sampler(
    *, temperature: float = 0.7, ids_of: IdsOf | None = None, vocabulary: Vocabulary | None = None, **choices: Any
) -> Sampler:
    fixed: dict[str, Any] = {"max_new_tokens": 16, "request_timeout_s": 20, "temperature": temperature}
    known = vocabulary or Vocabulary(ids_of=ids_of)
    return Sampler(SamplingConfig(**fixed | choices), vocabulary=known, sleep=no_wait)


def sampled(endpoint: Endpoint, *, num_samples: int = 2, **choices: Any) -> list[tuple[Completion, ...]]:
    with sampler(**choices) as ours:
        return ours.sample([endpoint], PROMPTS, num_samples=num_samples, seed=0)


def error_of(answers: Answers, **choices: Any) -> BridgeError:
    with serving(answers) as server:
        with pytest.raises(BridgeError) as caught:
            sampled(Endpoint(url=server.url), num_samples=3, **choices)
        assert server.url in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


def bent_choice(**changes: Any) -> Answers:
    """Answer with one choice changed; a value of `...` removes the key."""

    def bend(document: dict[str, Any], _: HttpRequest) -> dict[str, Any]:
        changed = {**document["choices"][1], **changes}
        document["choices"][1] = {key: value for key, value in changed.items() if value is not ...}
        return document

    return openai(bend)


def test_completions_are_ordered_by_prompt_and_choice() -> None:
    shuffler = random.Random(0)

    def bend(document: dict[str, Any], request: HttpRequest) -> dict[str, Any]:
        shuffler.shuffle(document["choices"])
        time.sleep(0.05 / len(request.body["prompt"]))  # the first prompt is answered last
        return document

    with serving(openai(bend)) as server:
        groups = sampled(Endpoint(url=server.url), num_samples=4)
    assert [[done.token_ids for done in group] for group in groups] == [
        [(40 + index, 50 + len(prompt), 2) for index in range(4)] for prompt in PROMPTS
    ]
    first = groups[0][0]
    assert (first.logprobs, first.text, first.finish_reason) == ((-5.7, -5.7, -5.7), "EQ", "stop")


def test_request_has_the_fields_that_the_loss_needs() -> None:
    with serving(openai()) as server, sampler() as ours:
        ours.sample([Endpoint(url=server.url)], PROMPTS, num_samples=3, seed=1)
        ours.sample([Endpoint(url=server.url)], PROMPTS, num_samples=3, seed=2)
    requests = [request.body for request in server.requests if request.path == "/v1/completions"]
    assert len(requests) == 2 * len(PROMPTS)
    assert sorted(tuple(request["prompt"]) for request in requests[:3]) == sorted(PROMPTS)
    for request in requests:
        assert request["return_token_ids"] is True
        assert (request["model"], request["n"], request["max_tokens"]) == ("tiny", 3, 16)
        assert (request["temperature"], request["top_p"], request["top_k"], request["min_p"]) == (0.7, 1.0, -1, 0.0)
        assert request["logprobs"] == 0
        assert request["repetition_penalty"] == 1.0
        assert (request["presence_penalty"], request["frequency_penalty"]) == (0.0, 0.0)


def test_patched_vllm_gets_requests_on_bridges_route() -> None:
    with serving(openai(is_bridge=True)) as server:
        groups = sampled(Endpoint(url=server.url), num_samples=3)
    assert [len(group) for group in groups] == [3, 3, 3]
    assert groups[0][1].token_ids == (41, 52, 2)
    for request in server.requests[1:]:
        CompletionsRequest.model_validate(request.body)  # which refuses unknown fields
        assert (request.path, request.body["temperature"], request.body["max_tokens"]) == (COMPLETIONS, 0.7, 16)


def bodies(server: HttpServer) -> list[dict[str, Any]]:
    return [request.body for request in server.requests if request.path.endswith("completions")]


BASE = Vocabulary(
    special={"<|im_end|>": 316, "<s>": 1}, end_of_turn="<|im_end|>", end_id=316, end_ids=(316,), num_embeddings=200
)
"""Of a base model, whose chat template ends a turn with a token that is no EOS."""


@pytest.mark.parametrize("is_bridge", [False, True])
def test_chat_stops_at_the_end_of_a_turn_but_text_does_not(is_bridge: bool) -> None:
    with serving(openai(is_bridge=is_bridge)) as server, sampler(vocabulary=BASE) as ours:
        endpoint = Endpoint(url=server.url)
        ours.sample([endpoint], PROMPTS[:2], num_samples=2, seed=0, are_chat=[True, False])
        ours.sample([endpoint], PROMPTS[:1], num_samples=2, seed=0)
    chat, text, other = sorted(bodies(server), key=lambda body: "stop_token_ids" not in body)
    assert chat["stop_token_ids"] == [316]
    assert not any(body.keys() & {"stop", "stop_token_ids"} for body in (text, other))


@pytest.mark.parametrize("is_bridge", [False, True])
def test_special_token_stop_is_sent_as_its_id(is_bridge: bool) -> None:
    with serving(openai(is_bridge=is_bridge)) as server, sampler(vocabulary=BASE, stop=("x", "<|im_end|>")) as ours:
        ours.sample([Endpoint(url=server.url)], PROMPTS[:1], num_samples=2, seed=0)
        servers = ours.servers_at([Endpoint(url=server.url)])
        ours.loop.run(ours.one(servers, PROMPTS[0], num_samples=2, seed=0, is_chat=True, stop=["<s>"]))
    run, agent = bodies(server)
    assert (run["stop"], run["stop_token_ids"]) == (["x"], [316])
    assert (agent["stop"], agent["stop_token_ids"]) == (["x"], [316, 316, 1])


def test_plain_openai_server_gets_stop_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "PROTOCOL", openai_server.PROTOCOL | {"stop"})
    vocabulary = replace(BASE, ids_of=lambda text: (ord(text),))
    answers = openai_server.plain(chr)
    with serving(answers) as server, sampler(vocabulary=vocabulary, stop=("<s>",), temperature=1.0) as ours:
        ours.sample([Endpoint(url=server.url)], PROMPTS[:1], num_samples=2, seed=0, are_chat=[True])
        lines = ours.lacks
    (body,) = bodies(server)
    assert body["stop"] == ["<s>"]
    assert f"{server.url} does not end completions at <|im_end|>, which ends a turn in" in " ".join(lines)


def test_tokens_without_an_embedding_are_refused() -> None:
    few = replace(BASE, num_embeddings=50)
    with serving(openai()) as server, sampler(vocabulary=few) as ours:
        with pytest.raises(RejectedRequestError, match="token 50 of the prompt is beyond the model's 50 embeddings"):
            ours.sample([Endpoint(url=server.url)], [(3, 50)], num_samples=2, seed=0)
        assert bodies(server) == []
        with pytest.raises(RejectedRequestError, match=f"of a completion of {server.url} is beyond the model's 50"):
            ours.sample([Endpoint(url=server.url)], [(3, 49)], num_samples=2, seed=0)


@pytest.mark.parametrize("is_bridge", [False, True])
def test_stop_strings_are_sent_only_if_configured(is_bridge: bool) -> None:
    with serving(openai(is_bridge=is_bridge)) as server:
        sampled(Endpoint(url=server.url), num_samples=2)
        with sampler(stop=("x", "yz")) as ours:
            ours.sample([Endpoint(url=server.url)], PROMPTS, num_samples=2, seed=1)
    requests = [request.body for request in server.requests if request.method == "POST"]
    without, given = requests[: len(PROMPTS)], requests[len(PROMPTS) :]
    assert not any(request.keys() & {"stop", "include_stop_str_in_output"} for request in without)
    assert all(request["stop"] == ["x", "yz"] for request in given)
    assert all(request.get("include_stop_str_in_output", is_bridge) is True for request in given)
    if is_bridge:
        CompletionsRequest.model_validate(given[0])


def test_seeds_are_unique_and_repeatable() -> None:
    """In vLLM, completion i of a request gets the request's seed + i."""
    num_samples, prompts = 8, [(5,)] * 50

    def seeds(seed: int) -> list[int]:
        with serving(openai()) as server, sampler() as ours:
            ours.sample([Endpoint(url=server.url)], prompts, num_samples=num_samples, seed=seed)
        return sorted(request.body["seed"] + i for request in server.requests[1:] for i in range(num_samples))

    sampled_seeds = seeds(1) + seeds(2) + seeds(2**31)
    assert len(set(sampled_seeds)) == len(sampled_seeds) == 3 * 50 * num_samples
    assert seeds(1) == sampled_seeds[: 50 * num_samples]
    assert min(seeds(2**63 - 1)) >= 0
    assert max(seeds(2**63 - 1)) < 2**63


def test_neighboring_run_seeds_are_far_apart() -> None:
    firsts = sorted(seed_of(run, 0) for run in range(1000))
    gaps = [after - before for before, after in pairwise([*firsts, NUM_CALLS])]
    assert firsts[0] == 0
    assert min(gaps) > 10**9
    assert max(seed_of(run, 2**31) for run in (0, 1, 2**40, 2**63 - 1)) < NUM_CALLS
    assert NUM_CALLS * CALL_SEEDS <= 2**62


@pytest.mark.parametrize(("header", "version"), [("3", 3), ("0", 0), ("3-4", None), ("", None), ("new", None)])
def test_token_version_is_never_guessed(header: str, version: int | None) -> None:
    with serving(openai(version=lambda: header)) as server:
        groups = sampled(Endpoint(url=server.url))
    assert {done.versions for group in groups for done in group} == {(version,) * 3}


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_every_finish_reason_of_vllm_is_accepted(reason: str) -> None:
    with serving(bent_choice(finish_reason=reason)) as server:
        groups = sampled(Endpoint(url=server.url))
    assert groups[0][1].finish_reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "error"},
        {"finish_reason": None},
        {"finish_reason": "whim"},
        {"index": ...},
        {"index": 0},
        {"index": 3},
        {"text": None},
        {"token_ids": "abc"},
        {"token_ids": [1, 2]},
        {"token_ids": [1, 2, None]},
        {"logprobs": {"token_logprobs": [None, -1.0, -1.0]}},
        {"logprobs": {}},
        {"logprobs": {"token_logprobs": [float("nan"), -1.0, -1.0]}},
        {"logprobs": {"token_logprobs": [float("-inf"), -1.0, -1.0]}},
    ],
)
def test_misfitting_choice_is_a_server_error(changes: dict[str, Any]) -> None:
    assert type(error_of(bent_choice(**changes))) is ServerUnreachableError


@pytest.mark.parametrize("changes", [{"token_ids": None}, {"token_ids": ...}, {"logprobs": None}, {"logprobs": ...}])
def test_server_without_token_ids_is_a_usage_error(changes: dict[str, Any]) -> None:
    error = error_of(bent_choice(**changes))
    assert type(error) is UsageError  # restarting it would not help
    assert "token ids" in error.message
    assert "bridge serve-vllm" in error.hint


@pytest.mark.parametrize("keep", [0, 2, 4])
def test_wrong_number_of_completions_is_reported(keep: int) -> None:
    def bend(document: dict[str, Any], _: HttpRequest) -> dict[str, Any]:
        extra = {**document["choices"][0], "index": 3}
        return {**document, "choices": [*document["choices"], extra][:keep]}

    assert f"requested 3 completions, got {keep}" in error_of(openai(bend)).message


def test_completion_without_tokens_is_accepted() -> None:
    with serving(bent_choice(token_ids=[], logprobs={"token_logprobs": []}, text="", finish_reason="abort")) as server:
        groups = sampled(Endpoint(url=server.url))
    assert groups[0][1].token_ids == ()


def sampled_by_text(text_of: Callable[[int], str], ids_of: IdsOf | None = None, **choices: Any) -> tuple[Sampler, Any]:
    """Sample from a server limited to the protocol."""
    ours = sampler(temperature=choices.get("temperature", 1.0), ids_of=ids_of)
    with serving(plain(text_of)) as server, ours:
        endpoint = Endpoint(url=server.url, version=choices.get("version"))
        return ours, ours.sample([endpoint], PROMPTS, num_samples=2, seed=0)


def test_server_that_rejects_unknown_fields_can_be_sampled() -> None:
    _, groups = sampled_by_text(chr, lambda text: (ord(text),))
    assert [[done.token_ids for done in group] for group in groups] == [
        [(40 + index, 50 + len(prompt)) for index in range(2)] for prompt in PROMPTS
    ]
    assert groups[0][0].logprobs == (-5.7, -5.7)


def test_token_ids_written_as_text_need_no_vocabulary() -> None:
    _, groups = sampled_by_text("token_id:{}".format)
    assert groups[0][1].token_ids == (41, 52)


@pytest.mark.parametrize(
    ("text", "ids", "number"), [("bad", (), "no tokens"), ("\ufffd", (7, 8, 9), "3 tokens"), ("token_id:x", (), "no")]
)
def test_text_that_is_not_exactly_one_token_is_named(text: str, ids: tuple[int, ...], number: str) -> None:
    with pytest.raises(UsageError) as caught:
        sampled_by_text(lambda _: text, lambda _: ids)
    assert f"{text!r} matches {number}" in caught.value.message
    assert "return_token_ids" in caught.value.hint


def test_tokens_returned_as_text_need_a_vocabulary() -> None:
    with pytest.raises(UsageError, match="does not return token ids"):
        sampled_by_text(chr)


def test_server_token_ids_take_precedence_over_text() -> None:
    with serving(bent_choice(logprobs={"token_logprobs": [-1.0] * 3, "tokens": ["a", "b", "c"]})) as server:
        groups = sampled(Endpoint(url=server.url))
    assert groups[0][1].token_ids == (41, 52, 2)


def test_nan_weights_are_not_retried_and_keep_the_message() -> None:
    refusal = Refusal(error="NaN or infinity in 2 of 26 tensors", hint="bridge restore saved/step_3")
    times: list[float] = []

    def bend(_: dict[str, Any], request: HttpRequest) -> Answer:
        times.append(request.connection)
        return as_json(refusal.model_dump(), 409)

    error = error_of(openai(bend, is_bridge=True), max_retries=5)
    assert (type(error), error.hint) == (AttachError, refusal.hint)
    assert refusal.error in error.message
    assert len(times) <= len(PROMPTS)
    assert type(error_of(openai(lambda *_: as_json({"error": "busy"}, 409)))) is ServerUnreachableError


def test_nan_weights_of_a_stock_server_are_suspected() -> None:
    error = error_of(bent_choice(logprobs={"token_logprobs": [float("nan"), -1.0, -1.0]}))
    assert "are its weights NaN?" in error.message


def test_missing_capabilities_are_known_after_sampling() -> None:
    with serving(openai()) as server, sampler() as ours:
        assert ours.lacks == ()
        ours.sample([Endpoint(url=server.url)], PROMPTS, num_samples=1, seed=0)
        assert ours.lacks == ()
    by_text, _ = sampled_by_text("token_id:{}".format)
    assert ["end token" in by_text.lacks[0], "which version" in by_text.lacks[1]] == [True, True]
    assert "defaults for min_p, repetition_penalty, top_k apply" in by_text.lacks[0]
    versioned, _ = sampled_by_text("token_id:{}".format, version=4, temperature=0.5)
    assert ["end token" in versioned.lacks[0], "temperature 0.5" in versioned.lacks[1]] == [True, True]
    assert len(by_text.lacks) == len(versioned.lacks) == 2


@pytest.mark.parametrize("answers", [openai(), plain("token_id:{}".format)], ids=["stock vLLM", "another server"])
def test_filters_need_a_server_that_reports_what_they_kept(answers: Answers) -> None:
    error = error_of(answers, top_p=0.9, top_k=20)
    assert type(error) is UsageError
    assert error.message.startswith("--top-p 0.9 --top-k 20 needs a server that reports which tokens were kept")
    assert "bridge serve-vllm" in error.hint


def test_filters_are_sent_to_servers_that_report_kept_words() -> None:
    def bend(document: dict[str, Any], _: HttpRequest) -> dict[str, Any]:
        for choice in document["choices"]:
            choice["kept"] = [[0.5, 3], [-1.5, 4], [2.5, 5]]
        return document

    with serving(openai(bend, is_bridge=True)) as server:
        groups = sampled(Endpoint(url=server.url), min_p=0.1)
    assert groups[0][0].kept == ((0.5, 3), (-1.5, 4), (2.5, 5))
    bodies = [CompletionsRequest.model_validate(request.body) for request in server.requests[1:]]
    assert {(body.min_p, body.top_p, body.top_k) for body in bodies} == {(0.1, 1.0, 0)}
    short = error_of(openai(lambda document, _: cut(bend(document, _)), is_bridge=True), min_p=0.1)
    assert "3 tokens with 2 thresholds" in short.message


def cut(document: dict[str, Any]) -> dict[str, Any]:
    document["choices"][1]["kept"].pop()
    return document


def test_experts_are_requested_of_a_server_that_reports_them() -> None:
    """Return the experts of all tokens except the last, in two layers with two experts each."""

    def rows(body: dict[str, Any]) -> Any:
        return np.arange(4 * (len(body["prompt"]) + 3 - 1), dtype=np.uint8)

    def bend(document: dict[str, Any], request: HttpRequest) -> dict[str, Any]:
        content = base64.b64encode(rows(request.body).tobytes()).decode()
        for choice in document["choices"]:
            if request.body["experts"] == 0:
                choice["experts"] = {"kind": "uint8", "content": content}
        return document

    with serving(openai(bend, is_bridge=True)) as server:
        groups = sampled(Endpoint(url=server.url, reports_experts=True))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert group[0].experts == rows({"prompt": prompt}).astype("<i2").tobytes()
    CompletionsRequest.model_validate(server.requests[1].body)
    with serving(openai(is_bridge=True)) as server:
        assert sampled(Endpoint(url=server.url))[0][0].experts == b""
    assert "experts" not in server.requests[1].body


def test_experts_that_do_not_match_the_tokens_are_refused() -> None:
    def bend(document: dict[str, Any], _: HttpRequest) -> dict[str, Any]:
        for choice in document["choices"]:
            choice["experts"] = {"kind": "int16", "content": base64.b64encode(bytes(2 * 7)).decode()}
        return document

    assert "7 experts for" in error_of(openai(bend, is_bridge=True)).message


def test_version_from_the_caller_overrides_the_servers() -> None:
    with serving(openai(version=lambda: "3")) as server:
        groups = sampled(Endpoint(url=server.url, version=0))
    assert groups[0][0].versions == (0, 0, 0)


def test_endpoint_can_name_a_second_model_of_its_server() -> None:
    with serving(openai()) as server:
        sampled(Endpoint(url=server.url, model="adapter"))
    assert {request.body["model"] for request in server.requests[1:]} == {"adapter"}


TOO_LONG = "This model's maximum context length is 256 tokens. However, you requested\n 400 tokens."


@pytest.mark.parametrize("document", [{"error": {"message": TOO_LONG, "code": 400}}, {"message": TOO_LONG}])
@pytest.mark.parametrize("status", [400, 422])
def test_too_long_prompt_is_a_usage_error(document: dict[str, Any], status: int) -> None:
    error = error_of(openai(lambda *_: as_json(document, status)))
    assert type(error) is RejectedRequestError
    assert "maximum context length is 256 tokens" in error.message
    assert "--max-model-len" in error.hint


BAD: dict[str, Bend] = {
    "dropped": lambda *_: None,
    "500": lambda *_: as_json({"error": {"message": "EngineDead"}}, 500),
    "404": lambda *_: as_json({"error": {"message": "no such model"}}, 404),
    "html": lambda *_: Answer("<html>"),
    "a list": lambda *_: Answer("[]"),
    "no choices": lambda *_: {"id": "x"},
    "choices of text": lambda *_: {"choices": "three"},
}


@pytest.mark.parametrize("kind", BAD)
def test_unhealthy_server_is_unreachable(kind: str) -> None:
    assert type(error_of(openai(BAD[kind]))) is ServerUnreachableError


def test_server_message_is_quoted_in_the_error() -> None:
    assert "EngineDead" in error_of(openai(BAD["500"])).message


@pytest.mark.parametrize("body", ["[]", "{}", '{"data": []}', '{"data": [{}]}', "<html>"])
def test_invalid_model_list_is_unreachable(body: str) -> None:
    assert type(error_of(lambda _: Answer(body))) is ServerUnreachableError


def test_proxy_in_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(openai()) as server:
        assert len(sampled(Endpoint(url=server.url))) == len(PROMPTS)


@pytest.mark.parametrize(("longest", "limit_s"), [(None, 30), (4_096, 30), (65_536, 480)])
def test_time_limit_scales_with_completion_length(longest: int | None, limit_s: float) -> None:
    assert SamplingConfig(max_new_tokens=longest, request_timeout_s=30).answer_limit_s == limit_s


def test_images_are_sent_once_and_only_to_patched_servers() -> None:
    array = Array(name="pixel_values", dtype="float32", shape=(1, 1), content=bytes(4))
    images = Images.of((array,), starts=(0,), grids=((1, 1, 1),))
    bodies = list[dict[str, Any]]()

    def keep(document: dict[str, Any], request: HttpRequest) -> dict[str, Any]:
        bodies.append(request.body)
        return document

    with serving(openai(keep, is_bridge=True)) as server, sampler() as ours:
        servers = ours.servers_at([Endpoint(url=server.url)])
        completions = ours.loop.run(ours.one(servers, (5, 6), num_samples=3, seed=0, images=images))
    assert len(completions) == 3
    (body,) = bodies
    assert CompletionsRequest.model_validate(body).images["pixel_values"] == ("float32", (1, 1), bytes(4))
    with serving(openai()) as server, sampler() as ours:
        servers = ours.servers_at([Endpoint(url=server.url)])
        with pytest.raises(UsageError, match="images need a vLLM that Bridge has patched"):
            ours.loop.run(ours.one(servers, (5, 6), num_samples=3, seed=0, images=images))
