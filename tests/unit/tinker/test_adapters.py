"""Adapters of several clients over a patched server without vLLM: what each samples from, and what outlives it.

Not covered: what both kinds of weights have in common (`test_service.py`), what vLLM computes (`tests/cpu`).
"""

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bridge
from bridge.core.http_limits import Refusal
from bridge.modes.lora import AdapterSnapshot
from bridge.tinker import adapters as module
from bridge.tinker import service as service_module
from bridge.tinker.adapters import Adapters
from bridge.tinker.paths import Checkpoints, SavedPath
from bridge.tinker.service import Service
from bridge.tinker.training import SamplingClient
from bridge.tinker.wire import Datum, PassRequest
from bridge.weights.adapter import AdapterCopy
from tests.scenarios import LiveServer
from tests.unit import patched_server
from tests.unit.patched_server import Sampled
from tests.unit.tinker import calls
from tests.unit.tinker.calls import done, new_model, request, run, sampling, step

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("tinker")]


NUM_SLOTS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with patched_server.tiny_llama(tmp_path_factory.mktemp("server"), num_slots=NUM_SLOTS) as served:
        yield served


@pytest.fixture(scope="module")
def without_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose slots are not shared, so that vLLM loads adapters from folders."""
    with patched_server.tiny_llama(tmp_path_factory.mktemp("without_slots")) as served:
        yield served


@pytest.fixture
def service(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with made(server, tmp_path, monkeypatch) as service:
        yield service


@contextmanager
def made(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    lora = bridge.LoraConfig(r=8, alpha=32)
    with closing(bridge.attach(server.path, lora=lora, several_adapters=True)) as policy:
        trainer = Adapters(policy, "base", Checkpoints(tmp_path / "runs"), most_models=2)
        with calls.served(trainer, monkeypatch) as service:
            yield service


def loaded(server: LiveServer) -> list[str]:
    answer = httpx.get(f"{server.manifest.url}/v1/models", trust_env=False).json()
    return [model["id"] for model in answer["data"][1:]]


def sampled(server: LiveServer) -> list[Sampled]:
    """Return what requests have sampled from; none of them has seen its slot change."""
    found: list[Sampled] = httpx.get(f"{server.manifest.url}/sampled", trust_env=False).json()
    assert all(one["is_same"] for one in found)
    return found


def sampled_from(server: LiveServer) -> tuple[str, str]:
    """Return the model that was sampled last, and a digest of its slot."""
    last = sampled(server)[-1]
    return last["model"].partition("~")[0], last["held"]


async def client(service: Service, model: str, seq_id: int, **more: Any) -> str:
    """Return a sampling client of a model."""
    made = await done(service, service.save_for_sampler({"model_id": model, "seq_id": seq_id, **more}))
    if "path" not in made:
        return str(made["sampling_session_id"])
    body = {"session_id": model.partition(":")[0], "sampling_session_seq_id": seq_id, "model_path": made["path"]}
    return service.create_sampling_session(body)


async def sample(service: Service, sampler: str, seq_id: int = 0) -> Any:
    return await done(service, service.sample(sampling(sampler, seq_id)))


async def refused(service: Service, *models: str) -> str:
    """Ask for another model while the clients of these show signs of life; return the error."""
    body = {"session_id": service.create_session(), "model_seq_id": 0, "base_model": "base"}
    promise = service.create_model(body)
    await asyncio.sleep(0.05)
    for model in models:
        service.heartbeat(model.partition(":")[0])
    return str((await done(service, promise))["error"])


@pytest.mark.parametrize("has_slots", [True, False])
def test_each_client_samples_from_its_own_weights(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_slots: bool
) -> None:
    server: LiveServer = request.getfixturevalue("server" if has_slots else "without_slots")

    async def scenario(service: Service) -> None:
        one, two = await new_model(service), await new_model(service)
        first = await client(service, one, 1)
        live = await client(service, one, 2, kind="inflight")
        named = await client(service, one, 3, path="named")
        other = await client(service, two, 1)
        base = service.create_sampling_session(
            {"session_id": two.partition(":")[0], "sampling_session_seq_id": 9, "base_model": "base"}
        )
        names = []
        for sampler in (first, live, named, other, base):
            assert "tokens" in await sample(service, sampler)
            names.append(sampled_from(server))
        assert len({*names}) == 5
        assert names[-1] == (server.manifest.model, "")
        await step(service, one, 4)
        after = []
        for sampler in (first, live, named, other, base):
            assert "tokens" in await sample(service, sampler, 1)
            after.append(sampled_from(server))
        assert [a == b for a, b in zip(after, names, strict=True)] == [True, False, True, True, True]
        assert len({held for _, held in (*names, *after)}) == (4 if has_slots else 1), "one, two, one's step, no slot"

    with made(server, tmp_path, monkeypatch) as service:
        run(scenario(service))


def test_a_snapshot_has_the_weights_of_its_turn(service: Service) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        await client(service, model, 1)
        service.passes(request(model, 2))
        service.step({**calls.STEP, "model_id": model, "seq_id": 3})
        await client(service, model, 4)
        trainer = service.trainer
        assert isinstance(trainer, Adapters)
        folders = [kept.adapter.folder.result() for kept in trainer._snapshots.values()]
        before, after = (load_file(folder / "adapter_model.safetensors") for folder in folders)
        assert all(not tensor.any() for name, tensor in before.items() if "lora_B" in name)
        assert all(tensor.any() for name, tensor in after.items() if "lora_B" in name)

    run(scenario())


def test_a_snapshot_is_sampled_before_it_is_written(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = AdapterCopy.save

    def later(copied: AdapterCopy, folder: Path) -> None:
        assert may_write.wait(60)
        write(copied, folder)

    async def scenario() -> None:
        one, two = await new_model(service), await new_model(service)
        monkeypatch.setattr(AdapterCopy, "save", later)
        sampler = await client(service, one, 1)
        await step(service, two, 1)
        await step(service, one, 2)
        assert "tokens" in await sample(service, sampler)
        may_write.set()

    run(scenario())


@pytest.mark.parametrize("has_slots", [True, False])
def test_a_snapshot_without_disk_space_is_said(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_slots: bool,
) -> None:
    """A slot is filled from memory; a folder that vLLM should load is not there."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario(service: Service) -> None:
        model = await new_model(service)
        with monkeypatch.context() as patched:
            patched.setattr(AdapterCopy, "save", full)
            sampler = await client(service, model, 1)
            for number in range(2):
                answer = await sample(service, sampler, number)
                assert ("tokens" in answer) == has_slots
        said = caplog.text if has_slots else answer["error"]
        assert "cannot write" in said
        assert "No space left on device" in said
        assert "tokens" in await sample(service, await client(service, model, 2))

    with made(request.getfixturevalue("server" if has_slots else "without_slots"), tmp_path, monkeypatch) as service:
        run(scenario(service))


