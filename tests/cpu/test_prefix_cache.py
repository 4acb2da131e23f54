"""The fast prefix-cache reset on vLLM's own block pool.

Not covered: that a server uses it (`test_one_copy.py` shows that a cached prefix is dropped).
"""

from typing import Any

import pytest

from patches import prefix_cache

NUM_BLOCKS = 1000


@pytest.fixture(params=[False, True], ids=["stock", "patched"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.core.block_pool import BlockPool  # takes four seconds, too slow for collection

    monkeypatch.setattr(BlockPool, "reset_prefix_cache", BlockPool.reset_prefix_cache)  # restored after the test
    if request.param:
        prefix_cache.patch()
    return BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=16)


def remember(pool: Any, number: int, digest: bytes) -> None:
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    pool._insert_block_hash(make_block_hash_with_group_id(BlockHash(digest), 0), pool.blocks[number], 16)


def test_every_block_forgets_its_hash_and_the_pool_stays_whole(pool: Any) -> None:
    blocks = pool.blocks
    remember(pool, 5, b"a")
    remember(pool, 6, b"a")  # two blocks with the same hash
    remember(pool, 999, b"b")
    assert sum(block.block_hash is not None for block in blocks) == 3
    assert pool.reset_prefix_cache() is True
    assert all(block.block_hash is None for block in blocks)
    assert pool.blocks is blocks
    assert not pool.cached_block_hash_to_block._cache


def test_a_pool_in_use_keeps_its_cache(pool: Any) -> None:
    remember(pool, 999, b"b")
    pool.get_new_blocks(2)
    assert pool.reset_prefix_cache() is False
    assert pool.blocks[999].block_hash is not None
    assert len(pool.blocks) == NUM_BLOCKS


def test_only_blocks_with_a_hash_are_visited(pool: Any) -> None:
    remember(pool, 7, b"c")
    seen = prefix_cache.HashedBlocks(pool)
    assert [block.block_id for block in seen] == [7]
    assert (len(seen), seen[3].block_id, seen[-1].block_id) == (NUM_BLOCKS, 3, 999)
