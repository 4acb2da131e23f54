"""Synthetic run directories: a rising reward, a small log-prob mismatch, evaluations, events and completions."""

import json
import math
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bridge.checkpoints.metrics import RECORDED, StepMetrics, Summary
from bridge.checkpoints.run_directory import RunDirectory, write_json
from bridge.config import ServeConfig, TrainConfig
from bridge.core import json_lines

PROBLEMS = (
    ("A baker fills {a} trays with {b} rolls each, and sells all but {c}. How many rolls are sold?", "{a} * {b} - {c}"),
    ("Mira reads {a} pages on each of {b} days, and {c} pages on the last. How many pages is that?", "{a} * {b} + {c}"),
    ("{a} boxes hold {b} pencils each; {c} children share them evenly. How many does each get?", "{a} * {b} // {c}"),
)


def metrics(step: int, num_steps: int, *, gain: float = 0.5, seed: int = 0, **changes: Any) -> StepMetrics:
    """Return the metrics of one healthy step, with `changes`."""
    draw = random.Random(f"{seed}-{step}")
    done = 1 - math.exp(-4 * step / num_steps)
    reward = min(0.99, max(0.0, 0.28 + gain * done + draw.gauss(0, 0.05)))
    difference = draw.lognormvariate(math.log(0.012), 0.18) * (1 + 0.8 * done)
    shares = [math.exp(-(((index - 2.3 - 0.5 * done - draw.gauss(0, 0.05)) / 1.5) ** 2)) for index in range(8)]
    values: dict[str, Any] = {
        "step": step, "weight_version": step, "reward_mean": reward, "reward_std": math.sqrt(reward * (1 - reward)),
        "reward_parts": {"correct": reward, "format": min(1.0, 0.55 + 0.45 * done + draw.gauss(0, 0.03))},
        "unscored": int(draw.random() < 0.04) * draw.randint(1, 3), "retries": int(draw.random() < 0.05),
        "completion_tokens_mean": 148 + 52 * done + draw.gauss(0, 7),
        "truncated_share": max(0.0, draw.gauss(0.09, 0.03) * (1.1 - done)), "updates": 1,
        "no_signal_share": 0.2,
        "loss": draw.gauss(0, 0.01), "grad_norm": draw.lognormvariate(-1.2, 0.25) * (9 if draw.random() < 0.01 else 1),
        "entropy": 0.46 * math.exp(-1.2 * done) + draw.gauss(0, 0.012), "clipped_low_share": abs(draw.gauss(0, 6e-4)),
        "clipped_high_share": abs(draw.gauss(0, 9e-4)), "kl": 0.0,
        "logprob_diff_mean": difference, "logprob_diff_max": difference * draw.uniform(12, 40),
        "logprob_diff_histogram": tuple(share / sum(shares) for share in shares),
        "corrected_share": abs(draw.gauss(0, 2e-4)), "importance_weight": draw.gauss(0.9996, 2e-4),
        "effective_share": 1 - abs(draw.gauss(0, 6e-4)), "staleness": 0,
        "changed_weight_share": 0.05 + draw.gauss(0, 0.003),
        "rollout_s": draw.gauss(1.28, 0.07) + 0.3 * done, "train_s": draw.gauss(1.9, 0.06),
        "fence_pause_s": draw.gauss(0.0052, 4e-4), "fence_prepare_s": 0.0, "fence_write_s": draw.gauss(0.0164, 9e-4),
        "fence_publish_s": draw.gauss(0.0029, 3e-4), "rollouts": f"{draw.getrandbits(64):016x}",
        "tokens_generated": int(64 * (148 + 52 * done)), "tokens_trained": int(64 * (148 + 52 * done) * 0.8),
        "peak_memory_gib": 61.8 + 4 * (step > num_steps / 3), "device": "cuda", "objective": "dapo",
    }  # fmt: skip
    return StepMetrics(dict.fromkeys(RECORDED, math.nan) | {"skipped_updates": 0, "lag_shares": ()} | values | changes)


def completion(draw: random.Random, formula: str, quality: float) -> dict[str, Any]:
    """Return a completion of a problem; the lower the quality, the more often it is wrong."""
    answer, right = eval(formula), draw.random() < quality
    number = answer if right else answer + draw.choice((-10, -1, 1, 7))
    tidy = draw.random() < 0.5 + quality / 2
    lines = [f"Let me work this out step by step.\n\nFirst, {formula} is what is asked for."]
    lines += [f"Step {number}: I check the numbers once more." for number in range(1, draw.randint(2, 5))]
    text = "\n".join(lines) + (f"\n\nThe answer is \\boxed{{{number}}}." if tidy else f"\n\nso it is {number} I think")
    parts = {"correct": float(right), "format": float(tidy)}
    return {"text": text, "reward": 0.8 * right + 0.2 * tidy, "parts": parts, "tokens": len(text) // 4,
            "finish_reason": "stop" if tidy or draw.random() < 0.7 else "length", "weight_version": 0}  # fmt: skip


