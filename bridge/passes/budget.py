"""The token budget of a micro-batch: as many tokens as fit into free memory, measured instead of modeled.

Two passes of different sizes give the memory of a token. A GPU's allocator reports its peak. A CPU's does not: there,
what autograd keeps is counted tensor by tensor, plus three layers' share for the temporaries of a backward pass.

Where too few tokens fit, activations are recomputed. Running out of memory halves the budget. Gradients of many
micro-batches are summed in float32 if that leaves enough memory for the passes.

The parts of a replica decide alike, by the one with the least memory.

Not covered: packing (`packing.py`), retrying what did not fit (`bridge/learn/learner.py`).
"""

import gc
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.config.optimizers import FLOAT32_BYTES
from bridge.core.memory import left_bytes
from bridge.errors import UsageError
from bridge.passes import attention, layers
from bridge.passes.logprobs import BLOCK_LOGITS, model_logprobs
from bridge.passes.packing import MicroBatch, Sample, num_tokens, packs
from bridge.passes.preparation import Note, first_trained, recompute_activations
from bridge.planning.memory import EXCHANGED, FEW, GIB, MOST_TOKENS
from bridge.ranks.world import ALONE, Ranks

MASKED_TOKENS = 8_192
"""Most tokens where attention is not Bridge's: its mask grows quadratically."""
ENOUGH_TOKENS = 2_048
"""Fewer would leave a GPU idle: recomputing activations is faster then."""
SHARE = 0.85
"""Of the free memory: the rest is for fragments, and for what a pass takes besides its tokens."""
HOST_SHARE = 0.5
"""The same on the CPU: other processes take memory at any time, and the system kills instead of refusing."""
BF16_SUMS = "over N micro-batches the error is about sqrt(N) / 512 of the largest partial sum, at worst N / 256 of it"
"""The cost of summing gradients in bf16: each addition is off by up to 1/256 of its result. Errors add up like noise
where gradients are noisy; where each gradient equals the one before, all errors have the same sign."""
WORTH_IT = 0.9
"""Share of a budget's tokens that is enough beside float32 gradients: an adapter's gradients take next to nothing."""
PROBES, PROBE_LENGTH = (1_024, 2_048), 512
"""Tokens of the two measured passes, and of each of their sequences."""
CPU_PROBES, CPU_PROBE_LENGTH = (64, 128), 32
"""The same on a CPU, where a pass takes long and counting is exact."""
LIVE_LAYERS = 3
"""Layers whose recomputed activations and gradients a backward pass holds at once on a CPU."""
CPU_LOGITS_BYTES = 3 * 4 * BLOCK_LOGITS["cpu"]
"""Float32 logits of one block of the vocabulary, and what is computed from them."""


