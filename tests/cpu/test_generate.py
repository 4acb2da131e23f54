"""`/generate` and the rollout route on the real vLLM on the CPU, with an API key and LoRA, beside vLLM's own routes."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from bridge.rollouts.distribution import WHOLE
from bridge.server import api_key, fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.server.protocol import ADAPTER, COMPLETIONS, TOKEN_HEADER, VERSION_HEADER
from bridge.types import Completion, Group
from bridge.weights.attach import attach
from tests import scenarios
from tests.fenced import publish
from tests.scenarios import LiveServer, bridge

PROMPT = [5, 6, 7]
ROLLOUT = {"prompt": PROMPT, "n": 6, "max_tokens": 8, "temperature": 1.3, "seed": 11}
BODY = {"prompt": {"prompt_token_ids": PROMPT}, "n": 6, "max_tokens": 8, "temperature": 1.3, "seed": 11, "logprobs": 0}


@pytest.fixture
def http(lora_llama: LiveServer) -> Iterator[httpx.Client]:
    url, headers = lora_llama.manifest.url, api_key.headers()
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def answered(http: httpx.Client, **choices: Any) -> dict[str, Any]:
    answer = http.post("/generate", json={**BODY, **choices})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def as_group(completions: list[Completion]) -> list[Group]:
    rewards = (0.0,) * len(completions)
    prompt = tuple(PROMPT)
    return [Group(problem={"prompt": ""}, prompt_token_ids=prompt, completions=tuple(completions), rewards=rewards)]


def generated(answer: dict[str, Any]) -> list[Group]:
    """Parse a response like Atropos' client: ids and log-probabilities from `logprobs`."""
    completions = [
        Completion(
            token_ids=tuple(int(next(iter(entry[0]))) for entry in tokens),
            logprobs=tuple(next(iter(entry[0].values())) for entry in tokens),
            text=text,
            finish_reason=reason,
        )
        for tokens, text, reason in zip(answer["logprobs"], answer["text"], answer["finish_reasons"], strict=True)
    ]
    assert [list(completion.token_ids) for completion in completions] == answer["token_ids"]
    return as_group(completions)


def completed(http: httpx.Client, **choices: Any) -> list[Group]:
    """Sample through vLLM's own route."""
    body = {**BODY, **WHOLE, "prompt": PROMPT, "return_token_ids": True, **choices}
    return groups_of(http.post("/v1/completions", json=body))


def rolled_out(lora_llama: LiveServer, http: httpx.Client, **choices: Any) -> list[Group]:
    """Sample through the rollout route."""
    return groups_of(http.post(COMPLETIONS, json={"model": lora_llama.manifest.model, **ROLLOUT, **choices}))


def groups_of(answer: httpx.Response) -> list[Group]:
    assert answer.status_code == 200, answer.text
    return as_group(
        [
            Completion(
                token_ids=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]["token_logprobs"]),
                text=choice["text"],
                finish_reason=choice["finish_reason"],
            )
            for choice in answer.json()["choices"]
        ]
    )


def test_generate_samples_like_vllms_own_route(http: httpx.Client) -> None:
    answer = answered(http)
    assert len(answer["text"]) == len(answer["logprobs"]) == BODY["n"]
    assert all(1 <= len(tokens) <= 8 for tokens in answer["token_ids"])
    assert answer["prompt_token_ids"] == PROMPT
    assert scenarios.same_samples(generated(answer), completed(http))
    assert not scenarios.same_samples(generated(answer), generated(answered(http, seed=12)))


def test_rollout_route_samples_like_vllms_own_route(lora_llama: LiveServer, http: httpx.Client) -> None:
    ours, own = rolled_out(lora_llama, http), completed(http)
    assert scenarios.same_samples(ours, own)
    assert not scenarios.same_samples(ours, rolled_out(lora_llama, http, seed=12))
    both = zip(ours[0].completions, own[0].completions, strict=True)
    texts = [(mine.text, theirs.text) for mine, theirs in both if mine.token_ids == theirs.token_ids]
    assert texts
    assert all(mine == theirs for mine, theirs in texts), texts


def test_models_sampling_defaults_are_ignored(lora_llama: LiveServer, http: httpx.Client) -> None:
    scenarios.samples_the_whole_distribution(lora_llama, http)


