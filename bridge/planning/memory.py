"""Compute what one run holds on a GPU, and whether it fits, without loading anything.

With G the GPU's memory, and bytes on it:

    W  weights, once or twice                           held always
    S  the optimizer's state, a frozen reference        held always
    E  vLLM's buffers and CUDA graphs, CUDA's contexts  held always
    D  gradients, logits of one vocabulary block         held while training
    A  activations of one micro-batch                   held while training
    K  the KV cache                                     held while generating, and while training unless it sleeps

    awake     W + S + E + D + A + K <= G
    asleep    W + S + E + K <= G  while generating, and  W + S + E + D + A <= G  while training

vLLM's share of the GPU holds its W and E, and K. A trainer on a different device has its W, S, D and A there, which
again gives two inequalities, one per device.

Replicas on several GPUs share the optimizer's state: each holds its part of S, but all weights and gradients. An
offloaded state is shared too, so that the replicas of a host together hold it once in host memory. With context
parallelism, each replica holds the activations of its slice of a micro-batch.

The plan for a sequence longer than `LEAST_TOKENS` puts what recomputed layers keep into host memory if there is room,
because a run does the same when nothing else fits.

Not covered: float32 sums of gradients, which a run makes only where they fit; compiled layers and Liger kernels, whose
activations take about a quarter less.
Source of A: transformers' decoder layers in bf16, tensor by tensor as autograd saves them, with attention that keeps no
matrix of scores.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from bridge.config import OWN_WEIGHTS, ComputeConfig, LoraConfig, OptimizerConfig, SamplingConfig, TrainConfig
from bridge.config.optimizers import BF16_BYTES, FLOAT32_BYTES, BytesPerParameter
from bridge.errors import BridgeError, UsageError
from bridge.planning.model_size import Dimensions, ModelSize

GIB = 2**30
CONTEXT_BYTES = GIB / 2
"""CUDA context of one process, and its libraries' workspaces."""
CUDA_GRAPHS_BYTES = GIB
ENGINE_TOKENS, ENGINE_SEQUENCES, ENGINE_GPU_BYTES = 8192, 1024, 80 * GIB
"""Tokens of one forward pass and sequences sampled at once, as vLLM chooses them on a GPU of at least this size. On a
smaller one it uses 2048 and 256; counted here in proportion to the size, which is more."""
SAMPLER_BYTES = 16
"""Bytes per logit in vLLM's sampler: float32 logits and probabilities, sorted, and their indices."""
LOGITS_BYTES = 3 * 4 * 2**26
"""Float32 logits of one block of the vocabulary, and values computed from them (`bridge/passes/logprobs.py`)."""
LARGEST_SHARE = 0.9
"""Largest share of a GPU that vLLM gets."""
ENGINE_MARGIN_BYTES = 2 * GIB
"""Margin for memory that vLLM allocates beyond its estimate, taken from its KV cache."""
STEP_BYTES, STEP_ELEMENTS = 24, 2**26
"""A step inside a backward pass: bytes per element, and elements stepped at once (`bridge/optimizers/split_adamw.py`);
master, gradient and moments in float32, and two temporaries."""
EXCHANGED = 3
"""Copies of the largest gradient that several GPUs hold when it is released: the gradient, what the other GPUs send,
and at most as much again for the float32 sum."""
SERVERS_GPU = frozenset({"auto", "cuda", "cuda:0"})
"""Values of `--trainer-device` that mean the server's GPU."""
SLACK = 1.15
"""Factor for gaps in the allocator: 7.6B took 7.2 MB a token on an H200, its widths account for 6.3 MB."""
BUSY_KV_TOKENS = 2**17
"""Tokens of KV cache that are enough to keep a server busy, however long its completions may become."""
PROMPT_TOKENS = 256
"""Assumed length of a prompt."""
PINNED = 2
"""Largest ratio of torch's pinned memory to its contents: torch rounds sizes up to a power of two."""
HOST_SHARE = 0.5
"""Share of a host's free memory that passes may take: other processes may take some at any time, and the system kills
processes instead of refusing memory."""
LEAST_TOKENS, MOST_TOKENS = 4_096, 16_384
"""Tokens of a micro-batch, unless the user chooses: fewer leave a GPU idle, more gain nothing."""
FEW = 16
"""Micro-batches per update up to which gradients are summed in bf16: the bf16 passes themselves are off by about
as much as that many sums. Float32 sums take memory, and time in every pass."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a run holds, grouped by how long it holds them, and bytes available."""

    gpu: float  # available bytes of vLLM's GPU
    trainer: float  # available bytes of the trainer's device, which may be the same GPU; infinite for the CPU
    apart: bool  # whether the trainer's device is not vLLM's GPU
    can_sleep: bool  # whether the KV cache can sleep
    served: float  # vLLM's weights, and its slot for an adapter
    engine: float  # vLLM's context, buffers and CUDA graphs
    own: float  # the trainer's own weights: a copy, an adapter, a frozen reference, a teacher
    state: float  # the optimizer's state
    gradients: float  # as many as exist at once, in bf16
    sums: float  # added to the gradients by float32 sums, in an update of more than FEW micro-batches
    temporaries: float  # logits of one block, the head's unsummed gradient, one step of gradient release
    least_activations: float  # of the smallest micro-batch worth training with, recomputed and offloaded if allowed
    most_activations: float  # of the largest micro-batch, kept in GPU memory if allowed
    offloaded: float  # bytes in one host's memory: optimizer state and master weights of all its GPUs, and activations
    kv_per_token: float  # keys and values of one token, and a share of its sequence's recurrent state
    replicas: int  # number of replicas on one host

    @classmethod
    def of(
        cls, size: ModelSize, config: TrainConfig, *, gpu_bytes: float, host_bytes: float = math.inf, num_ranks: int = 1
    ) -> Self:
        """Derive the need of `config.gpus` replicas on `num_ranks` GPUs of `gpu_bytes` each, with `host_bytes` free."""
        widths = size.dimensions
        optimizer = config.optimizer
        slices = config.context_parallel_size
        has_copy = config.mode == "none"
        weights = _weights(
            size, config.mode, config.lora, num_ranks, has_reference=config.loss.reference_model is not None
        )
        teacher = _teacher(config)
        num_sequences = slices * config.rollouts.batch_size // optimizer.updates_per_batch // config.replicas
        tokens = _tokens(num_sequences, config.sampling, optimizer, config.compute, slices)
        state = _optimizer_state(
            widths, optimizer, weights, tokens,
            replicas=config.replicas, hosts=config.hosts, trains_head=config.mode != "lora_only",
        )  # fmt: skip
        activations = _activations(
            widths, config.compute, tokens, host_bytes - state.on_host,
            gpus=config.gpus, may_offload=tokens.sequence > slices * LEAST_TOKENS and not has_copy,
        )  # fmt: skip
        return cls(
            gpu=gpu_bytes,
            trainer=math.inf if has_copy and config.trainer_device == "cpu" else gpu_bytes,
            apart=has_copy and config.trainer_device not in SERVERS_GPU,
            can_sleep=config.trains_in_server,
            served=weights.served,
            engine=_engine(widths, gpu_bytes),
            own=weights.own + teacher.on_device,
            state=state.on_device,
            gradients=state.gradients,
            sums=state.sums,
            temporaries=state.temporaries + teacher.while_training,
            least_activations=activations.least,
            most_activations=activations.most,
            offloaded=state.on_host + activations.on_host + config.gpus * teacher.on_host,
            kv_per_token=_kept_per_token(widths, tokens.sequence) / num_ranks,
            replicas=config.gpus,
        )

    @property
    def allocated(self) -> float:
        """The most that the trainer itself allocates with its smallest micro-batch."""
        return self.own + self.state + self.gradients + self.temporaries + self.least_activations

    @property
    def host(self) -> float:
        """Host memory that the trainers of one host hold."""
        return self.offloaded + (self.replicas * self.allocated if math.isinf(self.trainer) else 0)

    @property
    def room_generating(self) -> float:
        """Memory for the KV cache on vLLM's GPU while generating: G - W - S - E."""
        trainer_bytes = 0 if self.apart else CONTEXT_BYTES + self.own + self.state
        return min(self.gpu - trainer_bytes, LARGEST_SHARE * self.gpu) - self.served - self.engine

    @property
    def room_training(self) -> float:
        """Memory on the trainer's device for activations, and for a KV cache that is awake: G - W - S - E - D."""
        server_bytes = 0 if self.apart else self.served + self.engine
        return self.trainer - CONTEXT_BYTES - self.own - self.state - self.gradients - self.temporaries - server_bytes


