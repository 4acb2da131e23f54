"""Report which experts each token of a rollout was sent to, so that the trainer can use the same.

vLLM's own report (`--enable-return-routed-experts`) needs its second model runner since 0.31, which no CPU has, and is
made in another way before. What is the same in every version are a router's callback and the scheduler's messages:

Worker: every layer with experts writes its choice into one buffer, row by row of the step's tokens, also inside a CUDA
graph. The step's output takes a copy of it along.
Engine: the rows of a step are kept by the place of their tokens in the KV cache, like keys and values: whoever finds a
prefix in the cache finds its experts there. A request keeps the first ones of each token: one that restarts computes
its tokens again, maybe with newer weights, but its log-probabilities are those of the first time.

Not covered: speculation, whose rejected tokens would have to be left out, and models without full attention.
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
    wrap Worker.execute_model(scheduler_output)  # inherited by the CPU's worker
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
"""Attribute of a step's output."""
DIVIDING = "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"
"""Numbers of ranks that hold some layers, or some tokens of the KV cache."""
ROUTED = "routed-"
"""Part of the ids of rollouts whose experts are reported; a number follows, of the first tokens that are left out."""


class Recorder:
    """Records, in a worker, the choices of all layers for the tokens of one step."""

    def __init__(self, routers: list[Any], num_tokens: int, device: torch.device) -> None:
        """Have the routers, one per layer, report their choices of a step of `num_tokens` at most."""
        self.shape = len(routers), int(routers[0].top_k)
        self.type = torch.uint8 if routers[0].global_num_experts <= 256 else torch.int16
        self._rows = torch.zeros((num_tokens, *self.shape), dtype=torch.int16, device=device)
        """Experts by token and layer; CUDA graphs write here."""
        self._seen = set[int]()
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, layer))

    @property
    def is_complete(self) -> bool:
        """Whether every layer has reported a choice: a kernel that chooses by itself reports none."""
        return len(self._seen) == self.shape[0]

    @property
    def may_report(self) -> bool:
        """Whether every layer will; on a GPU vLLM computes an example before it serves."""
        return self.is_complete or not self._rows.is_cuda

    def rows(self, num_tokens: int) -> Callable[[], Any]:
        """Begin to copy the rows of the step that was computed; the returned function waits for them."""
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
    """Let each step's output take the choices along."""
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
    """Record the choices of a model that was just loaded, if it has experts.

    Not with a KV connector, which brings tokens whose experts are unknown, nor where the cache or the layers are
    divided among ranks.
    """
    global _recorder  # noqa: PLW0603  a process has one model at most
    routers: list[Any] = [getattr(module, "router", None) for module in model.modules()]
    own = list(dict.fromkeys(router for router in routers if hasattr(router, "set_capture_fn")))
    is_uniform = len({(router.top_k, router.global_num_experts) for router in own}) == 1
    is_divided = any(getattr(vllm_config.parallel_config, name, 1) > 1 for name in DIVIDING)
    if is_uniform and not is_divided and not vllm_config.speculative_config and not vllm_config.kv_transfer_config:
        num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        _recorder = Recorder(own, num_tokens, next(model.parameters()).device)


def reported(kv_cache_config: Any) -> tuple[int, int] | None:
    """Return in how many layers a token's experts are reported, and how many; None: they are not."""
    if _recorder is None or not _recorder.may_report or _attention_group(kv_cache_config) is None:
        return None
    return _recorder.shape


def _attention_group(kv_cache_config: Any) -> int | None:
    """Return the number of the KV cache's group that holds every token of a request."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return next((number for number, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), None)


def _with_rows(output: Any, rows: Callable[[], Any]) -> Any:
    if output.req_ids:  # else it may be a constant of vLLM's
        setattr(output, ROWS, rows())
    return output


@dataclass
class RequestExperts:
    """Positions of a request's tokens in the KV cache, and the experts of the computed ones."""

    blocks: list[int]
    num_prompt: int
    """Tokens of its prompt."""
    known: bytearray = field(default_factory=bytearray)
    """The rows of its first tokens, if they are to be reported."""
    num_reported: int = 0
    """Bytes of `known` already reported or not requested."""


class ExpertsInCache:
    """Holds, in the engine, the experts of all tokens in the KV cache and of each request."""

    def __init__(self) -> None:
        self._group: int | None = None
        self._block_size = 0
        self._store: Any = None
        """Experts by position in the KV cache; None before the first step of a model with experts."""
        self._requests: dict[str, RequestExperts] = {}
        """Experts by request."""

    def take(self, scheduler: Any, scheduled: Any, output: Any) -> None:
        """Keep the experts of a step, and forget requests that had ended when it was scheduled."""
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
            if not known:  # a prefix from the cache, which another request may have computed in this step
                known += self._store[self._slots(request_id, 0, start)].tobytes()
            num_before = len(known) // rows[0].nbytes - start  # computed again
            assert num_before >= 0, (request_id, start, len(known))
            known += rows[end - count + num_before : end].tobytes()

    def report(self, outputs: Iterable[Any], *, at_once: str) -> None:
        """Give finished requests the experts of their tokens, maybe but for the last: [T, L, K].

        Those with `at_once` in their id report new ones in every output: vLLM may end them outside of the engine.
        """
        for output in outputs:
            request_id = output.request_id
            request = self._requests.get(request_id) if ROUTED in request_id else None
            if request is not None and (output.finish_reason is not None or at_once in request_id):
                rows = np.frombuffer(bytes(request.known[request.num_reported :]), self._store.dtype)
                output.routed_experts = rows.reshape(-1, *self._store.shape[1:])
                request.num_reported = len(request.known)

    def _allocate(self, kv_cache_config: Any, rows: Any) -> bool:
        """Allocate the store; return whether a group of the cache has a place for every token."""
        self._group = _attention_group(kv_cache_config)
        if self._group is None:
            return False
        self._block_size = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        num_slots = kv_cache_config.num_blocks * self._block_size
        self._store = np.empty((num_slots, *rows.shape[1:]), rows.dtype)  # memory once it is written
        return True

    def _follow(self, scheduled: Any) -> dict[str, int]:
        """Note the blocks of a step's requests; return how many tokens of each were computed before."""
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
        """Begin a request, or begin it again, maybe with newer weights.

        The tokens that sampled another one keep their experts; a step whose sampled token was discarded is not kept.
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
        """Return the places in the KV cache of `count` tokens from `start` on."""
        blocks = self._requests[request_id].blocks
        size = self._block_size
        return [blocks[position // size] * size + position % size for position in range(start, start + count)]