def test_sampling_fields_that_bias_training_are_logged_once(lora_llama: LiveServer, http: httpx.Client) -> None:
    for _ in range(2):
        answered(http, top_p=0.37, min_tokens=1)  # a combination of fields that no other test uses
        answered(http, top_p=0.38, min_tokens=1)
    (line,) = [line for line in lora_llama.child.log.read_text().splitlines() if "min_tokens" in line]
    assert "importance weights and KL are off" in line


def test_text_prompt_equals_the_same_prompt_as_tokens(http: httpx.Client) -> None:
    text = answered(http, max_tokens=1)["prompt"]
    by_text = answered(http, prompt=text)
    assert by_text["prompt"] == text
    assert by_text["prompt_token_ids"] == PROMPT
    assert scenarios.same_samples(generated(by_text), generated(answered(http)))


def test_generate_returns_likeliest_tokens_of_the_prompt(http: httpx.Client) -> None:
    answer = answered(http, prompt_logprobs=2, n=1, temperature=0.0, max_tokens=1)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert [str(token) in entry for token, entry in zip(PROMPT[1:], rest, strict=True)] == [True, True]
    assert all(2 <= len(entry) <= 3 and max(entry.values()) < 0.0 for entry in rest)


def test_likeliest_tokens_include_the_sampled_token(http: httpx.Client) -> None:
    for tokens in answered(http, logprobs=2)["logprobs"]:
        for (entry,) in tokens:
            assert 2 <= len(entry) <= 3
            assert max(entry.values()) <= 0.0


ROUTES = ["/generate", COMPLETIONS, "/v1/completions", "/invocations", "/adapters", "/tokenize", "/metrics", "/version"]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another"}])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_requires_the_servers_key(lora_llama: LiveServer, route: str, headers: dict[str, str]) -> None:
    answer = httpx.post(f"{lora_llama.manifest.url}{route}", json=BODY, headers=headers, trust_env=False)
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})


def test_all_vllm_routes_but_health_require_the_key(lora_llama: LiveServer, http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert len(paths) > 10
    with httpx.Client(base_url=lora_llama.manifest.url, trust_env=False) as stranger:
        statuses = {path: {stranger.request(method, path).status_code for method in paths[path]} for path in paths}
    assert {path for path, statuses in statuses.items() if statuses != {401}} == {"/health"}, statuses


def test_dns_rebinding_web_page_is_refused(http: httpx.Client) -> None:
    answer = http.post("/generate", json=BODY, headers={"host": "evil.example"})
    assert (answer.status_code, "evil.example" in answer.json()["error"]) == (403, True)


@pytest.mark.parametrize(("mode", "flags"), [("shared_vllm", ()), ("none", ("--reload", "in-place"))])
def test_every_mode_trains_behind_a_key(
    lora_llama: LiveServer, tmp_path: Path, mode: str, flags: tuple[str, ...]
) -> None:
    scenarios.trains_in_place(lora_llama, tmp_path, *flags, mode=mode)  # adapters: test_lora_only.py


def test_foreign_request_cannot_unload_the_trained_adapter(
    lora_llama: LiveServer, http: httpx.Client, tmp_path: Path
) -> None:
    save_adapter(lora_llama, tmp_path)
    with BridgeClient(lora_llama.manifest, timeout_s=60) as client:
        client.take_lease("runs/a")
        client.adapter(ADAPTER, tmp_path)
        refused = http.post("/v1/unload_lora_adapter", json={"lora_name": ADAPTER})
        assert (refused.status_code, "runs/a" in refused.json()["error"]["message"]) == (409, True), refused.text
        refused = http.post("/v1/load_lora_adapter", json={"lora_name": f"{ADAPTER}-9", "lora_path": str(tmp_path)})
        assert refused.status_code == 409
        headers = {TOKEN_HEADER: lora_llama.manifest.token}
        ours = http.post("/v1/unload_lora_adapter", json={"lora_name": ADAPTER}, headers=headers)
        assert ours.status_code == 200
        waiting = http.post("/generate", json=BODY)
        assert (waiting.status_code, "not being served right now" in waiting.text) == (503, True)
        client.release_adapter()
    assert answered(http)


def test_nan_weights_are_named_in_the_error(lora_llama: LiveServer, http: httpx.Client, tmp_path: Path) -> None:
    attached = attach(lora_llama.manifest)
    weight = attached.model.get_parameter("model.norm.weight").detach()
    before = weight.clone()
    with BridgeClient(lora_llama.manifest, timeout_s=60) as client:
        with fence.publish(client, Update()):
            weight[3].fill_(float("nan"))
        refused = http.post(COMPLETIONS, json={"model": lora_llama.manifest.model, **ROLLOUT})
        output = bridge("doctor", "--json", "--vllm-config-path", lora_llama.path, folder=tmp_path, expect=3).stdout
        with fence.publish(client, Update()):
            weight.copy_(before)
    assert (refused.status_code, "tensors, the first: model.norm.weight" in refused.json()["error"]) == (409, True)
    assert refused.json()["hint"].startswith("bridge restore ")
    (check,) = [check for check in map(json.loads, output.splitlines()) if check["name"] == "Server's numbers"]
    assert (check["status"], "model.norm.weight" in check["found"]) == ("FAIL", True)
    assert rolled_out(lora_llama, http)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temprature": 1.0},
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"n": 0},
        {"max_tokens": 100_000},
        {"stream": True},
        {"prompt": []},
        {"prompt": {"prompt_token_ids": [100_000]}},
    ],
    ids=str,
)
def test_invalid_generate_request_is_refused(http: httpx.Client, wrong: dict[str, Any]) -> None:
    answer = http.post("/generate", json={**BODY, **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        ({"prompt": [100_000]}, 400, "vocabulary"),
        ({"max_tokens": 100_000}, 400, "--max-model-len"),
        ({"temperature": 0.0}, 400, "greedy"),
        ({"n": 0}, 400, "greater than or equal to 1"),
        ({"repetition_penalty": 1.5}, 400, "Extra inputs"),
        ({"model": "gone"}, 404, "gone does not exist"),
    ],
    ids=str,
)
def test_invalid_rollout_request_is_refused(
    lora_llama: LiveServer, http: httpx.Client, wrong: dict[str, Any], status: int, words: str
) -> None:
    answer = http.post(COMPLETIONS, json={"model": lora_llama.manifest.model, **ROLLOUT, **wrong})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


