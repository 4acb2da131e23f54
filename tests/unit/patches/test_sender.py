"""The sender for vLLM before 0.28, built from vLLM's parts; later ones are in `tests/cpu/test_transfer.py`."""

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bridge_patches import sender

PACKAGE = "vllm.distributed.weight_transfer"


def test_older_sender_makes_the_same_calls_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def send(iterator: Any, chosen: Any) -> None:
        calls.append(("broadcast", [name for name, _ in iterator], chosen.group, chosen.packed))

    engine = SimpleNamespace(trainer_send_weights=send)
    parts: Mapping[str, Any] = {
        "base": SimpleNamespace(),
        "nccl_engine": SimpleNamespace(NCCLTrainerSendWeightsArgs=SimpleNamespace, NCCLWeightTransferEngine=engine),
        "nccl_common": SimpleNamespace(trainer_init=lambda meeting: ("group", meeting["world_size"])),
    }
    for name in ("vllm", "vllm.distributed", PACKAGE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, part in parts.items():
        monkeypatch.setattr(sys.modules[PACKAGE], name, part, raising=False)

    class Client:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            calls.append(("init", init_info))

        def start_weight_update(self) -> None:
            calls.append("start")

        def update_weights(self, update_info: dict[str, Any]) -> None:
            calls.append(("update", update_info))

        def finish_weight_update(self) -> None:
            calls.append("finish")

    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    opened = sender.open_sender(tensors, Client(), "10.0.0.1", 29500, 3)
    opened.send_weights()
    meeting = {"master_address": "10.0.0.1", "master_port": 29500, "world_size": 4, "rank_offset": 1}
    update = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]], "packed": True}
    assert calls[:2] == [("init", meeting), "start"]
    assert ("update", update) in calls[2:4]
    assert ("broadcast", ["a", "b"], ("group", 4), True) in calls[2:4]
    assert calls[4:] == ["finish"]
