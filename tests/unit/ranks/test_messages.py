"""Messages between ranks survive a round trip bit for bit, and cannot execute code."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.config import TrainConfig
from bridge.errors import CheckpointError, RankError, UsageError
from bridge.ranks import messages
from bridge.ranks.messages import Outcome
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Group

ODD = struct.unpack("d", struct.pack("Q", 0x3FB999999999999B))[0]
COMPLETION = Completion(
    token_ids=tuple(range(40)), logprobs=(-ODD, -math.inf, -0.0, 1e-310) * 10, text="é\n", finish_reason="stop",
    versions=(None, 3) * 20, sampled=(True, False) * 20, kept=((ODD, 7),) * 40, transcript=({"role": "user"},),
    experts=bytes(range(256)),
)  # fmt: skip
GROUP = Group(
    problem={"prompt": "p", "answer": [1, None]},
    number=2**70,
    prompt_token_ids=(1,),
    completions=(COMPLETION,),
    rewards=(ODD,),
)


@pytest.mark.parametrize(
    "value",
    [
        None, ODD, -0.0, math.inf, [1, [2.5, "x"]], (), (1, (2, ())), {(0, "w"): "a", 3: None}, Path("a/b"), [GROUP],
        tuple(range(2**63 - 8, 2**63 + 12)), (ODD,) * 20, ((1,), ()) * 20, Endpoint(url="http://a", kv_tokens=7),
        TrainConfig.of(model_name="m", lr=1e-5, run_dir=Path("r")),
    ],
)  # fmt: skip
def test_value_survives_a_round_trip(value: Any) -> None:
    back = messages.loads(messages.dumps(value))
    assert back == value
    assert repr(back) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensor_survives_a_round_trip_bitwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    back = messages.loads(messages.dumps({"t": tensor}))["t"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_unsupported_value_is_refused_by_the_sender() -> None:
    with pytest.raises(UsageError, match=r"a builtins\.set cannot be sent to other ranks"):
        messages.dumps([{"prompt": {1, 2}}])


@pytest.mark.parametrize(
    "message",
    [
        b"\xff", b"{", b'{"os:system": {"command": "true"}}', b'{"bridge.core.folder_claim:make": {}}',
        b'{"a": 1, "b": 2}', b'{"bridge.nowhere:A": {}}', b'{"bridge.types:Group": {}}', b'{"tensor": ["os", [1], ""]}',
    ],
)  # fmt: skip
def test_message_of_unknown_kind_is_refused(message: bytes) -> None:
    with pytest.raises(RankError, match="cannot be read"):
        messages.loads(message)


def test_outcome_carries_results_errors_and_interrupts() -> None:
    sent = Outcome(result=(1,), message=messages.dumps([(1,)]))
    assert Outcome.loads(sent.dumps()).result == (1,)
    error = Outcome.loads(Outcome.of(CheckpointError("a", hint="b")).dumps()).error
    assert isinstance(error, CheckpointError)
    assert (error.message, error.hint) == ("a", "b")
    assert isinstance(Outcome.loads(Outcome.of(KeyboardInterrupt()).dumps()).error, KeyboardInterrupt)
    assert Outcome.loads(Outcome.of(ZeroDivisionError("x")).dumps()).fault == "ZeroDivisionError: x"
    with pytest.raises((RankError, ValueError)):
        Outcome.loads(json.dumps(["bridge.types:Group", "a", "b"]).encode() + b"\n[null]")
