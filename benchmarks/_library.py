"""A program that trains with `import bridge` on the task of `_work.py`: one side of `two_trees --library`.

It takes the flags of `bridge run` about optimization and computation, starts a server with `bridge.serve`, and prints
one JSON object per step, with the seconds of its parts under the names used by `bridge run --json`.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

import bridge
from benchmarks import _sides, _work
from benchmarks._sides import Work
from bridge.config import TrainConfig


@dataclass(frozen=True)
class Program:
    """The arguments of the program."""

    model: Path
    work: Work
    variant: Sequence[str]
    """The optimizer, followed by flags of `bridge run`."""
    module: str = "benchmarks._library"
    """The program."""

    @property
    def argv(self) -> list[str]:
        """The command that runs the program until it is killed."""
        work = {name: getattr(self.work, name) for name in ("completions", "group", "tokens", "share")}
        return [sys.executable, "-m", self.module, str(self.model), json.dumps(work), *self.variant]


def main() -> None:
    """Train until this process is killed, and print one line per step."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout, which is reserved for results
    model, work, *variant = sys.argv[1:]
    train(Program(Path(model), Work(**json.loads(work)), variant), lines)


def train(program: Program, lines: TextIO) -> None:
    """Take steps forever."""
    work, config = program.work, TrainConfig.of(model_name=str(program.model), **choices(program.variant))
    server: dict[str, Any] = {"max_model_len": work.max_model_len}
    if work.share:
        server["gpu_memory_utilization"] = work.share
    prompts = itertools.cycle(_work.prompts())
    with bridge.serve(
        program.model,
        *_sides.engine_flags(work.completions),
        sampling=bridge.SamplingConfig(group_size=work.group, max_new_tokens=work.tokens),
        optimizer=config.optimizer,
        compute=config.compute,
        publishing=bridge.PublishingConfig(kv_sleep="never"),
        **server,
    ) as policy:
        while True:
            started = time.perf_counter()
            batch = list(itertools.islice(prompts, work.completions // work.group))
            groups = policy.sample(batch, lambda _, text: _work.reward(text))
            sampled = time.perf_counter()
            passes = policy.forward_backward(bridge.samples(groups))
            trained = time.perf_counter()
            times = policy.optim_step().times
            line = {
                "rollout_s": sampled - started,
                "train_s": trained - sampled,
                "fence_pause_s": times.pause_s,
                "fence_write_s": times.write_s,
                "fence_publish_s": times.publish_s,
                "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
                "tokens_generated": sum(len(each.token_ids) for group in groups for each in group.completions),
                "mismatch_kl": passes.metrics.get("mismatch_kl"),
            }
            lines.write(json.dumps(line) + "\n")


def choices(variant: Sequence[str]) -> dict[str, Any]:
    """Return flags as configuration keys; a flag without a value is True."""
    chosen: dict[str, Any] = {"optimizer": variant[0]}
    for flag, follows in itertools.pairwise([*variant[1:], "--"]):
        if flag.startswith("--"):
            chosen[flag.removeprefix("--").replace("-", "_")] = True if follows.startswith("--") else follows
    return chosen


if __name__ == "__main__":
    main()
