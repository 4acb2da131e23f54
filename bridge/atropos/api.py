"""Client of an Atropos API for trainers and environments, and the bodies of requests and responses.

Unknown keys in responses are ignored, because other versions of the API may add some.

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
"""Marks a token in `inference_logprobs` that is masked, or whose log-probability is unknown."""
NO_TRAINER = -1
"""The API reports this value instead of a trainer's settings until a trainer registers."""
WEIGHT_VERSIONS = "weight_versions"
"""Key in `overrides` for the weights that sampled a sequence: [version, number of sampled tokens] for each run of
consecutive tokens. Atropos passes it on; its own environments do not send it."""
LIMIT_S = 120.0
"""Longest wait for a response; a batch of long sequences is some ten megabytes of JSON."""
FIRST_WAIT_S = 0.25
"""Wait in seconds before the first retry of a request; doubled for each further retry."""
LONGEST_WAIT_S = 8.0
"""Longest wait before a retry."""

Numbers = tuple[float | None, ...]
"""An API writes null for NaN."""


class Body(BaseModel):
    """The body of a request or a response."""

    model_config = ConfigDict(frozen=True)


class TrainerInfo(Body):
    """The response of `GET /info`, with the values that the trainer registered; -1 if no trainer has registered."""

    batch_size: int
    """Number of sequences in a batch, which consists of complete groups."""
    max_token_len: int
    """Environments leave out groups with a sequence of this many tokens or more; 0 or less: no limit."""


class EnvironmentStatus(Body):
    """The response of `GET /status-env`."""

    queue_size: int
    """Number of queued groups that are not in a batch yet, in units of the environment's own group size."""
    current_step: int
    """Number of batches formed since the trainer's first step."""
    max_group_size: int = 1
    """Number of sequences in the largest queued group."""


class RegisteredEnvironment(Body):
    """The response of `POST /register-env`."""

    status: str
    """`success`, or that the environment must wait until a trainer requests its first batch."""
    env_id: int | None = None
    """Number of the environment, from 0, which it sends with every request."""
    starting_step: int | None = None
    num_steps: int | None = None


class ScoredGroup(Body):
    """One group in `POST /scored_data_list` or in a batch: the sequences for one problem.

    The API checks only types: neither that lengths match, nor that numbers are finite. A single non-finite number may
    cost the whole batch. An empty list means None.
    """

    tokens: tuple[tuple[int, ...], ...]
    """Each sequence from its first token: prompt, completion and, with several turns, the tokens between them."""
    masks: tuple[tuple[int, ...], ...]
    """-100 for each token that the model did not sample, otherwise the token itself; not shifted."""
    scores: Numbers
    """One reward per sequence."""
    advantages: tuple[Numbers, ...] | None = None
    """One per token, including the prompt, or one per sequence; None: computed from the scores."""
    inference_logprobs: tuple[Numbers, ...] | None = None
    """Log-probability of each token when it was sampled, in nats; 1 where masked or unknown. None: all unknown."""
    generation_params: dict[str, Any] | None = None
    """Sampling parameters."""
    overrides: tuple[dict[str, Any], ...] | None = None
    """For each sequence: `set_advantage_to_zero`, `temperature`, and Bridge's own `WEIGHT_VERSIONS`."""
    group_overrides: dict[str, Any] | None = None
    """Overrides for the group: `temperature`, `group_size`."""
    env_id: int | None = None
    """Number of the environment that sent it."""
    messages: Any = None
    """The sequences as chat messages."""
    images: Any = None
    ref_logprobs: Any = None
    """A reference model's log-probabilities."""
    distill_token_ids: Any = None
    """A teacher's likeliest tokens at each position."""
    distill_logprobs: Any = None


class Received(Body):
    """The response of `POST /scored_data_list`."""

    status: Literal["received"]
    """The API would report `buffered` for a group that is smaller than its environment's group size."""


class BatchAnswer(Body):
    """The response of `GET /batch`."""

    batch: tuple[ScoredGroup, ...] | None
    """The newest batch; None if no batch is complete yet."""
    status: str | None = None
    """`error` if no trainer is registered, in which case the batch is empty."""


Answer = TypeVar("Answer", bound=BaseModel)


class AtroposApi:
    """The connection of a trainer or an environment to an API.

    A request that did not reach the API is retried. A request that the API may have accepted is not retried if
    accepting it twice would make a difference. Every call raises AtroposError if the response is missing or invalid.
    """

    def __init__(self, url: str, *, max_retries: int = 4) -> None:
        """Create the client without connecting.

        Raises:
            UsageError: `url` is not a valid URL.
        """
        self.url = url.rstrip("/")
        self.num_retries = 0
        """Number of requests retried so far."""
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
        """Return the settings that the trainer registered."""
        return self._parsed(self._send("GET", "info"), TrainerInfo)

    def register(self, trainer: TrainerInfo, **other: str | int) -> None:
        """Register a trainer. If one is registered already, the API silently keeps it: check `info` afterwards.

        `other` holds optional fields of the API: `wandb_group` and `wandb_project` for the environments' runs,
        `checkpoint_dir`, where environments save their state every `save_checkpoint_interval` steps (0 or less:
        never), `starting_step` (steps taken before), and `num_steps`, after which environments stop.
        """
        self._checked(self._send("POST", "register", trainer.model_dump() | other))

    def batch(self) -> BatchAnswer | None:
        """Take the newest batch out of the API; None if the API failed to encode a batch, which is then lost.

        Environments start after the first call.
        """
        response = self._send("GET", "batch")
        return None if response.is_server_error else self._parsed(response, BatchAnswer)

    def register_environment(self, name: str, *, group_size: int, max_token_length: int) -> RegisteredEnvironment:
        """Register an environment, which must wait until a trainer has requested its first batch.

        The API appends a number to `name`. All environments contribute equal shares to a batch.
        """
        body = {"desired_name": name, "group_size": group_size, "max_token_length": max_token_length, "weight": 1.0}
        return self._parsed(self._send("POST", "register-env", body), RegisteredEnvironment)

    def environment_status(self, env_id: int) -> EnvironmentStatus | None:
        """Return the queue's status for an environment; None if no environment with this number is connected."""
        response = self._send("GET", "status-env", {"env_id": env_id})
        return None if response.is_server_error else self._parsed(response, EnvironmentStatus)

    def send(self, groups: Sequence[ScoredGroup]) -> None:
        """Put groups into the queue. They must not hold non-finite numbers, which would cost a whole batch."""
        body = [group.model_dump(exclude_none=True) for group in groups]
        self._parsed(self._send("POST", "scored_data_list", body), Received)

    def disconnect_environment(self, env_id: int) -> None:
        """Report that an environment will send no more groups."""
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
            hint="start it with run-api (pip install atroposlib), or name a different one with --atropos-url; a"
            " stopped run resumes with --resume",
        )
