"""`bridge verify` on a server that serves FP8 made of the shared weights."""

from bridge.checks import Check, judged
from bridge.weights import fp8
from bridge.weights.attach import AttachedModel

LOGPROB_MEAN_LIMIT = 0.2
"""Nats. FP8 alone moves log-probabilities by some hundredths; with a stale copy they differ by whole nats."""


def weights(attached: AttachedModel, theirs: dict[str, str]) -> Check:
    """Check that the FP8 which the server serves is the quantization of the weights as this process maps them.

    `theirs` has the server's digests. The caller holds the fence.
    """
    tensors = attached.server_tensors
    ours = {name: fp8.digest(*fp8.quantized(tensors[name], how)) for name, how in attached.shard.quantized.items()}
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    found = f"{len(ours)} of {len(ours)} served tensors are the FP8 of the shared weights"
    if different:
        found = f"{len(different)} of {len(ours)} served tensors are not the FP8 of the shared ones: {different[0]}"
    expected = "the server's FP8 equals the quantization of the shared weights, tensor by tensor"
    hint = "publish once more, which makes it again: bridge restore MODEL_OR_CHECKPOINT"
    return judged("FP8", not different, found, expected, hint)
