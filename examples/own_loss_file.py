"""A loss for `bridge run --loss own_loss_file.py:soft_clip`: DAPO, with a soft clip instead of a hard one.

The gate of SAPO (arXiv 2511.20347), equation 5: a ratio far from 1 keeps a small gradient, where a clip leaves none.
"""

import torch

GOOD, BAD = 1.0, 1.05
"""How fast the gradient vanishes for tokens with a positive and with a negative advantage."""


def soft_clip(tensors):
    """Return each sampled token's term of the loss, and metrics."""
    ratios = (tensors.logprobs - tensors.old_logprobs).exp()
    sharpness = torch.where(tensors.advantages > 0, GOOD, BAD)
    gates = torch.sigmoid(sharpness * (ratios - 1)) * 4 / sharpness
    longest = tensors.lengths[tensors.sequences]  # number of sampled tokens in each token's completion
    return -gates * tensors.advantages, {
        "ratio": ratios,  # one value per token: the mean over all tokens is recorded
        "ratio_of_long": ((ratios * (longest > 100)).sum(), (longest > 100).sum()),  # sum and count: over some
    }
