"""`/generate` as an Atropos environment sees it, in front of a server that answers like vLLM."""

import asyncio
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from bridge.rollouts.distribution import NO_DEFAULT, WHOLE, changes
from bridge.server.protocol import ADAPTER, VERSION_HEADER, Holder
from bridge_patches import generate, routes
from bridge_patches.adapter_slots import Adapters
from bridge_patches.engine_outputs import FILTERED
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import manifest
from tests.unit.http_server import status_after_disconnecting

BODY = {"prompt": {"prompt_token_ids": [5, 6]}, "logprobs": 0, "n": 2, "max_tokens": 3}
KEY = "Bearer the key"


def choice(index: int, num_top: int | None) -> dict[str, Any]:
    """Return one choice as vLLM writes it: the sampled token precedes the top ones."""
    ids = [10 + index, 20 + index]
    tops = [{f"token_id:{i}": -0.5, **{f"token_id:{900 + k}": -1.0 - k for k in range(num_top or 0)}} for i in ids]
    logprobs = {"token_logprobs": [-0.5, -0.5], "tokens": [f"token_id:{i}" for i in ids], "top_logprobs": tops}
    return {
        "index": index,
        "text": f"completion {index}",
        "finish_reason": "stop" if index else "length",
        "token_ids": ids,
        "prompt_token_ids": [5, 6],
        "logprobs": None if num_top is None else logprobs,
        "prompt_logprobs": None,
    }


class FakeModels:
    """vLLM's list of models, with loading and unloading of adapters."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}

    async def load_lora_adapter(self, request: Any) -> str:
        self.lora_requests[request.lora_name] = request
        return "loaded"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "unloaded"


class FakeVllm:
    """vLLM's two routes, which record their requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.aborted = False
        self.waits = False
        self.meanwhile: Callable[[], None] = lambda: None
        self.app = FastAPI()
        self.models = FakeModels()
        self.app.state.openai_serving_models = self.models
        self.app.state.bridge_adapters = Adapters(None, self.models, ServerFence(None, manifest()))
        guarded = [Depends(self._authorise)]
        self.app.add_api_route("/v1/completions", self._complete, methods=["POST"], dependencies=guarded)
        self.app.add_api_route("/detokenize", self._detokenize, methods=["POST"])
        routes.BridgeRoutes().attach_router(self.app)
        self.http = TestClient(self.app, headers={"authorization": KEY})

    def _authorise(self, request: Request) -> None:
        if request.headers.get("authorization") != KEY:
            raise HTTPException(401, "Unauthorized")

    async def _complete(self, request: Request) -> Any:
        body = json.loads(await request.body())
        self.bodies.append({**body, "headers": dict(request.headers)})
        self.meanwhile()
        if self.waits:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.aborted = True
            return None
        if body.get("n") == 99:
            return JSONResponse({"error": {"message": "n is too large", "code": 400}}, status_code=400)
        choices = [choice(index, body.get("logprobs")) for index in range(body.get("n", 1))]
        if body.get("prompt_logprobs") is not None:
            for made in choices:
                made["prompt_logprobs"] = [None, {"6": {"logprob": -2.0, "rank": 3}, "7": {"logprob": -0.1, "rank": 1}}]
        return {"choices": choices[::-1]}

    async def _detokenize(self, document: dict[str, Any]) -> dict[str, str]:
        return {"prompt": f"text of {document['tokens']}"}


@pytest.fixture
def vllm() -> FakeVllm:
    return FakeVllm()


def test_response_has_the_shape_that_atropos_reads(vllm: FakeVllm) -> None:
    answer = vllm.http.post("/generate", json=BODY)
    assert answer.status_code == 200
    assert answer.json() == {
        "text": ["completion 0", "completion 1"],
        "prompt": "text of [5, 6]",
        "finish_reasons": ["length", "stop"],
        "logprobs": [[[{"10": -0.5}], [{"20": -0.5}]], [[{"11": -0.5}], [{"21": -0.5}]]],
        "token_ids": [[10, 20], [11, 21]],
        "prompt_token_ids": [5, 6],
    }


def test_defaults_sample_the_full_distribution(vllm: FakeVllm) -> None:
    vllm.http.post("/generate", json={**BODY, "top_p": 0.5, "seed": 7})
    body = vllm.bodies[0]
    assert (body["prompt"], body["n"], body["max_tokens"], body["seed"]) == ([5, 6], 2, 3, 7)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 0.5, -1, 0.0)
    assert body["repetition_penalty"] == 1.0
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0.0, 0.0)
    assert "model" not in body


