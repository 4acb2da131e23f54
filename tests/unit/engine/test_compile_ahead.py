"""Compiling the trainer's code while vLLM starts, on a stand-in for the attached model."""

import os
import random
import signal
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.engine import compile_ahead
from bridge.optimizers import factory, split_master
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.passes import attention, layers, logprobs, preparation
from bridge.types import Completion, Group
from bridge.weights import loaded
from bridge.weights.adapter import Adapter
from bridge.weights.attach import stand_in
from tests.logged import logged, nothing_logged
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.unit import learners
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu

CPU = torch.device("cpu")


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace what would be compiled on a GPU, with the GPU's attention, and run the graphs eagerly."""
    monkeypatch.setattr(layers, "COMPILER", "eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(factory, "SplitMasterAdamW", partial(SplitMasterAdamW, compiles=True))
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    _forget()
    with kernel_on_the_cpu():
        yield
    _forget()


def _forget() -> None:
    torch.compiler.reset()
    logprobs._compiled.cache_clear()
    split_master.compiled.cache_clear()
    counters.clear()


def write_model(folder: Path, family: str = "Llama 3, 3.1") -> str:
    tiny.write(FAMILIES[family](), folder)
    return str(folder)


def num_traced() -> int:
    number = counters["frames"]["total"]
    counters.clear()
    return number


def maker(name: str) -> Callable[[], PreTrainedModel | None]:
    return partial(stand_in, name, torch.bfloat16, CPU, share=0.5)


def config_of(name: str, **choices: Any) -> TrainConfig:
    fixed = {"model_name": name, "compile_layers": True, "batch_size": 2, "group_size": 2, "lr": 1e-3}
    return TrainConfig.of(**fixed, **choices)


def compiling_ahead(make: Callable[[], PreTrainedModel | None], config: TrainConfig) -> AbstractContextManager[None]:
    lora = config.lora if config.mode == "lora_only" else None
    temperature = config.sampling.temperature
    return compile_ahead.compiling_ahead(make, config.compute, config.optimizer, lora=lora, temperature=temperature)


def group_of(experts: tuple[int, int] | None) -> Group:
    """Return two completions of one prompt, with the experts of every token if the model replays them."""
    prompt, made = (1, 2, 3), list[Completion]()
    for token_ids in ((4, 5, 6, 7), (8, 9)):
        num_tokens = len(prompt) + len(token_ids) - 1
        sent_to = b"" if experts is None else array("h", range(experts[1])).tobytes() * (experts[0] * num_tokens)
        made.append(
            Completion(
                token_ids=token_ids,
                logprobs=(-1.0,) * len(token_ids),
                text="",
                finish_reason="stop",
                experts=sent_to,
            )
        )
    return Group(problem={"prompt": "?"}, prompt_token_ids=prompt, completions=tuple(made), rewards=(0.0, 1.0))


def train_real(config: TrainConfig, *, replays: bool = False) -> None:
    """Take one training step on the real model."""
    opened = loaded.load(config.model_name, device="cpu")
    if config.mode == "lora_only":
        adapter = Adapter(opened.model, config.lora, seed=1, base_name=config.model_name)
        opened = replace(opened, lr_factors=adapter.lr_factors())
    model = opened.model
    experts = (model.config.num_hidden_layers, model.config.num_experts_per_tok) if replays else None
    with logged() as lines:
        learner = learners.made(config, opened, max_model_len=64, experts=experts)
        assert layers.are_compiled(model)
        learner.take([group_of(experts)])
        learner.prepare()
        learner.write()
    assert [line for line in lines if "compiled" in line] == []


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.parametrize(
    ("family", "choices", "replays"),
    [
        ("Llama 3, 3.1", {}, False),
        ("Llama 3, 3.1", {"gradient_checkpointing": True, "optimizer": "adamw-8bit", "temperature": 0.7}, False),
        ("Qwen3-MoE", {}, False),
        ("Qwen3-MoE", {}, True),
    ],
)
def test_first_step_compiles_nothing(
    tmp_path: Path, family: str, choices: dict[str, Any], replays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(write_model(tmp_path / "model", family), **choices)
    with compiling_ahead(maker(config.model_name), config):
        pass
    assert caplog.messages == ["waiting for the trainer's code, which is still being compiled"]
    assert num_traced() >= 6
    train_real(config, replays=replays)
    assert num_traced() == 0


@pytest.mark.usefixtures("eager_graphs")
def test_compiling_ahead_does_not_change_random_numbers(tmp_path: Path) -> None:
    choices = {"mode": "lora_only", "lora_r": 8, "lora_dropout": 0.1, "offload_optimizer": False}
    config, states = config_of(write_model(tmp_path / "model"), **choices), []
    for compiles_ahead in (False, True):
        _forget()
        random.seed(5)
        torch.manual_seed(5)
        before = random.getstate(), torch.get_rng_state().tolist()
        if compiles_ahead:
            with compiling_ahead(maker(config.model_name), config):
                pass
            assert (random.getstate(), torch.get_rng_state().tolist()) == before
            assert num_traced() >= 6
        train_real(config)
        assert (num_traced() == 0) == compiles_ahead, "the first step compiles nothing that was compiled ahead"
        states.append((random.getstate(), torch.get_rng_state().tolist()))
        assert states[-1] != before
    assert states[0] == states[1]


def test_stand_in_shares_memory_between_equal_shapes(tmp_path: Path) -> None:
    model = maker(write_model(tmp_path / "model"))()
    assert model is not None
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {parameter.shape for parameter in model.parameters()}
    assert len(storages) == len(shapes) < len(list(model.parameters()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(("share", "free_gib"), [(0.95, None), (0.5, 9)])
def test_nothing_is_compiled_without_memory_beside_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, free_gib: int | None
) -> None:
    """Otherwise vLLM would find less free memory than its share, and fail to start.

    `free_gib` is None if free memory must not be measured, since that creates a CUDA context.
    """
    whole = 16 * 2**30
    free = pytest.fail if free_gib is None else lambda _: (free_gib * 2**30, whole)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=whole))
    model = stand_in(write_model(tmp_path / "model"), torch.bfloat16, torch.device("cuda", 0), share=share)
    assert model is None
    with nothing_logged(), compiling_ahead(lambda: model, TrainConfig.of(model_name="m")):
        pass


@pytest.mark.parametrize("failing", ["stand_in", "prepare"])
def test_compile_ahead_error_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr(preparation, "prepare", fail)
    make = maker(write_model(tmp_path / "model")) if failing == "prepare" else fail
    with compiling_ahead(make, TrainConfig.of(model_name="m")):
        pass
    assert (
        "the trainer's code is compiled when training begins: OutOfMemoryError: CUDA out of memory" in caplog.messages
    )


def _run_forever() -> NoReturn:
    while True:
        time.sleep(0.01)


def test_stand_in_is_freed_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, config = list["weakref.ref[PreTrainedModel]"](), TrainConfig.of(model_name="m")
    monkeypatch.setattr(preparation, "prepare", lambda model, *_: models.append(weakref.ref(model)))
    monkeypatch.setattr(compile_ahead, "_compile_step", lambda *_: None)
    with compiling_ahead(maker(write_model(tmp_path / "model")), config):
        pass
    assert [model() for model in models] == [None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_vllm_ready", [False, True])
def test_ctrl_c_stops_compiling_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_vllm_ready: bool) -> None:
    """Otherwise the process would crash when it exits."""
    numbers = list[int]()

    def compile_forever(*_: object) -> bool:
        numbers.append(threading.get_ident())
        for delay_s in (0.5, 0.7):  # the second Ctrl-C arrives while the first one ends the thread
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        with suppress(SystemExit):  # which an interrupted process may raise
            _run_forever()
        _run_forever()

    monkeypatch.setattr(preparation, "prepare", compile_forever)
    config = TrainConfig.of(model_name="m")
    compiling = compiling_ahead(maker(write_model(tmp_path / "model")), config)
    with pytest.raises(KeyboardInterrupt), compiling:
        time.sleep(0 if is_vllm_ready else 60)
    assert numbers
    assert sys._current_frames().keys().isdisjoint(numbers)
