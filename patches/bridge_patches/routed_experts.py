"""Report which experts each token of a rollout was routed to, so that the trainer can use the same ones.

vLLM's own report (`--enable-return-routed-experts`) has required its second model runner since 0.31, which CPUs lack,
and worked differently before. A router's callback and the scheduler's messages are the same in every version:

Worker: every layer with experts writes its choices into one buffer, with a row per token of the step, even inside a
CUDA graph. The step's output carries a copy of the buffer.
Engine: the rows of a step are stored by the position of their tokens in the KV cache, like keys and values, so a
request that finds a prefix in the cache also finds its experts. A request keeps the first experts reported for each
token: if it restarts, its tokens are recomputed, possibly with newer weights, but its log-probabilities are those of
the first time.

Not covered: speculative decoding, whose rejected tokens would have to be removed, and models without full attention.
Seen in vLLM 0.26 to 0.33: `vllm/model_executor/layers/fused_moe/router/base_router.py`, `vllm/v1/core/sched/output.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bridge_patches import wrap

PINS = """
vllm.model_executor.layers.fused_moe.router.base_router
    BaseRouter: top_k, global_num_experts
    call BaseRouter.set_capture_fn(capture_fn)
vllm.v1.worker.gpu_worker
    wrap Worker.execute_model(scheduler_output)  # the CPU's worker inherits it
    wrap Worker.sample_tokens(grammar_output)
vllm.v1.outputs
    ModelRunnerOutput: req_ids
    call AsyncModelRunnerOutput.get_output()
vllm.v1.core.sched.output
    SchedulerOutput: scheduled_new_reqs, scheduled_cached_reqs, num_scheduled_tokens, total_num_scheduled_tokens,
        finished_req_ids
    NewRequestData: req_id, block_ids, num_computed_tokens, prompt_token_ids, prefill_token_ids
    CachedRequestData: req_ids, resumed_req_ids, new_block_ids, num_computed_tokens, num_output_tokens
vllm.v1.kv_cache_interface
    KVCacheConfig: num_blocks, kv_cache_groups
    KVCacheGroupSpec: kv_cache_spec
    FullAttentionSpec: block_size
vllm.v1.core.sched.scheduler: Scheduler: kv_cache_config
vllm.config.vllm: VllmConfig: speculative_config, kv_transfer_config, parallel_config, scheduler_config
vllm.config.parallel: ParallelConfig: pipeline_parallel_size
"""
ROWS = "bridge_experts"
"""Attribute of a step's output with the experts of its tokens."""
DIVIDING = "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"
"""Settings that split the layers, or the tokens of the KV cache, among ranks."""
ROUTED = "routed-"
"""Part of the ids of rollouts whose experts are reported, followed by the number of leading tokens to leave out."""


class Recorder:
    """Records, in a worker, the experts that all layers choose for the tokens of one step."""

    def __init__(self, routers: list[Any], num_tokens: int, device: torch.device) -> None:
        """Make the routers, one per layer, report their choices for steps of up to `num_tokens` tokens."""
        self.shape = len(routers), int(routers[0].top_k)
        self.type = torch.uint8 if routers[0].global_num_experts <= 256 else torch.int16
        self._rows = torch.zeros((num_tokens, *self.shape), dtype=torch.int16, device=device)
        """Experts by token and layer, written by CUDA graphs."""
        self._seen = set[int]()
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, layer))

    @property
    def is_complete(self) -> bool:
        """Whether every layer has reported a choice; a kernel that chooses experts itself does not report any."""
        return len(self._seen) == self.shape[0]

    @property
    def may_report(self) -> bool:
        """Whether every layer reports, or may still do so; on a GPU, vLLM runs a dummy batch before it serves."""
        return self.is_complete or not self._rows.is_cuda

    def rows(self, num_tokens: int) -> Callable[[], Any]:
        """Start to copy the rows of the step that was just computed; the returned function waits for the copy."""
        own = self._rows[:num_tokens].to(self.type)
        host = own.to("cpu", non_blocking=True)
        copied = torch.Event() if own.is_cuda else None
        if copied is not None:
            copied.record()

        def wait() -> Any:
            if copied is not None:
                copied.synchronize()
            return host.numpy()

        return wait

    def _capture(self, layer: int, chosen: Tensor) -> None:
        self._rows[: len(chosen), layer] = chosen
        self._seen.add(layer)