def test_likeliest_tokens_follow_the_sampled_one(vllm: FakeVllm) -> None:
    answer = vllm.http.post("/generate", json={**BODY, "n": 1, "logprobs": 2}).json()
    assert answer["logprobs"] == [
        [[{"10": -0.5, "900": -1.0, "901": -2.0}], [{"20": -0.5, "900": -1.0, "901": -2.0}]],
    ]
    assert list(answer["logprobs"][0][0][0]) == ["10", "900", "901"], "a client takes the first for the sampled one"


def test_teacher_gets_log_probabilities_of_the_prompt(vllm: FakeVllm) -> None:
    body = {"prompt": {"prompt_token_ids": [5, 6]}, "prompt_logprobs": 1, "n": 1, "temperature": 0.0, "max_tokens": 1}
    answer = vllm.http.post("/generate", json=body).json()
    assert answer["prompt_logprobs"] == [None, {"6": -2.0, "7": -0.1}]
    assert "logprobs" not in answer
    assert vllm.bodies[0]["temperature"] == 0.0


@pytest.mark.parametrize("prompt", ["some text", {"prompt": "some text"}])
def test_prompt_may_be_a_string(vllm: FakeVllm, prompt: Any) -> None:
    answer = vllm.http.post("/generate", json={"prompt": prompt})
    assert answer.json()["prompt"] == "some text"
    assert vllm.bodies[0]["prompt"] == "some text"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"prompt": "a", "temprature": 1}', "/generate does not support temprature, only "),
        ('{"prompt": "a", "stream": true}', "/generate does not stream; /v1/completions does"),
        ("{}", "prompt must be one string"),
        ('{"prompt": []}', "with at least one token"),
        ('{"prompt": ["a", "b"]}', "prompt must be one string"),
        ('{"prompt": [[1], [2]]}', "prompt must be one string"),
        ('{"prompt": {"prompt_token_ids": [1, true]}}', "prompt must be one string"),
        ('{"prompt": {"prompt_token_ids": [1], "multi_modal_data": {}}}', "prompt must be one string"),
    ],
)
def test_invalid_request_is_refused_in_one_line(vllm: FakeVllm, body: str, words: str) -> None:
    answer = vllm.http.post("/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]
    assert vllm.bodies == []


@pytest.mark.parametrize("body", ["{", "[]", "3", "", "[" * 100_000], ids=["cut", "list", "number", "empty", "deep"])
def test_body_that_is_not_a_json_object_is_refused(vllm: FakeVllm, body: str) -> None:
    answer = vllm.http.post("/generate", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code in {400, 422}, vllm.bodies) == (True, [])  # vLLM answers 400 in both cases


@pytest.mark.parametrize("kind", ["text/plain", "text/plain; a=application/json", "application/x-www-form-urlencoded"])
def test_web_page_request_without_preflight_is_refused(vllm: FakeVllm, kind: str) -> None:
    answer = vllm.http.post("/generate", content=json.dumps(BODY), headers={"content-type": kind})
    assert (answer.status_code, vllm.bodies) == (415, [])
    assert "expected application/json" in answer.json()["detail"]
    assert vllm.http.post("/generate", content=json.dumps(BODY)).status_code == 415


def test_vllms_refusals_are_passed_through(vllm: FakeVllm) -> None:
    answer = vllm.http.post("/generate", json={**BODY, "n": 99})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "n is too large")


def test_generate_requires_the_servers_key(vllm: FakeVllm) -> None:
    answer = TestClient(vllm.app).post("/generate", json=BODY)
    assert (answer.status_code, vllm.bodies) == (401, [])


def test_inner_request_has_the_clients_headers(vllm: FakeVllm) -> None:
    headers = {"x-request-id": "7", "accept-encoding": "gzip", "content-type": "application/json"}
    vllm.http.post("/generate", content=json.dumps(BODY), headers=headers)
    inside = vllm.bodies[0]["headers"]
    assert (inside["authorization"], inside["x-request-id"], inside["content-type"]) == (KEY, "7", "application/json")
    assert "accept-encoding" not in inside, "a compressed answer would be unreadable"


@pytest.mark.parametrize(
    ("served", "model"),
    [
        (["mine"], None),
        ([ADAPTER], ADAPTER),
        ([f"{ADAPTER}-3", f"{ADAPTER}-4", "mine"], f"{ADAPTER}-4"),
    ],
)
def test_trained_adapter_is_the_default_model(vllm: FakeVllm, served: list[str], model: str | None) -> None:
    vllm.models.lora_requests = dict.fromkeys(served)
    vllm.http.post("/generate", json=BODY)
    vllm.http.post("/generate", json={**BODY, "model": "base"})
    assert [request.get("model") for request in vllm.bodies] == [model, "base"]


