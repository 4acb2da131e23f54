"""Symbols of vLLM: how our code gets into its processes.

Not covered: the symbols that it replaces there (`loading.py`).
"""

from patches.pins import Class, Constant, Function, Name, Pin

PLUGINS: tuple[Pin, ...] = (
    Constant(
        module="vllm.plugins",
        name="DEFAULT_PLUGINS_GROUP",
        value="vllm.general_plugins",
        why="our entry point's group: the patches",
    ),
    Constant(
        module="vllm.plugins",
        name="ENDPOINT_PLUGINS_GROUP",
        value="vllm.endpoint_plugins",
        why="our entry point's group: the routes",
    ),
    Function(
        module="vllm.plugins",
        name="load_general_plugins",
        use="call",
        why="vLLM calls it in every process, which is how the patches get there",
    ),
    Function(
        module="vllm.plugins",
        name="load_endpoint_plugins",
        use="call",
        parameters=("supported_tasks",),
        why="vLLM calls it in the API server, which is how the routes get there",
    ),
    Class(
        module="vllm.plugins.endpoint_plugins.interface",
        name="EndpointPlugin",
        attributes=("name", "required_tasks"),
        why="what an endpoint plugin declares",
    ),
    Function(
        module="vllm.plugins.endpoint_plugins.interface",
        name="EndpointPlugin.attach_router",
        use="replace",
        parameters=("app",),
        why="our routes implement it",
    ),
    Function(
        module="vllm.plugins.endpoint_plugins.interface",
        name="EndpointPlugin.init_state",
        use="replace",
        parameters=("engine_client", "state", "args"),
        is_async=True,
        why="our routes implement it",
    ),
    Class(
        module="vllm.config.parallel",
        name="ParallelConfig",
        attributes=("worker_extension_cls", "tensor_parallel_size", "data_parallel_size"),
        why="our worker extension is named here, and how many ranks there are",
    ),
    Function(
        module="vllm.v1.worker.worker_base",
        name="WorkerWrapperBase.init_worker",
        use="wrap",
        parameters=("all_kwargs",),
        why="vLLM mixes the worker extension into the worker here",
    ),
    Class(
        module="vllm.v1.worker.worker_base",
        name="WorkerBase",
        attributes=("rank", "vllm_config", "model_runner"),
        why="what the worker extension reads of the worker",
    ),
    Name(
        module="vllm.envs",
        name="environment_variables",
        why="our variables are added, or vLLM warns that it does not know them",
    ),
    Function(
        module="vllm.entrypoints.cli.main",
        name="main",
        use="call",
        why="`python -m vllm.entrypoints.cli.main serve` is the server that we start",
    ),
)
