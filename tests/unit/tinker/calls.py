"""Calls of a client, as the state of the API gets them, without HTTP."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from bridge.tinker import wire
from bridge.tinker.service import Job, Service
from bridge.tinker.training import Trainer
from bridge.tinker.wire import Datum, PassRequest

STEP = {"adam_params": {"learning_rate": 1e-3}}


@contextmanager
def served(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Yield a service whose jobs another thread does, as the main thread of the command does them."""
    monkeypatch.setattr(wire, "pass_result", lambda logprobs, metrics: {"logprobs": logprobs, "metrics": metrics})
    monkeypatch.setattr(wire, "sample_result", lambda found, *_: {"tokens": [one.tokens for one in found.sequences]})
    jobs: SimpleQueue[Job | None] = SimpleQueue()
    made = Service(trainer, jobs)  # type: ignore[arg-type]

    def work() -> None:
        while (job := jobs.get()) is not None:
            job()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield made
    finally:
        jobs.put(None)
        thread.join()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def done(service: Service, promise: dict[str, Any]) -> Any:
    """Poll until the result of a request is there."""
    while True:
        result = await service.result(promise["request_id"])
        if not (isinstance(result, dict) and result.get("type") == "try_again"):
            return result


async def new_model(service: Service, session: str | None = None, number: int = 0, **lora: Any) -> str:
    session = session or service.create_session()
    body = {
        "session_id": session, "model_seq_id": number, "base_model": "base", "lora_config": {"rank": 4, **lora},
    }  # fmt: skip
    created = await done(service, service.create_model(body))
    assert "error" not in created, created
    return str(created["model_id"])


def request(model: str, seq_id: int, *tokens: int, is_forward: bool = False) -> PassRequest:
    ids = tokens or (5, 6, 7, 8)
    inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)}
    return PassRequest(model, seq_id, "cross_entropy", {}, [Datum(ids[:-1], inputs)], is_forward)


async def step(service: Service, model: str, first: int) -> Any:
    service.passes(request(model, first))
    return await done(service, service.step({**STEP, "model_id": model, "seq_id": first + 1}))


def sampling(session: str, seq_id: int = 0) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    return {
        "sampling_session_id": session, "seq_id": seq_id, "prompt": prompt, "sampling_params": {"max_tokens": 3},
    }  # fmt: skip
