"""What is measured: one object of `metrics.jsonl` a step, and what a whole run came to.

Not covered: measuring it (`loop.py`) and writing it (`bridge/run/run_directory.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step behind one fence."""

    step: int
    """Number of the step, from 1."""
    weight_version: int
    """Version that this step published."""
    reward_mean: float
    """Mean reward of the step's completions, sampled before the update."""
    reward_std: float
    """Standard deviation of the same rewards."""
    reward_parts: Mapping[str, float]
    """Where the reward is a sum of several: name of each -> its mean, before its weight."""
    unscored: int
    """Completions that are left out since their score failed."""
    completion_tokens_mean: float
    """Mean length of the completions, in tokens."""
    truncated_share: float
    """Share of the completions that were cut off by their length."""
    no_signal_share: float
    """Share of the groups that teach nothing, because all rewards of the group are equal."""
    retries: int
    """Requests that were sent again."""
    loss: float
    """Policy loss, mean over the step's updates."""
    grad_norm: float
    """Global norm of the gradient before it is scaled down, mean over the step's updates."""
    updates: int
    """Optimizer steps; fewer than asked for where nothing was to learn, or a gradient was not finite."""
    skipped_updates: int = 0
    """Updates that were left out because their gradient was not finite."""
    entropy: float
    """Mean entropy of the policy where a token was sampled, before the update, in nats."""
    clipped_low_share: float
    """Share of the tokens without a gradient because they were bad, and less likely already than the clip allows."""
    clipped_high_share: float
    """Share of the tokens without a gradient because they were good, and likelier already than the clip allows."""
    kl: float
    """Mean KL divergence from the reference over the tokens, in nats; 0 without a reference."""
    logprob_diff_mean: float
    """Mean over the tokens trained on of |log-probability of vLLM - of the trainer|, in nats, before the update.

    Not a number, and null in `metrics.jsonl`, when no group's rewards differ: nothing is trained on then.
    """
    logprob_diff_max: float
    """Largest of the same differences, in nats."""
    logprob_diff_histogram: tuple[float, ...]
    """Share of the tokens with a difference below 0.001, 0.003, 0.01, 0.03, 0.1, 0.3 and 1 nat, and above."""
    corrected_share: float
    """Share of the tokens whose importance weight was truncated, or that were left out."""
    importance_weight: float
    """Mean importance weight of the tokens, 1 where server and trainer agree."""
    effective_share: float
    """Effective sample size of the importance weights over the number of tokens, 0 to 1."""
    staleness: float
    """Largest number of updates that were published between a completion's weights and the step's own.

    Not a number, and null in `metrics.jsonl`, when the version of one of the completions is unknown.
    """
    changed_weight_share: float
    """Share of the weights whose bytes this step changed, 0 to 1."""
    rollout_s: float
    """Seconds spent on generating and scoring."""
    train_s: float
    """Seconds spent on the forward and backward passes."""
    fence_pause_s: float
    """Seconds until the server was paused and its devices idle; 0 in modes that pause nothing."""
    fence_prepare_s: float
    """Seconds of `train_s` in which the server stood still, since its KV cache slept; 0 where it did not."""
    fence_write_s: float
    """Seconds in which the optimizer wrote and its device finished."""
    fence_publish_s: float
    """Seconds until the server generated with the new weights: by the fence, a hand-over by disk, or a restart.

    0 when the step was not published: mode `none` does so every `vllm_restart_interval` steps.
    """
    rollouts: str
    """Digest of the step's sampled token ids, in their order: steps with equal digests had the same rollouts."""
    tokens_generated: int
    """Sampled tokens of the step."""
    tokens_trained: int
    """Those of them that were trained on: the others had no advantage, or were cut off and are masked."""
    peak_memory_gib: float
    """Most memory that the trainer has held so far, in GiB: of the GPU, or of the process on the CPU."""
    device: str
    """Where that memory is: `cuda`, or `cpu`."""

    @property
    def fence_s(self) -> float:
        """Return the seconds from the pause until the server generates with the new weights, the write included."""
        return self.fence_pause_s + self.fence_prepare_s + self.fence_write_s + self.fence_publish_s

    @property
    def is_published(self) -> bool:
        """Tell whether the server got the weights of this step."""
        return self.fence_publish_s > 0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The held-out problems, sampled and scored as in training; nothing is learnt from them."""

    step: int
    """Steps taken before; 0: it was done before training."""
    weight_version: int
    """Version that made the completions."""
    reward_mean: float
    """Mean reward of the completions."""
    reward_std: float
    """Standard deviation of the same rewards."""
    reward_parts: Mapping[str, float]
    """Where the reward is a sum of several: name of each -> its mean, before its weight."""
    unscored: int
    """Completions that are left out since their score failed."""
    num_problems: int
    """Held-out problems."""
    completion_tokens_mean: float
    """Mean length of the completions, in tokens."""
    truncated_share: float
    """Share of the completions that were cut off by their length."""
    seconds: float
    """Time that it took."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one run came to."""

    steps: int
    """The last step."""
    updates: int
    """Optimizer steps taken since this process started; a batch without a gradient takes none."""
    weight_version: int
    """Version that the server serves now."""
    checkpoint: Path
    """The last checkpoint."""
    reward_before: float | None
    """Mean reward of the held-out problems before the first step, of a resumed run too; None without evaluation."""
    reward_after: float | None
    """The same afterwards."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    logprob_diff_max: float
    """Largest difference of log-probabilities between vLLM and the trainer in all steps, in nats.

    Not a number when nothing was trained on.
    """
    fence_p50_ms: float
    """Median of the fence (`StepMetrics.fence_s`) over the steps that were published, in milliseconds."""
    attach_ms: float
    """Attaching all parameters, in milliseconds."""
    weight_bytes: int
    """Bytes of weights that the trainer holds beside the server's; 0 with one copy."""
