"""Compiling the trainer's layers while vLLM starts, on a model that stands in for the attached one."""

import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

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


def maker(name: str) -> Callable[[], PreTrainedModel | None]:
    return partial(stand_in, name, torch.bfloat16, CPU, share=0.5)


def prepare_real(name: str, compute: ComputeConfig, lora: LoraConfig | None, *, replays: bool = False) -> None:
    model, notes = loaded.load(name, device="cpu").model, list[str]()
    if lora is not None:
        Adapter(model, lora, seed=1, base_name=name)
    experts = (model.config.num_hidden_layers, model.config.num_experts_per_tok) if replays else None
    opening._prepared(model, compute, notes.append, 64, experts, ALONE)
    assert layers.are_compiled(model)
    assert notes == []


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.parametrize(
    ("family", "recomputed", "lora", "replays"),
    [
        ("Llama 3, 3.1", None, None, False),
        ("Llama 3, 3.1", True, None, False),
        ("Llama 3, 3.1", None, LoraConfig(r=8), False),
        ("Qwen3-MoE", None, None, False),
        ("Qwen3-MoE", None, None, True),
    ],
)
def test_the_real_model_finds_all_compiled_layers(
    tmp_path: Path, family: str, recomputed: bool | None, lora: LoraConfig | None, replays: bool
) -> None:
    name = write_model(tmp_path / "model", family)
    compute, notes = ComputeConfig(compile_layers=True, gradient_checkpointing=recomputed), list[str]()
    with opening.rehearsed(maker(name), compute, lora, notes.append):
        pass
    assert notes == ["waiting for the trainer's layers, which are still being compiled"]
    assert num_traced() >= 4
    prepare_real(name, compute, lora, replays=replays)
    assert num_traced() == 0


@pytest.mark.usefixtures("eager_graphs")
def test_random_numbers_of_a_run_stay_the_same(tmp_path: Path) -> None:
    name, compute, lora = (
        write_model(tmp_path / "model"),
        ComputeConfig(compile_layers=True),
        LoraConfig(r=8, dropout=0.1),
    )
    states = []
    for is_rehearsed in (False, True):
        torch.compiler.reset()
        random.seed(5)
        torch.manual_seed(5)
        before = random.getstate(), torch.get_rng_state().tolist()
        if is_rehearsed:
            with opening.rehearsed(maker(name), compute, lora, lambda _: None):
                pass
            assert (random.getstate(), torch.get_rng_state().tolist()) == before
        prepare_real(name, compute, lora)
        states.append((random.getstate(), torch.get_rng_state().tolist()))
        assert states[-1] != before
    assert states[0] == states[1]


def test_a_stand_in_has_one_memory_for_each_shape(tmp_path: Path) -> None:
    model = maker(write_model(tmp_path / "model"))()
    assert model is not None
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {parameter.shape for parameter in model.parameters()}
    assert len(storages) == len(shapes) < len(list(model.parameters()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(("share", "free_gib"), [(0.95, None), (0.5, 9)])
def test_without_room_beside_vllm_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, free_gib: int | None
) -> None:
    """Else vLLM would find less free memory than its share, and not start.

    `free_gib` is None where free memory may not even be measured, which makes a CUDA context.
    """
    whole = 16 * 2**30
    free = pytest.fail if free_gib is None else lambda _: (free_gib * 2**30, whole)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=whole))
    model = stand_in(write_model(tmp_path / "model"), torch.bfloat16, torch.device("cuda", 0), share=share)
    assert model is None
    with opening.rehearsed(lambda: model, ComputeConfig(), None, pytest.fail):
        pass


@pytest.mark.parametrize("failing", ["stand_in", "_prepared"])
def test_an_error_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr(opening, "_prepared", fail)
    notes, make = list[str](), maker(write_model(tmp_path / "model")) if failing == "_prepared" else fail
    with opening.rehearsed(make, ComputeConfig(), None, notes.append):
        pass
    assert notes[-1] == "the trainer's layers are compiled when training begins: OutOfMemoryError: CUDA out of memory"


def _run_forever() -> NoReturn:
    while True:
        time.sleep(0.01)


def test_a_stand_in_is_freed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = list["weakref.ref[PreTrainedModel]"]()
    monkeypatch.setattr(opening, "_prepared", lambda model, *_: models.append(weakref.ref(model)))
    with opening.rehearsed(maker(write_model(tmp_path / "model")), ComputeConfig(), None, lambda _: None):
        pass
    assert [model() for model in models] == [None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_vllm_ready", [False, True])
def test_ctrl_c_ends_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_vllm_ready: bool) -> None:
    """Else the process would crash as it ends."""
    numbers = list[int]()

    def compile_forever(*_: object) -> bool:
        numbers.append(threading.get_ident())
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with suppress(SystemExit):  # as any code may
            _run_forever()
        _run_forever()

    monkeypatch.setattr(opening, "_prepared", compile_forever)
    rehearsed = opening.rehearsed(maker(write_model(tmp_path / "model")), ComputeConfig(), None, lambda _: None)
    with pytest.raises(KeyboardInterrupt), rehearsed:
        time.sleep(0 if is_vllm_ready else 60)
    assert numbers
    assert sys._current_frames().keys().isdisjoint(numbers)
