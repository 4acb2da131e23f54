"""Compile the training step while vLLM starts, on a stand-in with random weights."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from bridge.config import ComputeConfig, LoraConfig, OptimizerConfig
from bridge.core.concurrency import end_thread
from bridge.core.interrupt import COMPILER, deferred_interrupt, wait_until
from bridge.errors import with_class
from bridge.optimizers import factory
from bridge.passes import layers, packing_proof, pass_cost, preparation
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import ALONE, Ranks
from bridge.weights.adapter import Adapter

logger = logging.getLogger(__name__)


@contextmanager
def compiling_ahead(
    stand_in: Callable[[], PreTrainedModel | None],
    compute: ComputeConfig,
    optimizer: OptimizerConfig,
    *,
    lora: LoraConfig | None,
    temperature: float,
    ranks: Ranks = ALONE,
) -> Iterator[None]:
    """Compile the training step on a stand-in while the block waits for vLLM; the learner then reuses the code.

    With `lora` an adapter is trained, otherwise all weights.

    vLLM compares the free memory at its start with that after loading. So the stand-in allocates its memory before
    the block, and torch's allocator keeps it until the end. If compiling fails, only time is lost.
    """
    has_memory, is_over = threading.Event(), threading.Event()

    def compile_all() -> None:
        try:
            model = stand_in()
            has_memory.set()
            if model is None:
                return
            with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
                if lora is not None:
                    Adapter(model, lora, seed=0, base_name="")
                with _unlogged(preparation.logger, packing_proof.logger):
                    prepared = preparation.prepare(model, compute)
                _compile_step(prepared, optimizer, temperature, ranks)
        except Exception as error:  # noqa: BLE001  the real model raises it again, if it is not the stand-in's
            logger.info(f"the trainer's code is compiled when training begins: {with_class(error)}")
        finally:
            has_memory.set()
            is_over.set()

    thread = threading.Thread(target=compile_all, name=COMPILER, daemon=True)
    try:
        with deferred_interrupt():  # a half-started thread cannot be joined
            thread.start()
        wait_until(has_memory.wait)
        yield
        if thread.is_alive():
            logger.info("waiting for the trainer's code, which is still being compiled")
        wait_until(is_over.wait)
        thread.join()
    except BaseException:
        with deferred_interrupt():  # exiting while torch compiles in a thread crashes
            end_thread(thread)
        raise
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _unlogged(*loggers: logging.Logger) -> Iterator[None]:
    """Drop what this thread logs to `loggers` inside the block, since the real model logs the same lines."""
    own = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != own

    for each in loggers:
        each.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_of_another_thread)


def _compile_step(prepared: PreparedModel, choices: OptimizerConfig, temperature: float, ranks: Ranks) -> None:
    """Compile the remaining parts of a step: the log-probabilities, and the update of a parameter."""
    micro_batch = pass_cost.example(prepared.model, 64, 32)
    trained = layers.first_trained(prepared.model)
    logprobs_N, _ = prepared.logprobs(micro_batch, temperature)
    torch.autograd.grad(logprobs_N.sum(), trained)
    smallest = factory.scaled_group(min(trained, key=torch.numel), 1.0, lr=0.0, weight_decay=0.0)
    factory.make(choices, [smallest], ranks=ranks).allocate()
