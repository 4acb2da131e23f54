"""Symbols of vLLM: how the API server talks to the engine and its workers.

Not covered: HTTP, which is the plugin's own (`plugins.py`).
"""

from patches.pins import Class, Function, Pin

ENGINE: tuple[Pin, ...] = (
    Class(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM",
        attributes=("engine_core", "vllm_config", "model_config"),
        why="the engine client that the routes get",
    ),
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.collective_rpc",
        use="call",
        parameters=("method", "timeout", "args", "kwargs"),
        is_async=True,
        why="asks every rank for its shard, and to synchronise its device",
    ),
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.reset_prefix_cache",
        use="call",
        parameters=("reset_running_requests", "reset_connector"),
        is_async=True,
        why="stale keys and values are dropped inside the fence",
    ),
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.resume_generation",
        use="call",
        is_async=True,
        why="ends the fence",
    ),
    Function(
        module="vllm.v1.engine.core_client",
        name="AsyncMPClient.pause_scheduler_async",
        use="call",
        parameters=("mode", "clear_cache"),
        is_async=True,
        why="the pause without the sleep (0.33's pause_generation goes through pause_generation_async instead)",
    ),
    Function(
        module="vllm.v1.engine.core_client",
        name="AsyncMPClient.resume_scheduler_async",
        use="call",
        is_async=True,
        why="the resume of that pause",
    ),
    Function(
        module="vllm.v1.core.block_pool",
        name="BlockPool.reset_prefix_cache",
        use="wrap",
        why="wrapped: it forgets the hashes of the blocks that have one",
    ),
    Class(
        module="vllm.v1.core.block_pool",
        name="BlockPool",
        attributes=("blocks", "cached_block_hash_to_block"),
        why="the blocks, and vLLM's own map of those with a hash",
    ),
    Class(
        module="vllm.v1.core.block_pool",
        name="BlockHashToBlockMap",
        attributes=("_cache",),
        why="hash -> block, or blocks by their numbers",
    ),
)
