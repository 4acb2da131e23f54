"""Tinker's wire format: protobuf for passes and samples, JSON for the rest.

The messages are those of the SDK's own generated module, which is loaded without the rest of the SDK. `FIELDS` pins
what is read and written: an SDK that has changed it is refused by the name of the field.
Shape suffixes: T positions of a datum, K targets of a position.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import UsageError

SDKS = "tinker>=0.25,<0.39"
"""Versions whose wire format is known."""
INSTALL = f"pip install '{SDKS}'"
FIELDS: Mapping[str, tuple[str, ...]] = {
    "ForwardBackwardRequest": ("model_id", "seq_id", "loss_fn", "loss_fn_config", "data"),
    "Datum": ("model_input", "loss_fn_inputs"),
    "Chunk": ("encoded_text",),
    "EncodedTextChunk": ("tokens",),
    "Tensor": ("dense", "sparse_csr", "dtype", "shape"),
    "SparseCsr": ("values", "crow_indices", "col_indices"),
    "ForwardBackwardOutput": ("loss_fn_output_type", "loss_fn_outputs", "metrics"),
    "ArrayRecord": ("fields", "type_tag", "num_datums"),
    "BatchedTensor": ("data", "offsets", "dtype", "trailing_shape"),
    "SampleResponse": ("sequences", "prompt_logprobs", "topk_prompt_logprobs"),
    "SampledSequence": ("stop_reason", "tokens", "logprobs"),
    "TopkLogprobs": ("token_ids", "logprobs", "k", "length"),
}
"""Message -> its fields that are used here."""
NOTHING = -99_999.0
"""The SDK's log-probability of an empty place in a table of the likeliest tokens."""


@dataclass(frozen=True)
class Datum:
    """A sequence, and what its loss reads."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, NDArray[Any]]
    """Dense: [T], or [T, K] with several targets."""


@dataclass(frozen=True)
class PassRequest:
    """A request of `forward` or `forward_backward`."""

    model_id: str
    seq_id: int
    loss_fn: str
    config: Mapping[str, object]
    data: Sequence[Datum]
    is_forward: bool
    """Whether no gradients are wanted."""


@cache
def messages() -> ModuleType:
    """Return the SDK's module of messages.

    Raises:
        UsageError: there is no SDK, or it has another wire format.
    """
    found = importlib.util.find_spec("tinker")
    if found is None or not found.submodule_search_locations:
        raise UsageError("the package tinker is not installed, and the server uses its message formats", hint=INSTALL)
    file = Path(next(iter(found.submodule_search_locations))) / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("bridge_tinker_public_pb2", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UsageError(f"the installed package tinker has no {file.name}, expected {SDKS}", hint=INSTALL)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UsageError(f"the messages of tinker cannot be loaded: {error}", hint=INSTALL) from error
    check(module)
    return module


def check(module: Any) -> None:
    """Raise UsageError if a message of the SDK lacks a field that is used here."""
    for message, fields in FIELDS.items():
        descriptor = getattr(getattr(module, message, None), "DESCRIPTOR", None)
        known = () if descriptor is None else descriptor.fields_by_name
        if missing := [field for field in fields if field not in known]:
            raise UsageError(
                f"the installed package tinker has another wire format: {message} has no field {missing[0]}, expected"
                f" {SDKS}",
                hint=INSTALL,
            )


def pass_request(body: bytes) -> PassRequest:
    """Decode a request for a pass; UsageError if it is none, or has what is not supported."""
    pb: Any = messages()
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except Exception as error:  # protobuf's own, of whichever version
        raise UsageError(f"the body is no ForwardBackwardRequest: {error}", hint=f"use {SDKS}") from error
    config: dict[str, object] = dict(message.loss_fn_config)
    for key, value in getattr(message, "loss_fn_config_v2", {}).items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss_fn=message.loss_fn,
        config=config,
        data=[_datum(one, number) for number, one in enumerate(message.data)],
        is_forward=bool(getattr(message, "forward_only", False)),
    )


def _datum(message: Any, number: int) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UsageError(
                f"datum {number} has a part of the type {kind}, expected encoded_text", hint="images are not supported"
            )
        tokens += np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
    try:
        inputs = {name: _array(tensor) for name, tensor in message.loss_fn_inputs.items()}
    except (ValueError, KeyError, IndexError) as error:
        raise UsageError(f"datum {number} has an input that cannot be read: {error}", hint=f"use {SDKS}") from error
    return Datum(tuple(tokens), inputs)


def _array(message: Any) -> NDArray[Any]:
    pb: Any = messages()
    dtypes = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
    dtype, shape = np.dtype(dtypes[message.dtype]), tuple(message.shape)
    if message.WhichOneof("encoding") != "sparse_csr":
        flat = np.frombuffer(message.dense, dtype)
        return flat.reshape(shape) if shape else flat
    csr = message.sparse_csr
    starts = np.frombuffer(csr.crow_indices, "<i8")
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    if len(shape) != 2 or len(starts) != shape[0] + 1 or shape[0] * shape[1] > 2**27:
        raise ValueError(f"a sparse tensor of shape {shape} with {len(starts) - 1} rows")
    dense = np.zeros(shape, dtype)
    dense[rows, np.frombuffer(csr.col_indices, "<i8")] = np.frombuffer(csr.values, dtype)
    return dense


def pass_result(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a pass as one record per datum, with its log-probabilities: [T] or [T, K]."""
    pb: Any = messages()
    answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for one in logprobs:
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        field = record.fields["logprobs"]
        field.data = one.astype("<f4").tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.offsets = np.array([0, one.size * 4], "<i8").tobytes()
        field.trailing_shape.extend(one.shape[1:])
    encoded: bytes = answer.SerializeToString()
    return encoded


