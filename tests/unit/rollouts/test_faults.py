"""Servers that fail, hang, lie or die: every prompt gets exactly one response, or a one-line error says why not."""

import asyncio
import gc
import inspect
import os
import re
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from bridge.config import SamplingConfig
from bridge.core.concurrency import gather_or_cancel
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import BridgeError, RewardError, ServerUnreachableError, UsageError
from bridge.rollouts.event_loop import EventLoop
from bridge.rollouts.groups import MOST_UNUSABLE, Completions, Sampled, Unusable, scored_group
from bridge.rollouts.openai_api import RequestFailed
from bridge.rollouts.sampler import FIRST_WAIT_S, WAIT_LIMIT_S, Sampler, wait_s
from bridge.rollouts.servers import COOLDOWN_LIMIT_S, Health, Server, next_of
from bridge.scoring.score import FailedScore, FailedScores, Score, UnusablePrompt
from bridge.server import client
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Problem
from tests.unit.http_server import Answer, HttpRequest, as_json
from tests.unit.openai_server import openai
from tests.unit.rollouts.faulty_server import Cut, FaultyServer, Hang, Script, faulty

PROMPTS = [(7,) * length for length in range(1, 13)]
NUM_SAMPLES = 3
EXPECTED = [
    [(40 + index, 50 + len(prompt), 2) for index in range(NUM_SAMPLES)] for prompt in PROMPTS
]  # the completions of `openai`, which are all different
Reaction = Answer | Cut | Hang | None
WELL = openai()
Result = TypeVar("Result")


def react(request: HttpRequest) -> Answer:
    """Answer like a healthy server."""
    answer = WELL(request)
    assert answer is not None
    return answer


