"""The token budget of a micro-batch: as many tokens as fit into free memory.

If too few tokens fit, activations are recomputed; if that is not enough, they are also moved to host memory. Running
out of memory halves the budget. Gradients of many micro-batches are summed in float32 if that leaves enough memory for
the passes.

The ranks that share a pass decide together; the one with the least memory sets the budget. With context parallelism the
budget counts the tokens of all slices, and the passes that measure it are sliced as well.

Not covered: the memory of a pass (`pass_cost.py`), packing (`packing.py`), retrying a pass that did not fit
(`bridge/run/learner.py`).
"""

import logging
import sys
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from bridge.config import ComputeConfig, OptimizerConfig
from bridge.config.optimizers import BF16_BYTES, FLOAT32_BYTES
from bridge.core.host_memory import left_bytes
from bridge.errors import UsageError, first_line
from bridge.passes import attention, kernels, layers
from bridge.passes.layers import ALL, ATTENTION, HOST_ATTENTION, HOST_INPUTS, INPUTS, Kept
from bridge.passes.packing import MicroBatch, Sample, longest_unit, num_tokens, packs
from bridge.passes.pass_cost import free_memory, let_go, measure_cost
from bridge.passes.preparation import recompute_activations
from bridge.passes.prepared_model import PreparedModel
from bridge.planning.memory import EXCHANGED, FEW, GIB, HOST_SHARE, MOST_TOKENS, PINNED
from bridge.ranks.world import Ranks

logger = logging.getLogger(__name__)

LONG_TOKENS = 4_096
"""From this many tokens on, a sequence's attention output is worth keeping: recomputing attention would take long."""
WORDS = {
    ATTENTION: "activations are recomputed, except attention",
    INPUTS: "activations are recomputed",
    HOST_ATTENTION: "activations are recomputed, except attention, and kept ones are in host memory",
    HOST_INPUTS: "activations are recomputed, and kept ones are in host memory",
}
"""How log lines describe the activations that layers keep."""
WAYS = (ALL, *WORDS)
"""Every choice of kept activations, from most to least device memory."""
MASKED_TOKENS = 8_192
"""Maximum number of tokens in a micro-batch if the attention is not Bridge's, since its mask grows quadratically."""
ENOUGH_TOKENS = 2_048
"""A micro-batch of fewer tokens leaves a GPU partly idle; recomputing activations to fit more is faster."""
SHARE = 0.85
"""Share of the free memory that passes may take; the rest covers fragmentation and allocations of fixed size."""
BF16_SUMS = "over N micro-batches the error is about sqrt(N) / 512 of the largest partial sum, at worst N / 256 of it"
"""The cost of summing gradients in bf16: each addition is off by up to 1/256 of its result. Errors add up like noise
if gradients are noisy; if all gradients are equal, all errors have the same sign."""
WORTH_IT = 0.9
"""Float32 gradients are used if they leave room for this share of the budget; an adapter's need almost no memory."""