def test_base_model_never_stands_in_for_a_trained_adapter(vllm: FakeVllm) -> None:
    claim, first = vllm.app.state.bridge_adapters, SimpleNamespace(lora_name=ADAPTER)
    asyncio.run(vllm.models.load_lora_adapter(first))
    claim._fence.take_lease(Holder.current(), "runs/a")
    vllm.models.lora_requests.clear()  # as during a replacement
    refused = vllm.http.post("/generate", json=BODY)
    assert (refused.status_code, vllm.bodies) == (503, [])
    assert "not being served right now" in refused.json()["detail"]
    assert vllm.http.post("/generate", json={**BODY, "model": "base"}).status_code == 200
    claim._fence.release_lease(Holder.current())
    asyncio.run(vllm.models.load_lora_adapter(first))
    assert vllm.http.post("/generate", json=BODY).status_code == 200
    assert [request["model"] for request in vllm.bodies] == ["base", ADAPTER]
    asyncio.run(
        vllm.models.unload_lora_adapter(first)
    )  # unloaded by the server's owner, while no trainer holds the lease
    assert vllm.http.post("/generate", json=BODY).status_code == 200
    assert "model" not in vllm.bodies[-1]


def test_base_model_answers_once_the_trainer_has_ended(vllm: FakeVllm) -> None:
    claim = vllm.app.state.bridge_adapters
    asyncio.run(vllm.models.load_lora_adapter(SimpleNamespace(lora_name=ADAPTER)))
    claim._fence.take_lease(Holder.current(), "runs/a")
    vllm.models.lora_requests.clear()
    assert vllm.http.post("/generate", json=BODY).status_code == 503
    claim._fence.release_lease(Holder.current())  # the new adapter was refused
    assert vllm.http.post("/generate", json=BODY).status_code == 200
    assert "model" not in vllm.bodies[-1]


def test_response_reports_the_versions_that_sampled_it(vllm: FakeVllm) -> None:
    vllm.app.state.bridge_fence = fence = SimpleNamespace(version=3)
    assert vllm.http.post("/generate", json=BODY).headers.get_list(VERSION_HEADER) == ["3"]
    vllm.meanwhile = lambda: setattr(fence, "version", 4)
    assert vllm.http.post("/generate", json=BODY).headers.get_list(VERSION_HEADER) == ["3-4"]


def test_disconnecting_client_aborts_its_request(vllm: FakeVllm) -> None:
    vllm.waits = True
    assert status_after_disconnecting(vllm.app, "/generate", BODY, authorization=KEY) == generate.CLIENT_GONE
    assert vllm.aborted


def test_root_path_is_kept_for_the_inner_request(vllm: FakeVllm) -> None:
    http = TestClient(vllm.app, headers={"authorization": KEY}, root_path="/behind")
    assert http.post("/behind/generate", json=BODY).status_code == 200
    assert len(vllm.bodies) == 1


NEUTRAL = {**WHOLE, **dict.fromkeys(NO_DEFAULT), "temperature": 1.0}


class Engine:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def add_request(self, request_id: str, prompt: str, params: Any, *, lora_request: Any = None) -> str:
        self.calls.append((request_id, prompt, params, lora_request))
        return "queue"


def logged(caplog: pytest.LogCaptureFixture, *requests: dict[str, Any], name: str = "1") -> list[str]:
    engine = Engine()
    generate.watch_sampling(engine)
    with caplog.at_level(logging.WARNING, logger="vllm.bridge"):
        for request in requests:
            params = SimpleNamespace(**{**NEUTRAL, **request})
            asyncio.run(engine.add_request(name, prompt="p", params=params, lora_request="adapter"))
            assert engine.calls.pop() == (name, "p", params, "adapter")
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
def test_each_set_of_fields_is_logged_once_with_its_values(
    caplog: pytest.LogCaptureFixture, params: dict[str, Any], words: str
) -> None:
    (line,) = logged(caplog, params, params, {})
    assert words in line
    assert "generation_config.json" in line


def test_filtered_rollout_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, {"top_p": 0.9}, name=f"0_{FILTERED}7") == []


def test_fields_with_other_values_are_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    assert len(logged(caplog, {"top_p": 0.9}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 5, "top_p": 0.8})) == 3


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 0}, {"top_k": -1, "min_tokens": 0, "bad_words": []}, {"temperature": 0.0, "presence_penalty": 1.0}],
)
def test_unfiltered_and_greedy_sampling_is_not_logged(caplog: pytest.LogCaptureFixture, params: dict[str, Any]) -> None:
    assert logged(caplog, params) == []


def test_request_that_samples_nothing_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    generate.watch_sampling(engine)
    assert asyncio.run(engine.add_request("1", "p", SimpleNamespace(task="embed"))) == "queue"
    assert caplog.records == []


def test_omitted_fields_change_nothing() -> None:
    assert changes({"top_p": None, "temperature": 0.3}) == changes({}) == changes(WHOLE) == {}
