"""The state of the API: futures, the order of requests, sessions and sampling clients.

Everything here runs in the event loop of the HTTP server. What computes with the weights is a job for the main thread,
which takes jobs one by one (`serving.py`). A request's future has a name that depends on its numbers alone, so that a
request that is sent twice is done once.
"""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import httpx

from bridge.core.http_limits import Refusal
from bridge.errors import BridgeError, ServerUnreachableError, UsageError
from bridge.server.client import VllmClient, error_message, open_async_http
from bridge.server.protocol import COMPLETIONS, SEED_LIMIT
from bridge.tinker import wire
from bridge.tinker.paths import KINDS, SavedPath
from bridge.tinker.training import SamplingClient, Trainer

logger = logging.getLogger(__name__)

POLL_S = 20.0
"""Longest time that a poll waits for a result; the SDK gives up after 45 s."""
SILENT_S = 45.0
"""A session that is silent for this long is over; the SDK sends a heartbeat every 10 s."""
PERIOD_S = 1.0
"""Interval between checks for silent sessions."""
ROOM_PERIOD_S = 0.2
"""Interval between checks whether there is room for a model."""
MOST_PENDING = 4096
"""Maximum number of requests without a result; more get the status 429, and the SDK retries them."""
MOST_FUTURES = 16_384
"""Maximum number of futures that are kept; the oldest ones with a result are dropped first."""
MOST_SAMPLES = 1024
SAMPLING_PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
"""The SDK's sampling parameters. Others are refused, because they would have no effect."""
REFUSED_SAMPLING = {
    "target_prompt_logprobs": "", "prompt_alt_tokens_k": "",
    "record_stability_info": ": train with loss_fn=importance_sampling, ppo or cispo",
}  # fmt: skip
"""Fields of a request to sample that are not supported, and what to do instead."""

Answer = bytes | dict[str, Any]
Job = Callable[[], None]


@dataclass
class Line:
    """The requests of one model, in the order of `seq_id`: the SDK sends the first part of a batch last."""

    next: int = 1
    waiting: dict[int, tuple[Job, "asyncio.Future[Answer]"]] = field(default_factory=dict)
    """seq_id -> the function that starts the request, and its future, for requests that came too early."""

    def add(self, number: int, start: Job, future: "asyncio.Future[Answer]") -> None:
        self.waiting[number] = start, future
        while (first := self.waiting.pop(self.next, None)) is not None:
            self.next += 1
            first[0]()

    def end(self, why: str) -> None:
        """Fail all requests that are still waiting for earlier ones."""
        for _, future in self.waiting.values():
            _settle(future, {"error": why, "category": "user"})
        self.waiting.clear()


@dataclass
class Session:
    """A client program."""

    seen: float
    """Time of the last sign of life, on the monotonic clock."""
    models: set[str] = field(default_factory=set)