Position = Mapping[str, float]
"""Token id as text -> its log-probability, at one position."""


@dataclass(frozen=True)
class SampledSequence:
    """One sampled sequence."""

    tokens: Sequence[int]
    is_cut: bool
    """Whether it ended at its limit."""
    positions: Sequence[Position]
    """For each token, the log-probabilities that are known there; the token's own is among them."""


@dataclass(frozen=True)
class Sampled:
    """What a server has sampled."""

    sequences: Sequence[SampledSequence]
    prompt: Sequence[Position | None] | None
    """The same for each token of the prompt, None where nothing is known; None: it was not scored."""


def sampled(reply: Mapping[str, Any], prompt: Sequence[int]) -> Sampled:
    """Read a server's reply to Bridge's route of completions, or to `POST /generate`."""
    if "choices" in reply:
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        sequences = [
            SampledSequence(
                choice["token_ids"],
                choice["finish_reason"] == "length",
                _own(choice["token_ids"], choice["logprobs"]["token_logprobs"]),
            )
            for choice in choices
        ]
        scores = choices[0].get("prompt_logprobs")
        return Sampled(sequences, None if scores is None else _own(prompt, scores))
    sequences = [
        SampledSequence(tokens, reason == "length", [position[0] for position in positions])
        for tokens, reason, positions in zip(
            reply["token_ids"], reply["finish_reasons"], reply["logprobs"], strict=True
        )
    ]
    return Sampled(sequences, reply.get("prompt_logprobs"))


def _own(tokens: Sequence[int], logprobs: Sequence[float | None]) -> list[Any]:
    both = zip(tokens, logprobs, strict=True)
    return [None if logprob is None else {str(token): logprob} for token, logprob in both]


def sample_result(found: Sampled, request: Mapping[str, Any], prompt: Sequence[int]) -> bytes:
    """Encode what was sampled as the result of this request."""
    pb: Any = messages()
    answer = pb.SampleResponse()
    k = request.get("topk_sample_logprobs") or 0
    for one in found.sequences:
        own = [position[str(token)] for token, position in zip(one.tokens, one.positions, strict=True)]
        sequence = answer.sequences.add(stop_reason=pb.STOP_REASON_LENGTH if one.is_cut else pb.STOP_REASON_STOP)
        sequence.tokens = np.array(one.tokens, "<i4").tobytes()
        sequence.logprobs = np.array(own, "<f4").tobytes()
        if k:
            sequence.topk_sampled_logprobs.CopyFrom(_likeliest(one.positions, k))
    if request.get("prompt_logprobs") or request.get("topk_prompt_logprobs"):
        last = request.get("prompt_logprobs_last_n")
        first = 1 if last is None else max(1, len(prompt) - last)
        positions = [place if index >= first else None for index, place in enumerate(found.prompt or ())]
        scored = [np.nan if p is None else p[str(token)] for token, p in zip(prompt, positions, strict=True)]
        answer.prompt_logprobs = np.array(scored, "<f4").tobytes()
        if k := request.get("topk_prompt_logprobs") or 0:
            answer.topk_prompt_logprobs.CopyFrom(_likeliest(positions, k))
    encoded: bytes = answer.SerializeToString()
    return encoded


def _likeliest(positions: Sequence[Position | None], k: int) -> Any:
    pb: Any = messages()
    ids, values = np.zeros((len(positions), k), "<i4"), np.full((len(positions), k), NOTHING, "<f4")
    for row, position in enumerate(positions):
        best = sorted((position or {}).items(), key=lambda item: -item[1])[:k]
        for column, (token, value) in enumerate(best):
            ids[row, column], values[row, column] = int(token), value
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=len(positions))
