"""Send a step's log-probabilities from the engine as raw bytes, and with them the version of the weights.

Symptom: with log-probabilities, 64 completions of a 1.5B model take an H200 a third longer.
Cause: every completion sends three one-element arrays per step, and msgspec calls back into Python for each of them, in
a thread that delays the one that launches the next step.
Why this is safe: these are the bytes that vLLM's own encoder makes of these arrays, and vLLM's own decoder reads them.
Log-probabilities of prompts, which are sent once, are left alone.

A rollout has no use for the third array, the ranks of its tokens in the vocabulary: it gets the version that sampled
each token instead, and if it is filtered what was kept in the same number (`thresholds.py`). A paused engine has no
output left to send, so a step's outputs are all of one version.
Seen in vLLM 0.26 to 0.33: `vllm/v1/outputs.py`, `vllm/v1/serial_utils.py`, `vllm/v1/core/sched/scheduler.py`.
"""

import math
from functools import wraps
from typing import Any

import numpy as np

from patches.thresholds import COUNT_BITS, KEPT_MASK, RANK_SHIFT, unpack

PINS = """
vllm.v1.engine.core
    wrap EngineCoreProc.process_output_sockets()
    EngineCore  # gets a method for `call_utility_async`
vllm.v1.engine: EngineCoreOutput: request_id, new_logprobs
vllm.v1.core.sched.scheduler: wrap Scheduler.update_from_output(scheduler_output, model_runner_output)
vllm.v1.outputs
    # Three arrays, and where each request's rows begin.
    LogprobsLists: logprob_token_ids, logprobs, sampled_token_ranks, cu_num_generated_tokens
    replace LogprobsLists.slice_request(req_idx, num_positions)
vllm.v1.serial_utils
    CUSTOM_TYPE_RAW_VIEW
    call MsgpackEncoder._encode_ndarray(obj)  # what we do in its place
    call MsgpackDecoder._decode_ndarray(arr)
"""
ROLLOUT = "bridge-rollout-"
"""Part of the ids of requests whose tokens get versions; vLLM adds more at both ends."""
FILTERED = f"{ROLLOUT}filtered-"
"""The same for requests whose tokens get thresholds, too."""
SERVE_VERSION = "bridge_serve_version"
"""Method of the engine: from now on it samples with this version."""

_version = 0


def patch() -> None:
    """Wrap the thread that sends an engine's outputs; a process without one is unaffected."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    original = EngineCoreProc.process_output_sockets

    @wraps(original)
    def process_output_sockets(self: Any, *args: Any, **kwargs: Any) -> Any:
        send_bytes()
        return original(self, *args, **kwargs)

    def serve_version(_: Any, version: int) -> None:
        global _version  # noqa: PLW0603  a process has one engine at most
        _version = version

    EngineCoreProc.process_output_sockets = process_output_sockets
    setattr(EngineCore, SERVE_VERSION, serve_version)


def send_bytes() -> None:
    """Replace how this process slices a request's part out of a step's log-probabilities, and add the versions."""
    from msgspec.msgpack import Ext
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW

    step: Any = None
    arrays: list[Any] = []  # those of the step, each as type, shape of a row, bytes, and bytes of a row
    is_packed = False  # whether the step's ranks share their bits with thresholds

    def slice_request(self: Any, req_idx: int, num_positions: int) -> Any:
        nonlocal step, arrays, is_packed
        if step is not self:
            step, arrays = self, [_as_bytes(array) for array in self[:3]]
            is_packed = bool(np.any(self.sampled_token_ranks.astype(np.int64) >> RANK_SHIFT))
        first = req_idx if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[req_idx]
        wires = []
        for dtype, shape, content, row_bytes in arrays:
            part = content[first * row_bytes : (first + num_positions) * row_bytes]
            wires.append((dtype, (len(part) // row_bytes, *shape), Ext(CUSTOM_TYPE_RAW_VIEW, part)))
        return LogprobsLists(*wires)

    original = Scheduler.update_from_output

    @wraps(original)
    def update_from_output(*args: Any, **kwargs: Any) -> Any:
        sent = original(*args, **kwargs)
        for outputs in sent.values():
            for output in outputs.outputs:
                lists = output.new_logprobs
                if lists is not None and (is_packed or ROLLOUT in output.request_id):
                    dtype, shape, content = lists.sampled_token_ranks
                    numbers = _instead(output.request_id, np.frombuffer(content.data, dtype), is_packed=is_packed)
                    content = Ext(CUSTOM_TYPE_RAW_VIEW, numbers.tobytes())
                    output.new_logprobs = lists._replace(sampled_token_ranks=(dtype, shape, content))
        return sent

    LogprobsLists.slice_request, Scheduler.update_from_output = slice_request, update_from_output


def _instead(request_id: str, ranks: Any, *, is_packed: bool) -> Any:
    """Return what a request gets in place of its tokens' ranks, or of ranks packed with thresholds."""
    if FILTERED in request_id:
        kept = ranks & KEPT_MASK if is_packed else np.zeros(len(ranks), np.int64)  # no number of words: unknown
        return np.int64(_version % 2**COUNT_BITS) << RANK_SHIFT | kept
    return np.full_like(ranks, _version) if ROLLOUT in request_id else unpack(ranks)[0]


def _as_bytes(array: Any) -> tuple[str, tuple[int, ...], bytes, int]:
    return array.dtype.str, array.shape[1:], array.tobytes(), array.itemsize * math.prod(array.shape[1:])