class Waits(list[float]):
    """Records the waits between tries, without waiting."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


def sampler(*, sleep: Callable[[float], Awaitable[None]] | None = None, **choices: Any) -> Sampler:
    fixed: dict[str, Any] = {"max_new_tokens": 16, "request_timeout_s": 60}
    return Sampler(SamplingConfig(**fixed | choices), sleep=Waits() if sleep is None else sleep)


def sample(ours: Sampler, *servers: FaultyServer, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> Any:
    """Return the token ids of every completion."""
    endpoints = [Endpoint(url=server.url) for server in servers]
    groups = ours.sample(endpoints, prompts, num_samples=NUM_SAMPLES, seed=1)
    return [[completion.token_ids for completion in group] for group in groups]


def at_first(num_times: int, fault: Callable[[HttpRequest], Reaction]) -> Script:
    """Fail each prompt `num_times`, then answer it."""
    tries: Counter[int] = Counter()
    lock = threading.Lock()

    def script(request: HttpRequest) -> Reaction:
        if request.method == "GET":
            return react(request)
        with lock:
            tries[request.body["seed"]] += 1
            fails = tries[request.body["seed"]] <= num_times
        return fault(request) if fails else react(request)

    return script


def always(fault: Callable[[HttpRequest], Reaction]) -> Script:
    return at_first(10**6, fault)


def bent(bend: Callable[[list[Any]], list[Any]]) -> Callable[[HttpRequest], Reaction]:
    """Answer with altered choices."""
    return openai(lambda document, _: {**document, "choices": bend(document["choices"])})


FAULTS: dict[str, Callable[[HttpRequest], Reaction]] = {
    "500": lambda _: as_json({"error": {"message": "EngineDead"}}, 500),
    "503": lambda _: Answer("not yet", 503),
    "408": lambda _: Answer("", 408),
    "dropped": lambda _: None,
    "cut in the middle": lambda request: Cut(react(request)),
    "too few": bent(lambda choices: choices[:2]),
    "too many": bent(lambda choices: [*choices, {**choices[0], "index": 3}]),
    "one twice": bent(lambda choices: [choices[0], choices[1], choices[1]]),
    "no JSON": lambda _: Answer("<html>all is well</html>"),
    "half of the JSON": lambda request: Answer(react(request).body[:-40]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_transient_fault_costs_a_retry_but_no_sample(fault: str) -> None:
    with faulty(at_first(1, FAULTS[fault])) as server, sampler() as ours:
        assert sample(ours, server) == EXPECTED
        assert ours.num_retries == len(PROMPTS)
    seeds = Counter(body["seed"] for body in server.completions)
    assert set(seeds.values()) == {2}  # with the same seed each time
    assert sorted(seeds) == [1_000_003 + NUM_SAMPLES * index for index in range(len(PROMPTS))]


def test_retries_after_errors_wait_longer_each_time() -> None:
    waits = Waits()
    with faulty(at_first(4, FAULTS["500"])) as server, sampler(sleep=waits) as ours:
        assert sample(ours, server, prompts=PROMPTS[:1]) == EXPECTED[:1]
    assert len(waits) == 4
    assert all(0 <= wait <= longest for wait, longest in zip(waits, (0.5, 1.0, 2.0, 4.0), strict=True))
    assert len(set(waits)) == 4  # with jitter: requests that failed together must not come back together


def test_retry_waits_stop_growing_at_their_limit() -> None:
    assert max(wait_s(10**9) for _ in range(100)) <= WAIT_LIMIT_S
    assert max(wait_s(1) for _ in range(100)) <= FIRST_WAIT_S


def error_of(script: Script, **choices: Any) -> tuple[BridgeError, FaultyServer]:
    with faulty(script) as server, sampler(**choices) as ours:
        with pytest.raises(BridgeError) as caught:
            sample(ours, server, prompts=PROMPTS[:1])
        assert server.url in caught.value.message
        assert "\n" not in caught.value.message
    return caught.value, server


@pytest.mark.parametrize(("max_retries", "words"), [(0, "tried once"), (1, "tried 2 times"), (4, "tried 5 times")])
def test_persistent_server_error_ends_with_its_message(max_retries: int, words: str) -> None:
    error, server = error_of(always(FAULTS["500"]), max_retries=max_retries)
    assert type(error) is ServerUnreachableError
    assert f"answered 500: EngineDead; {words}" in error.message
    assert len(server.completions) == max_retries + 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [("too few", "requested 3 completions, got 2"), ("too many", "requested 3 completions, got 4"),
     ("one twice", "requested 3 completions, got completions with the indices 0, 1, 1"),
     ("no JSON", "sent an invalid response")],
)  # fmt: skip
def test_second_invalid_answer_ends_the_run(fault: str, words: str) -> None:
    error, server = error_of(always(FAULTS[fault]))
    assert type(error) is ServerUnreachableError
    assert words in error.message
    assert "tried 2 times" in error.message
    assert len(server.completions) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 501])
def test_permanent_refusal_is_not_retried(status: int) -> None:
    _, server = error_of(always(lambda _: as_json({"error": {"message": "no"}}, status)))
    assert len(server.completions) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_rejected_key_error_names_the_variable(status: int) -> None:
    error, _ = error_of(lambda _: as_json({"error": "Unauthorized"}, status))
    assert type(error) is UsageError  # restarting it would not help
    assert "VLLM_API_KEY" in error.hint


@pytest.mark.parametrize("key", [None, "abc"])
def test_api_key_from_the_environment_is_always_sent(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    with faulty(react) as server, sampler() as ours:
        sample(ours, server)
    assert {request.headers.get("authorization") for request in server.requests} == {key and f"Bearer {key}"}


def test_hanging_server_is_disconnected_without_a_retry() -> None:
    error, server = error_of(always(lambda _: Hang()), request_timeout_s=2)
    assert type(error) is ServerUnreachableError
    assert "no answer within 2 s; tried once" in error.message
    assert "--request-timeout-s" in error.hint
    assert len(server.completions) == len(server.given_up) == 1


def test_endless_response_times_out_like_a_missing_one() -> None:
    error, _ = error_of(
        always(lambda request: Answer(react(request).body, headers={"content-length": "99999"})), request_timeout_s=2
    )
    assert "no answer within 2 s" in error.message


def test_lost_server_is_reported_within_seconds() -> None:
    waits = Waits()
    with sampler(sleep=waits) as ours:
        with faulty(react) as server:
            assert sample(ours, server) == EXPECTED
        with pytest.raises(ServerUnreachableError, match=r"ConnectError.*; tried 5 times") as caught:
            sample(ours, server, prompts=PROMPTS[:1])
    assert server.url in caught.value.message
    assert len(waits) == 4
    assert sum(waits) < 8


def test_invalid_address_is_reported_immediately() -> None:
    with sampler() as ours, pytest.raises(ServerUnreachableError, match="tried once"):
        ours.sample([Endpoint(url="gopher://here")], PROMPTS, num_samples=1, seed=0)


@pytest.mark.parametrize(("wanted", "waited"), [("7", 7.0), ("86400", 30.0), ("soon", 0.0), ("-3", 0.0), (None, 0.0),
    ("Wed, 21 Oct 2105 07:28:00 GMT", 0.0)])  # fmt: skip
def test_retry_after_is_respected_within_limits(wanted: str | None, waited: float) -> None:
    waits, headers = Waits(), {} if wanted is None else {"retry-after": wanted}
    with faulty(at_first(1, lambda _: Answer("busy", 429, headers))) as server, sampler(sleep=waits) as ours:
        assert sample(ours, server) == EXPECTED
    assert len(waits) == len(PROMPTS)
    assert all(waited <= wait <= waited + FIRST_WAIT_S for wait in waits)


def test_busy_server_causes_no_delay_if_another_is_healthy() -> None:
    waits = Waits()
    busy = always(lambda _: Answer("busy", 429, {"retry-after": "20"}))
    with faulty(busy) as one, faulty(react) as other, sampler(sleep=waits) as ours:
        assert sample(ours, one, other) == EXPECTED
    assert waits
    assert max(waits) <= FIRST_WAIT_S


def test_groups_of_a_dead_server_move_to_the_other_server() -> None:
    def dies(request: HttpRequest) -> Answer | None:
        if request.method == "POST" and len(one.completions) > 1:  # the first four are spread over both
            threading.Thread(target=one.stop).start()
            return None
        return react(request)

    with faulty(dies) as one, faulty(react) as other, sampler(max_concurrency=4) as ours:
        assert sample(ours, one, other) == EXPECTED
        assert ours.num_retries > 0
        assert sample(ours, one, other) == EXPECTED
    assert len(other.completions) >= 2 * len(PROMPTS) - 1


def test_groups_of_a_hanging_server_move_to_the_other_one() -> None:
    with (
        faulty(always(lambda _: Hang())) as one,
        faulty(react) as other,
        sampler(request_timeout_s=3, max_concurrency=4) as ours,
    ):
        assert sample(ours, one, other) == EXPECTED
        num_hung = len(one.completions)
        assert 1 <= num_hung <= 4
        assert sample(ours, one, other) == EXPECTED
    assert len(one.given_up) == len(one.completions) <= num_hung + 1  # one more if the server was due for another try
    assert ours.num_retries == len(one.completions)


def test_invalid_response_is_retried_on_a_different_server() -> None:
    with faulty(always(FAULTS["no JSON"])) as one, faulty(react) as other, sampler() as ours:
        assert sample(ours, one, other) == EXPECTED


def test_error_names_the_last_server_if_all_fail() -> None:
    with (
        faulty(always(FAULTS["500"])) as one,
        faulty(always(lambda _: Hang())) as other,
        sampler(request_timeout_s=2) as ours,
        pytest.raises(ServerUnreachableError, match="EngineDead; tried 5 times") as caught,
    ):
        sample(ours, one, other, prompts=PROMPTS[:1])
    assert one.url in caught.value.message
    assert (len(one.completions), len(other.completions)) == (4, 1)


def test_requests_go_to_the_least_loaded_server() -> None:
    released = threading.Event()

    def slow(request: HttpRequest) -> Answer:
        if request.method == "POST":
            released.wait(timeout=60)
        return react(request)

    def quick(request: HttpRequest) -> Answer:
        if len(other.completions) == len(PROMPTS) - 2:
            released.set()
        return react(request)

    with faulty(slow) as one, faulty(quick) as other, sampler(max_concurrency=4) as ours:
        assert sample(ours, one, other) == EXPECTED
    assert (len(one.completions), len(other.completions)) == (2, len(PROMPTS) - 2)


def test_equally_busy_servers_are_used_round_robin() -> None:
    with faulty(react) as one, faulty(react) as other, sampler(max_concurrency=1) as ours:
        assert sample(ours, one, other) == EXPECTED
    assert len(one.completions) == len(other.completions) == len(PROMPTS) / 2


def test_versions_names_and_notes_are_tracked_per_server() -> None:
    def plain(request: HttpRequest) -> Answer:
        if request.method == "GET":
            return as_json({"data": [{"id": "theirs"}]})
        tokens = {"tokens": ["token_id:9"], "token_logprobs": [-1.0]}
        choices = [{"index": i, "text": "", "finish_reason": "stop", "logprobs": tokens} for i in range(NUM_SAMPLES)]
        return as_json({"choices": choices})

    with faulty(react) as one, faulty(plain) as other, sampler(max_concurrency=1) as ours:
        endpoints = [Endpoint(url=one.url, model="adapter"), Endpoint(url=other.url, version=5)]
        groups = ours.sample(endpoints, PROMPTS, num_samples=NUM_SAMPLES, seed=0)
        assert [other.url in line for line in ours.lacks] == [True]
    assert [group[0].versions[0] for group in groups] == [3, 5] * (len(PROMPTS) // 2)
    assert {body["model"] for body in one.completions} == {"adapter"}
    assert {body["model"] for body in other.completions} == {"theirs"}


def test_connections_are_reused_within_and_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEEPALIVE_S", 600)
    with faulty(react) as server, sampler(max_concurrency=3) as ours:
        for _ in range(5):
            assert sample(ours, server) == EXPECTED
        assert 1 <= len(server.connections) <= 3


def test_idle_connection_closed_by_server_costs_no_retry() -> None:
    def closes(request: HttpRequest) -> Answer:
        return Answer(react(request).body, headers={"connection": "close"})

    with faulty(closes) as server, sampler() as ours:
        assert sample(ours, server) == EXPECTED
        assert sample(ours, server) == EXPECTED
        assert ours.num_retries == 0


def test_in_flight_requests_respect_the_limit() -> None:
    lock, running, most = threading.Lock(), 0, 0
    both = threading.Barrier(2)

    def script(request: HttpRequest) -> Answer:
        nonlocal running, most
        if request.method == "GET":
            return react(request)
        with lock:
            running += 1
            most = max(most, running)
        both.wait(timeout=60)  # always two at a time
        with lock:
            running -= 1
        return react(request)

    with faulty(script) as server, sampler(max_concurrency=2) as ours:
        assert sample(ours, server) == EXPECTED
    assert most == 2


def endpoint_of(server: FaultyServer) -> list[Endpoint]:
    return [Endpoint(url=server.url)]


def test_groups_arrive_one_by_one_with_their_index() -> None:
    last, taken = threading.Event(), list[int]()

    def script(request: HttpRequest) -> Answer:
        if request.method == "POST" and len(request.body["prompt"]) == 1:
            last.wait(timeout=60)  # the first prompt is answered once all others have been taken
        return react(request)

    async def take(index: int, group: tuple[Completion, ...]) -> int:
        assert [completion.token_ids for completion in group] == EXPECTED[index]
        taken.append(index)
        if len(taken) == len(PROMPTS) - 1:
            last.set()
        return index

    with faulty(script) as server, sampler() as ours:
        indices = ours.loop.run(sample_each(ours, server, PROMPTS, take))
    assert taken[-1] == 0
    assert sorted(taken) == indices == list(range(len(PROMPTS)))


def test_slow_caller_does_not_delay_requests() -> None:
    async def take(_index: int, _group: tuple[Completion, ...]) -> None:
        await asyncio.to_thread(wait_until, lambda: len(server.completions) == len(PROMPTS))

    with faulty(react) as server, sampler(max_concurrency=2) as ours:
        ours.loop.run(sample_each(ours, server, PROMPTS, take))


@contextmanager
def hanging(num_requests: int, act: Callable[[], None]) -> Iterator[FaultyServer]:
    """Never respond, and call `act` once `num_requests` requests hang."""

    def script(request: HttpRequest) -> Reaction:
        if request.method == "GET":
            return react(request)
        if len(server.completions) == num_requests:
            act()
        return Hang()

    with faulty(script) as server:
        yield server


async def sample_each(
    ours: Sampler,
    server: FaultyServer,
    prompts: Sequence[tuple[int, ...]],
    then: Callable[[int, tuple[Completion, ...]], Awaitable[Result]],
) -> list[Result]:
    """Await `then` with each prompt's index and completions as they arrive, as a stream does."""
    servers = ours.servers_at(endpoint_of(server))

    async def one(index: int, prompt: tuple[int, ...]) -> Result:
        return await then(index, await ours.one(servers, prompt, num_samples=NUM_SAMPLES, seed=0, index=index))

    return await gather_or_cancel(one(index, prompt) for index, prompt in enumerate(prompts))