def test_snapshots_beyond_the_slots_are_each_sampled_whole(service: Service, server: LiveServer) -> None:
    """More snapshots than slots are sampled at once, by several requests each, while the adapters are trained."""

    async def scenario() -> None:
        models = [await new_model(service), await new_model(service)]
        samplers = list[str]()
        for number in range(NUM_SLOTS):
            for model in models:
                samplers.append(await client(service, model, 1 + 3 * number))
                await step(service, model, 2 + 3 * number)
        before = len(sampled(server))
        for turn in range(2):
            asked = [sample(service, sampler, 5 * turn + number) for number in range(5) for sampler in samplers]
            steps = (step(service, model, 1 + 3 * NUM_SLOTS + 2 * turn) for model in models)
            answers = await asyncio.gather(*asked, *steps)
            assert all("tokens" in answer for answer in answers[: len(asked)]), answers
        held = dict[str, set[str]]()
        seen = sampled(server)[before:]
        assert len({one["model"] for one in seen}) > len(samplers), "a new name each time that a slot is filled"
        for one in seen:
            held.setdefault(one["model"].partition("~")[0], set()).add(one["held"])
        assert len(held) == len(samplers)
        assert all(len(digests) == 1 for digests in held.values()), "the same weights each time"
        assert len({*map(min, held.values())}) == len(samplers), "and different ones for each"

    run(scenario())


