"""Client of an Atropos API, for a trainer or an environment, and the bodies that both sides send and get.

Unknown keys in answers are ignored: another version of the API may add some.

Source: atroposlib 0.4.0, `atroposlib/api/server.py`.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from bridge.errors import AtroposError, UsageError
from bridge.server.limited_http import MAX_SAMPLED_BYTES, LimitedTransport

MASKED = -100
"""Marks a token in `masks` that the model did not sample."""
UNKNOWN_LOGPROB = 1.0
"""Marks a token in `inference_logprobs` that is masked or whose log-probability is unknown."""
NO_TRAINER = -1
"""Answer of an API instead of a trainer's settings before a trainer registers."""
WEIGHT_VERSIONS = "weight_versions"
"""In `overrides`, which weights sampled a sequence: [version, number of sampled tokens] for each run of tokens.
Atropos passes it on; its own environments do not send it."""
LIMIT_S = 120.0
"""Longest wait for an answer: a batch of long sequences is some ten megabytes of JSON."""
FIRST_WAIT_S = 0.25
"""Seconds before the first retry of a request; doubled each time."""
LONGEST_WAIT_S = 8.0
"""Longest wait before a retry."""

Numbers = tuple[float | None, ...]
"""An API writes null for NaN."""


class Body(BaseModel):
    """A request or an answer."""

    model_config = ConfigDict(frozen=True)


class TrainerInfo(Body):
    """The answer of `GET /info`, as the trainer registered it; -1 if none has."""

    batch_size: int
    """Sequences of one batch, which is made of whole groups."""
    max_token_len: int
    """Environments leave out groups with a sequence of at least this many tokens; 0 or less: no limit."""


class EnvironmentStatus(Body):
    """The answer of `GET /status-env`."""

    queue_size: int
    """Groups that wait and are in no batch yet, counted in the environment's own group size."""
    current_step: int
    """Batches formed since the trainer's first step."""
    max_group_size: int = 1
    """Sequences in the largest group that waits."""


class RegisteredEnvironment(Body):
    """The answer of `POST /register-env`."""

    status: str
    """`success`, or what the environment has to wait for: a trainer that requests its first batch."""
    env_id: int | None = None
    """Number of the environment, from 0; it sends it with everything."""
    starting_step: int | None = None
    num_steps: int | None = None


class ScoredGroup(Body):
    """One group of `POST /scored_data_list` and of a batch: sequences of one problem.

    The API checks the types, but neither that lengths agree nor that numbers are finite: one that is not may cost the
    whole batch. An empty list stands for None.
    """

    tokens: tuple[tuple[int, ...], ...]
    """Each sequence from its first token: the prompt, the completion, and whatever came between several."""
    masks: tuple[tuple[int, ...], ...]
    """-100 for each token that the model did not sample, else the token; not shifted."""
    scores: Numbers
    """One reward per sequence."""
    advantages: tuple[Numbers, ...] | None = None
    """One per token, prompt included, or one per sequence; None: they come from the scores."""
    inference_logprobs: tuple[Numbers, ...] | None = None
    """Log-probability of each token when it was sampled, in nats; 1 where masked or unknown. None: unknown."""
    generation_params: dict[str, Any] | None = None
    """Sampling parameters."""
    overrides: tuple[dict[str, Any], ...] | None = None
    """Per sequence: `set_advantage_to_zero`, `temperature`, and Bridge's own `WEIGHT_VERSIONS`."""
    group_overrides: dict[str, Any] | None = None
    """Overrides of the whole group: `temperature`, `group_size`."""
    env_id: int | None = None
    """Number of the environment that sent it."""
    messages: Any = None
    """The sequences as chat messages."""
    images: Any = None
    ref_logprobs: Any = None
    """A reference model's log-probabilities."""
    distill_token_ids: Any = None
    """A teacher's likeliest tokens at each place."""
    distill_logprobs: Any = None


class Received(Body):
    """The answer of `POST /scored_data_list`."""

    status: Literal["received"]
    """It would be `buffered` for a group that is smaller than its environment's groups are."""


class BatchAnswer(Body):
    """The answer of `GET /batch`."""

    batch: tuple[ScoredGroup, ...] | None
    """The newest batch; None: there is none yet."""
    status: str | None = None
    """`error` if no trainer is registered; the batch is empty then."""


Answer = TypeVar("Answer", bound=BaseModel)