class _Weights(NamedTuple):
    """The number of trained parameters, and the bytes of all weights."""

    served: float  # bytes of vLLM's weights on one GPU, and its slot for an adapter
    own: float  # bytes of the trainer's own weights
    trained: float  # parameters that one rank trains
    trained_by_all: float  # parameters that all ranks of a replica train


def _weights(
    size: ModelSize, mode: str, lora: LoraConfig, num_ranks: int = 1, *, has_reference: bool = False
) -> _Weights:
    """Return the weights that vLLM and the trainer hold on one of `num_ranks` GPUs in this `mode`."""
    of_one_rank = size.num_params / num_ranks
    adapter = copy = own = 0
    if mode == "lora_only":
        adapter = lora.r * size.dimensions.adapted(experts=lora.has_experts)
        if lora.handover == "disk":
            own += adapter
            if num_ranks > 1:  # one process cannot train on shards, so it holds the full base itself
                own += size.num_params
    if mode == "none":
        copy = size.num_params
        own += copy
    if has_reference:
        own += size.num_params
    return _Weights(
        served=BF16_BYTES * (of_one_rank + size.num_untrained / num_ranks + adapter),
        own=BF16_BYTES * own,
        trained=adapter or copy or of_one_rank,
        trained_by_all=adapter or copy or size.num_params,
    )


