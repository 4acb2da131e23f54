"""The prefix cache at a publication: no later request finds blocks of older weights, but running ones may keep theirs.

Two changes to what vLLM calls a reset of the prefix cache:

A reset takes time proportional to the cache's contents. vLLM resets the hash of every block in the pool, including
blocks that never had one: with 200,000 blocks, every update takes 8 ms longer, and more on a larger GPU. Here, while
vLLM's own reset runs, a loop over the pool visits only the blocks in its map of hashes. A block outside that map cannot
be found by a prefix, whatever hash it still has.

A reset can leave running requests alone. vLLM refuses this, because their blocks are in use; here every block forgets
its hash instead, and the requests keep their keys and values. A request without any token yet restarts, so that a
complete prompt belongs to one version. The blocks of requests that run across such a reset are never hashed again: they
are partly of older weights, and a block that fills later could otherwise be found by its tokens.

Seen in vLLM 0.26 to 0.33: `vllm/v1/core/block_pool.py`, `vllm/v1/core/kv_cache_manager.py`,
`vllm/v1/core/sched/scheduler.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from bridge_patches import wrap

PINS = """
vllm.v1.core.block_pool
    wrap BlockPool.reset_prefix_cache()
    wrap BlockPool.cache_full_blocks(request)
    BlockPool: blocks, cached_block_hash_to_block, num_gpu_blocks
    call BlockPool.get_num_free_blocks()
    BlockHashToBlockMap: _cache  # hash -> block, or {number: block}
vllm.v1.core.kv_cache_utils: call KVCacheBlock.reset_hash()
vllm.v1.core.kv_cache_manager
    wrap KVCacheManager.get_computed_blocks(request)  # called whenever a request starts or restarts
    KVCacheManager: block_pool
vllm.v1.core.sched.scheduler
    wrap Scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
    Scheduler: running, kv_cache_manager
vllm.v1.request: Request: num_output_tokens
"""


class HashedBlocks:
    """The blocks of a pool: indexing reaches all of them, but iteration visits only those with a hash."""

    def __init__(self, pool: Any) -> None:
        self._blocks = pool.blocks
        entries = pool.cached_block_hash_to_block._cache.values()
        self._hashed = [
            block for entry in entries for block in (entry.values() if isinstance(entry, dict) else (entry,))
        ]

    def __getitem__(self, index: Any) -> Any:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._hashed)


class Resets:
    """The resets of the prefix cache of this process's only scheduler, and which requests run across a reset."""

    def __init__(self) -> None:
        self.keeps_running = False
        """Whether the reset in progress leaves running requests alone."""
        self._num_kept = 0
        """Number of resets so far that kept running requests."""
        self._began: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Request -> value of `_num_kept` when it started."""

    def reset_pool(self, original: Callable[..., bool], pool: Any, *args: Any, **kwargs: Any) -> bool:
        is_in_use = pool.num_gpu_blocks - pool.get_num_free_blocks() != 1  # the null block is always in use
        if is_in_use and self.keeps_running:
            self._forget_hashes(pool)
            return True
        blocks = pool.blocks
        pool.blocks = HashedBlocks(pool)
        try:
            return bool(original(pool, *args, **kwargs))
        finally:
            pool.blocks = blocks

    def _forget_hashes(self, pool: Any) -> None:
        """Drop all hashes, so that no request finds any block; blocks in use keep their contents."""
        for block in HashedBlocks(pool):
            block.reset_hash()
        pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
        if hasattr(pool, "cached_block_hashes_by_block"):  # since 0.31, where a block may have several hashes
            pool.cached_block_hashes_by_block.clear()
        self._num_kept += 1

    def cache_full_blocks(
        self, original: Callable[..., Any], pool: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_of_one_version = self._began.get(request, 0) == self._num_kept
        return original(pool, request, *args, **kwargs) if is_of_one_version else None

    def get_computed_blocks(
        self, original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._began[request] = self._num_kept
        return original(manager, request, *args, **kwargs)

    def reset_scheduler(
        self,
        original: Callable[..., bool],
        scheduler: Any,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        if reset_running_requests:
            return bool(original(scheduler, True, reset_connector, *args, **kwargs))
        kept = [request for request in scheduler.running if request.num_output_tokens]
        scheduler.running = [request for request in scheduler.running if not request.num_output_tokens]
        self.keeps_running = True
        try:
            return bool(original(scheduler, True, reset_connector, *args, **kwargs))
        finally:
            self.keeps_running = False
            scheduler.running = [*kept, *scheduler.running]


def patch() -> Resets:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    resets = Resets()
    wrap(BlockPool, "reset_prefix_cache")(resets.reset_pool)
    wrap(BlockPool, "cache_full_blocks")(resets.cache_full_blocks)
    wrap(KVCacheManager, "get_computed_blocks")(resets.get_computed_blocks)
    wrap(Scheduler, "reset_prefix_cache")(resets.reset_scheduler)
    return resets
