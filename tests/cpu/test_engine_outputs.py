"""The engine's outputs for each request, read by vLLM's own decoder."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import pytest
import torch

from bridge_patches import engine_outputs, filter_thresholds
from bridge_patches.engine_outputs import AT_ONCE, FILTERED, MOST_HELD, ROLLOUT, Outbox


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the patches after the test."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc  # takes four seconds, too slow for collection
    from vllm.v1.outputs import LogprobsLists

    for owner, name in (
        (LogprobsLists, "slice_request"), (Scheduler, "update_from_output"),
        (EngineCoreProc, "process_output_sockets"), (EngineCoreProc, "_send_finish_outputs_to_client"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))


def lists(num_rows: int, num_columns: int, starts: list[int] | None = None) -> Any:
    from vllm.v1.outputs import LogprobsLists

    chance = np.random.default_rng(0)
    ids = chance.integers(0, 150_000, (num_rows, num_columns))
    ranks = chance.integers(1, 9, num_rows)
    return LogprobsLists(ids, -chance.random((num_rows, num_columns), np.float32), ranks, starts)


def output(step: Any, request: int, count: int = 1, *, id_: str = "cmpl-1", **given: Any) -> Any:
    """Return the scheduler's output for one request in a step."""
    from vllm.v1.engine import EngineCoreOutput

    first = request if step.cu_num_generated_tokens is None else step.cu_num_generated_tokens[request]
    ids = step.logprob_token_ids[first : first + count, 0].tolist()
    return EngineCoreOutput(
        request_id=id_, new_token_ids=ids, new_logprobs=step.slice_request(request, count), **given
    )  # fmt: skip


def received(outputs: Sequence[Any]) -> list[Any]:
    """Encode and decode outputs, and return what arrives."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    decoded: list[Any] = decoder.decode(encoder.encode(EngineCoreOutputs(outputs=list(outputs)))).outputs
    return decoded


def update_returning(outputs: Sequence[Sequence[Any]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Wrap an `update_from_output` of vLLM that returns these outputs one after the other."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs

    remaining = iter(outputs)
    monkeypatch.setattr(
        Scheduler, "update_from_output", lambda *_: {0: EngineCoreOutputs(outputs=list(next(remaining)))}
    )
    engine_outputs.collect()
    update: Callable[..., Any] = Scheduler.update_from_output
    return update


def columns(request_output: Any) -> tuple[list[int], list[float], list[int]]:
    """Return the sampled tokens' ids, log-probabilities and ranks, or the values sent instead of ranks."""
    arrived = request_output.new_logprobs
    return (
        arrived.logprob_token_ids[:, 0].tolist(),
        arrived.logprobs[:, 0].tolist(),
        arrived.sampled_token_ranks.tolist(),
    )


def test_vllm_decodes_the_patched_output_like_its_own() -> None:
    one, top = lists(64, 1), lists(3, 100)  # vLLM sends the second, large one outside of the message
    several = lists(7, 2, [0, 3, 4, 7])
    steps = [
        (one, [(request, 1) for request in range(64)]),
        (top, [(2, 1), (0, 1)]),
        (several, [(0, 3), (1, 1), (2, 3), (0, 1)]),
        (one, [(63, 1), (0, 0)]),
    ]

    def outputs() -> list[Any]:
        return [output(step, request, count) for step, parts in steps for request, count in parts]

    expected = received(outputs())
    engine_outputs.collect()
    decoded = received(Outbox().due(outputs()))
    assert len(decoded) == len(expected) == 64 + 2 + 4 + 2
    for mine, theirs in zip(decoded, expected, strict=True):
        assert mine.new_logprobs.cu_num_generated_tokens is theirs.new_logprobs.cu_num_generated_tokens is None
        for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
            one_array, other = getattr(mine.new_logprobs, name), getattr(theirs.new_logprobs, name)
            assert (one_array.dtype, one_array.shape) == (other.dtype, other.shape)
            assert np.array_equal(one_array, other)