def groups(num_steps: int, *, per_step: int = 4, num_problems: int = 0, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the lines of `rollouts.jsonl`; with `num_problems`, problems repeat."""
    draw = random.Random(seed)
    for step in range(1, num_steps + 1):
        for _ in range(per_step):
            own = random.Random(draw.randrange(num_problems) if num_problems else draw.random())
            question, formula = own.choice(PROBLEMS)
            numbers = {"a": own.randint(3, 12), "b": own.randint(4, 30), "c": own.randint(2, 9)}
            prompt = [{"role": "system", "content": "Reason, then put the answer into \\boxed{}."},
                     {"role": "user", "content": question.format(**numbers)}]  # fmt: skip
            formula = formula.format(**numbers)
            quality = 0.3 + 0.6 * step / num_steps
            yield {
                "step": step,
                "problem": {"prompt": prompt, "answer": str(eval(formula))},
                "completions": [completion(draw, formula, quality) | {"weight_version": step - 1} for _ in range(8)],
                "unscored": [],
            }


def make(
    path: Path, *, num_steps: int = 60, planned: int | None = None, seed: int = 0, gain: float = 0.5, **choices: Any
) -> RunDirectory:
    """Create the directory of a run of `num_steps`; with `planned`, it stopped before that many."""
    run = RunDirectory.create(path, environment="gsm8k")
    given = {"model_name": "Qwen/Qwen2.5-7B-Instruct", "environment": "gsm8k", "lr": 2e-6, "max_new_tokens": 384,
             "eval_samples": 4, "eval_interval": 20,
             "system_prompt": "Reason, then put the answer into \\boxed{}."}  # fmt: skip
    config = TrainConfig.model_validate(
        given | {"training_steps": planned or num_steps, "run_dir": path, "save_path": path / "checkpoints"} | choices
    )
    run.write_config(config.document())
    write_json(
        run.server_config, ServeConfig(model=config.model_name, gpu_memory_utilization=0.4).model_dump(mode="json")
    )
    steps = [metrics(step, num_steps, gain=gain, seed=seed) for step in range(1, num_steps + 1)]
    run.metrics.write_text("".join(json_lines.line(step) + "\n" for step in steps))
    write_events(run, num_steps)
    evaluate(run, num_steps, gain)
    if planned is None:
        run.write_summary(summary(steps, run))
    return run


def write_events(run: RunDirectory, num_steps: int) -> None:
    """Write `events.log`: one line names a step, the others have only a time."""
    end = datetime.fromtimestamp(run.metrics.stat().st_mtime).astimezone()
    happened = {
        3.5 * num_steps: "micro-batches of up to 24,576 tokens, in 71.3 GiB of free memory",
        3.5 * num_steps / 2 + 20: "the server died: no answer from http://127.0.0.1:9001",
        3.5 * num_steps / 2: f"the server was restarted with the weights of step {num_steps // 2}",
        3.5 * num_steps / 5: "log-probabilities of vLLM and of the trainer differ by 0.11 nats on average, up to 2.1",
    }
    lines = [f"{end - timedelta(seconds=ago):%Y-%m-%dT%H:%M:%S%z} {text}" for ago, text in happened.items()]
    run.events.write_text("\n".join(lines) + "\n")


def evaluate(run: RunDirectory, num_steps: int, gain: float) -> None:
    """Write `evaluations.jsonl`: before training, every quarter, and at the end."""
    for step in (0, num_steps // 4, num_steps // 2, 3 * num_steps // 4, num_steps):
        reward = 0.26 + gain * (1 - math.exp(-4 * step / num_steps)) * 0.92
        row = {"step": step, "weight_version": step, "reward_mean": reward, "reward_std": 0.4,
               "reward_parts": {"correct": reward}, "unscored": 0, "num_problems": 200,
               "completion_tokens_mean": 190.0, "truncated_share": 0.04, "seconds": 21.0}  # fmt: skip
        with run.evaluations.open("a") as file:
            file.write(json.dumps(row) + "\n")


def write_rollouts(run: RunDirectory, lines: Iterator[dict[str, Any]]) -> None:
    with run.rollouts.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def summary(steps: list[StepMetrics], run: RunDirectory) -> Summary:
    return Summary(
        steps=len(steps), weight_version=len(steps), checkpoint=run.path / "checkpoints", reward_before=0.26,
        reward_after=0.74, rewards=tuple(step.reward_mean for step in steps),
        logprob_diff_max=max(step.logprob_diff_max for step in steps), fence_p50_ms=8.1, attach_ms=6.3, weight_bytes=0,
        updates=len(steps),
    )  # fmt: skip


def older(step: StepMetrics, *missing: str) -> str:
    """Return a step's line as written by an older Bridge without the fields `missing`."""
    values = {name: value for name, value in step.items() if name not in missing}
    return json.dumps(values)
