"""Tinker's wire format against the SDK's own module of messages, and the fields of it that are pinned."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.errors import UsageError
from bridge.tinker import wire
from tests import tinker_sdk


@pytest.fixture
def pb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(tinker_sdk.package(tmp_path / "sdk"))
    wire.messages.cache_clear()
    yield wire.messages()
    wire.messages.cache_clear()


def test_a_missing_sdk_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.messages.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="tinker is not installed") as error:
        wire.messages()
    assert "pip install" in error.value.hint


def test_a_changed_message_is_refused_by_its_field() -> None:
    known = {
        message: SimpleNamespace(DESCRIPTOR=SimpleNamespace(fields_by_name=[*fields]))
        for message, fields in wire.FIELDS.items()
    }
    wire.check(SimpleNamespace(**known))
    known["Datum"].DESCRIPTOR.fields_by_name.remove("loss_fn_inputs")
    with pytest.raises(UsageError, match="Datum has no field loss_fn_inputs"):
        wire.check(SimpleNamespace(**known))
    del known["Datum"]
    with pytest.raises(UsageError, match="Datum has no field model_input"):
        wire.check(SimpleNamespace(**known))


@tinker_sdk.needs_messages
def test_a_request_for_a_pass_is_read(pb: Any) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.5
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = np.array([7], "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = pb.DTYPE_INT64, np.array([[1, 2], [3, 4], [5, 6]], "<i8").tobytes()
    targets.shape.extend([3, 2])
    sparse = datum.loss_fn_inputs["weights"]
    sparse.dtype = pb.DTYPE_FLOAT32
    sparse.shape.extend([3, 2])
    sparse.sparse_csr.values = np.array([0.5, 2.0], "<f4").tobytes()
    sparse.sparse_csr.crow_indices = np.array([0, 1, 1, 2], "<i8").tobytes()
    sparse.sparse_csr.col_indices = np.array([1, 0], "<i8").tobytes()
    read = wire.pass_request(message.SerializeToString())
    assert (read.model_id, read.seq_id, read.loss_fn, read.is_forward) == ("m", 3, "ppo", False)
    assert read.config == {"clip_low_threshold": 0.5}
    (one,) = read.data
    assert one.tokens == (5, 6, 7)
    assert one.inputs["target_tokens"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert one.inputs["weights"].tolist() == [[0, 0.5], [0, 0], [2, 0]]


@tinker_sdk.needs_messages
def test_an_unusable_request_is_refused(pb: Any) -> None:
    with pytest.raises(UsageError, match="no ForwardBackwardRequest"):
        wire.pass_request(b"\xff\xff\xff")
    image = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    image.data.add().model_input.add().image.data = b"x"
    with pytest.raises(UsageError, match="datum 0 has a part of the type image"):
        wire.pass_request(image.SerializeToString())
    odd = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    tensor = odd.data.add().loss_fn_inputs["weights"]
    tensor.dtype, tensor.dense = pb.DTYPE_FLOAT32, b"123"
    with pytest.raises(UsageError, match="datum 0 has an input that cannot be read"):
        wire.pass_request(odd.SerializeToString())


@tinker_sdk.needs_messages
def test_results_are_what_the_sdk_reads(pb: Any) -> None:
    logprobs = [np.array([-1.0, -2.0], np.float32), np.array([[-1.0, -3.0]], np.float32)]
    answer = pb.ForwardBackwardOutput.FromString(wire.pass_result(logprobs, {"loss:sum": 2.0}))
    assert dict(answer.metrics) == {"loss:sum": 2.0}
    assert [list(record.fields["logprobs"].trailing_shape) for record in answer.loss_fn_outputs] == [[], [2]]
    reply = {
        "token_ids": [[3, 4]], "finish_reasons": ["length"],
        "logprobs": [[[{"3": -0.5, "9": -1.5}], [{"4": -0.25}]]], "prompt_logprobs": [None, {"6": -2.0, "1": -1.0}],
    }  # fmt: skip
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    sampled = pb.SampleResponse.FromString(wire.sample_result(wire.sampled(reply, [5, 6]), asked, [5, 6]))
    (sequence,) = sampled.sequences
    assert np.frombuffer(sequence.tokens, "<i4").tolist() == [3, 4]
    assert np.frombuffer(sequence.logprobs, "<f4").tolist() == [-0.5, -0.25]
    assert np.frombuffer(sequence.topk_sampled_logprobs.token_ids, "<i4").tolist() == [3, 9, 4, 0]
    scored = np.frombuffer(sampled.prompt_logprobs, "<f4").tolist()
    assert np.isnan(scored[0])
    assert scored[1] == -2.0
    assert np.frombuffer(sampled.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 1, 6]


@tinker_sdk.needs_messages
def test_completions_are_what_the_sdk_reads(pb: Any) -> None:
    choices = [
        {
            "index": index, "token_ids": tokens, "finish_reason": reason, "logprobs": {"token_logprobs": logprobs},
            "prompt_logprobs": [None, -2.0],
        }
        for index, tokens, reason, logprobs in ((1, [7], "stop", [-1.0]), (0, [3, 3], "length", [-0.5, -0.25]))
    ]  # fmt: skip
    found = wire.sampled({"choices": choices}, [5, 6])
    sampled = pb.SampleResponse.FromString(wire.sample_result(found, {"prompt_logprobs": True}, [5, 6]))
    tokens = [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in sampled.sequences]
    logprobs = [np.frombuffer(sequence.logprobs, "<f4").tolist() for sequence in sampled.sequences]
    assert (tokens, logprobs) == ([[3, 3], [7]], [[-0.5, -0.25], [-1.0]])
    reasons = [sequence.stop_reason for sequence in sampled.sequences]
    assert reasons == [pb.STOP_REASON_LENGTH, pb.STOP_REASON_STOP]
    scored = np.frombuffer(sampled.prompt_logprobs, "<f4").tolist()
    assert np.isnan(scored[0])
    assert scored[1] == -2.0