class _Teacher(NamedTuple):
    """Bytes of a teacher's weights."""

    on_device: float = 0  # held always
    while_training: float = 0  # copied to the device for its passes
    on_host: float = 0


def _teacher(config: TrainConfig) -> _Teacher:
    """Return the weights of a teacher that is loaded beside the trained model.

    Raises:
        UsageError: its files cannot be read.
    """
    loss = config.loss
    same_model = loss.teacher is not None and Path(loss.teacher).resolve() == Path(config.model_name).resolve()
    is_own_base = config.mode == "lora_only" and same_model
    if loss.teacher in (None, OWN_WEIGHTS) or loss.has_remote_teacher or is_own_base:
        return _Teacher()
    try:
        size = ModelSize.of(str(loss.teacher))
    except BridgeError as error:
        raise UsageError(f"--teacher {loss.teacher}: {error.message}", hint=error.hint) from error
    whole = BF16_BYTES * (size.num_params + size.num_untrained)
    if not loss.offload_teacher:
        return _Teacher(on_device=whole)
    head = BF16_BYTES * size.dimensions.vocabulary * size.dimensions.hidden
    return _Teacher(on_device=head, while_training=whole - head, on_host=PINNED * (whole - head))


def host_state_bytes(size: ModelSize, optimizer: OptimizerConfig, mode: str, lora: LoraConfig, *, hosts: int) -> float:
    """Return the bytes of an offloaded optimizer's state and master in the memory of one of the `hosts`."""
    per_parameter = BytesPerParameter.of(optimizer.name, offload=optimizer.offload, release=optimizer.gradient_release)
    return _weights(size, mode, lora).trained_by_all * per_parameter.host / hosts


class _Tokens(NamedTuple):
    """Token counts of a sequence and of micro-batches."""

    sequence: int  # a prompt and its completion
    num_micro_batches: float  # number of the smallest micro-batches in an update of one replica
    least: int  # the smallest micro-batch worth training with, or one slice of it
    most: int  # the largest micro-batch, or one slice of it


def _tokens(
    num_sequences: int, sampling: SamplingConfig, optimizer: OptimizerConfig, compute: ComputeConfig, slices: int
) -> _Tokens:
    """Return the micro-batch sizes for an update of `num_sequences`, where each micro-batch is cut into `slices`."""
    sequence = sequence_tokens(sampling)
    update = sequence * num_sequences
    least, most = micro_batch_tokens(sequence, update, optimizer, compute, slices)
    return _Tokens(sequence, update / (slices * least), least, most)


