"""The prefix cache at a publication: no later request finds a block of older weights, and running ones may keep theirs.

Two changes, both to what vLLM calls a reset of the prefix cache:

A reset takes time proportional to the cache's contents. vLLM resets the hash of every block in the pool, including
blocks that never had one: with 200,000 blocks every update takes 8 ms longer, and more on a larger GPU. While vLLM's
own reset runs, a loop over the pool visits only the blocks in its map of hashes. A block outside that map cannot be
found by a prefix, whatever hash it still has.

A reset that leaves running requests alone succeeds. vLLM refuses it, because their blocks are in use; here every block
forgets its hash instead, and the requests keep their keys and values. A request that has no token yet begins again,
so that a whole prompt is of one version. What runs across such a reset is never hashed again: its blocks are partly of
older weights, and a block that fills afterwards could otherwise be found by its tokens alone.

Seen in vLLM 0.26 to 0.33: `vllm/v1/core/block_pool.py`, `vllm/v1/core/kv_cache_manager.py`,
`vllm/v1/core/sched/scheduler.py`.
"""

from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

PINS = """
vllm.v1.core.block_pool
    wrap BlockPool.reset_prefix_cache()
    wrap BlockPool.cache_full_blocks(request)
    BlockPool: blocks, cached_block_hash_to_block, num_gpu_blocks
    call BlockPool.get_num_free_blocks()
    BlockHashToBlockMap: _cache  # hash -> block, or {number: block}
vllm.v1.core.kv_cache_utils: call KVCacheBlock.reset_hash()
vllm.v1.core.kv_cache_manager
    wrap KVCacheManager.get_computed_blocks(request)  # called whenever a request begins, or begins again
    KVCacheManager: block_pool
vllm.v1.core.sched.scheduler
    wrap Scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
    Scheduler: running, kv_cache_manager
vllm.v1.request: Request: num_output_tokens
"""


class HashedBlocks(Sequence[Any]):
    """The blocks of a pool: all of them by index and length, but only those with a hash in a loop."""

    def __init__(self, pool: Any) -> None:
        self._blocks: Sequence[Any] = pool.blocks
        entries = pool.cached_block_hash_to_block._cache.values()
        self._hashed = [
            block for entry in entries for block in (entry.values() if isinstance(entry, dict) else (entry,))
        ]

    def __getitem__(self, index: Any) -> Any:
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._hashed)


def patch() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    reset_all, cache_full_blocks = BlockPool.reset_prefix_cache, BlockPool.cache_full_blocks
    get_computed_blocks, reset_scheduler = KVCacheManager.get_computed_blocks, Scheduler.reset_prefix_cache

    @wraps(reset_all)
    def reset_prefix_cache(pool: Any) -> bool:
        blocks = pool.blocks
        is_in_use = pool.num_gpu_blocks - pool.get_num_free_blocks() != 1  # the null block always is
        if is_in_use and getattr(pool, "bridge_keeps", False):
            _forget(pool)
            return True
        pool.blocks = HashedBlocks(pool)
        try:
            return bool(reset_all(pool))
        finally:
            pool.blocks = blocks

    @wraps(cache_full_blocks)
    def cache_blocks_of_one_version(pool: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if _resets(request) == _resets(pool):
            return cache_full_blocks(pool, request, *args, **kwargs)
        return None

    @wraps(get_computed_blocks)
    def begin(manager: Any, request: Any) -> Any:
        request.bridge_resets = _resets(manager.block_pool)
        return get_computed_blocks(manager, request)

    @wraps(reset_scheduler)
    def reset(scheduler: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests:
            return bool(reset_scheduler(scheduler, True, reset_connector))
        pool = scheduler.kv_cache_manager.block_pool
        kept = [request for request in scheduler.running if request.num_output_tokens]
        scheduler.running = [request for request in scheduler.running if not request.num_output_tokens]
        pool.bridge_keeps = True
        try:
            return bool(reset_scheduler(scheduler, True, reset_connector))
        finally:
            pool.bridge_keeps = False
            scheduler.running = [*kept, *scheduler.running]

    BlockPool.reset_prefix_cache, BlockPool.cache_full_blocks = reset_prefix_cache, cache_blocks_of_one_version
    KVCacheManager.get_computed_blocks, Scheduler.reset_prefix_cache = begin, reset


def _forget(pool: Any) -> None:
    """Let no request find any block by its hash; blocks in use keep their contents."""
    for block in HashedBlocks(pool):
        block.reset_hash()
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    if hasattr(pool, "cached_block_hashes_by_block"):  # since 0.31: a block may have several
        pool.cached_block_hashes_by_block.clear()
    pool.bridge_resets = _resets(pool) + 1


def _resets(owner: Any) -> int:
    """Return the number of resets while blocks were in use: of a pool so far, or when a request began."""
    return getattr(owner, "bridge_resets", 0)
