"""The engine's encoding of log-probabilities, read by vLLM's own decoder."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from patches import logprobs_wire


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore both functions after the test."""
    from vllm.v1.engine.core import EngineCoreProc  # takes four seconds, too slow for collection
    from vllm.v1.outputs import LogprobsLists

    monkeypatch.setattr(LogprobsLists, "slice_request", LogprobsLists.slice_request)
    monkeypatch.setattr(EngineCoreProc, "process_output_sockets", EngineCoreProc.process_output_sockets)


def lists(num_rows: int, num_columns: int, starts: list[int] | None = None) -> Any:
    from vllm.v1.outputs import LogprobsLists

    chance = np.random.default_rng(0)
    ids = chance.integers(0, 150_000, (num_rows, num_columns))
    ranks = chance.integers(1, 9, num_rows)
    return LogprobsLists(ids, -chance.random((num_rows, num_columns), np.float32), ranks, starts)


def received(steps: list[tuple[Any, list[tuple[int, int]]]]) -> list[Any]:
    """Send the parts of some steps, each (request, positions), and return what arrives."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    encoder, decoder, arrived = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), []
    for step, parts in steps:
        outputs = [
            EngineCoreOutput(request_id="", new_token_ids=[1], new_logprobs=step.slice_request(request, count))
            for request, count in parts
        ]
        decoded = decoder.decode(encoder.encode(EngineCoreOutputs(outputs=outputs)))
        arrived += [output.new_logprobs for output in decoded.outputs]
    return arrived


def test_vllm_reads_what_it_would_have_written() -> None:
    one, top = lists(64, 1), lists(3, 100)  # vLLM sends the second outside of the message, as it is too large
    several = lists(7, 2, [0, 3, 4, 7])
    steps = [
        (one, [(request, 1) for request in range(64)]),
        (top, [(2, 1), (0, 1)]),
        (several, [(0, 3), (1, 1), (2, 3), (0, 1)]),
        (one, [(63, 1), (0, 0)]),
    ]
    expected = received(steps)
    logprobs_wire.send_bytes()
    found = received(steps)
    assert len(found) == len(expected) == 64 + 2 + 4 + 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.cu_num_generated_tokens is theirs.cu_num_generated_tokens is None
        for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
            one_array, other = getattr(mine, name), getattr(theirs, name)
            assert (one_array.dtype, one_array.shape) == (other.dtype, other.shape)
            assert np.array_equal(one_array, other)


def test_nothing_changes_in_a_process_that_sends_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import LogprobsLists

    original, ran = LogprobsLists.slice_request, list[Any]()
    sends: Callable[..., Any] = lambda *given: ran.append(given)  # noqa: E731  what the thread runs
    monkeypatch.setattr(EngineCoreProc, "process_output_sockets", sends)
    logprobs_wire.patch()
    assert LogprobsLists.slice_request is original
    EngineCoreProc.process_output_sockets("self", ["path"], None, 0)
    assert ran == [("self", ["path"], None, 0)]
    assert LogprobsLists.slice_request is not original