def test_rollout_output_has_the_version_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, FinishReason
    from vllm.v1.metrics.stats import PrefillStats

    engine_outputs.collect()
    outbox, rollout, sent, expected = Outbox(), f"0_{ROLLOUT}x", list[Any](), list[Any]()
    queued, preempted = (
        EngineCoreEvent.new_event(kind) for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.PREEMPTED)
    )
    for number in range(MOST_HELD + 3):
        monkeypatch.setattr(engine_outputs, "_version", 7 + (number >= 10))
        step = lists(5 + number % 2, 1 + number % 3)  # other requests start, end, and request alternatives
        given = {
            0: {"events": [queued], "prefill_stats": PrefillStats(num_prompt_tokens=9)},
            4: {"events": [preempted]},
        }
        last = {"finish_reason": FinishReason.STOP, "stop_reason": 3} if number == MOST_HELD + 2 else {}
        other = output(step, 0)
        expected.append((step.logprob_token_ids[4, 0], step.logprobs[4, 0], engine_outputs._version))
        sent_now = outbox.due([other, output(step, 4, id_=rollout, **given.get(number, {}), **last)])
        assert sent_now[0] is other, "no other request waits"
        sent += sent_now[1:]
        assert len(sent) == (number >= MOST_HELD - 1) + (number == MOST_HELD + 2)
    first, second = received(sent)
    assert first.new_token_ids + second.new_token_ids == [token for token, *_ in expected]
    assert [*zip(*columns(first), strict=True), *zip(*columns(second), strict=True)] == expected
    assert (first.events, second.events, first.finish_reason) == ([queued, preempted], None, None)
    assert (first.prefill_stats.num_prompt_tokens, second.prefill_stats) == (9, None)
    assert (second.finish_reason, second.stop_reason) == (FinishReason.STOP, 3)
    assert not outbox._held


def test_tokens_of_a_speculative_step_are_held_together() -> None:
    engine_outputs.collect()
    outbox, step = Outbox(), lists(7, 2, [0, 3, 4, 7])
    assert not outbox.due([output(step, 0, 3, id_=ROLLOUT), output(step, 2, 3, id_=f"{ROLLOUT}2")])
    first, second = received(outbox.rest([ROLLOUT, "unknown", f"{ROLLOUT}2"]))
    assert (first.new_token_ids, second.new_token_ids) == tuple(
        step.logprob_token_ids[rows, 0].tolist() for rows in (slice(3), slice(4, 7))
    )
    assert columns(first)[1] == step.logprobs[:3, 0].tolist()
    assert columns(second)[1] == step.logprobs[4:7, 0].tolist()


def test_held_tokens_do_not_keep_the_steps_arrays_alive() -> None:
    engine_outputs.collect()
    outbox, part = Outbox(), output(lists(3, 1), 1, id_=ROLLOUT)
    step = ref(part.new_logprobs.step)
    assert not outbox.due([part])
    output(lists(3, 1), 0)  # vLLM continues with the next step
    del part
    assert step() is None


def test_nan_logits_are_counted_over_held_steps() -> None:
    engine_outputs.collect()
    outbox, step = Outbox(), lists(3, 1)
    for number in (0, 3, 0):
        assert not outbox.due([output(step, 1, id_=ROLLOUT, num_nans_in_logits=number)])
    (request_output,) = received(outbox.rest([ROLLOUT]))
    assert (len(request_output.new_token_ids), request_output.num_nans_in_logits) == (3, 3)


def test_tokens_checked_for_stop_strings_are_not_held() -> None:
    engine_outputs.collect()
    step = lists(3, 1)
    (request_output,) = received(Outbox().due([output(step, 1, id_=f"{ROLLOUT}{AT_ONCE}x")]))
    assert columns(request_output) == (request_output.new_token_ids, step.logprobs[1].tolist(), [0])


def test_aborted_request_sends_its_held_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.core import EngineCoreProc

    ended = list[Any]()
    monkeypatch.setattr(EngineCoreProc, "_send_finish_outputs_to_client", lambda _, *given: ended.append(given))
    step, kept, aborted = lists(3, 1), f"{ROLLOUT}kept", f"{ROLLOUT}gone"
    outputs = [list[Any]()]
    update = update_returning(outputs, monkeypatch)
    outputs[0] += [output(step, 0, id_=kept), output(step, 1, id_=aborted)]
    assert update(SimpleNamespace(requests={kept: None, aborted: None}), None, None)[0].outputs == []
    queued = list[Any]()
    engine = SimpleNamespace(output_queue=SimpleNamespace(put_nowait=queued.append))
    EngineCoreProc._send_finish_outputs_to_client(engine, [aborted, "other"], 4, FinishReason.ABORT)
    ((client, message),) = queued
    assert client == 4
    assert [(request_output.request_id, request_output.new_token_ids) for request_output in message.outputs] == [
        (aborted, step.logprob_token_ids[1].tolist())
    ]
    EngineCoreProc._send_finish_outputs_to_client(engine, [aborted], 4, FinishReason.ABORT)
    assert len(queued) == 1, "nothing is sent twice"
    assert ended == [([aborted, "other"], 4, FinishReason.ABORT), ([aborted], 4, FinishReason.ABORT)]


