"""Symbols of vLLM: how the API server talks to the engine and its workers.

Not covered: HTTP, which is the plugin's own (`plugins.py`).
"""

from patches.pins import Class, Function, Pin

ENGINE: tuple[Pin, ...] = (
    Class(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM",
        attributes=("engine_core", "vllm_config", "model_config", "tokenizer"),
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
    Class(
        module="vllm.config.model",
        name="ModelConfig",
        attributes=("enable_sleep_mode", "sleep_mode_backend", "max_model_len"),
        why="whether the KV cache can be freed, and by which mechanism; the longest sequence",
    ),
    Function(
        module="vllm.v1.worker.gpu_worker",
        name="Worker.sleep",
        use="call",
        parameters=("level",),
        why="frees the KV cache (AsyncLLM.sleep would pause once more, and AsyncLLM.wake_up resume too early)",
    ),
    Function(
        module="vllm.v1.worker.gpu_worker",
        name="Worker.wake_up",
        use="call",
        parameters=("tags",),
        why="takes the KV cache back",
    ),
    Class(
        module="vllm.device_allocator.cumem",
        name="CuMemAllocator",
        attributes=("get_instance", "pointer_to_data"),
        why="the sleep pool: what lies in it",
    ),
    Class(
        module="vllm.device_allocator",
        name="AllocationData",
        attributes=("handle", "cpu_backup_tensor", "is_asleep"),
        why="one allocation of it: its size, whether its content is kept, and whether it has memory",
    ),
    Function(
        module="vllm.device_allocator.cumem",
        name="unmap_and_release",
        use="call",
        parameters=("allocation_handle",),
        why="puts back to sleep what woke up in vain",
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
