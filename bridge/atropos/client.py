"""Talk to an Atropos API, as a trainer or as an environment, over one pooled connection.

A request that did not reach the API is sent again after a while; one that may have been taken in is not, where that
would double what it says.

Not covered: the bodies (`protocol.py`), what becomes of a batch (`experience.py`).
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from bridge.atropos.protocol import (
    BatchAnswer,
    EnvironmentId,
    EnvironmentRegistration,
    EnvironmentStatus,
    Info,
    Received,
    RegisteredEnvironment,
    ScoredGroup,
    Status,
    TrainerRegistration,
)
from bridge.errors import AtroposError, UsageError

Answer = TypeVar("Answer", bound=BaseModel)
LIMIT_S = 120.0
"""Longest wait for an answer: a batch of long sequences is some ten megabytes of JSON."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0
"""Seconds until a request is sent again; each time twice as long."""
GROUPS = TypeAdapter(tuple[ScoredGroup, ...])


class AtroposApi:
    """The connection of one trainer, or of one environment, to an API.

    Every call raises AtroposError when the API does not answer, however often it is asked, or answers nonsense.
    """

    def __init__(self, url: str, *, max_retries: int = 4, sleep: Callable[[float], None] = time.sleep) -> None:
        """Open no connection yet.

        Raises:
            UsageError: `url` is no address.
        """
        self.url = url.rstrip("/")
        self.num_retries = 0
        """Requests that were sent again, so far."""
        self._max_retries, self._sleep = max_retries, sleep
        _refuse_no_address(self.url)
        self._http = httpx.Client(base_url=self.url, timeout=LIMIT_S, trust_env=False)

    def __enter__(self) -> Self:
        """Use the connection in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def info(self) -> Info:
        """Return what the trainer registered."""
        return self._ask("GET", "info", None, Info)

    def register(self, trainer: TrainerRegistration) -> None:
        """Register a trainer; an API that has one keeps that one without a word: compare `info` afterwards."""
        self._told(self._send("POST", "register", trainer.model_dump_json()))

    def batch(self) -> BatchAnswer | None:
        """Take the newest batch out of the API; None: the API failed at writing one down, which is lost.

        The first call lets environments begin.
        """
        response = self._send("GET", "batch", None)
        return None if response.is_server_error else self._parsed(response, BatchAnswer)

    def status(self) -> Status:
        """Return what waits."""
        return self._ask("GET", "status", None, Status)

    def register_environment(self, environment: EnvironmentRegistration) -> RegisteredEnvironment:
        """Register an environment, which has to wait until a trainer asked for its first batch."""
        return self._ask("POST", "register-env", environment.model_dump_json(), RegisteredEnvironment)

    def environment_status(self, env_id: int) -> EnvironmentStatus | None:
        """Return what waits, as one environment sees it; None: there is none of that number, or none is connected."""
        response = self._send("GET", "status-env", EnvironmentId(env_id=env_id).model_dump_json())
        return None if response.is_server_error else self._parsed(response, EnvironmentStatus)

    def send(self, groups: Sequence[ScoredGroup]) -> None:
        """Put groups into the queue; every number in them has to be finite, or a whole batch is lost."""
        body = GROUPS.dump_json(tuple(groups), exclude_none=True).decode()
        answer = self._ask("POST", "scored_data_list", body, Received)
        assert answer.status == "received", answer

    def disconnect_environment(self, env_id: int) -> None:
        """Say that an environment sends nothing any more."""
        self._told(self._send("POST", "disconnect-env", EnvironmentId(env_id=env_id).model_dump_json()))

    def _ask(self, method: str, route: str, content: str | None, kind: type[Answer]) -> Answer:
        return self._parsed(self._send(method, route, content), kind)

    def _send(self, method: str, route: str, content: str | None) -> httpx.Response:
        again = httpx.TransportError if method == "GET" else httpx.ConnectError
        for wait_s in (*self._waits(), None):
            try:
                return self._http.request(
                    method, f"/{route}", content=content, headers={"content-type": "application/json"}
                )
            except (httpx.TransportError, httpx.DecodingError) as error:
                if wait_s is None or not isinstance(error, again):
                    raise self._gone(f"{type(error).__name__}: {error}") from error
                self.num_retries += 1
                self._sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _waits(self) -> list[float]:
        return [min(FIRST_WAIT_S * 2**number, LONGEST_WAIT_S) for number in range(self._max_retries)]

    def _told(self, response: httpx.Response) -> Any:
        if not response.is_success:
            words = " ".join(response.text.split())[:200]
            raise self._gone(f"{response.request.url.path} answered {response.status_code}: {words}")
        return response

    def _parsed(self, response: httpx.Response, kind: type[Answer]) -> Answer:
        try:
            return kind.model_validate_json(self._told(response).content)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"])) or "body"
            route = response.request.url.path
            raise self._gone(f"{route} answered nonsense: {place}: {fault['msg']}") from error

    def _gone(self, reason: str) -> AtroposError:
        return AtroposError(
            f"the Atropos API at {self.url} does not answer as expected ({reason})",
            remedy="start it with run-api (pip install atroposlib), or name another with --atropos-url; a run that was"
            " stopped goes on with --resume",
        )


def _refuse_no_address(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise UsageError(f"{url!r} is no address of an Atropos API", remedy="--atropos-url http://127.0.0.1:8000")
