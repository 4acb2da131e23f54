"""The rollout route in front of a fake engine: the requests to the engine, and the responses to a sampler."""

import asyncio
import math
import random
import sys
from collections.abc import AsyncIterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models

from bridge.rollouts import openai_api
from bridge.rollouts.openai_api import Completions
from bridge.server.protocol import COMPLETIONS, VERSION_HEADER, Refusal
from bridge_patches import completions as completions_route
from bridge_patches import expanded_images, routes
from bridge_patches.engine_outputs import AT_ONCE, FILTERED
from bridge_patches.filter_thresholds import COUNT_BITS, KEEP_ALL, pack
from bridge_patches.generate import CLIENT_GONE
from bridge_patches.routed_experts import ROUTED
from bridge_patches.server_fence import ServerFence
from tests.unit.checks_sample import manifest
from tests.unit.http_server import status_after_disconnecting

BODY = {"model": "base", "prompt": [5, 6], "n": 2, "max_tokens": 3, "temperature": 0.7, "seed": 7}
LONGEST = 8


class Backend:
    """A Hugging Face tokenizer, as wrapped by one of transformers."""

    def decode_batch(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(f"<{token}>" for token in sequence) for sequence in sequences]


def output(index: int, finish_reason: str, logprobs: list[float], stop_reason: int | str | None = None) -> Any:
    """Return a completion from the engine whose first token has a likelier alternative."""
    starts = [0, 2, 3][: len(logprobs)]
    flat = SimpleNamespace(logprobs=[logprobs[0], -0.01, *logprobs[1:]], ranks=[3, 1, 3, 4], start_indices=starts)
    ids = tuple(10 * (position + 1) + index for position in range(len(logprobs)))
    return SimpleNamespace(
        index=index,
        token_ids=ids,
        logprobs=flat,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        routed_experts=None,
    )


