"""The engine's encoding of log-probabilities, read by vLLM's own decoder."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from patches import logprobs_wire, thresholds


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


def test_ranks_and_what_was_kept_come_apart_as_they_were_packed() -> None:
    ranks, counts = torch.tensor([1, 7, 151_936, 2**20 - 1]), torch.tensor([1, 20, 262_144, 9])
    found = torch.tensor([-0.125, 17.3, thresholds.KEEP_ALL, 1e-3])
    back = thresholds.unpack(thresholds.pack(ranks, found, counts).numpy())
    assert back[0].tolist() == ranks.tolist()
    assert back[1] == pytest.approx(found.numpy(), rel=2**-15)
    assert back[2].tolist() == counts.tolist()


@pytest.mark.parametrize("is_packed", [True, False])
def test_each_kind_of_request_gets_its_own_in_place_of_ranks(
    monkeypatch: pytest.MonkeyPatch, *, is_packed: bool
) -> None:
    monkeypatch.setattr(logprobs_wire, "_version", 2**20 + 5)  # the last bits are sent
    ranks = torch.tensor([4, 9])
    if is_packed:
        ranks = thresholds.pack(ranks, torch.tensor([0.5, -2.0]), torch.tensor([3, 40]))
    rollout, filtered, other = (
        logprobs_wire._instead(f"0_{name}x", ranks.numpy(), is_packed=is_packed)
        for name in (logprobs_wire.ROLLOUT, logprobs_wire.FILTERED, "cmpl-")
    )
    assert rollout.tolist() == [2**20 + 5] * 2
    assert other.tolist() == [4, 9] or not is_packed, "then it is left alone"
    versions, found, counts = thresholds.unpack(filtered)
    assert versions.tolist() == [5, 5]
    if is_packed:
        assert (found.tolist(), counts.tolist()) == ([0.5, -2.0], [3, 40])
    else:
        assert not counts.any(), "unknown"


def test_a_threshold_is_between_what_was_kept_and_what_was_dropped() -> None:
    inf = torch.inf
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [4.0, 4.0, 4.0, 4.0], [1.0, 0.0, 2.0, 3.0]])
    processed = torch.tensor([[0.0, -inf, -1.0, -inf], [-1.4, -1.4, -1.4, -1.4], [-inf, -inf, -inf, 0.0]])
    found, counts = thresholds.kept(logits, processed, torch.tensor([0.5, 1.0, 0.0]))
    assert found.tolist() == [3.0, pytest.approx(thresholds.KEEP_ALL), 2.5]
    assert counts.tolist() == [2, 4, 1]


class SecondRunner:
    """vLLM's sampler of its second model runner, as far as it is wrapped: it keeps the likelier half."""

    bridge_processed: Any

    def __init__(self, top_p: float) -> None:
        def both(value: float) -> Any:
            return SimpleNamespace(np=np.array([value, 9.0]), gpu=torch.tensor([value, 9.0]))

        self.sampling_states = SimpleNamespace(
            temperature=both(0.5), top_k=both(4), top_p=both(top_p), min_p=both(0.0), vocab_size=4
        )

    def __call__(self, logits: Any, input_batch: Any) -> Any:
        sampled, _ = self.sample(logits, input_batch)
        return SimpleNamespace(logprobs_tensors=Tensors(selected_token_ranks=sampled))

    def sample(self, logits: Any, _: Any) -> Any:
        logits[:, :2] = -torch.inf  # in place, as some versions do
        return torch.ones(len(logits), dtype=torch.int64), logits


class Tensors(NamedTuple):
    """Stands in for vLLM's `LogprobsTensors`."""

    selected_token_ranks: Any


@pytest.mark.parametrize(("top_p", "is_filtered"), [(0.9, True), (1.0, False)])
def test_a_sampler_reports_what_it_kept_if_a_request_of_the_step_is_filtered(
    top_p: float, *, is_filtered: bool
) -> None:
    class Wrapped(SecondRunner):
        pass

    thresholds._wrap(Wrapped, "__call__", "input_batch", thresholds._temperatures_v2)
    batch = SimpleNamespace(idx_mapping_np=np.array([0]), expanded_idx_mapping=torch.tensor([0]))
    sampler = Wrapped(top_p)
    output = sampler(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), input_batch=batch)
    packed = output.logprobs_tensors.selected_token_ranks
    ranks, found, counts = thresholds.unpack(packed.numpy())
    assert packed.tolist() == [1] if not is_filtered else (ranks, found, counts) == (1, 3.0, 2)
    assert sampler.bridge_processed is None, "a step's logits are not kept"


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
