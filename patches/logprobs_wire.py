"""Send a step's log-probabilities from the engine as raw bytes, not array by array.

Symptom: with log-probabilities, 64 completions of a 1.5B model take an H200 a third longer.
Cause: every completion sends three one-element arrays per step, and msgspec calls back into Python for each of them, in
a thread that delays the one that launches the next step.
Why this is safe: these are the bytes that vLLM's own encoder makes of these arrays, and vLLM's own decoder reads them.
Log-probabilities of prompts, which are sent once, are left alone.
Seen in vLLM 0.26 to 0.33, `vllm/v1/outputs.py` and `vllm/v1/serial_utils.py`.
"""

import math
from functools import wraps
from typing import Any

PINS = """
vllm.v1.engine.core: wrap EngineCoreProc.process_output_sockets()
vllm.v1.outputs
    # Three arrays, and where each request's rows begin.
    LogprobsLists: logprob_token_ids, logprobs, sampled_token_ranks, cu_num_generated_tokens
    replace LogprobsLists.slice_request(req_idx, num_positions)
vllm.v1.serial_utils
    CUSTOM_TYPE_RAW_VIEW
    call MsgpackEncoder._encode_ndarray(obj)  # what we do in its place
    call MsgpackDecoder._decode_ndarray(arr)
"""


def patch() -> None:
    """Wrap the thread that sends an engine's outputs; a process without one is unaffected."""
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.process_output_sockets

    @wraps(original)
    def process_output_sockets(self: Any, *args: Any, **kwargs: Any) -> Any:
        send_bytes()
        return original(self, *args, **kwargs)

    EngineCoreProc.process_output_sockets = process_output_sockets


def send_bytes() -> None:
    """Replace how this process slices a request's part out of a step's log-probabilities."""
    from msgspec.msgpack import Ext
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW

    step: Any = None
    arrays: list[Any] = []  # those of the step, each as type, shape of a row, bytes, and bytes of a row

    def slice_request(self: Any, req_idx: int, num_positions: int) -> Any:
        nonlocal step, arrays
        if step is not self:
            step, arrays = self, [_as_bytes(array) for array in self[:3]]
        first = req_idx if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[req_idx]
        wires = []
        for dtype, shape, content, row_bytes in arrays:
            part = content[first * row_bytes : (first + num_positions) * row_bytes]
            wires.append((dtype, (len(part) // row_bytes, *shape), Ext(CUSTOM_TYPE_RAW_VIEW, part)))
        return LogprobsLists(*wires)

    LogprobsLists.slice_request = slice_request


def _as_bytes(array: Any) -> tuple[str, tuple[int, ...], bytes, int]:
    return array.dtype.str, array.shape[1:], array.tobytes(), array.itemsize * math.prod(array.shape[1:])
