"""A fake Atropos API that keeps the first trainer and returns the batches a test provides, with its own clock.

Not covered: the real one (`tests/cpu/test_atropos.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from bridge.atropos import api, atropos_stream
from tests.unit.http_server import Answer, HttpRequest, as_json

Batch = list[dict[str, Any]]
LOST = Answer("Internal Server Error", 500)
MODELS = {"object": "list", "data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 1024}]}


def scored(*sequences: tuple[tuple[int, ...], int], **given: Any) -> dict[str, Any]:
    """Return a group of sequences, each given by its tokens and the length of its prompt."""
    tokens = [list(tokens) for tokens, _ in sequences]
    masks = [[-100] * start + list(tokens[start:]) for tokens, start in sequences]
    logprobs = [[1.0 if token == -100 else -0.5 for token in mask] for mask in masks]
    fixed = {"tokens": tokens, "masks": masks, "scores": [float(n) for n in range(len(tokens))], "env_id": 0}
    empty = dict.fromkeys(("advantages", "ref_logprobs", "messages", "generation_params", "overrides", "images"))
    return {**empty, **fixed, "inference_logprobs": logprobs, **given}


def pair(**given: Any) -> dict[str, Any]:
    """Return a valid group of two sequences."""
    return scored(((5, 6, 7, 8), 2), ((5, 6, 9), 2), **given)


@dataclass
class FakeApi:
    """The fake API, and the server that environments sample from."""

    settings: dict[str, Any] | None = None
    """What a trainer registered."""
    batches: list[Batch | Answer] = field(default_factory=list)
    """Batches to return, last one first."""
    num_waiting: int = 0
    """Groups in the queue."""
    largest: int = 4
    """Sequences of the largest group."""
    is_connected: bool = True
    """Whether an environment is connected."""
    has_strays: bool = False
    """Whether an environment sent groups before a trainer registered."""
    was_reset: bool = False
    """Whether it was reset while it ran."""
    health: Answer = field(default_factory=lambda: Answer(""))
    """The server's answer to `/health`."""
    models: dict[str, Any] = field(default_factory=lambda: MODELS)
    """The server's answer to `/v1/models`."""
    is_gone: Callable[[HttpRequest], bool] = lambda _: False
    """Whether the connection is dropped without an answer."""

    def __call__(self, request: HttpRequest) -> Answer | None:
        if self.is_gone(request):
            return None
        routes = {
            "/health": lambda _: self.health,
            "/v1/models": lambda _: as_json(self.models),
            "/info": self._info,
            "/register": self._register,
            "/batch": self._batch,
            "/status": lambda _: as_json({"current_step": 0, "queue_size": self.num_waiting}),
            "/status-env": self._status_env,
        }
        return routes[request.path](request)

    def _info(self, _: HttpRequest) -> Answer:
        settings = self.settings or {"batch_size": -1, "max_token_len": -1}
        return as_json({name: settings[name] for name in ("batch_size", "max_token_len")})

    def _register(self, request: HttpRequest) -> Answer:
        if self.settings is None and not self.has_strays:
            self.settings = request.body
        return as_json({"uuid": 1})

    def _batch(self, _: HttpRequest) -> Answer:
        if self.settings is None and self.was_reset:
            return LOST  # the real API looks for its queue, which no longer exists
        if self.settings is None:
            return as_json({"status": "error", "message": "Trainer not registered.", "batch": []})
        batch = self.batches.pop() if self.batches else None
        return batch if isinstance(batch, Answer) else as_json({"batch": batch})

    def _status_env(self, request: HttpRequest) -> Answer:
        assert request.body == {"env_id": 0}
        if not self.is_connected:
            return LOST
        status = {"current_step": 0, "queue_size": self.num_waiting, "max_group_size": self.largest, "env_weight": 1.0}
        return as_json(status)


@dataclass
class FakeTime:
    """A clock that advances only when something waits."""

    at: float = 0.0
    waits: list[float] = field(default_factory=list)
    happening: dict[float, Callable[[], None]] = field(default_factory=dict)
    """Time -> what happens then, once."""

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.at += seconds
        for when in sorted(when for when in self.happening if when <= self.at):
            self.happening.pop(when)()

    def monotonic(self) -> float:
        return self.at

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Replace the clock of the stream and of its client."""
        with mock.patch.object(atropos_stream, "time", self), mock.patch.object(api, "time", self):
            yield