class Service:
    """The API's state, and what its calls do."""

    def __init__(self, trainer: Trainer, jobs: "SimpleQueue[Job]") -> None:
        """Run the trainer's calls as `jobs` of the main thread."""
        self.trainer = trainer
        self.policy = trainer.policy
        self._jobs = jobs
        self._futures: OrderedDict[str, asyncio.Future[Answer]] = OrderedDict()
        self._num_pending = 0
        self._lines: dict[str, Line] = {}
        self.sessions: dict[str, Session] = {}
        self.samplers: dict[str, SamplingClient] = {}
        self._sampling: dict[str, asyncio.Task[Answer]] = {}
        self._http: httpx.AsyncClient | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        """Models that wait for room."""
        self._starting: set[str] = set()
        """Models that the main thread is creating or will create next."""
        self._restarting = asyncio.Lock()
        self._num_starts = 0
        """Number of times that vLLM was restarted."""
        self._stopped = asyncio.Event()
        """Set when the server stops: polls end at once."""

    # Futures.

    def _do(self, future: "asyncio.Future[Answer]", work: Callable[[], Answer]) -> None:
        """Let the main thread do `work`; the future gets the result, or the error."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            result: Answer = {"error": "the server is being stopped", "category": "server"}
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  a request that fails ends no server
                result = failure(error)
            finally:
                loop.call_soon_threadsafe(_settle, future, result)

        self._jobs.put(run)

    def _new(self, name: str) -> asyncio.Future[Answer]:
        if self._num_pending >= MOST_PENDING:
            raise Refusal(f"{self._num_pending} requests wait for a result already", status=429)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._futures[name] = future
        self._num_pending += 1
        future.add_done_callback(self._count_down)
        while len(self._futures) > MOST_FUTURES:
            oldest = next((key for key, kept in self._futures.items() if kept.done()), None)
            if oldest is None:
                break
            del self._futures[oldest]
        return future

    def _count_down(self, _: asyncio.Future[Answer]) -> None:
        self._num_pending -= 1

    def future(self, name: str, work: Callable[[], Answer]) -> dict[str, Any]:
        """Return the promise of a future; a repeated request gets the same one."""
        if name not in self._futures:
            self._do(self._new(name), work)
        return {"request_id": name}

    def ordered(self, model_id: str, number: int, kind: str, work: Callable[[], Answer]) -> dict[str, Any]:
        """Run `work` after the model's earlier requests, and return the promise of its future."""
        name = f"{model_id}:{number}:{kind}"
        if name not in self._futures:
            line = self._lines.get(model_id)
            if line is None:
                raise Refusal(f"model {model_id}: {self.trainer.why_gone(model_id)}", status=404)
            if number < line.next or number in line.waiting:
                raise Refusal(f"seq_id {number} of {model_id} was used for another request", status=409)
            future = self._new(name)
            line.add(number, lambda: self._do(future, work), future)
        return {"request_id": name, "model_id": model_id}

    async def result(self, name: str) -> Answer:
        """Wait up to POLL_S for a future's result. Refusal: there is no future with this name."""
        future = self._futures.get(name)
        if future is None:
            raise Refusal(f"there is no request {name}: this server was restarted, or forgot its result", status=404)
        stopped = asyncio.ensure_future(self._stopped.wait())
        either: list[asyncio.Future[Any]] = [future, stopped]
        await asyncio.wait(either, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not future.done():
            return {"type": "try_again", "request_id": name, "queue_state": "active"}
        return future.result()

    # Sessions.

    def create_session(self) -> str:
        name = str(uuid.uuid4())
        self.sessions[name] = Session(time.monotonic())
        return name

    def heartbeat(self, session_id: str) -> None:
        """Record a sign of life. Refusal: the session is over."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Refusal(f"there is no session {session_id}: it was silent for {SILENT_S:g} s, or ended", status=404)
        session.seen = time.monotonic()

    def create_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._begin(body, "create", lambda model_id: self.trainer.create(model_id, body))

    def load_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if body.get("model_id"):
            model_id = str(body["model_id"])
            return self.ordered(model_id, body["seq_id"], "load", lambda: self.trainer.load(model_id, body))
        return self._begin(body, "load", lambda model_id: self.trainer.load(model_id, body))

    def _begin(self, body: Mapping[str, Any], kind: str, start: Callable[[str], Answer]) -> dict[str, Any]:
        """Start a model once there is room for it, and return its promise; a repeated request gets the same one."""
        session_id = str(body["session_id"])
        self.heartbeat(session_id)
        model_id = f"{session_id}:train:{int(body['model_seq_id'])}"
        name = f"{model_id}:{kind}"
        if name not in self._futures:
            future = self._new(name)
            self.sessions[session_id].models.add(model_id)
            self._lines.setdefault(model_id, Line())
            waiting = asyncio.ensure_future(self._begun(session_id, model_id, future, lambda: start(model_id)))
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
        return {"request_id": name, "model_id": model_id}

    async def _begun(
        self, session_id: str, model_id: str, future: "asyncio.Future[Answer]", work: Callable[[], Answer]
    ) -> None:
        """Start a model, or refuse it once every client that leaves no room for it has shown a new sign of life.

        A program that exits without closing its session keeps its models until the server notices its silence.
        """
        asked = time.monotonic()
        while holders := self._holders(session_id):
            if session_id not in self.sessions:
                _settle(future, failure(Refusal(f"session {session_id} has ended")))
                return
            if all(session.seen > asked for name, session in holders.items() if name != session_id):
                _settle(future, failure(Refusal(self._why_full(holders))))
                return
            await asyncio.sleep(ROOM_PERIOD_S)
        self._starting.add(model_id)
        future.add_done_callback(lambda _: self._starting.discard(model_id))
        self._do(future, work)

    def _holders(self, session_id: str) -> dict[str, Session]:
        """Return the sessions whose models leave no room for another one of this session; empty: there is room.

        Models of a session that has ended are freed before the next one starts.
        """
        taken = self.trainer.models.keys() | self._starting
        holders = {name: session for name, session in self.sessions.items() if session.models & taken}
        if not self.trainer.is_lora:  # a client's next model takes the place of its last one
            return {name: session for name, session in holders.items() if name != session_id}
        number = sum(len(session.models & taken) for session in holders.values())
        return holders if number >= self.trainer.most_models else {}

    def _why_full(self, holders: Mapping[str, Session]) -> str:
        if self.trainer.is_lora:
            number = self.trainer.most_models
            return (
                f"{number} adapters are trained already, the most that this server trains at once: wait until a client"
                f" ends, or start it with --max-adapters {number + 1}"
            )
        silent_s = time.monotonic() - max(session.seen for session in holders.values())
        return (
            f"another client trains all weights: its last sign of life was {silent_s:.0f} s ago; wait until it ends, or"
            " start a server for each"
        )

    def end_session(self, session_id: str, why: str) -> None:
        """Free a session's models. A model with steps that are in no checkpoint is saved first."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.models:
            self._lines.pop(model_id, Line()).end(f"model {model_id}: {why}")
        for name in [name for name in self.samplers if name.startswith(session_id)]:
            del self.samplers[name]

        def free() -> Answer:
            for model_id in session.models:
                try:
                    self.trainer.free(model_id, why)
                except BridgeError as error:  # nobody waits for this result
                    logger.warning(f"model {model_id} is not freed, because it cannot be saved: {error.message}")
            return {}

        self.trainer.forget_samplers(session.models)
        if session.models:
            self._do(asyncio.get_running_loop().create_future(), free)

    async def free_silent_sessions(self) -> None:
        """End sessions without a sign of life, for as long as the server runs.

        Time in which this process could not listen, because the machine was busy or slept, is nobody's silence.
        """
        while True:
            begun = time.monotonic()
            await asyncio.sleep(PERIOD_S)
            late_s = time.monotonic() - begun - PERIOD_S
            if late_s > PERIOD_S:
                for session in self.sessions.values():
                    session.seen += late_s
            silent = [name for name, session in self.sessions.items() if time.monotonic() - session.seen > SILENT_S]
            for name in silent:
                why = f"its client gave no sign of life for {SILENT_S:g} s"
                self.end_session(name, why)

    # Training.

    def passes(self, request: wire.PassRequest) -> dict[str, Any]:
        def work() -> Answer:
            return wire.pass_result(*self.trainer.passes(request))

        return self.ordered(request.model_id, request.seq_id, "pass", work)

    def step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.ordered(body["model_id"], body["seq_id"], "step", lambda: self.trainer.step(body))

    def save(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.ordered(body["model_id"], body["seq_id"], "save", lambda: self.trainer.save(body))

    def save_for_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Let a client sample from the weights as the model's earlier requests have left them."""

        def work() -> Answer:
            saved = self.trainer.save_for_sampler(body)
            if isinstance(saved, str):
                return {"path": saved, "type": "save_weights_for_sampler"}
            name = f"{body['model_id']}:sample:{body['seq_id']}"
            self.samplers[name] = saved
            return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

        return self.ordered(body["model_id"], body["seq_id"], "sampler", work)

    # Sampling.

    def create_sampling_session(self, body: Mapping[str, Any]) -> str:
        """Return the name of a new sampling client; a repeated request gets the same one."""
        name = f"{body['session_id']}:sampler:{body['sampling_session_seq_id']}"
        if name not in self.samplers:
            self.heartbeat(body["session_id"])
            self.samplers[name] = self.trainer.sampler(body.get("model_path"), body.get("base_model"))
        return name

    def sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start sampling, and return the promise of the future with the ids of the sequences."""
        number = _num_samples(body)
        if not 1 <= number <= MOST_SAMPLES:
            raise Refusal(f"num_samples is {number}, expected 1 to {MOST_SAMPLES}")
        session = body.get("sampling_session_id")
        if (owner := self.sessions.get(str(session).partition(":")[0])) is not None:
            owner.seen = time.monotonic()
        name = f"{session}:{body.get('seq_id')}" if session else str(uuid.uuid4())
        if name not in self._futures:
            if session is None:
                client = self.trainer.sampler(body.get("model_path"), body.get("base_model"))
            elif session in self.samplers:
                client = self.samplers[session]
            else:
                raise Refusal(f"there is no sampling session {session}: this server was restarted", status=404)
            future = self._new(name)
            task = asyncio.ensure_future(self._sampled(client, body))
            self._sampling[name] = task

            def end(done: "asyncio.Task[Answer]") -> None:
                del self._sampling[name]
                _settle(future, _outcome(done))

            task.add_done_callback(end)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{index}" for index in range(number)]}

    def cancel(self, name: str) -> dict[str, Any]:
        """Stop sampling for a request that its client has cancelled."""
        if (task := self._sampling.get(name)) is not None:
            task.cancel()
        return {}

    async def _sampled(self, client: SamplingClient, body: Mapping[str, Any]) -> Answer:
        for unknown, instead in REFUSED_SAMPLING.items():
            if body.get(unknown):
                raise UsageError(f"{unknown} is not supported{instead}", hint="leave it out")
        prompt = _prompt(body)
        starts = self._num_starts
        try:
            reply = await self._reply(client, body, prompt)
        except ServerUnreachableError:
            if not await self._restarted(starts):
                raise
            reply = await self._reply(client, body, prompt)
        self.trainer.check_sampled(client)  # what was sampled meanwhile may be of newer weights
        return wire.sample_result(reply, body, prompt)

    async def _reply(self, client: SamplingClient, body: Mapping[str, Any], prompt: list[int]) -> wire.Sampled:
        """Return what vLLM samples; a snapshot that has made room for another one meanwhile is served again."""
        while True:
            async with self.trainer.serving(client) as model:
                try:
                    return await self._generated(body, prompt, model)
                except UsageError:
                    if await self.trainer.is_served(model):
                        raise

    async def _restarted(self, starts: int) -> bool:
        """Restart vLLM if it is dead, and return whether the request may be repeated.

        `starts` is the number of restarts before the request was sent.
        """
        async with self._restarting:
            if self._num_starts != starts:
                return True
            if await asyncio.to_thread(self._is_well):
                return False
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._do(future, lambda: {"restarted": self.trainer.restart_server()})
            answer = await future
            is_up = isinstance(answer, dict) and answer.get("restarted") is True
            self._num_starts += is_up
            return is_up

    def _is_well(self) -> bool:
        try:
            with VllmClient(self.policy.url) as client:
                client.check_health()
        except ServerUnreachableError:
            return False
        return True

    async def _generated(self, body: Mapping[str, Any], prompt: list[int], model: str) -> wire.Sampled:
        """Return vLLM's answer: token ids in, token ids with log-probabilities out."""
        if self._http is None:
            self._http = open_async_http()
        route, request = _sampling_request(body, prompt, model, self.policy.max_model_len)
        url = f"{self.policy.url}{route}"
        try:
            try:
                answer = await self._http.post(url, json=request)
            except (httpx.NetworkError, httpx.RemoteProtocolError):  # after a pause, vLLM closes idle connections
                answer = await self._http.post(url, json=request)
        except httpx.HTTPError as error:
            raise ServerUnreachableError(
                f"vLLM does not answer: {type(error).__name__}", hint="its log says why; restart bridge tinker"
            ) from error
        if answer.status_code != httpx.codes.OK:
            words = f"vLLM answered {answer.status_code}: {error_message(answer)}"
            if answer.is_client_error:
                raise UsageError(words, hint="change the request")
            raise ServerUnreachableError(words, hint="its log says why")
        found = wire.sampled(answer.json(), prompt)
        if request["n"] < _num_samples(body):  # greedy: the others are the same
            found = replace(found, sequences=[*found.sequences] * _num_samples(body))
        return found

    def stop(self) -> None:
        """Answer all open polls now, since they would delay the end of the server."""
        self._stopped.set()

    async def close(self) -> None:
        """Cancel all requests that sample or wait for room, and close the connections."""
        for task in [*self._sampling.values(), *self._waiting]:
            task.cancel()
        if self._http is not None:
            await self._http.aclose()
        await self.trainer.close()

    # What there is.

    def capabilities(self) -> dict[str, Any]:
        model = {
            "model_name": self.trainer.base_name, "max_context_length": self.policy.max_model_len, "trainable": True,
            "sampleable": True,
        }  # fmt: skip
        return {"supported_models": [model]}

    def info(self, model_id: str) -> dict[str, Any]:
        model = self.trainer.models.get(model_id)
        if model is None:
            raise Refusal(f"there is no model {model_id}", status=404)
        name = self.trainer.base_name
        return {
            "type": "get_info", "model_id": model.id, "model_name": name, "is_lora": self.trainer.is_lora,
            "lora_rank": model.rank, "model_data": {"model_name": name, "tokenizer_id": self.policy.model_name},
        }  # fmt: skip

    def run(self, run: str) -> dict[str, Any]:
        """Return a training run as the SDK lists it."""
        about = self.trainer.checkpoints.about(run)
        listed = [*self.trainer.checkpoints.of_run(run)]
        newest = {
            kind: max(
                (one for one in listed if one["checkpoint_type"] == kind), key=lambda one: one["time"], default=None
            )
            for kind in KINDS.values()
        }
        times = [one["time"] for one in newest.values() if one is not None]
        is_lora = self.trainer.is_lora
        return {
            "training_run_id": run, "base_model": about["base_model"], "model_owner": "you", "is_lora": is_lora,
            "lora_rank": about["rank"] if is_lora else None,
            "last_request_time": max(times, default="1970-01-01T00:00:00+00:00"),
            "last_checkpoint": newest["training"], "last_sampler_checkpoint": newest["sampler"],
            "user_metadata": {key: str(value) for key, value in about["user_metadata"].items()},
        }  # fmt: skip

    def weights_info(self, path: str) -> dict[str, Any]:
        """Describe a checkpoint to a client. SDKs before 0.38 load only checkpoints that are marked as adapters."""
        about = self.trainer.checkpoints.about(SavedPath.parse(path).run)
        return {"base_model": about["base_model"], "is_lora": True, "lora_rank": about["rank"]}


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as a result, which the SDK shows."""
    if isinstance(error, BridgeError):
        is_server = isinstance(error, ServerUnreachableError)
        return {"error": f"{error.message} ({error.hint})", "category": "server" if is_server else "user"}
    if isinstance(error, Refusal):
        return {"error": error.message, "category": "user"}
    logger.error("a request failed", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}"[:500], "category": "server"}


def _settle(future: "asyncio.Future[Answer]", result: Answer) -> None:
    if not future.done():
        future.set_result(result)


def _outcome(done: "asyncio.Task[Answer]") -> Answer:
    if done.cancelled():
        return {"error": "the request was cancelled", "category": "user"}
    error = done.exception()
    return done.result() if error is None else failure(error)


def _prompt(body: Mapping[str, Any]) -> list[int]:
    ids = list[int]()
    for chunk in body["prompt"]["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise UsageError(
                f"the prompt has a part of the type {chunk['type']}, expected encoded_text",
                hint="images are not supported",
            )
        ids += chunk["tokens"]
    if not ids:
        raise UsageError("the prompt has no tokens", hint="give it at least one")
    return ids


def _num_samples(body: Mapping[str, Any]) -> int:
    return int(body.get("num_samples") or 1)


def _sampling_request(
    body: Mapping[str, Any], prompt: list[int], model: str, longest: int | None
) -> tuple[str, dict[str, Any]]:
    """Return the server's route for a request to sample, and the body of the request to it.

    The route of rollouts is the fast one; `/generate` also filters, takes any seed, and reports the likeliest tokens.
    At temperature 0 all sequences are the same, and vLLM accepts requests for one only.
    """
    chosen = body.get("sampling_params") or {}
    unknown = sorted(name for name, given in chosen.items() if given is not None and name not in SAMPLING_PARAMS)
    if unknown:
        raise UsageError(
            f"sampling_params has {unknown[0]!r}, expected {', '.join(SAMPLING_PARAMS)}", hint="leave it out"
        )
    limit = chosen.get("max_tokens")
    if longest is not None:
        room = longest - len(prompt)
        if room < 1:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, and the longest sequence {longest}", hint="shorten the prompt"
            )
        limit = min(limit or room, room)

    def value(name: str, default: float) -> Any:
        return default if chosen.get(name) is None else chosen[name]

    temperature = value("temperature", 1.0)
    top_k = max(value("top_k", -1), 0)
    top_p = value("top_p", 1.0)
    seed = chosen.get("seed")
    stop = chosen.get("stop")
    num_likeliest = body.get("topk_sample_logprobs") or 0
    num_likeliest_of_prompt = body.get("topk_prompt_logprobs") or 0
    scores_prompt = bool(body.get("prompt_logprobs") or num_likeliest_of_prompt)
    request: dict[str, Any] = {
        "model": model, "n": 1 if temperature == 0 else _num_samples(body), "max_tokens": limit,
        "temperature": temperature,
    }  # fmt: skip
    if seed is not None:
        request["seed"] = seed
    has_stop_tokens = isinstance(stop, list) and all(type(token) is int for token in stop)
    if stop and has_stop_tokens:
        request["stop_token_ids"] = stop
    elif stop:
        request["stop"] = [stop] if isinstance(stop, str) else stop
    ignores_end = stop == []
    is_odd_seed = isinstance(seed, int) and not 0 <= seed <= SEED_LIMIT - request["n"]
    is_slow = top_k or top_p != 1 or num_likeliest or num_likeliest_of_prompt or ignores_end or is_odd_seed
    if not (is_slow or limit is None):
        return COMPLETIONS, {**request, "prompt": prompt, "prompt_logprobs": scores_prompt}
    request |= {"prompt": {"prompt_token_ids": prompt}, "top_p": top_p, "top_k": top_k, "logprobs": num_likeliest}
    if ignores_end:
        request["ignore_eos"] = True
    if "stop" in request:
        request["include_stop_str_in_output"] = True
    if scores_prompt:
        request["prompt_logprobs"] = num_likeliest_of_prompt
    return "/generate", request