_recorder: Recorder | None = None
"""Recorder of this process's model, if it has experts."""


def patch() -> None:
    """Attach the experts to each step's output."""
    from vllm.v1.worker.gpu_worker import Worker

    num_tokens = 0

    @wrap(Worker, "execute_model")
    def execute_model(
        original: Callable[..., Any], worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal num_tokens
        num_tokens = scheduler_output.total_num_scheduled_tokens
        return original(worker, scheduler_output, *args, **kwargs)

    @wrap(Worker, "sample_tokens")
    def sample_tokens(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(worker, *args, **kwargs)
        if _recorder is None or not _recorder.is_complete or output is None or not num_tokens or worker.rank:
            return output
        rows = _recorder.rows(num_tokens)
        if not hasattr(output, "get_output"):
            return _with_rows(output, rows)
        get_output = output.get_output
        output.get_output = lambda: _with_rows(get_output(), rows)
        return output


def watch(model: nn.Module, vllm_config: Any) -> None:
    """Record the experts that a newly loaded model chooses, if it has any.

    This is not supported with a KV connector, which delivers tokens whose experts are unknown, or if the cache or the
    layers are split among ranks.
    """
    global _recorder  # noqa: PLW0603  a process has at most one model
    routers: list[Any] = [getattr(module, "router", None) for module in model.modules()]
    own = list(dict.fromkeys(router for router in routers if hasattr(router, "set_capture_fn")))
    is_uniform = len({(router.top_k, router.global_num_experts) for router in own}) == 1
    is_divided = any(getattr(vllm_config.parallel_config, name, 1) > 1 for name in DIVIDING)
    if is_uniform and not is_divided and not vllm_config.speculative_config and not vllm_config.kv_transfer_config:
        num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        _recorder = Recorder(own, num_tokens, next(model.parameters()).device)


def reported(kv_cache_config: Any) -> tuple[int, int] | None:
    """Return (layers, experts per layer) of a token's report; None if experts are not reported."""
    if _recorder is None or not _recorder.may_report or _attention_group(kv_cache_config) is None:
        return None
    return _recorder.shape


def _attention_group(kv_cache_config: Any) -> int | None:
    """Return the index of the KV cache group that holds every token of a request; None if there is none."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return next((number for number, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), None)


def _with_rows(output: Any, rows: Callable[[], Any]) -> Any:
    if output.req_ids:  # otherwise it may be one of vLLM's constants
        setattr(output, ROWS, rows())
    return output


@dataclass
class RequestExperts:
    """Where a request's tokens are in the KV cache, and the experts of those that have been computed."""

    blocks: list[int]
    num_prompt: int
    """Number of prompt tokens."""
    known: bytearray = field(default_factory=bytearray)
    """Rows of its first tokens; empty if experts are not reported for this request."""
    num_reported: int = 0
    """Number of bytes of `known` that are already reported or were not requested."""


class ExpertsInCache:
    """Holds, in the engine, the experts of all tokens in the KV cache and of each request."""

    def __init__(self) -> None:
        self._group: int | None = None
        self._block_size = 0
        self._store: Any = None
        """Experts by position in the KV cache; None until the first step of a model with experts."""
        self._requests: dict[str, RequestExperts] = {}
        """Experts by request."""

    def take(self, scheduler: Any, scheduled: Any, output: Any) -> None:
        """Store the experts of a step, and forget requests that had finished when it was scheduled."""
        rows = getattr(output, ROWS, None)
        if rows is None or (self._store is None and not self._allocate(scheduler.kv_cache_config, rows)):
            return
        for request_id in scheduled.finished_req_ids:
            self._requests.pop(request_id, None)
        starts = self._follow(scheduled)
        counts = [scheduled.num_scheduled_tokens[request_id] for request_id in output.req_ids]
        ends = np.cumsum(counts)
        assert len(rows) == ends[-1], (len(rows), counts)
        slots = list[int]()
        for request_id, count in zip(output.req_ids, counts, strict=True):
            slots += self._slots(request_id, starts[request_id], count)
        self._store[slots] = rows
        for request_id, count, end in zip(output.req_ids, counts, ends, strict=True):
            if ROUTED not in request_id:
                continue
            known = self._requests[request_id].known
            start = starts[request_id]
            if not known:  # take the experts of a cached prefix, which another request may have computed in this step
                known += self._store[self._slots(request_id, 0, start)].tobytes()
            num_before = len(known) // rows[0].nbytes - start  # recomputed tokens
            assert num_before >= 0, (request_id, start, len(known))
            known += rows[end - count + num_before : end].tobytes()

    def report(self, outputs: Iterable[Any], *, at_once: str) -> None:
        """Add the experts [T, L, K] of their tokens to finished requests; those of the last token may be missing.

        Requests with `at_once` in their id report new experts in every output, because vLLM may finish them outside
        the engine.
        """
        for output in outputs:
            request_id = output.request_id
            request = self._requests.get(request_id) if ROUTED in request_id else None
            if request is not None and (output.finish_reason is not None or at_once in request_id):
                rows = np.frombuffer(bytes(request.known[request.num_reported :]), self._store.dtype)
                output.routed_experts = rows.reshape(-1, *self._store.shape[1:])
                request.num_reported = len(request.known)

    def _allocate(self, kv_cache_config: Any, rows: Any) -> bool:
        """Allocate the store; return whether a cache group holds every token."""
        self._group = _attention_group(kv_cache_config)
        if self._group is None:
            return False
        self._block_size = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        num_slots = kv_cache_config.num_blocks * self._block_size
        self._store = np.empty((num_slots, *rows.shape[1:]), rows.dtype)  # takes memory only where it is written
        return True

    def _follow(self, scheduled: Any) -> dict[str, int]:
        """Update the blocks of a step's requests; return how many tokens of each were computed before."""
        starts = dict[str, int]()
        for new in scheduled.scheduled_new_reqs:
            num_prompt = len(new.prompt_token_ids or ())
            num_sampled = max(len(new.prefill_token_ids or ()) - num_prompt, 0)
            self._begin(new.req_id, new.block_ids, num_prompt, num_sampled)
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids:
                num_prompt = self._requests[request_id].num_prompt
                self._begin(request_id, blocks, num_prompt, cached.num_output_tokens[number])
            elif blocks is not None:
                self._requests[request_id].blocks += blocks[self._group]
            starts[request_id] = cached.num_computed_tokens[number]
        return starts

    def _begin(self, request_id: str, blocks: Any, num_prompt: int, num_sampled: int) -> None:
        """Start or restart a request, possibly with newer weights.

        Tokens from which a next token was sampled keep their experts; those of a discarded sample are dropped.
        """
        before = self._requests.get(request_id)
        size = self._store[0].nbytes
        num_left_out = int(request_id.partition(ROUTED)[2].partition("-")[0] or 0)
        self._requests[request_id] = request = RequestExperts(
            [*blocks[self._group]], num_prompt, num_reported=num_left_out * size
        )
        if before is not None and num_sampled:
            request.known += before.known[: (num_prompt + num_sampled - 1) * size]
            request.num_reported = before.num_reported

    def _slots(self, request_id: str, start: int, count: int) -> list[int]:
        """Return the KV cache positions of `count` tokens from `start` on."""
        blocks = self._requests[request_id].blocks
        size = self._block_size
        return [blocks[position // size] * size + position % size for position in range(start, start + count)]