def test_a_canceled_request_keeps_no_snapshot(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        await client(service, await new_model(service), 1)
        trainer = service.trainer
        assert isinstance(trainer, Adapters)
        ((name, snapshot),) = trainer._snapshots.items()
        is_dropping, may_end, has_dropped = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def drop_slowly() -> None:
            is_dropping.set()
            await may_end.wait()
            has_dropped.set()

        monkeypatch.setattr(trainer, "_drop_old", drop_slowly)

        async def ask() -> None:
            async with trainer.serving(SamplingClient(snapshot=name)):
                pass

        asked = asyncio.ensure_future(ask())
        await is_dropping.wait()
        assert snapshot.num_sampling == 1
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert snapshot.num_sampling == 0
        may_end.set()
        await asyncio.wait_for(has_dropped.wait(), 60)

    run(scenario())


def test_canceled_requests_leave_one_thread_and_its_slot(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        samplers = [await client(service, model, 1), await client(service, model, 2)]
        may_serve, serve, waiting, most, names = threading.Event(), service.policy.serve_snapshot, 0, 0, list[str]()

        def slowly(name: str, snapshot: AdapterSnapshot) -> None:
            nonlocal waiting, most
            names.append(name)
            waiting += 1
            most = max(most, waiting)
            assert may_serve.wait(60)
            serve(name, snapshot)
            waiting -= 1

        monkeypatch.setattr(service.policy, "serve_snapshot", slowly)
        for number in range(3):
            for sampler in samplers:
                promise = service.sample(sampling(sampler, number))
                await asyncio.sleep(0.05)
                service.cancel(promise["request_id"])
                assert "cancelled" in (await done(service, promise))["error"]
        later = [sample(service, sampler, 5) for sampler in samplers]
        may_serve.set()
        assert all("tokens" in answer for answer in await asyncio.gather(*later))
        assert most == 1
        assert len(names) == len({*names}) == 2

    run(scenario())


@pytest.mark.parametrize("has_slots", [True, False])
def test_a_checkpoint_that_was_written_again_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_slots: bool
) -> None:
    async def scenario(service: Service) -> None:
        model = await new_model(service)
        earlier = await client(service, model, 1, path="named")
        path = f"tinker://{model}/sampler_weights/named"
        await step(service, model, 2)
        service.trainer.checkpoints.delete(SavedPath.parse(path))
        await done(service, service.save_for_sampler({"model_id": model, "seq_id": 4, "path": "named"}))
        assert "was deleted or written again" in (await sample(service, earlier))["error"]
        body = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 9, "model_path": path}
        assert "tokens" in await sample(service, service.create_sampling_session(body))

    with made(request.getfixturevalue("server" if has_slots else "without_slots"), tmp_path, monkeypatch) as service:
        run(scenario(service))


