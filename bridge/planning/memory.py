"""What one run holds on a GPU, and whether it fits, by arithmetic alone.

With G the GPU's memory, and bytes on it:

    W  weights, once or twice                           held always
    S  the optimizer's state, a frozen reference        held always
    E  vLLM's buffers and CUDA graphs, CUDA's contexts  held always
    D  gradients, float32 logits of a few words         held while training
    A  activations of one micro-batch                   held while training
    K  the KV cache                                     held while generating, and while training unless it sleeps

    awake     W + S + E + D + A + K <= G
    asleep    W + S + E + K <= G  while generating, and  W + S + E + D + A <= G  while training

vLLM's share of the GPU holds its W, its E and K. A trainer on a device of its own has its W, S, D and A there: two
inequalities again, one for each device.

Not covered: measuring (`bridge plan --run` compares), how large a model is (`model_size.py`).
"""

import math
from dataclasses import dataclass
from typing import Self

from bridge.config import TrainConfig
from bridge.optimizers.state_bytes import BytesPerParameter
from bridge.planning.activations import activation_bytes, micro_batch_tokens, sequence_tokens
from bridge.planning.dimensions import Dimensions
from bridge.planning.model_size import ModelSize

GIB = 2**30
BF16_BYTES = 2
CONTEXT_BYTES = GIB / 2
"""CUDA's context of one process, and its libraries' workspaces."""
CUDA_GRAPHS_BYTES = GIB
ENGINE_TOKENS, ENGINE_SEQUENCES, ENGINE_GPU_BYTES = 8192, 1024, 80 * GIB
"""Tokens of one forward pass and sequences sampled at once, as vLLM chooses them on a GPU from this size on; on smaller
ones it takes less: 2048 and 256 up to 70 GiB, and in proportion here, which is more."""
SAMPLER_BYTES = 16
"""Of vLLM's sampler per logit: float32 logits and probabilities, sorted, and their places."""
LOGITS_BYTES = 3 * 4 * 2**26
"""Float32 logits of one block of the vocabulary, and what is made of them (`bridge/passes/logits.py`)."""
LARGEST_SHARE = 0.9
"""Of a GPU that vLLM gets at most."""
ENGINE_MARGIN_BYTES = 2 * GIB
"""For what vLLM takes beyond its estimate: its KV cache would be smaller by it."""
STEP_BYTES, STEP_ELEMENTS = 24, 2**26
"""Of a step in the middle of a backward pass, per element of the piece that is stepped at once
(`bridge/optimizers/slabs.py`): master, gradient and moments in float32, and two temporaries."""
SERVERS_GPU = frozenset({"auto", "cuda", "cuda:0"})
"""Values of `--trainer-device` that are taken for the GPU of the server."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a run holds beside each other, by how long it holds them, and bytes that there are."""

    gpu: float
    """Of vLLM's GPU."""
    trainer: float
    """Of the trainer's device, the same one or another; infinite where that is the CPU."""
    apart: bool
    """Whether it is another one."""
    can_sleep: bool
    """Whether the KV cache can sleep."""
    served: float
    """vLLM's weights, and its slot for an adapter."""
    engine: float
    """vLLM's context, buffers and CUDA graphs."""
    own: float
    """Weights that the trainer holds beside vLLM's: a copy, an adapter, a frozen reference."""
    state: float
    """The optimizer's state."""
    gradients: float
    """As many gradients as exist at once."""
    temporaries: float
    """Logits of one block of the vocabulary, the head's gradient before it is added to the others, a released step."""
    least_activations: float
    """Of the smallest micro-batch worth training with, recomputed if need be."""
    most_activations: float
    """Of the largest one, kept if that is allowed."""
    offloaded: float
    """The optimizer's state and master in the host's memory."""
    kv_per_token: float
    """Keys and values of one token."""

    @classmethod
    def of(cls, size: ModelSize, config: TrainConfig, *, gpu_bytes: float, num_ranks: int = 1) -> Self:
        """Derive it for a run of `config` whose server splits its weights over `num_ranks` GPUs of `gpu_bytes`."""
        widths, shard = size.dimensions, size.num_params / num_ranks
        adapter = config.lora.r * widths.adaptable if config.mode == "lora_only" else 0
        copy = size.num_params if config.mode == "none" else 0
        trained = adapter or copy or shard
        chosen = config.optimizer
        each = BytesPerParameter.of(chosen.name, offload=chosen.offload, release=chosen.gradient_release)
        least, most = micro_batch_tokens(config)
        return cls(
            gpu=gpu_bytes,
            trainer=math.inf if copy and config.trainer_device == "cpu" else gpu_bytes,
            apart=bool(copy) and config.trainer_device not in SERVERS_GPU,
            can_sleep=not copy,
            served=BF16_BYTES * (shard + adapter),
            engine=_engine_bytes(widths, gpu_bytes),
            own=BF16_BYTES * (copy + _beside(size, config, adapter)),
            state=trained * each.device,
            gradients=trained * each.gradient or BF16_BYTES * min(widths.largest, trained),
            temporaries=_temporary_bytes(widths, config),
            least_activations=activation_bytes(
                widths, least, recomputed=config.compute.gradient_checkpointing is not False
            ),
            most_activations=activation_bytes(widths, most, recomputed=config.compute.gradient_checkpointing is True),
            offloaded=trained * each.host,
            kv_per_token=2 * BF16_BYTES * widths.num_layers * widths.key_value / num_ranks,
        )

    @property
    def allocated(self) -> float:
        """Return the most that the trainer allocates with its smallest micro-batch; vLLM's memory is not its own."""
        return self.own + self.state + self.gradients + self.temporaries + self.least_activations

    @property
    def host(self) -> float:
        """Return what the trainer holds in the host's memory."""
        return self.offloaded + (self.allocated if math.isinf(self.trainer) else 0)

    @property
    def room_generating(self) -> float:
        """Return G - W - S - E on vLLM's GPU: what is left for the KV cache while nothing is trained."""
        beside = 0 if self.apart else CONTEXT_BYTES + self.own + self.state
        return min(self.gpu - beside, LARGEST_SHARE * self.gpu) - self.served - self.engine

    @property
    def room_training(self) -> float:
        """Return G - W - S - E - D on the trainer's device: left for activations, and for a KV cache that is awake."""
        beside = 0 if self.apart else self.served + self.engine
        return self.trainer - CONTEXT_BYTES - self.own - self.state - self.gradients - self.temporaries - beside


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a run fits, or what it lacks."""

    asleep: bool
    """Whether the KV cache sleeps while the trainer trains."""
    kv: float
    """Bytes left for the KV cache beside the smallest micro-batch."""
    lacking: float
    """Bytes that are lacking; 0: it fits."""


def fit(need: Need, *, least_kv: float, kv_sleep: str = "auto") -> Fit:
    """Tell how a run fits with a KV cache of at least `least_kv` bytes: awake where it can, else asleep."""
    ways = {"auto": (False, True), "always": (True,), "never": (False,)}[kv_sleep if need.can_sleep else "never"]
    return min((fit_by(need, least_kv, asleep=way) for way in ways), key=lambda found: found.lacking)


def fit_by(need: Need, least_kv: float, *, asleep: bool) -> Fit:
    """Tell how a run fits with a KV cache that sleeps while training, or one that does not."""
    left = need.room_training - need.least_activations
    kv = need.room_generating if asleep or need.apart else min(need.room_generating, left)
    return Fit(asleep=asleep, kv=max(kv, 0), lacking=max(0, least_kv - kv, -left))


def share(need: Need, found: Fit, *, least_kv: float) -> float:
    """Return vLLM's share: with a KV cache of twice `least_kv` before larger micro-batches, and all that they leave."""
    kv = found.kv
    if not (found.asleep or need.apart):
        spared = min(need.most_activations - need.least_activations, kv - least_kv - max(least_kv, ENGINE_MARGIN_BYTES))
        kv -= max(spared, 0)
    return (need.served + need.engine + max(kv, least_kv)) / need.gpu


