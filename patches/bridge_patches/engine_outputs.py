"""Send a rollout's tokens from the engine 32 at a time, with raw log-probabilities and the versions that sampled them.

Symptom: with log-probabilities, 64 completions of a 1.5B model take a third longer on an H200.
Cause: every completion sends three one-element arrays per step, and msgspec calls back into Python for each of them, in
a thread that delays the one that launches the next step; then the API server handles every token individually.
What is done: the log-probabilities of a step are converted to plain numbers once, for all its requests. A rollout,
whose client waits for the complete result, collects its tokens in the engine. Other requests get each step's part
immediately.
Why this is safe: the bytes sent are those that vLLM's own encoder would produce, and vLLM's own decoder reads them. A
step of speculative decoding also sends several tokens of a request together. An aborted request first sends what it
has. Prompt log-probabilities, which are sent only once, are unchanged; a rollout sends them with its first tokens.

A rollout does not use the vocabulary ranks of its tokens. It gets the version that sampled each token instead, and, if
it is filtered, what was kept, packed into the same number (`filter_thresholds.py`).

Not covered: vLLM's own statistics of when a rollout's tokens arrived (`/metrics`), which count 32 tokens as one.
Seen in vLLM 0.26 to 0.33: `vllm/v1/outputs.py`, `vllm/v1/serial_utils.py`, `vllm/v1/core/sched/scheduler.py`,
`vllm/v1/engine/core.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from bridge_patches import wrap
from bridge_patches.filter_thresholds import COUNT_BITS, KEPT_MASK, RANK_SHIFT, unpack
from bridge_patches.routed_experts import ExpertsInCache

PINS = """
vllm.v1.engine.core
    wrap EngineCoreProc.process_output_sockets()
    wrap EngineCoreProc._send_finish_outputs_to_client(req_ids, client_index, finish_reason)
    EngineCoreProc: output_queue
    EngineCore  # gets a method for `call_utility_async`
vllm.v1.engine
    EngineCoreOutput: request_id, new_token_ids, new_logprobs, finish_reason, events, prefill_stats, num_nans_in_logits,
        routed_experts, new_prompt_logprobs_tensors
    EngineCoreOutputs: outputs
vllm.v1.core.sched.scheduler
    wrap Scheduler.update_from_output(scheduler_output, model_runner_output)
    Scheduler: requests
vllm.v1.outputs
    # Three arrays, and the first row of each request.
    LogprobsLists: logprob_token_ids, logprobs, sampled_token_ranks, cu_num_generated_tokens
    replace LogprobsLists.slice_request(req_idx, num_positions)
vllm.v1.serial_utils
    CUSTOM_TYPE_RAW_VIEW
    call MsgpackEncoder._encode_ndarray(obj)  # which Bridge reimplements
    call MsgpackDecoder._decode_ndarray(arr)
"""
ROLLOUT = "bridge-rollout-"
"""Part of the ids of requests whose tokens get versions and wait in the engine; vLLM adds text at both ends."""
FILTERED = f"{ROLLOUT}filtered-"
"""Prefix of the ids of rollout requests whose tokens also get thresholds."""
AT_ONCE = "at-once-"
"""Part of the ids of rollouts whose tokens do not wait, because vLLM searches their text for stop strings."""
MOST_HELD = 32
"""Most tokens of a rollout that wait in the engine; if many rollouts end together, each sends at most this many."""
SERVE_VERSION = "bridge_serve_version"
"""Name of the engine's method that sets the version with which it samples from now on."""

_version = 0


