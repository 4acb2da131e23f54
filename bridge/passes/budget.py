"""The token budget of a micro-batch: as many as fit into the memory that is free, measured and not modelled.

What a token takes and what memory is free tell how many tokens fit. Where too few do, activations are recomputed. What
does not fit after all halves the budget. Gradients of many micro-batches are added up in float32 where that leaves
enough memory for the passes.

Not covered: what a pass takes (`cost.py`), packing (`batch.py`), doing over what did not fit
(`bridge/learn/learner.py`).
"""

import sys
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.optimizers.state_bytes import FLOAT32_BYTES
from bridge.passes import attention
from bridge.passes.cost import Cost, free_memory, let_go, measure_cost
from bridge.passes.expected import Note
from bridge.passes.packing import Sample, num_tokens
from bridge.passes.preparation import recompute_activations
from bridge.planning.memory import FEW, MOST_TOKENS

GIB = 2**30
MASKED_TOKENS = 8_192
"""The same where attention is not ours: its mask grows by the square."""
ENOUGH_TOKENS = 2_048
"""Fewer would leave a GPU idle: recomputing activations is faster then."""
SHARE = 0.85
"""Of the memory that is free: the rest is for fragments, and for what a pass takes beside its tokens."""
HOST_SHARE = 0.5
"""The same of a host's memory: others take of it at any time, and the system kills instead of refusing."""
BF16_SUMS = "over N micro-batches the error is about sqrt(N) / 512 of the largest partial sum, at worst N / 512 of it"
"""What adding gradients up in bf16 costs: each addition is off by up to 1/512 of its result. Roundings add up like
noise where gradients are noisy; where each is the same as the one before, all are to one side."""
WORTH_IT = 0.9
"""Share of a budget's tokens that is enough beside float32 gradients, few as the tokens may be: the gradients of an
adapter take next to nothing."""


Measure = Callable[[PreTrainedModel, float], Cost | None]
"""Measures a model at a temperature; None where not even the smallest pass fits."""