def test_response_has_the_version_and_waits_for_the_fence(lora_llama: LiveServer, http: httpx.Client) -> None:
    with BridgeClient(lora_llama.manifest, timeout_s=60) as client, ThreadPoolExecutor() as pool:
        version = client.status().version
        assert http.post("/generate", json=BODY).headers.get_list(VERSION_HEADER) == [str(version)]
        client.pause("keep")
        waiting = pool.submit(http.post, "/generate", json=BODY)
        assert not waiting.done()
        client.publish()
        assert waiting.result().headers[VERSION_HEADER] in {f"{version}-{version + 1}", str(version + 1)}
        publish(fence.publish(client, Update()))


@pytest.mark.parametrize("route", ["/generate", COMPLETIONS])
def test_disconnecting_client_aborts_its_request(lora_llama: LiveServer, http: httpx.Client, route: str) -> None:
    body = BODY if route == "/generate" else {"model": lora_llama.manifest.model, **ROLLOUT}
    before = num_completed(http)
    http.post(route, json={**body, "n": 4}).raise_for_status()
    assert num_completed(http) == before + 4
    many = 512  # some end early, at an end token; all of them together take many seconds
    with pytest.raises(httpx.ReadTimeout):
        http.post(route, json={**body, "n": many, "max_tokens": 2000}, timeout=0.5)
    deadline = time.monotonic() + 60
    while metric(http, "vllm:num_requests_running{") or metric(http, "vllm:num_requests_waiting{"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert num_completed(http) < before + 4 + many, "they ran to their end"


def num_completed(http: httpx.Client) -> float:
    """Return how many completions of this server ended normally."""
    return metric(http, 'vllm:request_success_total{.*finished_reason="(length|stop)"')


def metric(http: httpx.Client, pattern: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))


def test_trained_adapter_answers_requests(lora_llama: LiveServer, http: httpx.Client, tmp_path: Path) -> None:
    base = generated(answered(http))
    save_adapter(lora_llama, tmp_path)
    with BridgeClient(lora_llama.manifest, timeout_s=60) as client:
        client.adapter(ADAPTER, tmp_path)
    adapted = generated(answered(http))
    assert scenarios.same_samples(adapted, completed(http, model=ADAPTER))
    assert scenarios.same_samples(adapted, rolled_out(lora_llama, http, model=ADAPTER))
    assert not scenarios.same_samples(adapted, base)
    assert scenarios.same_samples(generated(answered(http, model=lora_llama.manifest.model)), base)


def save_adapter(server: LiveServer, folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(server.manifest.model, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(base, config, autocast_adapter_dtype=False).save_pretrained(folder)
