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
        why="stale keys and values are dropped at publish",
    ),
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.pause_generation",
        use="call",
        parameters=("mode", "clear_cache"),
        is_async=True,
        why="the public pause, with its fixed 20 ms sleep (0.32 dropped wait_for_inflight_requests)",
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
        module="vllm.v1.engine.core_client",
        name="AsyncMPClient.is_scheduler_paused_async",
        use="call",
        is_async=True,
        why="tells whether the fence is up",
    ),
    Function(
        module="vllm.v1.engine.core_client",
        name="AsyncMPClient.reset_prefix_cache_async",
        use="call",
        parameters=("reset_running_requests", "reset_connector"),
        is_async=True,
        why="what reset_prefix_cache calls",
    ),
)