class FakeEngine:
    """Stands in for `AsyncLLM`."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: 300)
        self.vllm_config = SimpleNamespace(speculative_config=None)
        self.tokenizer: Any = SimpleNamespace(backend_tokenizer=Backend())
        self.outputs = [output(1, "length", [-0.5, -0.25, -1.5]), output(0, "stop", [-0.5, -0.125, -2.0])]
        self.calls: list[tuple[Any, ...]] = []
        self.refusal: Exception | None = None
        self.waits = self.aborted = False
        self.expanded: list[int] = []
        """Tokens that the engine adds to the prompt."""
        self.renderer = SimpleNamespace(mm_processor=None)
        self.not_finite: list[str] = []
        self.prompt_logprobs: Any = None

    async def collective_rpc(self, method: str) -> list[tuple[int, list[str]]]:
        assert method == "bridge_finiteness"
        return [(9, self.not_finite)]

    async def generate(self, prompt: Any, params: Any, request_id: str, *, lora_request: Any) -> AsyncIterator[Any]:
        self.calls.append((prompt, params, request_id, lora_request))
        if self.refusal is not None:
            raise self.refusal
        try:
            await asyncio.sleep(3600 if self.waits else 0)
        except asyncio.CancelledError:
            self.aborted = True
            raise
        used = prompt["prompt_token_ids"] + self.expanded
        yield SimpleNamespace(outputs=self.outputs, prompt_token_ids=used, prompt_logprobs=self.prompt_logprobs)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = SimpleNamespace(SamplingParams=dict, RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    app = FastAPI()
    app.state.bridge_engine, app.state.bridge_fence = engine, ServerFence(engine, manifest())
    app.state.bridge_fence.version = 3
    app.state.openai_serving_models = SimpleNamespace(
        lora_requests={"adapter": "the adapter"}, base_model_paths=[SimpleNamespace(name="base")]
    )
    routes.BridgeRoutes().attach_router(app)
    return app


@pytest.fixture
def http(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def words(answer: Any) -> str:
    return str(answer.json()["detail"])


def test_response_has_the_fields_that_samplers_read(http: TestClient) -> None:
    answer = http.post(COMPLETIONS, json=BODY)
    assert (answer.status_code, answer.headers[VERSION_HEADER]) == (200, "3")
    first, second = openai_api.in_order(Completions.model_validate_json(answer.content), 2)
    made = openai_api.completion("url", first, "3", None, 2)
    assert (made.token_ids, made.logprobs) == ((10, 20, 30), (-0.5, -0.125, -2.0))
    assert made.versions == (3, 3, 4), "the engine's own, not the header's"
    assert (made.text, made.finish_reason) == ("<10><20>", "stop"), "the stop token is not part of the text"
    assert (second.text, second.finish_reason) == ("<11><21><31>", "length")


def test_engine_samples_without_filters_or_decoding(http: TestClient, engine: FakeEngine) -> None:
    http.post(COMPLETIONS, json=BODY)
    http.post(COMPLETIONS, json=BODY)
    (prompt, params, first, adapter), (*_, second, _) = engine.calls
    assert (prompt, adapter) == ({"prompt_token_ids": [5, 6]}, None)
    assert params == {
        "n": 2, "temperature": 0.7, "seed": 7, "max_tokens": 3, "stop": [], "stop_token_ids": [],
        "logprobs": 0, "flat_logprobs": True, "detokenize": False, "output_kind": "final only",
    }  # fmt: skip
    assert first != second


def test_prompt_logprobs_belong_to_the_prompt_tokens(http: TestClient, engine: FakeEngine) -> None:
    engine.prompt_logprobs = SimpleNamespace(
        logprobs=[-0.75, -0.01], start_indices=[0, 0]
    )  # the second entry is a likelier token
    answer = http.post(COMPLETIONS, json={**BODY, "prompt_logprobs": True})
    assert engine.calls[0][1]["prompt_logprobs"] == 0
    for choice in openai_api.in_order(Completions.model_validate_json(answer.content), 2):
        first, second = openai_api.completion("url", choice, "3", None, 2).prompt_logprobs
        assert math.isnan(first)
        assert second == -0.75
    engine.prompt_logprobs.start_indices = [0]
    refusal = http.post(COMPLETIONS, json={**BODY, "prompt_logprobs": True})
    assert refusal.status_code == 409
    assert "of 1 tokens for a prompt of 2" in refusal.json()["error"]


def test_prompt_logprobs_that_are_nan_are_refused(http: TestClient, engine: FakeEngine) -> None:
    engine.prompt_logprobs = SimpleNamespace(logprobs=[math.nan], start_indices=[0, 0])
    answer = http.post(COMPLETIONS, json={**BODY, "prompt_logprobs": True})
    assert (answer.status_code, words(answer).partition(",")[0]) == (500, "log-probabilities are not finite")


def test_experts_are_returned_for_all_tokens_but_the_last(http: TestClient, engine: FakeEngine) -> None:
    rows = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    engine.outputs[0].routed_experts = engine.outputs[1].routed_experts = rows  # the engine was one step ahead
    answer = http.post(COMPLETIONS, json={**BODY, "experts": 0})
    first, _ = openai_api.in_order(Completions.model_validate_json(answer.content), 2)
    made = openai_api.completion("url", first, "3", None, 2)
    assert np.array_equal(np.frombuffer(made.experts, "<i2").reshape(4, 2, 3), rows[:4])
    assert ROUTED in engine.calls[0][2]
    rest, _ = http.post(COMPLETIONS, json={**BODY, "experts": 1}).json()["choices"]
    assert openai_api.Experts.model_validate(rest["experts"]).widened() == rows[:3].astype("<i2").tobytes()
    assert f"{ROUTED}1-" in engine.calls[1][2], "the engine leaves the first one out"
    refusal = http.post(COMPLETIONS, json={**BODY, "experts": 2})
    assert refusal.status_code == 422
    without = http.post(COMPLETIONS, json=BODY)
    assert "experts" not in without.json()["choices"][0]
    assert ROUTED not in engine.calls[2][2]


def test_missing_experts_are_refused_unless_aborted(http: TestClient, engine: FakeEngine) -> None:
    engine.outputs[0].routed_experts = np.zeros((3, 2, 3), np.uint8)
    engine.outputs[0].finish_reason = engine.outputs[1].finish_reason = "abort"
    answer = http.post(COMPLETIONS, json={**BODY, "experts": 0})
    assert answer.status_code == 200
    assert "experts" not in answer.json()["choices"][1]
    engine.outputs[0].finish_reason = "length"
    answer = http.post(COMPLETIONS, json={**BODY, "experts": 0})
    assert answer.status_code == 409
    assert "reported the experts of 3 tokens, expected 4" in answer.json()["error"]
    assert "--no-router-replay" in answer.json()["hint"]


def test_filters_reach_the_engine_and_report_what_they_kept(http: TestClient, app: FastAPI, engine: FakeEngine) -> None:
    now = 2**COUNT_BITS + 3  # the engine sends only the low bits of a version
    app.state.bridge_fence.version = now
    ranks = pack(torch.tensor([2, 1, 2, 3]), torch.tensor([0.5, 9.0, -1.0, KEEP_ALL]), torch.tensor([3, 9, 40, 300]))
    for request_output in engine.outputs:
        request_output.logprobs.ranks = ranks.tolist()
    answer = http.post(COMPLETIONS, json={**BODY, "top_p": 0.9, "top_k": 40})
    first, _ = openai_api.in_order(Completions.model_validate_json(answer.content), 2)
    made = openai_api.completion("url", first, "3", None, 2)
    assert made.versions == (now - 1, now - 1, now)
    assert [count for _, count in made.kept] == [3, 40, 300]
    assert [threshold for threshold, _ in made.kept] == pytest.approx([0.5, -1.0, KEEP_ALL], rel=1e-4)
    _, params, request_id, _ = engine.calls[0]
    assert (params["top_p"], params["top_k"], FILTERED in request_id) == (0.9, 40, True)
    assert "min_p" not in params


@pytest.mark.parametrize("fields", [{"temperature": 0.0, "top_p": 0.9}, {"top_k": 300}])
def test_filters_that_drop_nothing_are_not_sent(http: TestClient, engine: FakeEngine, fields: dict[str, float]) -> None:
    answer = http.post(COMPLETIONS, json={**BODY, **fields})
    assert "kept" not in answer.json()["choices"][0]
    assert FILTERED not in engine.calls[0][2]


def test_sampler_without_filter_report_is_refused(http: TestClient) -> None:
    answer = http.post(COMPLETIONS, json={**BODY, "top_p": 0.9})  # the fake engine reports plain ranks
    assert answer.status_code == 409
    assert "does not report what top_k, top_p and min_p keep" in Refusal.model_validate_json(answer.content).error


def test_filters_and_speculation_are_refused_together(http: TestClient, engine: FakeEngine) -> None:
    engine.vllm_config.speculative_config = "ngram"
    assert http.post(COMPLETIONS, json=BODY).status_code == 200
    answer = http.post(COMPLETIONS, json={**BODY, "min_p": 0.1, "top_k": 3})
    assert answer.status_code == 409
    refusal = Refusal.model_validate_json(answer.content)
    assert refusal.error.startswith("top_k, min_p cannot be combined with speculation")
    assert "--speculative-config" in refusal.hint


def test_completion_ends_at_the_requests_stop_tokens(http: TestClient, engine: FakeEngine) -> None:
    engine.outputs = [output(0, "stop", [-0.5, -0.125, -2.0], 30)]
    (choice,) = http.post(COMPLETIONS, json={**BODY, "n": 1, "stop_token_ids": [30, 7]}).json()["choices"]
    ((_, params, request_id, _),) = engine.calls
    assert (params["stop_token_ids"], params["detokenize"]) == ([30, 7], False)
    assert (choice["token_ids"], choice["text"]) == ([10, 20, 30], "<10><20>"), "it is trained, and in no text"
    assert AT_ONCE not in request_id


@pytest.mark.parametrize(("reason", "text"), [("x", "<10><20><30>"), (30, "<10><20>"), (None, "<10><20>")])
def test_text_keeps_stop_strings_and_drops_stop_tokens(
    http: TestClient, engine: FakeEngine, reason: int | str | None, text: str
) -> None:
    engine.outputs = [output(0, "stop", [-0.5, -0.125, -2.0], reason)]
    (choice,) = http.post(COMPLETIONS, json={**BODY, "n": 1, "stop": ["x", "yz"]}).json()["choices"]
    assert (choice["text"], choice["token_ids"]) == (text, [10, 20, 30])
    params = engine.calls[0][1]
    assert (params["stop"], params["detokenize"]) == (["x", "yz"], True)


def test_adapter_is_requested_by_name(http: TestClient, engine: FakeEngine) -> None:
    http.post(COMPLETIONS, json={**BODY, "model": "adapter"})
    assert engine.calls[0][-1] == "the adapter"
    answer = http.post(COMPLETIONS, json={**BODY, "model": "gone"})
    assert (answer.status_code, words(answer)) == (404, "the model gone does not exist, only base, adapter")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": []},
        {"prompt": "text"},
        {"n": 0},
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"seed": "x"},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.0},
        {"repetition_penalty": 1.1},
        {"stop": [""]},
        {"model": None},
    ],
    ids=str,
)
def test_malformed_request_is_refused(http: TestClient, engine: FakeEngine, wrong: dict[str, Any]) -> None:
    assert http.post(COMPLETIONS, json={**BODY, **wrong}).status_code == 422
    assert not engine.calls


def test_request_that_exceeds_the_servers_limits_is_refused(http: TestClient, engine: FakeEngine) -> None:
    too_long = http.post(COMPLETIONS, json={**BODY, "max_tokens": LONGEST - 1})
    assert too_long.status_code == 400
    assert words(too_long).endswith("a prompt of 2 tokens and max_tokens=7 exceed the server's --max-model-len 8")
    assert not engine.calls
    assert http.post(COMPLETIONS, json={**BODY, "max_tokens": LONGEST - 2}).status_code == 200
    engine.refusal = ValueError("Token id 9999 is out of vocabulary")
    refused = http.post(COMPLETIONS, json=BODY)
    assert (refused.status_code, words(refused)) == (400, "Token id 9999 is out of vocabulary")


def test_dead_engine_is_a_server_error(http: TestClient, engine: FakeEngine) -> None:
    engine.refusal = RuntimeError("the engine died")
    assert http.post(COMPLETIONS, json=BODY).status_code == 500


def test_non_finite_weights_are_named_with_the_fix(http: TestClient, engine: FakeEngine) -> None:
    engine.outputs[0] = output(1, "length", [-0.5, float("nan")])
    engine.not_finite = ["a", "b", "c", "d"]
    answer = http.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 409
    refusal = Refusal.model_validate_json(answer.content)
    assert "NaN or infinity in 4 of 9 tensors, the first: a, b, c" in refusal.error
    assert refusal.hint.startswith("bridge restore CHECKPOINT")


def test_non_finite_logprobs_with_finite_weights_are_an_error(http: TestClient, engine: FakeEngine) -> None:
    engine.outputs[0] = output(1, "length", [-0.5, float("nan")])
    answer = http.post(COMPLETIONS, json=BODY)
    assert (answer.status_code, words(answer).partition(",")[0]) == (500, "log-probabilities are not finite")
    assert "every number in 9 tensors is finite: a kernel is broken" in words(answer)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 2**63 - 1, "n": 2},
        {"seed": 10**30},
        {"prompt": [5, -1]},
        {"temperature": -1},
    ],
)
def test_numbers_outside_vllms_range_are_refused(http: TestClient, engine: FakeEngine, changes: dict[str, Any]) -> None:
    assert http.post(COMPLETIONS, json={**BODY, **changes}).status_code == 422
    assert engine.calls == []
    assert http.post(COMPLETIONS, json={**BODY, "seed": 2**63 - 2, "n": 2}).status_code == 200


def test_slow_tokenizers_decode_one_by_one(http: TestClient, engine: FakeEngine) -> None:
    def decode(tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, tokens))

    engine.tokenizer = SimpleNamespace(decode=decode)
    texts = [choice["text"] for choice in http.post(COMPLETIONS, json=BODY).json()["choices"]]
    assert texts == [" 10 20", " 11 21 31"], "the space belongs to the completion"
    engine.tokenizer = None
    assert [choice["text"] for choice in http.post(COMPLETIONS, json=BODY).json()["choices"]] == ["", ""]


WORDS = ["\u2581a", "\u2581b", "c", "<0xC3>", "<0xA9>", "\u2581\u00e9", "<s>"]


def spm() -> Tokenizer:
    """Return a tokenizer like Llama 1's: words begin with a space, and rare characters are split into bytes."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="c"))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<s>"])
    return made