class AtroposApi:
    """The connection of one trainer, or of one environment, to an API.

    A request that did not reach the API is retried. One that the API may have accepted is not, if accepting it twice
    would make a difference. Every call raises AtroposError if there is no answer, or one that cannot be used.
    """

    def __init__(self, url: str, *, max_retries: int = 4) -> None:
        """Open no connection yet.

        Raises:
            UsageError: `url` is not an address.
        """
        self.url = url.rstrip("/")
        self.num_retries = 0
        """Requests that were sent again, so far."""
        self._max_retries = max_retries
        try:
            transport = LimitedTransport(MAX_SAMPLED_BYTES, trust_env=False)
            self._http = httpx.Client(base_url=self.url, timeout=LIMIT_S, trust_env=False, transport=transport)
        except httpx.InvalidURL as error:
            raise UsageError(
                f"{self.url!r} is not the address of an Atropos API", hint="--atropos-url http://127.0.0.1:8000"
            ) from error

    def close(self) -> None:
        self._http.close()

    def info(self) -> TrainerInfo:
        """Return what the trainer registered."""
        return self._parsed(self._send("GET", "info"), TrainerInfo)

    def register(self, trainer: TrainerInfo, **other: str | int) -> None:
        """Register a trainer; an API that has one silently keeps that one: compare `info` afterwards.

        `other` are the API's own fields: `wandb_group` and `wandb_project` of the environments' runs, `checkpoint_dir`
        for a state of theirs every `save_checkpoint_interval` steps (0 or less: none), `starting_step` (steps that were
        taken before), and `num_steps`, after which they stop.
        """
        self._checked(self._send("POST", "register", trainer.model_dump() | other))

    def batch(self) -> BatchAnswer | None:
        """Take the newest batch out of the API; None: the API could not encode one, which is lost.

        The first call lets environments begin.
        """
        response = self._send("GET", "batch")
        return None if response.is_server_error else self._parsed(response, BatchAnswer)

    def register_environment(self, name: str, *, group_size: int, max_token_length: int) -> RegisteredEnvironment:
        """Register an environment; it has to wait until a trainer has requested its first batch.

        The API adds a number to `name`. Of several environments each gets the same share of a batch.
        """
        body = {"desired_name": name, "group_size": group_size, "max_token_length": max_token_length, "weight": 1.0}
        return self._parsed(self._send("POST", "register-env", body), RegisteredEnvironment)

    def environment_status(self, env_id: int) -> EnvironmentStatus | None:
        """Return what waits, as one environment sees it; None: no environment of that number is connected."""
        response = self._send("GET", "status-env", {"env_id": env_id})
        return None if response.is_server_error else self._parsed(response, EnvironmentStatus)

    def send(self, groups: Sequence[ScoredGroup]) -> None:
        """Put groups into the queue; a number in them that is not finite would cost a whole batch."""
        body = [group.model_dump(exclude_none=True) for group in groups]
        self._parsed(self._send("POST", "scored_data_list", body), Received)

    def disconnect_environment(self, env_id: int) -> None:
        """Report that an environment sends nothing more."""
        self._checked(self._send("POST", "disconnect-env", {"env_id": env_id}))

    def _send(self, method: str, route: str, body: object = None) -> httpx.Response:
        retried = httpx.TransportError if method == "GET" else httpx.ConnectError
        attempt = 0
        while True:
            try:
                return self._http.request(method, f"/{route}", json=body)
            except (httpx.TransportError, httpx.DecodingError) as error:
                if attempt == self._max_retries or not isinstance(error, retried):
                    raise self._lost(f"{type(error).__name__}: {error}") from error
            time.sleep(min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S))
            attempt += 1
            self.num_retries += 1

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if not response.is_success:
            words = " ".join(response.text.split())[:200]
            raise self._lost(f"{response.request.url.path} answered {response.status_code}: {words}")
        return response

    def _parsed(self, response: httpx.Response, kind: type[Answer]) -> Answer:
        try:
            return kind.model_validate_json(self._checked(response).content)
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(map(str, fault["loc"])) or "body"
            route = response.request.url.path
            raise self._lost(f"{route} sent an invalid response: {field}: {fault['msg']}") from error

    def _lost(self, reason: str) -> AtroposError:
        return AtroposError(
            f"the Atropos API at {self.url} does not answer as expected ({reason})",
            hint="start it with run-api (pip install atroposlib), or name another with --atropos-url; a run that was"
            " stopped resumes with --resume",
        )
