"""What the trainer learns from: single completions, each with its advantages and its share of the loss.

Not covered: packing them (`batch.py`), the loss (`bridge/learn`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion that is trained on."""

    prompt_token_ids: tuple[int, ...]
    """What was asked; not trained on."""
    token_ids: tuple[int, ...]
    """The completion, with at least one sampled token."""
    sampled_logprobs: tuple[float, ...]
    """Log-probability of each sampled token where it was sampled, in nats; not a number where unknown."""
    advantages: tuple[float, ...]
    """One per sampled token."""
    weight: float
    """Factor of each of its sampled tokens' terms in the loss, which is their sum over the whole update."""
    sampled: tuple[bool, ...] | None = None
    """Which tokens of the completion were sampled, where not all of them were; the others are read, not trained on."""

    @property
    def num_tokens(self) -> int:
        """Return the length, prompt and completion together."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Return the number of sampled tokens."""
        return len(self.advantages)
