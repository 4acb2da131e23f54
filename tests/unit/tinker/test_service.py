"""The API's state over a patched server without vLLM: order, futures, retries, sessions, snapshots and limits.

Not covered: the real client (`test_client.py`, `tests/cpu/test_tinker.py`), the wire format (`test_wire.py`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import bridge
from bridge.core.http_limits import Refusal
from bridge.errors import UsageError
from bridge.passes.packing import MicroBatch
from bridge.passes.prepared_model import PreparedModel
from bridge.server.protocol import COMPLETIONS, CompletionsRequest
from bridge.tinker import api
from bridge.tinker import service as module
from bridge.tinker.all_weights import AllWeights
from bridge.tinker.paths import Checkpoints
from bridge.tinker.service import Service
from bridge.tinker.wire import Datum, PassRequest
from tests.unit import patched_server
from tests.unit.tinker import calls
from tests.unit.tinker.calls import STEP, done, new_model, request, run, sampling, step

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("tinker")]
KEY = {"x-api-key": "tml-any"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with patched_server.tiny_llama(tmp_path_factory.mktemp("server")) as server:
        yield server.path


@pytest.fixture
def service(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    optimizer = bridge.OptimizerConfig(lr=1e-3)
    with closing(bridge.attach(path, optimizer=optimizer)) as policy:
        base = Path(policy.model_name)
        policy.load(base)
        with calls.served(AllWeights(policy, base, "base", Checkpoints(tmp_path / "runs")), monkeypatch) as made:
            yield made


def weights(service: Service) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in service.policy.parameters()]).clone()


def test_requests_are_done_in_their_order(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        late = [service.passes(request(model, number)) for number in (3, 2)]
        stepped = service.step({**STEP, "model_id": model, "seq_id": 4})
        await asyncio.sleep(0.2)
        version = service.policy.version
        first = service.passes(request(model, 1))
        assert all(["metrics" in await done(service, promise) for promise in (*late, first, stepped)])
        assert service.policy.version == version + 1
        assert service.trainer.models[model].num_steps == 1

    run(scenario())


def test_a_repeated_request_changes_nothing(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        once = service.passes(request(model, 1))
        assert service.passes(request(model, 1)) == once
        await done(service, once)
        assert service.passes(request(model, 1)) == once, "also when it is done"
        body = {**STEP, "model_id": model, "seq_id": 2}
        result = await done(service, service.step(body))
        after, version = weights(service), service.policy.version
        assert await done(service, service.step(body)) == result
        assert torch.equal(weights(service), after)
        assert service.policy.version == version
        with pytest.raises(Refusal, match="was used for another request"):
            service.save({"model_id": model, "seq_id": 1, "path": "a"})

        twin = await new_model(service, model.partition(":")[0], 1)
        await step(service, twin, 1)
        assert torch.equal(weights(service), after), "one pass and one step, whatever was repeated"

    run(scenario())


def test_a_model_resumes_to_the_digit(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        await step(service, model, 1)
        saved = await done(service, service.save({"model_id": model, "seq_id": 3, "path": "one"}))
        await step(service, model, 4)
        expected = weights(service)
        body = {"model_id": model, "seq_id": 6, "path": saved["path"], "optimizer": True}
        await done(service, service.load_weights(body))
        await step(service, model, 7)
        assert torch.equal(weights(service), expected)

    run(scenario())


def test_a_failed_request_ends_no_other(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        failed = await done(service, service.step({**STEP, "model_id": model, "seq_id": 1}))
        assert failed["category"] == "user"
        assert "no gradients" in failed["error"]
        wrong = request(model, 2, 5, 10**9)
        assert "token id" in (await done(service, service.passes(wrong)))["error"]
        assert "metrics" in await step(service, model, 3)
        with pytest.raises(Refusal, match="never had it"):
            service.passes(request("other", 1))
        with pytest.raises(Refusal, match="there is no request"):
            await service.result("other")

    run(scenario())


def test_a_forward_pass_adds_no_gradient(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        found = await done(service, service.passes(request(model, 1, is_forward=True)))
        assert len(found["logprobs"][0]) == 3
        assert "no gradients" in (await done(service, service.step({**STEP, "model_id": model, "seq_id": 2})))["error"]

    run(scenario())


@pytest.mark.parametrize("shape", [(1,), (3,), (0,)])
def test_inputs_that_a_loss_does_not_read_change_nothing(service: Service, shape: tuple[int, ...]) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        plain = request(model, 1, is_forward=True)
        (datum,) = plain.data
        others = {"advantages": np.zeros(shape, np.float32), "logprobs": np.full(2, np.nan, np.float32)}
        extended = replace(plain, seq_id=2, data=[replace(datum, inputs={**datum.inputs, **others})])
        expected, found = [await done(service, service.passes(one)) for one in (plain, extended)]
        assert "error" not in found
        assert np.array_equal(found["logprobs"][0], expected["logprobs"][0])

    run(scenario())


def test_data_with_the_same_prompt_compute_it_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = 11, 12, 13, 14, 15
    sizes = list[int]()
    logprobs = PreparedModel.logprobs

    def counted(prepared: PreparedModel, batch: MicroBatch, temperature: float, **choices: bool) -> Any:
        sizes.append(len(batch.tokens_T))
        return logprobs(prepared, batch, temperature, **choices)

    def datum(*completion: int, first: int | None = None) -> Datum:
        ids = *prompt, *completion
        targets = np.array(ids[1:])
        targets[0] = targets[0] if first is None else first
        weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(completion), np.float32)
        return Datum(ids[:-1], {"target_tokens": targets, "weights": weights})

    async def scenario() -> None:
        model = await new_model(service)
        data = [datum(20, 21, 22), datum(23, 24), datum(25, first=99)]

        async def passed(number: int, chosen: list[Datum]) -> Any:
            whole = PassRequest(model, number, "cross_entropy", {}, chosen, is_forward=True)
            return await done(service, service.passes(whole))

        monkeypatch.setattr(PreparedModel, "logprobs", counted)
        together = await passed(1, data)
        assert sizes[-1] == len(prompt) + 3 + 2 + 1
        alone = [await passed(2 + number, [one]) for number, one in enumerate(data)]
        for found, own, one in zip(together["logprobs"], alone, data, strict=True):
            assert len(found) == len(one.tokens)
            np.testing.assert_allclose(found, own["logprobs"][0], atol=2e-2)  # bf16, in packs of other sizes
        expected = sum(own["metrics"]["loss:sum"] for own in alone)
        assert together["metrics"]["loss:sum"] == pytest.approx(expected, rel=1e-2)

    run(scenario())


def test_a_snapshot_is_never_answered_from_newer_weights(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)

        async def client(seq_id: int, **more: Any) -> str:
            body = {"model_id": model, "seq_id": seq_id, **more}
            made = await done(service, service.save_for_sampler(body))
            return str(made.get("sampling_session_id") or made["path"])

        old, live, named = await client(1), await client(2, kind="inflight"), await client(3, path="named")
        session = model.partition(":")[0]
        by_name = service.create_sampling_session(
            {"session_id": session, "sampling_session_seq_id": 0, "model_path": named}
        )
        for sampler in (old, live, by_name):
            assert len((await done(service, service.sample(sampling(sampler))))["tokens"][0]) == 3
        await step(service, model, 4)
        assert "tokens" in await done(service, service.sample(sampling(live, 1)))
        for sampler in (old, by_name):
            assert "is a snapshot of version" in (await done(service, service.sample(sampling(sampler, 1))))["error"]
        with pytest.raises(Refusal, match="older checkpoint than the weights that are served"):
            service.create_sampling_session({"session_id": session, "sampling_session_seq_id": 1, "model_path": named})
        with pytest.raises(Refusal, match="itself is not served any more"):
            service.create_sampling_session({"session_id": session, "sampling_session_seq_id": 2, "base_model": "base"})

    run(scenario())


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_lost_connection_to_vllm_repeats_the_request_once(
    num_lost: int, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = httpx.AsyncClient.post
    lost = [httpx.ReadError("reset"), httpx.RemoteProtocolError("closed")][:num_lost]

    async def losing(http: httpx.AsyncClient, url: str, **more: Any) -> httpx.Response:
        if lost:
            raise lost.pop()
        return await post(http, url, **more)

    async def scenario() -> None:
        model = await new_model(service)
        made = await done(service, service.save_for_sampler({"model_id": model, "seq_id": 1}))
        monkeypatch.setattr(httpx.AsyncClient, "post", losing)
        answer = await done(service, service.sample(sampling(made["sampling_session_id"])))
        assert ("tokens" in answer) == (num_lost == 1)
        assert num_lost == 1 or "vLLM does not answer" in answer["error"]

    run(scenario())


def test_unknown_sampling_parameter_is_refused(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        made = await done(service, service.save_for_sampler({"model_id": model, "seq_id": 1, "kind": "inflight"}))
        body = sampling(made["sampling_session_id"])
        for given, words in (
            ({"min_p": 0.1}, "sampling_params has 'min_p', expected max_tokens"),
            ({"min_p": None}, ""),
        ):
            body |= {"sampling_params": {"max_tokens": 3, **given}, "seq_id": body["seq_id"] + 1}
            answer = await done(service, service.sample(body))
            assert words in answer.get("error", "")
            assert ("tokens" in answer) == (not words)

    run(scenario())


STOP_IS_KEPT = {"include_stop_str_in_output": True}
FAST = {"model": "m", "n": 1, "max_tokens": 3, "temperature": 1.0, "prompt": [5, 6], "prompt_logprobs": False}
SLOW = {
    "model": "m", "n": 1, "max_tokens": 3, "temperature": 1.0, "prompt": {"prompt_token_ids": [5, 6]}, "top_p": 1.0,
    "top_k": 0, "logprobs": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("params", "fields", "route", "expected"),
    [
        ({}, {}, COMPLETIONS, FAST),
        ({"top_k": -1, "top_p": 1, "stop": None}, {"num_samples": 4}, COMPLETIONS, {**FAST, "n": 4}),
        ({"temperature": 0, "seed": 7}, {"num_samples": 3}, COMPLETIONS, {**FAST, "temperature": 0, "seed": 7}),
        ({"stop": [1, 2]}, {}, COMPLETIONS, {**FAST, "stop_token_ids": [1, 2]}),
        ({}, {"prompt_logprobs": True}, COMPLETIONS, {**FAST, "prompt_logprobs": True}),
        ({"stop": "ab"}, {}, COMPLETIONS, {**FAST, "stop": ["ab"]}),
        ({"stop": ["ab", "c"]}, {}, COMPLETIONS, {**FAST, "stop": ["ab", "c"]}),
        ({"stop": []}, {}, "/generate", {**SLOW, "ignore_eos": True}),
        ({"top_p": 0.9}, {}, "/generate", {**SLOW, "top_p": 0.9}),
        ({"top_k": 1, "stop": "a"}, {}, "/generate", {**SLOW, "top_k": 1, "stop": ["a"], **STOP_IS_KEPT}),
        ({"top_k": 5, "stop": [1]}, {}, "/generate", {**SLOW, "top_k": 5, "stop_token_ids": [1]}),
        ({}, {"topk_sample_logprobs": 2}, "/generate", {**SLOW, "logprobs": 2}),
        ({}, {"topk_prompt_logprobs": 2}, "/generate", {**SLOW, "prompt_logprobs": 2}),
        ({"seed": -1}, {}, "/generate", {**SLOW, "seed": -1}),
        ({"seed": 2**63 - 4}, {"num_samples": 4}, COMPLETIONS, {**FAST, "seed": 2**63 - 4, "n": 4}),
        ({"seed": 2**63 - 4}, {"num_samples": 5}, "/generate", {**SLOW, "seed": 2**63 - 4, "n": 5}),
        ({"max_tokens": 900}, {}, COMPLETIONS, {**FAST, "max_tokens": 62}),
        ({"max_tokens": None}, {}, COMPLETIONS, {**FAST, "max_tokens": 62}),
    ],
)  # fmt: skip
def test_sampling_takes_the_fast_route_where_it_answers_all(
    params: dict[str, Any], fields: dict[str, Any], route: str, expected: dict[str, Any]
) -> None:
    body = {"sampling_params": {"max_tokens": 3, **params}, **fields}
    found = module._sampling_request(body, [5, 6], "m", 64)
    assert found == (route, expected)
    if route == COMPLETIONS:
        CompletionsRequest.model_validate(expected)


def test_greedy_samples_are_all_the_same(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        made = await done(service, service.save_for_sampler({"model_id": model, "seq_id": 1}))
        body = sampling(made["sampling_session_id"])
        tokens = []
        for temperature in (0.0, 1.0):
            params = {"max_tokens": 3, "temperature": temperature}
            body |= {"num_samples": 3, "sampling_params": params, "seq_id": body["seq_id"] + 1}
            tokens.append((await done(service, service.sample(body)))["tokens"])
        greedy, drawn = tokens
        assert greedy == [greedy[0]] * 3
        assert len(drawn) == 3
        assert drawn != [drawn[0]] * 3

    run(scenario())


def test_unsaved_model_of_an_ended_session_is_logged(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise UsageError("the disk is full", hint="make room")

    async def scenario() -> None:
        model = await new_model(service)
        await done(service, service.passes(request(model, 1)))
        await step(service, model, 2)
        monkeypatch.setattr(service.policy, "save_state", full)
        service.end_session(model.partition(":")[0], "it ended")
        later = asyncio.get_running_loop().create_future()
        service._do(later, dict)
        await later

    run(scenario())
    assert "is not freed, because it cannot be saved: the disk is full" in caplog.text


def test_a_step_waits_for_requests_of_a_snapshot(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        made = await done(service, service.save_for_sampler({"model_id": model, "seq_id": 1}))
        ways = list[str]()
        trainer = service.trainer
        assert isinstance(trainer, AllWeights)
        take_step = service.policy.optim_step

        def noted(**given: Any) -> Any:
            ways.append(given["in_flight"])
            return take_step(**given)

        monkeypatch.setattr(service.policy, "optim_step", noted)
        promise = service.sample(sampling(made["sampling_session_id"]))
        await asyncio.sleep(0)
        trainer.num_snapshots_sampling += 1
        await step(service, model, 2)
        trainer.num_snapshots_sampling -= 1
        await done(service, promise)
        await step(service, model, 4)
        assert ways == ["wait", "keep"]

    run(scenario())


def test_a_silent_session_frees_its_model_and_saves_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        watching = asyncio.ensure_future(service.free_silent_sessions())
        model = await new_model(service)
        trained = (await step(service, model, 1))["metrics"]
        waiting = service.passes(request(model, 9))  # its turn never comes
        session = service.create_session()
        promise = service.create_model({"session_id": session, "model_seq_id": 0, "base_model": "base"})
        await asyncio.sleep(0.05)
        service.heartbeat(model.partition(":")[0])
        assert "another client trains all weights" in (await done(service, promise))["error"]
        monkeypatch.setattr(module, "SILENT_S", 0.5)
        for _ in range(40):
            await asyncio.sleep(0.25)
            service.heartbeat(session)
            if not service.trainer.models:
                break
        assert "no sign of life" in (await done(service, waiting))["error"]
        with pytest.raises(Refusal, match=r"its weights are at tinker://\S+/weights/freed-1"):
            service.passes(request(model, 3))
        path = f"tinker://{model}/weights/freed-1"
        body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        assert "error" not in await done(service, service.load_weights(body))
        assert trained["unclipped_grad_l2:mean"] > 0
        watching.cancel()

    run(scenario())


def test_a_replaced_model_is_saved_and_refused(service: Service) -> None:
    async def scenario() -> None:
        before = weights(service)
        model = await new_model(service)
        await step(service, model, 1)
        service.passes(request(model, 3))
        session = model.partition(":")[0]
        other = await new_model(service, session, 1)
        assert torch.equal(weights(service), before), "it starts from the base's weights"
        refused = await done(service, service.save({"model_id": model, "seq_id": 4, "path": "late"}))
        assert "took its place" in refused["error"]
        assert "weights/freed-1" in refused["error"]
        left = await done(service, service.step({**STEP, "model_id": other, "seq_id": 1}))
        assert "no gradients" in left["error"], "those of the former model are gone"

    run(scenario())


def test_two_clients_cannot_start_at_once(service: Service) -> None:
    async def scenario() -> None:
        first, second = service.create_session(), service.create_session()
        body = {"base_model": "base"}
        made = service.create_model({"session_id": first, "model_seq_id": 0, **body})
        promise = service.create_model({"session_id": second, "model_seq_id": 0, **body})
        await asyncio.sleep(0.05)
        service.heartbeat(first)
        assert "another client trains all weights" in (await done(service, promise))["error"]
        await done(service, made)
        service.end_session(first, "its client has ended")
        assert "error" not in await done(
            service, service.create_model({"session_id": second, "model_seq_id": 1, **body})
        )

    run(scenario())


def test_too_many_requests_are_put_off(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        monkeypatch.setattr(module, "MOST_PENDING", 3)
        for number in (5, 6, 7):
            service.passes(request(model, number))
        with pytest.raises(Refusal, match="3 requests wait") as refused:
            service.passes(request(model, 8))
        assert refused.value.status == 429

    run(scenario())


def test_old_results_are_forgotten_first(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        monkeypatch.setattr(module, "MOST_FUTURES", 4)
        first = service.passes(request(model, 1, is_forward=True))
        await done(service, first)
        for number in range(2, 9):
            await done(service, service.passes(request(model, number, is_forward=True)))
        with pytest.raises(Refusal, match="forgot its result"):
            await service.result(first["request_id"])
        with pytest.raises(Refusal, match="was used for another request"):
            service.passes(request(model, 1, is_forward=True))

    run(scenario())


def test_http_checks_key_body_and_route(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def answer(key: str | None, path: str, body: Any = None, **headers: str) -> httpx.Response:
            transport = httpx.ASGITransport(api.app(service, key))
            async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
                content = body if isinstance(body, bytes) else None
                json = None if isinstance(body, bytes) else body or {}
                sent = {name.replace("_", "-"): value for name, value in headers.items()}
                return await client.post(f"/api/v1/{path}", content=content, json=json, headers=sent)

        for key, given, status in (
            (None, {}, 401), (None, {"x_api_key": "other"}, 401), (None, KEY, 200), ("tml-a", KEY, 401),
            ("tml-a", {"x_api_key": "tml-a"}, 200),
        ):  # fmt: skip
            sent = {name.replace("-", "_"): value for name, value in given.items()}
            assert (await answer(key, "create_session", **sent)).status_code == status, (key, given)
        mine = {"x_api_key": "tml-any"}
        for path, body, status, words in (
            ("session_heartbeat", {"session_id": "x"}, 404, "there is no session"),
            ("create_custom_loss", {}, 501, "not supported"),
            ("optim_step", {}, 422, "model_id"),
            ("optim_step", b"[", 422, "not JSON"),
            ("optim_step", b"[]", 422, "no JSON object"),
            ("create_model", {"session_id": "x", "model_seq_id": 0}, 404, "there is no session"),
            ("weights_info", {"tinker_path": "tinker://../weights/a"}, 400, "no path"),
            ("asample", {"sampling_session_id": "x", "num_samples": 10**6}, 400, "num_samples"),
        ):
            response = await answer(None, path, body, **mine)
            assert response.status_code == status, (path, response.text)
            assert words in response.json()["detail"]
        monkeypatch.setattr(api, "BODY_LIMIT_BYTES", 1000)
        assert (await answer(None, "telemetry", b"x" * 2000, **mine)).status_code == 413

    run(scenario())
