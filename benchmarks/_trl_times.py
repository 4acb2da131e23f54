"""Measurements of a TRL GRPO run: seconds per part of a step, torch's peak memory, and held-out rewards.

TRL is not modified: its methods are timed from outside, and every timed part begins and ends with an idle device.

Not covered: how TRL trains (`_trl.py`).
"""

import argparse
import faulthandler
import functools
import importlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import TrainerCallback

from benchmarks import _work
from bridge.rollouts import problems
from bridge.types import Task

STALL_S = 60
"""The stack traces of all threads are logged after this many seconds without a step."""


class Clock:
    """Counts seconds per part, and sampled tokens, since the last step."""

    def __init__(self, task: Task | None = None) -> None:
        self._task = task
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_tokens = 0

    def reward(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """Score completions for TRL, and count their tokens."""
        self.num_tokens += sum(map(len, completion_ids))
        if self._task is not None:
            texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
            return list(map(self._task.score, map(json.loads, columns["problem"]), texts))
        return [_work.reward(completion) for completion in completions]

    def part(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return `inner`, timed as a part of the step."""

        @functools.wraps(inner)
        def timed(*positional: Any, **named: Any) -> Any:
            start = moment()
            try:
                return inner(*positional, **named)
            finally:
                self.seconds[name] += moment() - start

        return timed


def watch(trainer: Any, clock: Clock) -> None:
    """Time the parts of every step of `trainer`."""
    if trainer.use_vllm:
        generation = trainer.vllm_generation
        generation.generate = clock.part("generation", generation.generate)
        generation.sync_weights = clock.part("sync", generation.sync_weights)
    trainer._prepare_inputs = clock.part("prepare", trainer._prepare_inputs)
    trainer.training_step = clock.part("training_step", trainer.training_step)
    trainer.accelerator.clip_grad_norm_ = clock.part("clip", trainer.accelerator.clip_grad_norm_)
    forward = trainer._get_per_token_logps_and_entropies
    without_gradient = clock.part("old_logprobs", forward)

    def either(*positional: Any, **named: Any) -> Any:
        return (forward if torch.is_grad_enabled() else without_gradient)(*positional, **named)

    trainer._get_per_token_logps_and_entropies = either


class Lines(TrainerCallback):  # type: ignore[misc]
    """Prints the times of every step in the first process, and the tokens of all processes."""

    def __init__(self, clock: Clock, out: TextIO | None, accelerator: Any) -> None:
        self._clock = clock
        self._out = out
        self._accelerator = accelerator
        self._stepped_at = 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._stepped_at = moment()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._clock.seconds["optimizer"] += moment() - self._stepped_at

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        watch_stalls()
        moment()
        mine = torch.tensor(self._clock.num_tokens, device=self._accelerator.device)
        num_tokens = int(self._accelerator.reduce(mine))
        if self._out is not None:
            document = {"step": state.global_step, "tokens": num_tokens, **parts(self._clock.seconds)}
            self._out.write(json.dumps(document) + "\n")
        self._clock.seconds.clear()
        self._clock.num_tokens = 0


class Checked(TrainerCallback):  # type: ignore[misc]
    """Calls a check at the end of every step."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._check()


class HeldOut(TrainerCallback):  # type: ignore[misc]
    """Prints the mean reward of greedy answers to held-out problems, before, during and after training."""

    def __init__(self, task: Task, out: TextIO, trainer: Any, options: argparse.Namespace) -> None:
        self._task = task
        self._out = out
        self._trainer = trainer
        self._options = options
        self._prompts = [list(problems.encode(trainer.processing_class, problem)) for problem in task.held_out()]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._evaluate(0)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step % self._options.eval_interval == 0 or state.global_step == self._options.steps:
            self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        start = moment()
        is_stock = self._trainer.use_vllm and not self._options.on_bridge
        answers = self._sampled() if is_stock else self._generated()
        texts = self._trainer.processing_class.batch_decode(answers, skip_special_tokens=True)
        rewards = list(map(self._task.score, self._task.held_out(), texts))
        measured = {"step": step, "reward_mean": statistics.fmean(rewards), "seconds": moment() - start}
        self._out.write(json.dumps({"evaluation": measured}) + "\n")

    def _sampled(self) -> list[list[int]]:
        generation, sampling = self._trainer.vllm_generation, importlib.import_module("vllm").SamplingParams
        generation.sync_weights()
        outputs = generation.llm.generate(
            [{"prompt_token_ids": ids} for ids in self._prompts],
            sampling_params=sampling(temperature=0, max_tokens=self._options.tokens), use_tqdm=False,
        )  # fmt: skip
        return [output.outputs[0].token_ids for output in outputs]

    def _generated(self) -> list[list[int]]:
        padded = self._trainer.processing_class.pad(
            {"input_ids": self._prompts}, padding_side="left", return_tensors="pt"
        )
        greedy = {"do_sample": False, "max_new_tokens": self._options.tokens}
        with torch.inference_mode():
            tokens: Tensor = self._trainer.model.generate(**padded.to(self._trainer.model.device), **greedy)
        answers: list[list[int]] = tokens[:, padded["input_ids"].shape[1] :].tolist()
        return answers


def parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return non-overlapping parts; the pass for old log-probs counts as training."""
    learning = seconds["training_step"] - seconds["prepare"] + seconds["clip"]
    return {
        "generation_s": seconds["generation"],
        "training_s": learning + seconds["old_logprobs"],
        "old_logprobs_s": seconds["old_logprobs"],
        "optimizer_s": seconds["optimizer"],
        "sync_s": seconds["sync"],
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }


def watch_stalls() -> None:
    """Log the stack traces of all threads every minute until the next call, to show where TRL waits."""
    faulthandler.dump_traceback_later(STALL_S, repeat=True)


def moment() -> float:
    """Return the time once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