class Budget:
    """How many tokens one run's micro-batches have: at first as many as fit, and never more again."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        note: Note,
        *,
        share_prompts: bool = False,
        parts: Ranks = ALONE,
    ) -> None:
        self._model, self._config, self._note, self._parts = model, config, note, parts
        self.share_prompts = share_prompts
        """Whether a micro-batch holds each prompt once."""
        self._on_gpu = model.device.type == "cuda"
        self._share = SHARE if self._on_gpu else HOST_SHARE
        self._tokens = config.compute.micro_batch_tokens
        self._recomputes = bool(config.compute.gradient_checkpointing)
        self.sums_in_float32: bool | None = None
        """Whether gradients of many micro-batches are summed in float32; None: no update has had more than a few."""
        self._longest = self._total = 0

    def is_short(self, samples: Sequence[Sample]) -> bool:
        """Whether more memory would help: now, activations would have to be recomputed or passes be small."""
        self._see(samples)
        return self._on_gpu and self._fitting(self._free()) < self._wanted

    def max_tokens(self, samples: Sequence[Sample]) -> int:
        """Return the budget for these samples.

        The first call measures it. The optimizer's state has to be allocated by then, and no gradient.
        """
        self._see(samples)
        if self._tokens is None:
            self._tokens = self._find()
        if self._total > FEW * self._tokens and self.sums_in_float32 is None:
            self.sums_in_float32 = self._widen(self._tokens)
        return self._tokens

    def shrink(self, error: torch.OutOfMemoryError) -> None:
        """Take less memory from now on; the caller retries from the first micro-batch on.

        Raises:
            UsageError: a single sequence does not fit, even with recomputed activations.
        """
        assert self._tokens is not None, "no budget was requested yet"
        let_go(error, self._model.device)
        halved = min(self._tokens, self._total) // 2
        is_small = halved < max(self._longest, ENOUGH_TOKENS)
        if self.sums_in_float32 and is_small:
            self.sums_in_float32 = False
            self._note(f"out of memory: gradients are summed in bf16 from now on; {BF16_SUMS}")
        elif self._may_recompute and is_small:
            self._recompute()
            self._note("out of memory: activations are recomputed from now on, which takes longer")
        elif self._longest < self._tokens:
            self._tokens = max(halved, self._longest)
            self._note(f"out of memory: micro-batches have at most {self._tokens:,} tokens from now on")
        else:
            raise UsageError(
                f"a sequence of {self._longest:,} tokens does not fit into the free memory: "
                f"{str(error).strip().splitlines()[0]}",
                remedy="--gradient-checkpointing, which recomputes activations"
                if self._config.compute.gradient_checkpointing is False
                else "a lower --max-new-tokens or --gpu-memory-utilization, --kv-sleep always, or an --optimizer with"
                " less state",
            ) from error

    def too_few_for_one_pass(self, samples: Sequence[Sample], num_passes: int, *, num_updates: int) -> UsageError:
        """Return the refusal of an update that has to be a single pass, and needs several within this budget."""
        num_groups = self._config.rollouts.batch_size // self._config.sampling.group_size
        cuts = [cut for cut in range(num_passes * num_updates, num_groups + 1) if num_groups % cut == 0]
        alone = self._config.replicas == 1
        return UsageError(
            f"--gradient-release updates each parameter within one backward pass, but the {len(samples)}"
            f" completions of an update need {num_passes}, of at most {self._tokens:,} tokens",
            remedy=(f"--updates-per-batch {cuts[0]}, " if cuts else "")
            + "a smaller --batch-size, or --offload-optimizer"
            + (", which sums gradients in host memory" if alone else " without --gradient-release"),
        )

    @property
    def _most(self) -> int:
        if self._model.config._attn_implementation != attention.NAME:
            return MASKED_TOKENS
        steps_in_backward = self._config.optimizer.gradient_release and not self._config.optimizer.offload
        return sys.maxsize if steps_in_backward else MOST_TOKENS  # an update is one backward pass then

    @property
    def _wanted(self) -> int:
        """Tokens that have to fit at once to keep a GPU busy."""
        return max(self._longest, min(self._tokens or ENOUGH_TOKENS, self._total))

    @property
    def _may_recompute(self) -> bool:
        wanted = self._config.compute.gradient_checkpointing is not False
        return wanted and self._model.supports_gradient_checkpointing and not self._recomputes

    def _recompute(self) -> None:
        recompute_activations(self._model, self._note)
        self._recomputes = True

    def _see(self, samples: Sequence[Sample]) -> None:
        self._longest = max(sample.num_tokens for sample in samples)
        self._total = num_tokens(samples, share_prompts=self.share_prompts)

    def _find(self) -> int:
        free = self._free()
        fitting = self._fitting(free)
        if fitting < self._wanted and self._may_recompute:
            self._note(f"activations are recomputed: without, only {fitting:,} of {self._wanted:,} tokens fit at once")
            self._recompute()
            fitting = self._fitting(free)
        tokens = min(max(fitting, self._longest), self._most)
        if self._on_gpu or tokens < min(self._most, MOST_TOKENS):
            self._note(f"micro-batches of up to {tokens:,} tokens, in {max(free, 0) / GIB:.1f} GiB of free memory")
        if fitting < self._longest and not self._on_gpu:
            self._note(f"a sequence of {self._longest:,} tokens may not fit: the system may kill the process")
        return tokens

    def _widen(self, tokens: int) -> bool:
        """Whether gradients are summed in float32: they are if that leaves enough memory for the passes."""
        more = _widening_bytes(self._model)
        if not more or self._config.optimizer.gradient_release:  # which sums in host memory, or has a single pass
            return False
        chosen = self._config.compute.micro_batch_tokens
        fitting = self._fitting(self._free() - self._share * more)
        fits = fitting >= min(max(self._longest, chosen or ENOUGH_TOKENS), WORTH_IT * tokens)
        if not fits:
            self._note(f"gradients are summed in bf16, because float32 needs {more / GIB:.1f} GiB more; {BF16_SUMS}")
        elif fitting < tokens and chosen is None:
            self._tokens = fitting
            self._note(f"micro-batches of up to {fitting:,} tokens, beside gradients in float32")
        return fits

    def _free(self) -> float:
        """Return the bytes that a pass may take, with all gradients allocated, or the largest if they are released."""
        sizes = [p.nbytes for p in self._model.parameters() if p.requires_grad and p.grad is None]
        pending: int = sum(sizes)
        if self._config.optimizer.gradient_release:
            pending = max(sizes, default=0) * (EXCHANGED if self._config.replicas > 1 else 1)
        return min(self._parts.told(self._share * (free_memory(self._model) - pending)))

    def _fitting(self, free: float) -> int:
        try:
            cost = measure_cost(self._model, self._config.sampling.temperature)
        except torch.OutOfMemoryError as error:
            if self._parts.size > 1:  # the others wait for this one in the midst of a pass, which cannot be retried
                raise
            let_go(error, self._model.device)
            return 0
        return min(self._parts.told(cost.tokens_in(free)))


def _widening_bytes(model: PreTrainedModel) -> int:
    """Return how many more bytes gradients take in float32 than in the parameters' own dtype."""
    return sum(FLOAT32_BYTES * p.numel() - p.nbytes for p in model.parameters() if p.requires_grad)


