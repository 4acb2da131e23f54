"""From groups to gradients: forward and backward over every micro-batch of one step.

Not covered: cutting micro-batches (`batch.py`), the loss (`grpo.py`), and what is done with the gradients.
Shape suffixes: G groups, N completions of a group, B sequences, T tokens of the longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.training import batch, grpo
from bridge.training.logprobs import model_logprobs
from bridge.training.optimizer import clip_by_global_norm
from bridge.types import Group


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What one pass over a batch found."""

    loss: float
    """Mean over the sampled tokens."""
    norm: float
    """Global norm before clipping."""
    diffs: Tensor
    """|log-probability of vLLM - of the trainer| of every token that was trained on, in nats."""


def accumulate(model: PreTrainedModel, groups: Sequence[Group], config: TrainConfig) -> Gradients:
    """Leave the gradients of the whole batch in the model's parameters, clipped to `config.max_grad_norm`."""
    model.zero_grad(set_to_none=True)
    advantages_GN = grpo.group_advantages(torch.tensor([group.rewards for group in groups]))
    num_tokens = batch.count_tokens(groups)
    losses, diffs = [torch.zeros((), device=model.device)], [torch.zeros(0, device=model.device)]
    for part in batch.micro_batches(
        groups, advantages_GN, max_tokens=config.micro_batch_tokens, pad_token_id=0, device=model.device
    ):
        logprobs_BT = model_logprobs(model, part, config.temperature)
        loss = grpo.clipped_loss(
            logprobs_BT,
            part.sampled_logprobs_BT,
            part.advantages_B,
            part.mask_BT,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            num_tokens=num_tokens,
        )
        loss.backward()
        losses.append(loss.detach())
        diffs.append((logprobs_BT.detach() - part.sampled_logprobs_BT)[part.mask_BT].abs())
    norm = clip_by_global_norm(model.parameters(), config.max_grad_norm)
    return Gradients(loss=torch.stack(losses).sum().item(), norm=norm, diffs=torch.cat(diffs))


def recompute_activations(model: PreTrainedModel) -> None:
    """Turn gradient checkpointing on, which works in training mode alone, and keep dropout off where it was."""
    off = [module for module in model.modules() if isinstance(module, nn.Dropout) and not module.training]
    model.gradient_checkpointing_enable()
    model.train()
    for dropout in off:  # an adapter's own stays on
        dropout.p = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