class EnoughError(Exception):
    """Raised by a caller that stops early."""


def test_cancelled_caller_leaves_no_request() -> None:
    def script(request: HttpRequest) -> Reaction:
        return react(request) if request.method == "GET" or len(request.body["prompt"]) == 1 else Hang()

    async def stop(_index: int, _group: tuple[Completion, ...]) -> None:
        await asyncio.to_thread(wait_until, lambda: len(server.completions) == len(PROMPTS))
        raise EnoughError

    with faulty(script) as server, sampler() as ours:
        with pytest.raises(EnoughError):
            ours.loop.run(sample_each(ours, server, PROMPTS, stop))
        wait_until(lambda: len(server.given_up) == len(PROMPTS) - 1)


def wait_until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(6000):
        if condition():
            return
        tick.wait(0.01)
    pytest.fail("the condition never became true")


def interrupt(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that asyncio reports no leftover task or generator."""
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_the_sampler_usable(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    try:
        with hanging(len(PROMPTS), lambda: interrupt(number)) as server, faulty(react) as well, sampler() as ours:
            with pytest.raises(KeyboardInterrupt):
                sample(ours, server)
            assert signal.getsignal(number) is signal.default_int_handler
            wait_until(lambda: len(server.given_up) == len(PROMPTS))
            assert len(server.completions) == len(PROMPTS)
            assert sample(ours, well) == EXPECTED
    finally:
        signal.signal(number, before)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("is_first", [True, False])
def test_interrupt_before_a_task_starts_closes_its_coroutine(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    coroutine = asyncio.sleep(0)
    with sampler() as ours:
        if not is_first:
            ours.loop.run(asyncio.sleep(0))
        with monkeypatch.context() as patched:
            patched.setattr(EventLoop, "_begin", lambda *_: interrupt(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                ours.loop.run(coroutine)
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
        assert ours.loop.run(asyncio.sleep(0, 3)) == 3


@pytest.mark.usefixtures("quiet")
def test_tasks_keep_running_while_the_caller_computes() -> None:
    happened = threading.Event()

    async def later() -> None:
        await asyncio.sleep(0.01)
        happened.set()

    async def leave() -> None:
        tasks.append(asyncio.create_task(later()))

    tasks: list[Any] = []
    with sampler() as ours:
        ours.loop.run(leave())
        assert happened.wait(60), "nobody waits in `run` meanwhile"


@pytest.mark.usefixtures("quiet")
def test_calls_run_in_the_waiting_thread() -> None:
    async def called(call: Callable[[], Any]) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return await ours.loop.call_here(call)

    with sampler() as ours:
        assert ours.loop.run(called(threading.current_thread)) is threading.main_thread()
        with pytest.raises(ZeroDivisionError):
            ours.loop.run(called(lambda: 1 / 0))
        with pytest.raises(KeyboardInterrupt):
            ours.loop.run(called(lambda: interrupt(signal.SIGINT)))
        with pytest.raises(SystemExit):
            ours.loop.run(called(lambda: sys.exit(3)))
        assert ours.loop.run(called(lambda: 7)) == 7, "the loop outlives all of them"


@pytest.mark.usefixtures("quiet")
def test_interrupt_before_a_retry_takes_effect_immediately() -> None:
    async def wait_for_ever(_: float) -> None:
        interrupt(signal.SIGINT)
        await asyncio.Event().wait()

    with (
        faulty(always(FAULTS["500"])) as server,
        sampler(sleep=wait_for_ever) as ours,
        pytest.raises(KeyboardInterrupt),
    ):
        sample(ours, server, prompts=PROMPTS[:1])


@pytest.mark.usefixtures("quiet")
def test_second_interrupt_ends_a_stuck_call() -> None:
    async def stubborn() -> None:
        try:
            interrupt(signal.SIGINT)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupt(signal.SIGINT)
            await asyncio.Event().wait()

    with sampler() as ours, pytest.raises(KeyboardInterrupt):
        ours.loop.run(stubborn())


def test_deferred_interrupt_waits_for_the_end() -> None:
    def script(request: HttpRequest) -> Answer:
        if len(server.completions) == 1:
            interrupt(signal.SIGINT)
        return react(request)

    def held_back() -> None:
        with deferred_interrupt():
            done.append(sample(ours, server))

    done: list[Any] = []
    with faulty(script) as server, sampler() as ours, pytest.raises(KeyboardInterrupt):
        held_back()
    assert done == [EXPECTED]


@pytest.mark.usefixtures("quiet")
def test_error_for_one_prompt_cancels_all_other_requests() -> None:
    def script(request: HttpRequest) -> Reaction:
        if request.method == "GET" or len(request.body["prompt"]) > 1:
            return react(request) if request.method == "GET" else Hang()
        wait_until(lambda: len(server.completions) == len(PROMPTS))
        return as_json({"error": {"message": "too long"}}, 400)

    with faulty(script) as server, sampler() as ours:
        with pytest.raises(UsageError, match="too long"):
            sample(ours, server)
        wait_until(lambda: len(server.given_up) == len(PROMPTS) - 1)


@pytest.mark.usefixtures("quiet")
def too_long(request: HttpRequest) -> Reaction:
    return react(request) if request.method == "GET" else as_json({"error": {"message": "too long"}}, 400)


class Encoded:
    async def encode_beside(self, _: Problem) -> tuple[tuple[int, ...], None]:
        return (1, 2), None


def group_of(server: FaultyServer, ours: Sampler) -> Sampled:
    groups = Completions(Encoded(), ours, None)  # type: ignore[arg-type]
    servers = ours.servers_at([Endpoint(url=server.url)])
    return ours.loop.run(groups.group(lambda: servers, {"prompt": "9+9=" * 99}, num_samples=2, seed=0, index=0))


def test_rejected_prompt_loses_only_its_group() -> None:
    with faulty(too_long) as server, sampler() as ours:
        sampled = group_of(server, ours)
    first, second = sampled.results
    assert isinstance(first, UnusablePrompt)
    assert first == second
    assert re.search(r"rejected the request: too long, on prompt '9\+9=", first.line)
    group = scored_group(3, {"prompt": "9+9="}, sampled)
    assert (group.completions, len(group.unscored)) == ((), 2)


def test_request_refused_for_every_prompt_ends_the_run() -> None:
    with faulty(too_long) as server, sampler(top_k=5) as ours, pytest.raises(UsageError) as refused:
        group_of(server, ours)
    assert re.search("^--top-k 5 needs a server that reports [^']*$", refused.value.message)


def test_many_consecutive_unusable_prompts_end_the_run() -> None:
    counted = Unusable()
    bad = UnusablePrompt.of({"prompt": "9+9="}, RewardError("no tokens", hint="r"))
    good, fault = Score(reward=1.0), FailedScore(kind="k", line="l")
    groups: list[list[Score | FailedScore]] = [[bad, bad], [bad, good], [good], [fault]]
    for results in groups:
        counted.count(results)
    for _ in range(MOST_UNUSABLE - 1):
        counted.count([bad, bad])
    with pytest.raises(RewardError, match=f"the prompts of {MOST_UNUSABLE} consecutive problems cannot be used, th"):
        counted.count([bad, bad])


def test_unusable_prompts_do_not_count_as_failed_scores(caplog: pytest.LogCaptureFixture) -> None:
    bad = UnusablePrompt.of({"prompt": "9+9="}, RewardError("no tokens", hint="r"))
    failures = FailedScores("step 1", num_completions=4, max_share=0.2)
    failures.add([bad] * 4)
    failures.log(set())
    (line,) = caplog.messages
    assert "4 completions without a reward left out: the prompt cannot be used: no tokens, on prompt" in line
    with pytest.raises(RewardError, match="at least 2 of 6 completions have no reward"):
        failures.add([FailedScore(kind="k", line="l")] * 2)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failing(health: Health) -> None:
    with pytest.raises(RequestFailed), health.watched():
        raise RequestFailed("no", "anywhere")


def test_cooldown_of_a_failing_server_grows() -> None:
    clock = Clock()
    health, cooldowns = Health(clock), list[float]()
    assert health.is_well()
    for _ in range(9):
        begun = clock.now
        failing(health)
        failing(health)  # failures during the cooldown count only once
        while not health.is_well():
            clock.now += 0.5
        cooldowns.append(clock.now - begun)
    assert cooldowns == [1, 2, 4, 8, 16, 32, COOLDOWN_LIMIT_S, COOLDOWN_LIMIT_S, COOLDOWN_LIMIT_S]
    with health.watched():
        assert not health.is_well()
    with health.watched():
        assert health.is_well()  # the server has answered


def test_server_whose_cooldown_ends_first_is_used() -> None:
    clock = Clock()
    one, other = (Server(Endpoint(url=url), Health(clock)) for url in ("http://one", "http://other"))
    servers = [one, other]
    assert [next_of(servers) for _ in range(4)] == [one, other, one, other]
    failing(one.health)
    assert [next_of(servers) for _ in range(2)] == [other, other]
    clock.now += 0.5
    failing(other.health)
    assert [next_of(servers) for _ in range(2)] == [one, one]


def test_memory_of_a_dropped_group_is_freed() -> None:
    taken = list[weakref.ref[Completion]]()

    async def take(_: int, group: tuple[Completion, ...]) -> None:
        taken.extend(map(weakref.ref, group))
        alive = sum(completion() is not None for completion in taken)
        assert alive <= 2 * NUM_SAMPLES  # this group, and the previous one while this one is being returned

    gc.disable()  # whatever a reference cycle held would also stay alive for a while in a run
    try:
        with faulty(react) as server, sampler(max_concurrency=4) as ours:
            ours.loop.run(sample_each(ours, server, [(7,)] * 60, take))
    finally:
        gc.enable()
    assert len(taken) == 60 * NUM_SAMPLES