def least_kv_tokens(config: TrainConfig, max_model_len: int | None = None) -> int:
    """Return the tokens of one batch, or of the longest sequence that the server has to take, if that is more."""
    longest = sequence_tokens(config) if max_model_len is None else min(sequence_tokens(config), max_model_len)
    return max(config.rollouts.batch_size * longest, max_model_len or 0)


def _beside(size: ModelSize, config: TrainConfig, adapter: int) -> int:
    """Return the parameters that the trainer holds and does not train as they lie in vLLM."""
    reference = size.num_params if config.loss.reference_model else 0
    return reference + (adapter if config.lora.handover == "disk" else 0)


def _engine_bytes(widths: Dimensions, gpu_bytes: float) -> float:
    forward = ENGINE_TOKENS * BF16_BYTES * (3 * widths.active + 4 * widths.hidden)
    sampler = ENGINE_SEQUENCES * SAMPLER_BYTES * widths.vocabulary
    return CONTEXT_BYTES + CUDA_GRAPHS_BYTES + min(gpu_bytes / ENGINE_GPU_BYTES, 1) * (forward + sampler)


def _temporary_bytes(widths: Dimensions, config: TrainConfig) -> float:
    head = 0 if config.mode == "lora_only" else BF16_BYTES * widths.vocabulary * widths.hidden
    steps_early = config.optimizer.gradient_release and not config.optimizer.offload
    return LOGITS_BYTES + head + (STEP_BYTES * min(STEP_ELEMENTS, widths.largest) if steps_early else 0)