class _OptimizerState(NamedTuple):
    """Bytes of the optimizer's state, and of what an update needs besides activations."""

    on_device: float  # state
    on_host: float  # state and master in the memory of one host
    gradients: float  # as many as exist at once
    sums: float  # added to the gradients by float32 sums
    temporaries: float  # logits of one block, the head's unsummed gradient, one step of gradient release


def _optimizer_state(
    widths: Dimensions,
    optimizer: OptimizerConfig,
    weights: _Weights,
    tokens: _Tokens,
    *,
    replicas: int,
    hosts: int,
    trains_head: bool,
) -> _OptimizerState:
    """Return what the optimizer holds, and the gradients that it uses."""
    per_parameter = BytesPerParameter.of(optimizer.name, offload=optimizer.offload, release=optimizer.gradient_release)
    gradients = weights.trained * per_parameter.gradient
    if optimizer.gradient_release:
        num_copies = EXCHANGED if replicas > 1 else 1
        gradients = num_copies * BF16_BYTES * min(widths.largest, weights.trained)
    temporaries = LOGITS_BYTES
    if trains_head:
        temporaries += BF16_BYTES * widths.vocabulary * widths.hidden
    if optimizer.steps_in_backward:
        temporaries += STEP_BYTES * min(STEP_ELEMENTS, widths.largest)
    return _OptimizerState(
        on_device=weights.trained * per_parameter.device / replicas,
        on_host=weights.trained_by_all * per_parameter.host / hosts,
        gradients=gradients,
        sums=weights.trained * per_parameter.gradient if tokens.num_micro_batches > FEW else 0,
        temporaries=temporaries,
    )


class _Activations(NamedTuple):
    """Bytes that a forward pass keeps for its backward pass."""

    least: float  # of the smallest micro-batch, recomputed and offloaded if allowed
    most: float  # of the largest micro-batch, kept in GPU memory if allowed
    on_host: float  # offloaded to the memory of one host


def _activations(
    widths: Dimensions, compute: ComputeConfig, tokens: _Tokens, host_left: float, *, gpus: int, may_offload: bool
) -> _Activations:
    """Return what micro-batches keep, with `host_left` bytes of host memory free next to the optimizer's state.

    `may_offload`: whether a run offloads activations if the user does not choose.
    """
    recompute = compute.gradient_checkpointing
    on_host = gpus * PINNED * kept_bytes(widths, tokens.least)
    offload = compute.activation_offload
    if offload is None:
        offload = may_offload and recompute is not False and on_host <= HOST_SHARE * host_left
    return _Activations(
        least=activation_bytes(widths, tokens.least, recomputed=recompute is not False, on_host=offload),
        most=activation_bytes(widths, tokens.most, recomputed=recompute is True),
        on_host=on_host if offload else 0,
    )


def _engine(widths: Dimensions, gpu_bytes: float) -> float:
    """Return the bytes of vLLM's context, buffers and CUDA graphs on a GPU of this size."""
    forward = ENGINE_TOKENS * BF16_BYTES * (3 * widths.active + 4 * widths.hidden)
    sampler = ENGINE_SEQUENCES * SAMPLER_BYTES * widths.vocabulary
    share_of_buffers = min(gpu_bytes / ENGINE_GPU_BYTES, 1)
    return CONTEXT_BYTES + CUDA_GRAPHS_BYTES + share_of_buffers * (forward + sampler)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a run fits, or how much memory it lacks."""

    asleep: bool  # whether the KV cache sleeps while the trainer trains
    kv: float  # bytes left for the KV cache next to the smallest micro-batch
    lacking: float  # missing bytes; 0: it fits


def fit(need: Need, *, least_kv: float, kv_sleep: str = "auto") -> Fit:
    """Fit a run with a KV cache of at least `least_kv` bytes, awake if possible, otherwise asleep."""
    ways = {"auto": (False, True), "always": (True,), "never": (False,)}[kv_sleep if need.can_sleep else "never"]
    return min((fit_by(need, least_kv, asleep=way) for way in ways), key=lambda way: way.lacking)


def fit_by(need: Need, least_kv: float, *, asleep: bool) -> Fit:
    """Fit a run whose KV cache sleeps while training (`asleep`) or stays awake."""
    left = need.room_training - need.least_activations
    kv = need.room_generating if asleep or need.apart else min(need.room_generating, left)
    return Fit(asleep=asleep, kv=max(kv, 0), lacking=max(0, least_kv - kv, -left))


def share(need: Need, chosen: Fit, *, least_kv: float) -> float:
    """Return vLLM's share: a KV cache of twice `least_kv` takes precedence over larger micro-batches."""
    kv = chosen.kv
    if not (chosen.asleep or need.apart):
        spared = min(need.most_activations - need.least_activations, kv - least_kv - max(least_kv, ENGINE_MARGIN_BYTES))
        kv -= max(spared, 0)
    return (need.served + need.engine + max(kv, least_kv)) / need.gpu