@pytest.mark.parametrize("end", [[], [3]], ids=["complete character", "incomplete character"])
@pytest.mark.parametrize("prompt", [[0, 1, 2], [6, 0], [1, 3, 4], [5], [0] * 100])
def test_decoded_text_matches_vllms_streaming(prompt: list[int], end: list[int]) -> None:
    """As in vLLM, which decodes tokens one by one after the prompt and holds back incomplete characters."""
    tokenizer, chance = spm(), random.Random(0)
    units = [[0], [1], [2], [3, 4], [5], [6]]
    completions = [[*chain(*chance.choices(units, k=length % 6)), *end] for length in range(60)]
    streamed = []
    for completion in completions:
        stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
        streamed.append("".join(stream.step(tokenizer, token) or "" for token in completion))
    texts = completions_route._texts(SimpleNamespace(backend_tokenizer=tokenizer), prompt, completions)
    assert texts == streamed
    assert any(text.startswith(" ") for text in texts)


def test_character_that_begins_in_the_prompt_is_dropped() -> None:
    texts = completions_route._texts(SimpleNamespace(backend_tokenizer=spm()), [0, 3], [[4, 1], [2, 1]])
    assert texts == ["\N{REPLACEMENT CHARACTER} b", "c b"]


def test_completion_without_tokens_is_empty(http: TestClient, engine: FakeEngine) -> None:
    ended = SimpleNamespace(logprobs=[], ranks=[], start_indices=[])
    engine.outputs = [SimpleNamespace(index=0, token_ids=(), logprobs=ended, finish_reason="abort", stop_reason=None)]
    (choice,) = http.post(COMPLETIONS, json={**BODY, "n": 1}).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "abort")