class Budget:
    """Chooses the size of a run's micro-batches in tokens: it starts with what fits, and only shrinks."""

    def __init__(
        self,
        prepared: PreparedModel,
        compute: ComputeConfig,
        optimizer: OptimizerConfig,
        *,
        temperature: float,
        num_groups: int,
        replicas: int,
        parts: Ranks,
        share_prompts: bool = False,
        neighbors: int = 1,
    ) -> None:
        """Store what determines the size of a pass; `num_groups` is the number of groups in a batch.

        `parts` are the ranks that decide together. `neighbors` is the number of ranks on this host, this one included.
        """
        self._prepared = prepared
        self._model = prepared.model
        self._compute = compute
        self._optimizer = optimizer
        self._temperature = temperature
        self._num_groups = num_groups
        self._replicas = replicas
        self._parts = parts
        self._num_slices = 1 if prepared.slices is None else prepared.slices.size
        self._neighbors = neighbors
        self.share_prompts = share_prompts
        """Whether a micro-batch holds each distinct prompt only once."""
        self._on_gpu = self._model.device.type == "cuda"
        self._share = SHARE if self._on_gpu else HOST_SHARE
        self._tokens = compute.micro_batch_tokens
        if compute.activation_offload and (not self._on_gpu or compute.gradient_checkpointing is False):
            raise UsageError(
                "--activation-offload works only on a GPU, and with recomputed activations",
                hint="leave out --activation-offload, or --no-gradient-checkpointing if you set it",
            )
        self.sums_in_float32: bool | None = None
        """Whether gradients of many micro-batches are summed in float32; None: no update had more than a few so far."""
        self._host_bytes = 0
        """This rank's share of the host memory that was free when the first batch arrived."""
        self._is_placed = False
        """Whether the activations that layers keep have been chosen; running out of memory may change the choice."""
        self._longest = 0
        """Tokens of the longest sample or pair in the last request."""
        self._has_pairs = False
        """Whether the samples of the last request are pairs."""
        self._total = 0
        """Tokens of all samples in the last request, packed into a single micro-batch."""

    def is_short(self, samples: Sequence[Sample]) -> bool:
        """Whether memory is too short for this batch without recomputing activations or making passes small."""
        self._measure_samples(samples)
        return self._on_gpu and self._fitting(self._free()) < self._wanted

    def packs(self, samples: Sequence[Sample], measured: Sequence[Sample]) -> list[MicroBatch]:
        """Pack samples into micro-batches within the budget for the `measured` ones; check the first images."""
        if not samples:
            return []
        self._prepared.prove_images(samples)
        max_tokens = self.max_tokens(measured)
        return packs(samples, max_tokens=max_tokens, device=self._model.device, share_prompts=self.share_prompts)

    def max_tokens(self, samples: Sequence[Sample]) -> int:
        """Return the budget for these samples.

        The first call measures it. By then the optimizer state must be allocated, and gradients must not be.
        """
        self._measure_samples(samples)
        if not self._is_placed and self._on_gpu:
            self._host_bytes = min(self._parts.all_gather_object(left_bytes())) // self._neighbors
        if self._tokens is None:
            self._tokens = self._measured()
        elif not self._is_placed and (ways := self._ways()):
            self._keep(ways[0])
        self._is_placed = True
        if self._total > FEW * self._tokens and self.sums_in_float32 is None:
            self.sums_in_float32 = self._widen(self._tokens)
        return self._tokens

    def decide_on_sums(self) -> None:
        """Decide whether gradients are summed in float32, for an update of several calls with a few passes each."""
        assert self._tokens is not None, "no budget was requested yet"
        self.sums_in_float32 = self._widen(self._tokens)

    def shrink(self, error: torch.OutOfMemoryError) -> None:
        """Use less memory from now on; the caller retries from the first micro-batch.

        Raise UsageError if a single sequence does not fit even with recomputed activations.
        """
        assert self._tokens is not None, "no budget was requested yet"
        let_go(error, self._model.device)
        longest = self._longest
        halved = min(self._tokens, self._total) // 2
        is_small = halved < max(longest, ENOUGH_TOKENS)
        if self.sums_in_float32 and is_small:
            self.sums_in_float32 = False
            logger.warning(f"out of memory: gradients are summed in bf16 from now on; {BF16_SUMS}")
        elif is_small and (ways := self._less()):
            self._keep(ways[0])
            logger.warning(f"out of memory: {WORDS[ways[0]]} from now on, which takes longer")
        elif longest < self._tokens:
            self._tokens = max(halved, longest)
            logger.warning(f"out of memory: micro-batches have at most {self._tokens:,} tokens from now on")
        else:
            raise UsageError(
                f"{'a pair' if self._has_pairs else 'a sequence'} of {longest:,} tokens does not fit into the free"
                f" memory: {first_line(error)}",
                hint="--gradient-checkpointing, which recomputes activations"
                if self._compute.gradient_checkpointing is False
                else "a lower --max-new-tokens or --gpu-memory-utilization, --kv-sleep always, or an --optimizer with"
                " less state",
            ) from error

    def too_few_for_one_pass(self, samples: Sequence[Sample], num_passes: int, *, num_updates: int) -> UsageError:
        """Return the error for an update that must be a single pass but needs several within this budget."""
        cuts = [cut for cut in range(num_passes * num_updates, self._num_groups + 1) if self._num_groups % cut == 0]
        hint = "a smaller --batch-size, or --offload-optimizer without --gradient-release"
        if self._replicas == 1:
            hint = "a smaller --batch-size, or --offload-optimizer, which sums gradients in host memory"
        if cuts:
            hint = f"--updates-per-batch {cuts[0]}, {hint}"
        return UsageError(
            f"--gradient-release updates each parameter within one backward pass, but the {len(samples)}"
            f" completions of an update need {num_passes}, of at most {self._tokens:,} tokens",
            hint=hint,
        )

    def _measure_samples(self, samples: Sequence[Sample]) -> None:
        self._longest = longest_unit(samples, share_prompts=self.share_prompts)
        self._has_pairs = any(sample.pair is not None for sample in samples)
        self._total = num_tokens(samples, share_prompts=self.share_prompts)

    @property
    def _wanted(self) -> int:
        """How many tokens must fit in one pass to keep a GPU busy."""
        return max(self._least, min(self._tokens or self._num_slices * ENOUGH_TOKENS, self._total))

    @property
    def _least(self) -> int:
        """How many tokens must fit in one pass: those of the longest sample, or of an update in a single pass."""
        return self._total if self._optimizer.steps_in_backward else self._longest

    @property
    def _most(self) -> int:
        if attention.chosen(self._model) != attention.NAME:
            return MASKED_TOKENS
        return sys.maxsize if self._optimizer.steps_in_backward else self._num_slices * MOST_TOKENS

    def _ways(self) -> list[Kept]:
        """Return what layers may keep in passes over the longest sample, from most to least device memory."""
        recomputes = self._compute.gradient_checkpointing
        offloads = self._compute.activation_offload
        if not offloads and (recomputes is False or not self._model.supports_gradient_checkpointing):
            return []
        is_long = self._on_gpu and self._longest >= LONG_TOKENS
        on_host = [HOST_ATTENTION, HOST_INPUTS] if is_long else [HOST_INPUTS]
        if offloads:
            return on_host
        on_device = [] if recomputes else [ALL]
        on_device += [ATTENTION] if is_long else [INPUTS]
        if self._on_gpu and offloads is None and self._kept_bytes() <= HOST_SHARE * self._host_bytes:
            return on_device + on_host
        return [*on_device, INPUTS] if is_long else on_device

    def _less(self) -> list[Kept]:
        """Return the ways that take less memory than the current one; those that use the host only as a last resort."""
        ways = [way for way in self._ways() if WAYS.index(way) > WAYS.index(self._prepared.kept)]
        assert self._tokens is not None, "no budget was requested yet"
        return [way for way in ways if not way.on_host or self._longest >= self._tokens]

    def _kept_bytes(self) -> int:
        """Return the bytes of all layers' inputs and attention outputs in the smallest possible pass."""
        config = self._model.config.get_text_config()
        width = getattr(config, "num_attention_heads", 1) * kernels.head_size(config)
        num_layers = len(layers.decoder_layers(self._model))
        num_tokens = self._least / self._num_slices
        return int(PINNED * BF16_BYTES * num_tokens * num_layers * (config.hidden_size + width))

    def _keep(self, kept: Kept) -> None:
        if kept not in (self._prepared.kept, ALL):
            recompute_activations(self._prepared, kept)

    def _measured(self) -> int:
        free = self._free()
        wanted = self._wanted
        fitting = -1
        for way in self._ways() or [self._prepared.kept]:
            if fitting >= (self._least if way.on_host else wanted):
                break
            if fitting >= 0:
                logger.info(f"{WORDS[way]}: without, only {fitting:,} of {wanted:,} tokens fit at once")
            self._keep(way)
            fitting = self._fitting(free)
        tokens = min(max(fitting, self._longest), self._most)
        if self._on_gpu or tokens < min(self._most, self._num_slices * MOST_TOKENS):
            logger.info(f"micro-batches of up to {tokens:,} tokens, in {max(free, 0) / GIB:.1f} GiB of free memory")
        if fitting < self._longest and not self._on_gpu:
            logger.warning(f"a sequence of {self._longest:,} tokens may not fit: the system may kill the process")
        return tokens

    def _widen(self, tokens: int) -> bool:
        """Decide whether gradients are summed in float32: yes if that leaves enough memory for the passes."""
        more = _widening_bytes(self._model)
        if not more or self._optimizer.gradient_release:  # summed in host memory anyway, or not summed at all
            return False
        chosen = self._compute.micro_batch_tokens
        fitting = self._fitting(self._free() - self._share * more)
        fits = fitting >= min(max(self._longest, chosen or self._num_slices * ENOUGH_TOKENS), WORTH_IT * tokens)
        if not fits:
            logger.info(f"gradients are summed in bf16, because float32 needs {more / GIB:.1f} GiB more; {BF16_SUMS}")
        elif fitting < tokens and chosen is None:
            self._tokens = fitting
            logger.info(f"micro-batches of up to {fitting:,} tokens, beside gradients in float32")
        return fits

    def _free(self) -> float:
        """Return the bytes left for a pass next to all gradients, or next to the largest if gradients are released."""
        sizes = [p.nbytes for p in self._model.parameters() if p.requires_grad and p.grad is None]
        pending: int = sum(sizes)
        if self._optimizer.gradient_release:
            pending = max(sizes, default=0) * (EXCHANGED if self._replicas > 1 else 1)
        return min(self._parts.all_gather_object(self._share * (free_memory(self._model) - pending)))

    def _fitting(self, free: float) -> int:
        try:
            cost = measure_cost(self._prepared, self._temperature)
        except torch.OutOfMemoryError as error:
            if self._parts.world_size > 1:  # the other ranks wait for this one inside the pass, which cannot be retried
                raise
            let_go(error, self._model.device)
            return 0
        return min(self._parts.all_gather_object(cost.tokens_in(free)))


def _widening_bytes(model: PreTrainedModel) -> int:
    """Return how many more bytes gradients take in float32 than in the parameters' own dtype."""
    return sum(FLOAT32_BYTES * p.numel() - p.nbytes for p in model.parameters() if p.requires_grad)