def least_kv_tokens(num_completions: int, longest: int, max_model_len: int | None = None) -> int:
    """Return how many tokens a server's KV cache has to hold: its share of a batch, or enough to keep it busy.

    The longest sequence always fits. Completions that do not fit are queued, or preempted and resumed.
    """
    longest = min(longest, max_model_len or longest)
    return max(min(num_completions * longest, BUSY_KV_TOKENS), longest, max_model_len or 0)


def sequence_tokens(sampling: SamplingConfig) -> int:
    """Return the assumed length of a prompt and its completion."""
    return PROMPT_TOKENS + sampling.longest


def micro_batch_tokens(
    longest: int, update: int, optimizer: OptimizerConfig, compute: ComputeConfig, slices: int = 1
) -> tuple[int, int]:
    """Return the smallest and the largest micro-batch in tokens, given the tokens of a sequence and of an update.

    If a micro-batch is cut into `slices`, these are the tokens of one slice.
    """
    if optimizer.steps_in_backward:
        return update, update
    if compute.micro_batch_tokens is not None:
        chosen = math.ceil(compute.micro_batch_tokens / slices)
        return chosen, chosen
    longest = math.ceil(longest / slices)
    update = math.ceil(update / slices)
    return max(longest, min(LEAST_TOKENS, update)), max(longest, min(MOST_TOKENS, update))


def _kept_per_token(widths: Dimensions, longest: int) -> float:
    """Return the bytes that vLLM keeps per token of a sequence of `longest` tokens."""
    convolved = (widths.convolved - 1) * (2 * widths.state_keys + widths.state_values)
    state = widths.num_states * (FLOAT32_BYTES * widths.state_size + BF16_BYTES * convolved)
    return 2 * BF16_BYTES * widths.num_attending * widths.key_value + state / longest


def kept_bytes(widths: Dimensions, num_tokens: int) -> float:
    """Return the bytes that recomputed layers keep of `num_tokens`: their inputs, and the outputs of attention."""
    return BF16_BYTES * num_tokens * (widths.num_layers * widths.hidden + widths.num_attending * widths.query)


def activation_bytes(widths: Dimensions, num_tokens: int, *, recomputed: bool, on_host: bool = False) -> float:
    """Return the bytes that `num_tokens` take, with the layers' activations kept or recomputed one layer at a time.

    With `on_host` the inputs of recomputed layers are in host memory, except for those of two layers.

    Per token and layer autograd keeps: per norm a float32 copy, the normalized and the scaled bf16 one (8 bytes);
    queries, keys, values and attention's output; in the feed-forward part the gate, the activated gate, up and their
    product (8 bytes); a copy per expert. A layer with a state keeps queries, keys and values before and after their
    convolution, and what its kernel saves of them in float32.
    """
    norms = 2 * 8 * widths.hidden
    attention = 4 * widths.query + 4 * widths.key_value + 4 * widths.gates
    state = 8 * widths.state_keys + 24 * widths.state_values
    mixing = (widths.num_attending * attention + widths.num_states * state) / widths.num_layers
    layer = norms + mixing + 8 * widths.active + 4 * widths.num_routes * widths.hidden
    ends = 16 * widths.hidden  # the embedding's output, the last norm, and the head's rows with a float32 gradient
    num_inputs = min(2, widths.num_layers) if on_host else widths.num_layers
    kept = 2 * widths.hidden * num_inputs + 1.5 * layer if recomputed else layer * widths.num_layers
    return SLACK * num_tokens * (kept + ends)
