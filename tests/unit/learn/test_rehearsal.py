"""Compiling the trainer's layers while vLLM starts, on a model that stands in for the attached one."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from bridge.config import ComputeConfig, LoraConfig
from bridge.learn import opening
from bridge.passes import attention, layers
from bridge.ranks.world import ALONE
from bridge.weights import loaded
from bridge.weights.adapter import Adapter
from bridge.weights.attach import stand_in
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu

CPU = torch.device("cpu")


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace layers with the GPU's attention, and run their graphs as they are."""
    monkeypatch.setattr(layers, "COMPILER", "eager")
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    torch.compiler.reset()
    counters.clear()
    with kernel_on_the_cpu():
        yield
    torch.compiler.reset()


def write_model(folder: Path, family: str = "Llama 3, 3.1") -> str:
    tiny.write(FAMILIES[family](), folder)
    return str(folder)


def num_traced() -> int:
    number = counters["frames"]["total"]
    counters.clear()
    return number


def prepare(model: PreTrainedModel, compute: ComputeConfig) -> list[str]:
    notes: list[str] = []
    opening._prepared(model, compute, notes.append, None, None, ALONE)
    return notes


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.parametrize(
    ("family", "recomputed", "lora"),
    [
        ("Llama 3, 3.1", None, None),
        ("Llama 3, 3.1", True, None),
        ("Llama 3, 3.1", None, LoraConfig(r=8)),
        ("Qwen3-MoE", None, None),
    ],
)
def test_the_real_model_finds_all_compiled_layers(
    tmp_path: Path, family: str, recomputed: bool | None, lora: LoraConfig | None
) -> None:
    name = write_model(tmp_path / "model", family)
    compute = ComputeConfig(compile_layers=True, gradient_checkpointing=recomputed)
    random_state = torch.get_rng_state()
    notes: list[str] = []
    with opening.rehearsed(name, compute, lora, CPU, notes.append, share=0.5):
        pass
    assert notes == ["waiting for the trainer's layers, which are still being compiled"]
    assert num_traced() >= 4
    assert torch.equal(torch.get_rng_state(), random_state)

    model = loaded.load(name, device="cpu").model
    if lora is not None:
        Adapter(model, lora, seed=1, base_name=name)
    assert prepare(model, compute) == []
    assert layers.are_compiled(model)
    assert num_traced() == 0


def test_a_stand_in_has_one_memory_for_each_shape(tmp_path: Path) -> None:
    model = stand_in(write_model(tmp_path / "model"), CPU, share=0.5)
    assert model is not None
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {parameter.shape for parameter in model.parameters()}
    assert len(storages) == len(shapes) < len(list(model.parameters()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_without_room_beside_vllm_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else vLLM would find less free memory than its share when it starts, and refuse to."""
    name = write_model(tmp_path / "model")
    whole = 16 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (whole - 2**28, whole))
    monkeypatch.setattr(opening, "in_thread", pytest.fail)
    with opening.rehearsed(name, ComputeConfig(), None, torch.device("cuda", 0), pytest.fail, share=0.95):
        pass


def test_what_fails_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(opening, "_prepared", fail)
    notes: list[str] = []
    name = write_model(tmp_path / "model")
    with opening.rehearsed(name, ComputeConfig(), None, CPU, notes.append, share=0.5):
        pass
    assert notes[-1:] == ["no layers were compiled while vLLM started: OutOfMemoryError: CUDA out of memory"]


def test_when_vllm_does_not_start_the_compiler_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process would crash as it ends."""
    is_compiling = threading.Event()

    def compile_forever(*_: object) -> bool:
        is_compiling.set()
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(opening, "_prepared", compile_forever)
    rehearsed = opening.rehearsed(write_model(tmp_path / "model"), ComputeConfig(), None, CPU, pytest.fail, share=0.5)
    with pytest.raises(KeyboardInterrupt), rehearsed:
        _interrupt_once(is_compiling)
    assert opening.COMPILING not in {thread.name for thread in threading.enumerate() if thread.is_alive()}


def _interrupt_once(is_begun: threading.Event) -> None:
    assert is_begun.wait(60)
    raise KeyboardInterrupt