def test_disconnecting_client_aborts_its_request(app: FastAPI, engine: FakeEngine) -> None:
    engine.waits = True
    assert status_after_disconnecting(app, COMPLETIONS, BODY) == CLIENT_GONE
    assert engine.aborted


def test_prompt_reexpanded_by_the_engine_is_refused(http: TestClient, engine: FakeEngine) -> None:
    engine.expanded = [9, 9]
    answer = http.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 409
    assert (
        "a prompt of 4 tokens, but a different one of 2 tokens was sent" in Refusal.model_validate(answer.json()).error
    )


def test_images_for_a_text_only_model_are_refused(http: TestClient, engine: FakeEngine) -> None:
    answer = http.post(COMPLETIONS, json={**BODY, "images": {"pixels": ["float32", [1], "AAAAAA=="]}})
    assert answer.status_code == 400
    assert "this server does not accept images" in answer.text
    assert engine.calls == []


def test_unrecognized_image_tokens_are_refused() -> None:
    """If an image was expanded twice, vLLM finds only its first tokens."""
    one, other = (SimpleNamespace(tokens=[7] * count) for count in (2, 3))
    ids = [1, 7, 7, 2, 7, 7, 7, 3]
    assert expanded_images._fault(ids, [one, other], 2) == ""
    assert "finds the tokens of 1 images in the prompt, expected those of 2" in expanded_images._fault(ids, [one], 2)
    assert "finds 5 image tokens in the prompt, which has 6" in expanded_images._fault([*ids, 7], [one, other], 2)