def patch() -> None:
    """Wrap the thread that sends an engine's outputs; processes without an engine are unaffected."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    def serve_version(_: Any, version: int) -> None:
        global _version  # noqa: PLW0603  a process has at most one engine
        _version = version

    @wrap(EngineCoreProc, "process_output_sockets")
    def process_output_sockets(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        collect()
        return original(*args, **kwargs)

    setattr(EngineCore, SERVE_VERSION, serve_version)


def collect() -> None:
    """Replace how this process extracts a request's part of a step's log-probabilities, and when it sends it."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import LogprobsLists

    step: Step | None = None
    experts = ExpertsInCache()
    outbox = Outbox()

    def slice_request(lists: Any, req_idx: int, num_positions: int) -> Part:
        nonlocal step
        if step is None or step.lists is not lists:
            step = Step(lists, _version)  # a paused engine has no output left to send
        starts = lists.cu_num_generated_tokens
        return Part(step, req_idx if starts is None else starts[req_idx], num_positions)

    LogprobsLists.slice_request = slice_request

    @wrap(Scheduler, "update_from_output")
    def update_from_output(
        original: Callable[..., Any],
        scheduler: Any,
        scheduler_output: Any,
        model_runner_output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        experts.take(scheduler, scheduler_output, model_runner_output)
        by_client = original(scheduler, scheduler_output, model_runner_output, *args, **kwargs)
        for outputs in by_client.values():
            experts.report(outputs.outputs, at_once=AT_ONCE)
            outputs.outputs = outbox.due(outputs.outputs)
        outbox.forget(scheduler.requests)
        return by_client

    @wrap(EngineCoreProc, "_send_finish_outputs_to_client")
    def send_finish(
        original: Callable[..., Any], engine: Any, req_ids: Any, client_index: int, *args: Any, **kwargs: Any
    ) -> Any:
        if held := outbox.rest(req_ids):
            engine.output_queue.put_nowait((client_index, EngineCoreOutputs(outputs=held)))
        return original(engine, req_ids, client_index, *args, **kwargs)


@dataclass
class Step:
    """The log-probabilities of one step, converted once for all of its requests."""

    lists: Any
    """vLLM's arrays."""
    version: int
    """The version that sampled the tokens."""

    @cached_property
    def sampled(self) -> tuple[list[float], list[int]]:
        """Log-probabilities and ranks of the sampled tokens, which are the first entries of their rows."""
        return self.lists.logprobs[:, 0].tolist(), self.lists.sampled_token_ranks.tolist()

    @cached_property
    def contents(self) -> list[tuple[str, tuple[int, ...], bytes, int]]:
        """Return dtype, row shape, bytes, and bytes per row of vLLM's three arrays, with ranks as plain integers."""
        ids, logprobs, ranks, _ = self.lists
        packed = ranks.astype(np.int64)
        if np.any(is_packed := packed >> RANK_SHIFT != 0):
            ranks = np.where(is_packed, unpack(packed)[0], packed)
        return [
            (array.dtype.str, array.shape[1:], array.tobytes(), array.itemsize * math.prod(array.shape[1:]))
            for array in (ids, logprobs, ranks)
        ]


class Part(NamedTuple):
    """One request's rows of a step."""

    step: Step
    first: int
    num_rows: int

    def encoded(self) -> Any:
        """Return the rows as vLLM's `LogprobsLists`, encoded."""
        rows = slice(self.first, self.first + self.num_rows)
        return _encoded(
            (dtype, (self.num_rows, *shape), content[rows.start * row_bytes : rows.stop * row_bytes])
            for dtype, shape, content, row_bytes in self.step.contents
        )


@dataclass(slots=True)
class Held:
    """Tokens that a rollout has sampled since it last sent any."""

    output: Any
    """The newest `EngineCoreOutput`."""
    limit: int
    """Number of tokens that are sent without waiting for more."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def take(self, output: Any) -> None:
        """Add the output of a step."""
        before = self.output
        self.output = output
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            step, first, num_rows = output.new_logprobs
            logprobs, ranks = step.sampled
            self.logprobs += logprobs[first : first + num_rows]
            self.ranks += ranks[first : first + num_rows]
            self.versions += [step.version] * num_rows
            output.new_logprobs = None  # a waiting request must not keep a step's arrays alive
        if before is not output:
            output.prefill_stats = before.prefill_stats or output.prefill_stats
            output.events = [*(before.events or ()), *(output.events or ())] or None
            output.num_nans_in_logits = max(before.num_nans_in_logits, output.num_nans_in_logits)
            if before.new_prompt_logprobs_tensors is not None:  # sent only once, with the first token
                output.new_prompt_logprobs_tensors = before.new_prompt_logprobs_tensors

    def message(self) -> Any:
        """Return the newest output with all tokens that were held."""
        self.output.new_token_ids = self.token_ids
        if self.logprobs:
            numbers = _replaced_ranks(self.output.request_id, np.array(self.ranks), np.array(self.versions))
            arrays = (np.array(self.token_ids)[:, None], np.array(self.logprobs, np.float32)[:, None], numbers)
            self.output.new_logprobs = _encoded((array.dtype.str, array.shape, array.tobytes()) for array in arrays)
        return self.output


class Outbox:
    """Tokens of rollouts that wait in the engine."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        """Held tokens by request."""

    def due(self, outputs: Iterable[Any]) -> list[Any]:
        """Return which of a step's outputs to send, and hold the others."""
        return [message for output in outputs if (message := self._output_if_due(output)) is not None]

    def _output_if_due(self, output: Any) -> Any:
        request_id = output.request_id
        if ROLLOUT not in request_id:
            output.new_logprobs = output.new_logprobs and output.new_logprobs.encoded()
            return output
        if request_id not in self._held:
            self._held[request_id] = Held(output, 1 if AT_ONCE in request_id else MOST_HELD)
        held = self._held[request_id]
        held.take(output)
        is_due = output.finish_reason is not None or len(held.token_ids) >= held.limit
        return self._held.pop(request_id).message() if is_due else None

    def rest(self, request_ids: Iterable[str]) -> list[Any]:
        """Return the held outputs of these requests, to be sent."""
        return [self._held.pop(request).message() for request in request_ids if request in self._held]

    def forget(self, living: Mapping[str, Any]) -> None:
        """Discard the tokens of finished requests, as soon as more requests have tokens here than are live."""
        if len(self._held) > len(living):
            self._held = {request: held for request, held in self._held.items() if request in living}


def _replaced_ranks(request_id: str, ranks: Any, versions: Any) -> Any:
    """Return the numbers that a rollout gets instead of its tokens' ranks; ranks may have packed thresholds.

    Shapes: [N] int64, [N] int64 -> [N] int64.
    """
    if FILTERED not in request_id:
        return versions
    kept = np.where(ranks >> RANK_SHIFT != 0, ranks & KEPT_MASK, 0)  # 0: no thresholds are packed
    return (versions % 2**COUNT_BITS) << RANK_SHIFT | kept


def _encoded(arrays: Iterable[tuple[str, tuple[int, ...], bytes]]) -> Any:
    """Return vLLM's `LogprobsLists` with the arrays encoded as vLLM does: dtype, shape and bytes."""
    lists, raw = _wire()
    return lists(*((dtype, shape, raw(content)) for dtype, shape, content in arrays))


@cache
def _wire() -> tuple[Callable[..., Any], Callable[[bytes], Any]]:
    from msgspec.msgpack import Ext
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW

    return LogprobsLists, partial(Ext, CUSTOM_TYPE_RAW_VIEW)
