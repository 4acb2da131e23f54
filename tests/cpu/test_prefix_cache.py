"""The prefix cache at a publication, on vLLM's own pool of blocks, cache manager and scheduler.

Not covered: that a server uses them (`test_one_copy.py`, `test_torn_tokens.py`).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_patches import prefix_cache
from bridge_patches.prefix_cache import Resets

NUM_BLOCKS = 1000
BLOCK = 16
"""Tokens in a block."""


@pytest.fixture
def _unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the patches after the test."""
    from vllm.v1.core.block_pool import BlockPool  # takes four seconds, too slow for collection
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    for owner in (BlockPool, KVCacheManager, Scheduler):
        for name in ("reset_prefix_cache", "cache_full_blocks", "get_computed_blocks"):
            if name in vars(owner):
                monkeypatch.setattr(owner, name, vars(owner)[name])


@pytest.fixture(params=[False, True], ids=["stock", "patched"])
def resets(request: pytest.FixtureRequest, _unpatched: None) -> Resets | None:
    """The patch's state; None without the patch."""
    return prefix_cache.patch() if request.param else None


@pytest.fixture
def pool(resets: Resets | None) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)


@pytest.fixture
def manager(_unpatched: None) -> Any:
    """A cache manager whose blocks are found by their tokens."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    prefix_cache.patch().keeps_running = True
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=50, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config, max_model_len=512, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )


def remember(pool: Any, number: int, digest: bytes) -> None:
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    pool._insert_block_hash(make_block_hash_with_group_id(BlockHash(digest), 0), pool.blocks[number], BLOCK)


def test_reset_clears_all_hashes_and_keeps_the_pool_consistent(pool: Any) -> None:
    blocks = pool.blocks
    remember(pool, 5, b"a")
    remember(pool, 6, b"a")  # two blocks with the same hash
    remember(pool, 999, b"b")
    assert sum(block.block_hash is not None for block in blocks) == 3
    assert pool.reset_prefix_cache() is True
    assert all(block.block_hash is None for block in blocks)
    assert pool.blocks is blocks
    assert not pool.cached_block_hash_to_block._cache


def test_pool_in_use_forgets_its_hashes_if_requests_are_kept(pool: Any, resets: Resets | None) -> None:
    remember(pool, 999, b"b")
    taken = pool.get_new_blocks(2)
    assert pool.reset_prefix_cache() is False, "nobody asked to keep what is in use"
    if resets is not None:
        resets.keeps_running = True
    assert pool.reset_prefix_cache() is (resets is not None)
    assert (pool.blocks[999].block_hash is None) is (resets is not None)
    assert len(pool.blocks) == NUM_BLOCKS
    pool.free_blocks(taken)
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_reset_visits_only_blocks_with_a_hash(pool: Any) -> None:
    remember(pool, 7, b"c")
    visited = prefix_cache.HashedBlocks(pool)
    assert [block.block_id for block in visited] == [7]
    assert (visited[3].block_id, visited[-1].block_id) == (3, 999)


numbers: Iterator[int] = iter(range(10**6))


def request_of(num_tokens: int) -> Any:
    """Return a request whose prompt is the first `num_tokens` tokens of a fixed sequence."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=str(next(numbers)), prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=200), pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )  # fmt: skip


def compute(manager: Any, request: Any, num_tokens: int) -> int:
    """Make `request` compute up to `num_tokens` tokens; return how many it found in the cache."""
    blocks, num_found = manager.get_computed_blocks(request)[:2]
    new = num_tokens - num_found - request.num_computed_tokens
    assert manager.allocate_slots(request, new, num_found, blocks) is not None
    request.num_computed_tokens = num_tokens
    return int(num_found)


def go_on(manager: Any, request: Any, num_tokens: int) -> None:
    """Make `request` generate up to `num_tokens` tokens, and compute all but the last."""
    request.append_output_token_ids(list(range(request.num_tokens, num_tokens)))
    assert manager.allocate_slots(request, num_tokens - request.num_computed_tokens) is not None
    request.num_computed_tokens = num_tokens


def test_blocks_from_before_a_reset_are_never_reused(manager: Any) -> None:
    before = request_of(40)
    assert compute(manager, before, 40) == 0
    assert compute(manager, request_of(40), 40) == 2 * BLOCK, "otherwise nothing would be found in any case"
    assert manager.reset_prefix_cache()
    go_on(manager, before, 80)  # fills the block that was half full at the reset, and two more
    later = request_of(100)
    assert compute(manager, later, 100) == 0
    go_on(manager, before, 130)
    manager.free(before)
    assert compute(manager, request_of(130), 130) == 6 * BLOCK, "what `later` computed"
    manager.free(later)
    assert compute(manager, request_of(130), 130) == 8 * BLOCK


def test_requests_restarted_after_a_reset_are_cached(manager: Any) -> None:
    before = request_of(40)
    compute(manager, before, 40)
    assert manager.reset_prefix_cache()
    manager.free(before)  # as when it is preempted
    before.num_computed_tokens = 0
    assert compute(manager, before, 40) == 0
    assert compute(manager, request_of(40), 40) == 2 * BLOCK


def test_reset_leaks_no_block(manager: Any) -> None:
    num_free = manager.block_pool.get_num_free_blocks()
    running = [request_of(40), request_of(40)]
    for request in running:
        compute(manager, request, 40)
    assert manager.reset_prefix_cache()
    for request in running:
        go_on(manager, request, 100)
        manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == num_free
    assert manager.reset_prefix_cache()


@pytest.mark.usefixtures("_unpatched")
def test_reset_restarts_only_requests_without_a_token() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    calls: list[Any] = []

    def stock(scheduler: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        calls.append((list(scheduler.running), reset_running_requests, reset_connector))
        scheduler.running.clear()
        return True

    Scheduler.reset_prefix_cache = stock
    resets = prefix_cache.patch()
    young, old = SimpleNamespace(num_output_tokens=0), SimpleNamespace(num_output_tokens=3)
    scheduler: Any = SimpleNamespace(running=[old, young])
    assert Scheduler.reset_prefix_cache(scheduler, reset_running_requests=False, reset_connector=True)
    assert (calls, scheduler.running, resets.keeps_running) == ([([young], True, True)], [old], False)
    assert Scheduler.reset_prefix_cache(scheduler, reset_running_requests=True, reset_connector=True)
    assert (calls[1], scheduler.running) == (([old], True, True), [])
