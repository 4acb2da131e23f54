"""The training loop: rollouts -> micro-batches -> gradients -> one write behind the fence, whatever the mode.

Not covered: forward and backward (`gradients.py`), the optimizer (`optimizer.py`), how weights reach vLLM
(`bridge/modes`).
"""

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import torch

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.modes import MODES
from bridge.modes.mode import Mode
from bridge.rewards import score_all
from bridge.rollouts import Sampler
from bridge.run_directory import RunDirectory
from bridge.training import batch, checkpoint, data
from bridge.training.gradients import Gradients, accumulate, recompute_activations
from bridge.training.logprobs import check_head
from bridge.training.metrics import StepMetrics, Summary
from bridge.training.optimizer import SplitMasterAdamW
from bridge.types import Environment, Group, Problem
from bridge.weights import skeleton
from bridge.weights.fence import FenceTimes, deferred_interrupt

Report = Callable[[StepMetrics], None]
EVALUATION_SEED = 2**31
"""Far from the seeds of the steps, so that no evaluation repeats a rollout."""


def train(config: TrainConfig, environment: Environment, run: RunDirectory, report: Report) -> Summary:
    """Train for `config.training_steps` steps, leave metrics and checkpoints behind, and tell `report` of each step.

    An interrupt or an error ends the run with the weights of the last published step saved.

    Raises:
        BridgeError: whatever the mode, the environment, the server or the disk gave as a reason to stop.
    """
    checkpoint.tokenizer_files(config.model_name)
    mode = MODES[config.mode](config)
    try:
        trainer = _Trainer(config, environment, run, mode)
        run.write_config(config)  # from here on there is something to keep: a refused run leaves no trace
        return trainer.run(report)
    finally:
        mode.close()


class _Trainer:
    """One run's state."""

    def __init__(self, config: TrainConfig, environment: Environment, run: RunDirectory, mode: Mode) -> None:
        self._config, self._environment, self._run, self._mode = config, environment, run, mode
        self._tokenizer = skeleton.tokenizer(config.model_name)
        self._sampler = Sampler(
            mode.url,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            timeout_s=config.request_timeout_s,
        )
        self._held_out = data.held_out(environment) if config.eval_samples else []
        self._problems = data.endless(list(environment), config.seed)
        self._attached = mode.open()
        self._model, self._device = self._attached.model, self._attached.device
        check_head(self._model)
        if config.gradient_checkpointing:
            recompute_activations(self._model)
        self._optimizer = SplitMasterAdamW(self._model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self._steps: list[StepMetrics] = []
        self._written = 0
        """The step whose weights are in memory, whole; 0 before the first, and while one is being written."""
        self._saved: dict[int, Path] = {}

    def run(self, report: Report) -> Summary:
        """Take every step, evaluating before and after if asked to."""
        before = self._evaluate()
        try:
            for step in range(1, self._config.training_steps + 1):
                report(self._step(step))
                if self._is_due(step):
                    self._save(step)
        except BaseException:  # whatever it was, steps that were paid for are not lost
            if self._written:
                self._save(self._written)
            raise
        after = self._evaluate()
        return self._summary(before, after)

    def _step(self, step: int) -> StepMetrics:
        config = self._config
        start = time.perf_counter()
        problems = list(islice(self._problems, config.batch_size // config.group_size))
        groups = self._roll_out(problems, config.group_size, seed=config.seed + step)
        sampled = time.perf_counter()
        gradients = accumulate(self._model, groups, config)
        self._check_finite(gradients)
        trained = time.perf_counter()
        with deferred_interrupt():  # a step that was published is in the metrics too
            times = self._mode.publish(lambda: self._write(step, gradients.norm))
            metrics = self._measure(step, groups, gradients, times, (sampled - start, trained - sampled))
            self._steps.append(metrics)
            self._run.append(metrics)
        return metrics

    def _measure(
        self, step: int, groups: Sequence[Group], gradients: Gradients, times: FenceTimes, seconds: tuple[float, float]
    ) -> StepMetrics:
        rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
        return StepMetrics(
            step=step,
            weight_version=times.version,
            reward_mean=rewards.mean().item(),
            reward_std=rewards.std(correction=0).item(),
            loss=gradients.loss,
            grad_norm=gradients.norm,
            logprob_diff_mean=gradients.diffs.mean().item(),
            logprob_diff_max=gradients.diffs.max().item() if len(gradients.diffs) else float("nan"),
            changed_weight_share=self._optimizer.changed_weight_share,
            rollout_s=seconds[0],
            train_s=seconds[1],
            fence_pause_s=times.pause_s,
            fence_write_s=times.write_s,
            fence_publish_s=times.publish_s,
            tokens_generated=batch.count_tokens(groups),
            peak_memory_gib=_peak_memory_gib(self._device),
        )

    def _roll_out(self, problems: Sequence[Problem], num_samples: int, *, seed: int) -> list[Group]:
        prompts = [data.encode(self._tokenizer, problem) for problem in problems]
        completions = self._sampler.sample(prompts, num_samples=num_samples, seed=seed)
        return [
            Group(
                problem=problem,
                prompt_token_ids=prompt,
                completions=group,
                rewards=score_all(self._environment, problem, [completion.text for completion in group]),
            )
            for problem, prompt, group in zip(problems, prompts, completions, strict=True)
        ]

    def _check_finite(self, gradients: Gradients) -> None:
        if not math.isfinite(gradients.norm):
            raise UsageError(
                f"the gradient's norm is {gradients.norm} at step {len(self._steps) + 1}; the weights were not touched",
                remedy="lower --lr",
            )

    def _write(self, step: int, norm: float) -> None:
        self._written = 0
        self._optimizer.step(grad_norm=norm)
        self._written = step

    def _evaluate(self) -> float | None:
        """Return the mean reward of the held-out problems, sampled as in training."""
        if not self._held_out:
            return None
        groups = self._roll_out(self._held_out, self._config.eval_samples, seed=self._config.seed + EVALUATION_SEED)
        return statistics.fmean(reward for group in groups for reward in group.rewards)

    def _is_due(self, step: int) -> bool:
        interval = self._config.save_interval
        return step == self._config.training_steps or (interval > 0 and step % interval == 0)

    def _save(self, step: int) -> None:
        """Save the weights, which are those of `step`, unless they are saved already."""
        if step not in self._saved:
            folder = self._config.save_path / f"step_{step}"
            self._saved[step] = checkpoint.save(
                self._model, self._config.model_name, folder, step=step, extra={"weight_version": self._mode.version}
            )

    def _summary(self, before: float | None, after: float | None) -> Summary:
        fences = [metrics.fence_pause_s + metrics.fence_publish_s for metrics in self._steps]
        diffs = [metrics.logprob_diff_max for metrics in self._steps if metrics.logprob_diff_max >= 0]
        return Summary(
            steps=len(self._steps),
            weight_version=self._mode.version,
            checkpoint=self._saved[len(self._steps)],
            reward_before=before,
            reward_after=after,
            rewards=tuple(metrics.reward_mean for metrics in self._steps),
            logprob_diff_max=max(diffs, default=float("nan")),
            fence_p50_ms=statistics.median(fences) * 1e3,
            attach_ms=self._attached.attach_s * 1e3,
            weight_bytes=self._attached.weight_bytes(),
        )


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
