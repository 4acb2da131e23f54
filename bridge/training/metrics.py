"""What is measured: one object of `metrics.jsonl` a step, and what a whole run came to.

Not covered: measuring it (`loop.py`) and writing it (`bridge/run_directory.py`).
"""

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
    loss: float
    """Clipped policy loss, averaged over the sampled tokens."""
    grad_norm: float
    """Global norm of the gradient before it is scaled down."""
    logprob_diff_mean: float
    """Mean over the tokens trained on of |log-probability of vLLM - of the trainer|, in nats, before the update.

    Not a number, and null in `metrics.jsonl`, when no group's rewards differ: nothing is trained on then.
    """
    logprob_diff_max: float
    """Largest of the same differences, in nats."""
    changed_weight_share: float
    """Share of the weights whose bytes this step changed, 0 to 1."""
    rollout_s: float
    """Seconds spent on generating and scoring."""
    train_s: float
    """Seconds spent on the forward and backward passes."""
    fence_pause_s: float
    """Seconds until the server was paused and its devices idle."""
    fence_write_s: float
    """Seconds in which the optimizer wrote and its device finished."""
    fence_publish_s: float
    """Seconds until stale KV was dropped, the version was up by one and the server went on."""
    rollouts: str
    """Digest of the step's sampled token ids, in their order: steps with equal digests had the same rollouts."""
    tokens_generated: int
    """Sampled tokens of the step."""
    peak_memory_gib: float
    """Most memory that the trainer has held so far, in GiB: of the GPU, or of the process on the CPU."""

    @property
    def fence_s(self) -> float:
        """Return how long no token was generated, in seconds."""
        return self.fence_pause_s + self.fence_write_s + self.fence_publish_s


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one run came to."""

    steps: int
    """Optimizer steps taken."""
    weight_version: int
    """Version that the server serves now."""
    checkpoint: Path
    """The last checkpoint."""
    reward_before: float | None
    """Mean reward of the held-out problems before training; None without evaluation."""
    reward_after: float | None
    """The same afterwards."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    logprob_diff_max: float
    """Largest difference of log-probabilities between vLLM and the trainer in all steps, in nats."""
    fence_p50_ms: float
    """Median over the steps of pausing and publishing (without writing), in milliseconds."""
    attach_ms: float
    """Attaching all parameters, in milliseconds."""
    weight_bytes: int
    """Bytes of weights that the trainer holds beside the server's; 0 with one copy."""