def test_old_snapshots_are_dropped_and_named_ones_stay(
    service: Service, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(module, "MOST_UNNAMED", 2)
        model = await new_model(service)
        named = await client(service, model, 1, path="named")
        live = await client(service, model, 2, kind="inflight")
        samplers = []
        for number in range(4):
            samplers.append(await client(service, model, 3 + number))
            assert "tokens" in await sample(service, samplers[-1])
            assert "tokens" in await sample(service, live, number)
        outcomes = [await sample(service, sampler, 1) for sampler in samplers]
        assert ["tokens" in outcome for outcome in outcomes] == [False, False, True, True]
        assert "this snapshot is gone: 2 newer ones" in outcomes[0]["error"]
        assert "tokens" in await sample(service, named)
        assert len(loaded(server)) == 4
        scratch = [kept.adapter.folder.result() for kept in service.trainer._snapshots.values()]  # type: ignore[attr-defined]
        assert all(folder.is_dir() for folder in scratch)

    run(scenario())


def test_an_ended_client_leaves_only_what_it_named(service: Service, server: LiveServer) -> None:
    async def scenario() -> None:
        one, two = await new_model(service), await new_model(service)
        assert "2 adapters are trained already" in await refused(service, one, two)
        named = await client(service, one, 1, path="named")
        unnamed = [await client(service, one, number) for number in (2, 3)]  # and a slot for the other client
        for sampler in (named, *unnamed):
            await sample(service, sampler)
        await step(service, one, 4)
        session = one.partition(":")[0]
        service.end_session(session, "its client has ended")
        third = await new_model(service)
        with pytest.raises(Refusal, match=r"its weights are at tinker://\S+/weights/freed-1"):
            service.passes(request(one, 6))
        other = await client(service, two, 1)
        at_once = await asyncio.gather(*(sample(service, other, number) for number in range(4)))
        assert all("tokens" in answer for answer in at_once), at_once
        assert len(loaded(server)) == 2, "the named one, and the other client's"
        path = f"tinker://{one}/weights/freed-1"
        body = {"model_id": third, "seq_id": 1, "path": path, "optimizer": True}
        assert "error" not in await done(service, service.load_weights(body))
        assert "metrics" in await step(service, third, 2)

    run(scenario())


def test_a_repeated_start_is_done_once_although_there_is_no_room(service: Service) -> None:
    async def scenario() -> None:
        one = await new_model(service)
        session = service.create_session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        once = service.create_model(body)
        await done(service, once)
        assert service.create_model(body) == once
        assert (await done(service, once))["model_id"] == once["model_id"]
        assert "2 adapters are trained already" in await refused(service, one, once["model_id"])
        assert len(service.trainer.models) == 2

    run(scenario())


def test_a_new_client_waits_for_one_that_ended_without_a_word(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        watching = asyncio.ensure_future(service.free_silent_sessions())
        ended, alive = await new_model(service), await new_model(service)
        await step(service, ended, 1)
        session = service.create_session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        promise = service.create_model(body)
        monkeypatch.setattr(service_module, "SILENT_S", 1.0)
        while not service._futures[promise["request_id"]].done():
            for name in (session, alive.partition(":")[0]):
                service.heartbeat(name)
            await asyncio.sleep(0.1)
        assert "error" not in await done(service, promise)
        assert {*service.trainer.models} == {alive, promise["model_id"]}
        watching.cancel()

    run(scenario())


def test_clients_in_turn_train_as_if_alone(service: Service) -> None:
    async def scenario() -> None:
        losses = []
        for number in range(2):
            model = await new_model(service, seed=7)
            losses.append([(await step(service, model, 1 + 2 * k))["metrics"] for k in range(3)])
            service.end_session(model.partition(":")[0], "done")
            assert number in (0, 1)
        one, two = await new_model(service, seed=7), await new_model(service, seed=8)
        beside = []
        for k in range(3):
            service.passes(request(one, 1 + 2 * k))
            await step(service, two, 1 + 2 * k)
            beside.append(await done(service, service.step({**calls.STEP, "model_id": one, "seq_id": 2 + 2 * k})))
        norms = [[each["unclipped_grad_l2:mean"] for each in of_model] for of_model in losses]
        assert norms[0] == norms[1] == [each["metrics"]["unclipped_grad_l2:mean"] for each in beside]

    run(scenario())


def test_chosen_modules_and_rank_are_saved(service: Service, tmp_path: Path) -> None:
    async def scenario() -> None:
        lora = {"rank": 4, "train_mlp": False, "train_unembed": False}
        session = service.create_session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": lora}
        model = (await done(service, service.create_model(body)))["model_id"]
        await step(service, model, 1)
        saved = await done(service, service.save({"model_id": model, "seq_id": 3, "path": "one"}))
        folder = tmp_path / "runs" / model.replace(":", "_") / "weights" / "one"
        tensors = load_file(folder / "adapter_model.safetensors")
        assert {min(tensor.shape) for tensor in tensors.values()} == {4}
        assert all("self_attn" in name for name in tensors)
        body = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        resumed = (await done(service, service.load_weights(body)))["model_id"]
        assert service.info(resumed)["lora_rank"] == 4
        first, second = [await step(service, name, number) for name, number in ((model, 4), (resumed, 1))]
        assert first["metrics"]["unclipped_grad_l2:mean"] == second["metrics"]["unclipped_grad_l2:mean"]

    run(scenario())


def test_each_step_is_a_line_of_the_models_run(service: Service, tmp_path: Path) -> None:
    async def scenario() -> None:
        model = await new_model(service)
        tokens, sampled = (5, 6, 7, 8), np.array([0.0, -1.5, -2.5])
        inputs = {"target_tokens": np.array(tokens[1:]), "logprobs": sampled, "advantages": np.array([0.0, 1.0, 1.0])}
        datum = Datum(tokens[:-1], inputs)
        found = await done(service, service.passes(PassRequest(model, 1, "importance_sampling", {}, [datum], False)))
        for number in (2, 3):
            service.passes(request(model, number))
        await done(service, service.step({**calls.STEP, "model_id": model, "seq_id": 4}))
        await step(service, model, 5)
        lines = (tmp_path / "runs" / model.replace(":", "_") / "run" / "metrics.jsonl").read_text().splitlines()
        first, second = map(json.loads, lines)
        assert (first["step"], second["step"]) == (1, 2)
        assert (first["tokens_trained"], second["tokens_trained"]) == (2 + 3 + 3, 3)
        assert first["lr"] == 1e-3
        assert first["grad_norm"] > 0
        apart = np.abs(found["logprobs"][0][1:] - sampled[1:])
        assert first["logprob_diff_max"] == pytest.approx(apart.max(), rel=1e-3)
        assert first["logprob_diff_mean"] == pytest.approx(apart.mean(), rel=1e-3)
        assert "logprob_diff_max" not in second

    run(scenario())


def test_a_stalled_server_ends_no_session(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(service_module, "SILENT_S", 2.0)
        monkeypatch.setattr(service_module, "PERIOD_S", 0.1)
        watching = asyncio.ensure_future(service.free_silent_sessions())
        await asyncio.sleep(0.05)
        session = service.create_session()
        time.sleep(3.0)  # noqa: ASYNC251 - nothing is heard meanwhile
        await asyncio.sleep(0.5)
        service.heartbeat(session)
        until = time.monotonic() + 60
        while session in service.sessions:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
        watching.cancel()

    run(scenario())


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 9}, "the adapter's rank is 9, expected 1 to 8"),
        ({"rank": 0}, "--all-weights"),
        ({"rank": 4, "train_mlp": False, "train_attn": False}, "no modules to train"),
    ],
)
def test_an_impossible_adapter_is_refused(service: Service, lora: dict[str, Any], words: str) -> None:
    async def scenario() -> None:
        body = {"model_seq_id": 0, "base_model": "base", "lora_config": lora}
        made = await done(service, service.create_model({"session_id": service.create_session(), **body}))
        assert words in made["error"]
        assert not service.trainer.models

    run(scenario())


def test_every_model_is_saved_at_the_end(service: Service) -> None:
    async def scenario() -> None:
        models = [await new_model(service), await new_model(service)]
        for model in models:
            await step(service, model, 1)
        rescued = await asyncio.to_thread(service.trainer.rescue)
        assert rescued == [f"tinker://{model}/weights/interrupted-1" for model in models]
        assert not await asyncio.to_thread(service.trainer.rescue)

    run(scenario())


def test_gradients_are_zero_outside_the_adapter(service: Service) -> None:
    """A lower rank is zeros in the full matrices, which no step may change."""

    async def scenario() -> None:
        model = await new_model(service)
        await step(service, model, 1)
        adapter = service.policy.opened.adapter
        assert adapter is not None
        for matrices in adapter.modules.values():
            assert torch.count_nonzero(matrices.lora_a[4:]) == torch.count_nonzero(matrices.lora_b[:, 4:]) == 0
            assert matrices.lora_b[:, :4].any()

    run(scenario())