def test_outputs_without_a_receiver_are_dropped() -> None:
    engine_outputs.collect()
    outbox, step = Outbox(), lists(9, 1)
    ids = [f"{ROLLOUT}{number}" for number in range(9)]
    assert not outbox.due([output(step, number, id_=id_) for number, id_ in enumerate(ids)])
    outbox.forget(dict.fromkeys(ids[:2]))
    assert [request_output.request_id for request_output in outbox.rest(ids)] == ids[:2]


def test_ranks_and_kept_words_unpack_as_they_were_packed() -> None:
    ranks, counts = torch.tensor([1, 7, 151_936, 2**20 - 1]), torch.tensor([1, 20, 262_144, 9])
    limits = torch.tensor([-0.125, 17.3, filter_thresholds.KEEP_ALL, 1e-3])
    back = filter_thresholds.unpack(filter_thresholds.pack(ranks, limits, counts).numpy())
    assert back[0].tolist() == ranks.tolist()
    assert back[1] == pytest.approx(limits.numpy(), rel=2**-15)
    assert back[2].tolist() == counts.tolist()


@pytest.mark.parametrize("is_packed", [True, False])
def test_each_kind_of_request_gets_its_values_instead_of_ranks(
    monkeypatch: pytest.MonkeyPatch, *, is_packed: bool
) -> None:
    monkeypatch.setattr(engine_outputs, "_version", 2**20 + 5)  # the last bits are sent
    step = lists(2, 1)
    ranks = torch.tensor([4, 9])
    if is_packed:
        ranks = filter_thresholds.pack(ranks, torch.tensor([0.5, -2.0]), torch.tensor([3, 40]))
    step = step._replace(sampled_token_ranks=ranks.numpy())
    engine_outputs.collect()
    sent = [output(step, 0, 2, id_=f"0_{kind}{AT_ONCE}x") for kind in (ROLLOUT, FILTERED, "cmpl-")]
    rollout, filtered, other = (columns(request_output)[2] for request_output in received(Outbox().due(sent)))
    assert rollout == [2**20 + 5] * 2
    assert other == [4, 9]
    versions, limits, counts = filter_thresholds.unpack(filtered)
    assert versions.tolist() == [5, 5]
    if is_packed:
        assert (limits.tolist(), counts.tolist()) == ([0.5, -2.0], [3, 40])
    else:
        assert not counts.any(), "unknown"


def test_threshold_is_between_kept_and_dropped_logits() -> None:
    inf = torch.inf
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [4.0, 4.0, 4.0, 4.0], [1.0, 0.0, 2.0, 3.0]])
    processed = torch.tensor([[0.0, -inf, -1.0, -inf], [-1.4, -1.4, -1.4, -1.4], [-inf, -inf, -inf, 0.0]])
    limits, counts = filter_thresholds.kept(logits, processed, torch.tensor([0.5, 1.0, 0.0]))
    assert limits.tolist() == [3.0, pytest.approx(filter_thresholds.KEEP_ALL), 2.5]
    assert counts.tolist() == [2, 4, 1]


class SecondRunner:
    """A stand-in for the sampler of vLLM's second model runner, which keeps the likelier half of the words."""

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
    """A stand-in for vLLM's `LogprobsTensors`."""

    selected_token_ranks: Any


@pytest.mark.parametrize(("top_p", "is_filtered"), [(0.9, True), (1.0, False)])
def test_sampler_reports_the_words_that_filters_kept(top_p: float, *, is_filtered: bool) -> None:
    class Wrapped(SecondRunner):
        pass

    filter_thresholds.wrap_sampler(Wrapped, "__call__", "input_batch", filter_thresholds._temperatures_v2)
    batch = SimpleNamespace(idx_mapping_np=np.array([0]), expanded_idx_mapping=torch.tensor([0]))
    sampler = Wrapped(top_p)
    output = sampler(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), input_batch=batch)
    packed = output.logprobs_tensors.selected_token_ranks
    ranks, limit, counts = filter_thresholds.unpack(packed.numpy())
    assert packed.tolist() == [1] if not is_filtered else (ranks, limit, counts) == (1, 3.0, 2)


def test_process_without_outputs_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import LogprobsLists

    original, ran = LogprobsLists.slice_request, list[Any]()
    sends: Callable[..., Any] = lambda *given: ran.append(given)  # noqa: E731  what the thread runs
    monkeypatch.setattr(EngineCoreProc, "process_output_sockets", sends)
    engine_outputs.patch()
    assert LogprobsLists.slice_request is original
    EngineCoreProc.process_output_sockets("self", ["path"], None, 0)
    assert ran == [("self", ["path"], None, 0)]
    assert LogprobsLists.slice_request is not original
