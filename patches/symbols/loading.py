"""Symbols of vLLM: where weights are loaded, and where they end up.

Not covered: what runs before them (`plugins.py`).
"""

from patches.pins import Class, Function, LateImport, Name, Pin

_DISPATCH = ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")

MODULAR_EXPERTS = "CPUUnquantizedExperts.finalize_weight_and_reduce_impl"
"""Since vLLM 0.30 experts are told which of them are chosen, and have this; before, they choose."""

LOADING: tuple[Pin, ...] = (
    Function(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner.load_model",
        use="wrap",
        parameters=("load_dummy_weights",),
        why="V1 runner: the weights are exported as soon as they are loaded (0.32 added the keyword `model`)",
    ),
    Function(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.load_model",
        use="wrap",
        parameters=("load_dummy_weights",),
        why="V2 runner, on the GPU and the CPU: the same",
    ),
    Function(
        module="vllm.v1.worker.cpu_model_runner",
        name="CPUModelRunner.load_model",
        use="wrap",
        parameters=("load_dummy_weights",),
        why="V1 runner on the CPU overrides load_model without calling the GPU's",
    ),
    Class(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner",
        attributes=("model", "device", "model_config", "vllm_config"),
        why="V1 runner: the loaded model, where it lies and how it was configured",
    ),
    Class(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner",
        attributes=("model", "device", "model_config", "vllm_config"),
        why="V2 runner: the same",
    ),
    Class(
        module="vllm.v1.worker.cpu_model_runner",
        name="CPUModelRunner",
        attributes=("model",),
        why="V1 runner on the CPU: the loaded model",
    ),
    Function(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner.get_model",
        use="call",
        why="V1 runner: the model without its wrappers",
    ),
    Function(
        module="vllm.v1.worker.gpu.model_runner",
        name="GPUModelRunner.get_model",
        use="call",
        why="V2 runner: the same",
    ),
    Function(
        module="vllm.v1.worker.cpu_model_runner",
        name="CPUModelRunner.get_model",
        use="call",
        why="V1 runner on the CPU: the same",
    ),
    Name(
        module="vllm.platforms",
        name="current_platform",
        why="tells the CPU's runner from the GPU's",
    ),
    Function(
        module="vllm.platforms.interface",
        name="Platform.is_cpu",
        use="call",
        why="the same",
    ),
    Function(
        module="vllm.device_allocator.cumem",
        name="CuMemAllocator.use_memory_pool",
        use="replace",
        parameters=("tag",),
        why="weights and LoRA slots get no sleep pool, whose memory has no IPC handle",
    ),
    Function(
        module="vllm.model_executor.layers.utils",
        name="dispatch_cpu_unquantized_gemm",
        use="replace",
        parameters=("layer", "remove_weight"),
        why="on the CPU vLLM would repack the weight and drop the one that is shared",
    ),
    LateImport(
        module="vllm.model_executor.layers.linear",
        name="UnquantizedLinearMethod.process_weights_after_loading",
        imports=_DISPATCH,
        why="linear layers call our replacement",
    ),
    LateImport(
        module="vllm.model_executor.layers.vocab_parallel_embedding",
        name="UnquantizedEmbeddingMethod.process_weights_after_loading",
        imports=_DISPATCH,
        why="the head calls our replacement",
    ),
    Function(
        module="vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        name="CPUUnquantizedExperts.process_weights_after_loading",
        use="wrap",
        parameters=("layer",),
        why="experts on the CPU are packed here, and would no longer be the shared ones",
        beside=MODULAR_EXPERTS,
    ),
    Function(
        module="vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        name="CPUUnquantizedExperts.apply",
        use="wrap",
        parameters=(
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "apply_router_weight_on_input",
        ),
        why="reads the experts as they are loaded",
        beside=MODULAR_EXPERTS,
    ),
)