def free_memory(model: PreTrainedModel) -> float:
    """Return the bytes that are free, those that a GPU's allocator holds unused included."""
    if model.device.type == "cpu":
        return float(left_bytes())
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return float(torch.cuda.mem_get_info(model.device)[0] + unused)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The memory of a forward and backward pass."""

    fixed_bytes: float
    token_bytes: float

    @classmethod
    def of(cls, measured: Sequence[tuple[int, int]]) -> Self:
        """Return the line through two measurements of (tokens, bytes)."""
        (few, low), (many, high) = sorted(measured)
        token_bytes = max((high - low) / (many - few), 1.0)
        return cls(fixed_bytes=max(low - few * token_bytes, 0.0), token_bytes=token_bytes)

    def tokens_in(self, free_bytes: float) -> int:
        return max(0, int((free_bytes - self.fixed_bytes) / self.token_bytes))


def measure_cost(model: PreTrainedModel, temperature: float) -> Cost:
    """Run passes of two sizes, without leaving a gradient, and return their cost.

    The random state is restored afterwards: a resumed run measures at another time.
    """
    on_cpu = model.device.type == "cpu"
    with torch.random.fork_rng(devices=[] if on_cpu else [model.device]):
        return _cost_on_cpu(model, temperature) if on_cpu else cost_on_gpu(model, temperature)


def cost_on_gpu(model: PreTrainedModel, temperature: float) -> Cost:
    return Cost.of([(tokens, _peak_bytes(model, tokens, temperature)) for tokens in PROBES])


def _peak_bytes(model: PreTrainedModel, num_tokens: int, temperature: float) -> int:
    part = _example(model, num_tokens, PROBE_LENGTH)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    logprobs_N, _ = model_logprobs(model, part, temperature)
    torch.autograd.grad(logprobs_N.sum(), first_trained(model))
    return int(torch.cuda.max_memory_allocated(model.device) - before)


def _cost_on_cpu(model: PreTrainedModel, temperature: float) -> Cost:
    """Count what autograd keeps, and the temporaries: some layers of what it would keep without recomputing."""
    recomputed = [layer for layer in layers.decoder_layers(model) if getattr(layer, "gradient_checkpointing", False)]
    kept = [_kept_bytes(model, tokens, temperature) for tokens in CPU_PROBES]
    for layer in recomputed:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    plain = [_kept_bytes(model, tokens, temperature) for tokens in CPU_PROBES] if recomputed else kept
    for layer in recomputed:
        layer.gradient_checkpointing = True  # type: ignore[assignment]
    share = LIVE_LAYERS / max(len(layers.decoder_layers(model)), 1)
    totals = [some + int(share * all_) for some, all_ in zip(kept, plain, strict=True)]
    found = Cost.of(list(zip(CPU_PROBES, totals, strict=True)))
    return Cost(fixed_bytes=found.fixed_bytes + CPU_LOGITS_BYTES, token_bytes=found.token_bytes)


def _kept_bytes(model: PreTrainedModel, num_tokens: int, temperature: float) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, each storage once, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor  # held, so that no other tensor gets its place
        return tensor

    part = _example(model, num_tokens, CPU_PROBE_LENGTH)
    with (
        torch.compiler.set_stance("force_eager"),  # a compiled layer would be compiled anew under the hooks
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model_logprobs(model, part, temperature)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _example(model: PreTrainedModel, num_tokens: int, length: int) -> MicroBatch:
    zeros = (0.0,) * (length - 1)
    sample = Sample(
        prompt_token_ids=(1,), token_ids=(1,) * len(zeros), sampled_logprobs=zeros, advantages=zeros, weight=0.0
    )
    (part,) = packs([sample] * (num_tokens // length), max_tokens=num_tokens, device=model.device)
    return part


def let_go(error: BaseException, device: torch.device) -> None:
    """Free what a failed pass still holds: its frames live as long as its error."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