class Budget:
    """How many tokens one run's micro-batches have; it starts with what fits, and only ever gets smaller."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        note: Note,
        *,
        share_prompts: bool = False,
        measure: Measure | None = None,
        free_bytes: Callable[[PreTrainedModel], float] | None = None,
    ) -> None:
        self._model, self._config, self._note = model, config, note
        self.share_prompts = share_prompts
        """Whether a prompt is in a micro-batch once, whatever the number of its completions there."""
        self._measure, self._free_bytes = measure or measure_cost, free_bytes or free_memory
        self._on_gpu = measure is not None or model.device.type == "cuda"
        self._share = SHARE if self._on_gpu else HOST_SHARE
        self._tokens = config.compute.micro_batch_tokens
        self._recomputes = bool(config.compute.gradient_checkpointing)
        self.sums_in_float32: bool | None = None
        """Whether gradients of many micro-batches are added up in float32; None: no update has had more than a few."""
        self._longest = self._total = 0

    def is_short(self, samples: Sequence[Sample]) -> bool:
        """Tell whether more memory would help: now, activations would have to be recomputed or passes be small."""
        self._see(samples)
        return self._on_gpu and self._fitting(self._free()) < self._wanted

    def max_tokens(self, samples: Sequence[Sample]) -> int:
        """Return the budget for these samples.

        It is found at the first call: then the optimizer's state has to be there, and nothing that goes before a pass.
        """
        self._see(samples)
        if self._tokens is None:
            self._tokens = self._find()
        if self._total > FEW * self._tokens and self.sums_in_float32 is None:
            self.sums_in_float32 = self._widen()
        return self._tokens

    def shrink(self, error: torch.OutOfMemoryError) -> None:
        """Take less memory from now on: what did not fit can be done over, from the first micro-batch on.

        Raises:
            UsageError: one sequence alone, with its activations recomputed, does not fit.
        """
        assert self._tokens is not None, "nothing was asked for yet"
        let_go(error, self._model.device)
        halved = min(self._tokens, self._total) // 2
        is_small = halved < max(self._longest, ENOUGH_TOKENS)
        if self.sums_in_float32 and is_small:
            self.sums_in_float32 = False
            self._note(f"out of memory: gradients are added up in bf16 from now on, and {BF16_SUMS}")
        elif self._may_recompute and is_small:
            self._recompute()
            self._note("out of memory: activations are recomputed from now on, which takes longer")
        elif self._longest < self._tokens:
            self._tokens = max(halved, self._longest)
            self._note(f"out of memory: micro-batches have at most {self._tokens:,} tokens from now on")
        else:
            raise UsageError(
                f"a sequence of {self._longest:,} tokens does not fit into the memory that is free: "
                f"{str(error).strip().splitlines()[0]}",
                remedy=self._remedy(),
            ) from error

    @property
    def _most(self) -> int:
        if self._model.config._attn_implementation != attention.NAME:
            return MASKED_TOKENS
        steps_in_backward = self._config.optimizer.gradient_release and not self._config.optimizer.offload
        return sys.maxsize if steps_in_backward else MOST_TOKENS  # an update is one backward pass then

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

    @property
    def _wanted(self) -> int:
        """Tokens that have to fit at once for a GPU to be busy."""
        return max(self._longest, min(self._tokens or ENOUGH_TOKENS, self._total))

    def _find(self) -> int:
        free = self._free()
        fitting = self._fitting(free)
        if fitting < self._wanted and self._may_recompute:
            self._note(f"activations are recomputed: without, {fitting:,} tokens fit at once, not {self._wanted:,}")
            self._recompute()
            fitting = self._fitting(free)
        tokens = min(max(fitting, self._longest), self._most)
        if self._on_gpu or tokens < min(self._most, MOST_TOKENS):
            self._note(f"micro-batches of up to {tokens:,} tokens, in {max(free, 0) / GIB:.1f} GiB of free memory")
        if fitting < self._longest and not self._on_gpu:
            self._note(f"a sequence of {self._longest:,} tokens may not fit: the system may kill the process")
        return tokens

    def _widen(self) -> bool:
        """Set memory aside for gradients in float32, if that leaves enough for the passes; return whether it does."""
        more = _widening_bytes(self._model)
        if not more or self._config.optimizer.gradient_release:  # which adds up in host memory, or has one pass
            return False
        assert self._tokens is not None
        asked = self._config.compute.micro_batch_tokens
        fitting = self._fitting(self._free() - self._share * more)
        fits = fitting >= min(max(self._longest, asked or ENOUGH_TOKENS), WORTH_IT * self._tokens)
        if not fits:
            self._note(f"gradients are added up in bf16, because float32 needs {more / GIB:.1f} GiB more; {BF16_SUMS}")
        elif fitting < self._tokens and asked is None:
            self._tokens = fitting
            self._note(f"micro-batches of up to {fitting:,} tokens, beside gradients in float32")
        return fits

    def _free(self) -> float:
        pending = _gradient_bytes(self._model, released=self._config.optimizer.gradient_release)
        return self._share * (self._free_bytes(self._model) - pending)

    def _fitting(self, free: float) -> int:
        cost = self._measure(self._model, self._config.sampling.temperature)
        return 0 if cost is None else cost.tokens_in(free)

    def _remedy(self) -> str:
        if self._config.compute.gradient_checkpointing is False:
            return "--gradient-checkpointing, which recomputes activations"
        return (
            "a lower --max-new-tokens or --gpu-memory-utilization, --kv-sleep always, or an --optimizer with less state"
        )


def _widening_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that float32 gradients take beyond those of the parameters' own type."""
    return sum(FLOAT32_BYTES * p.numel() - p.nbytes for p in model.parameters() if p.requires_grad)


def _gradient_bytes(model: PreTrainedModel, *, released: bool) -> int:
    """Return the bytes of the gradients that are still to be allocated; one at a time where each is released."""
    sizes = [p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None]
    return max(sizes, default=0) if released else sum(sizes)
