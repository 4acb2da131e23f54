"""Symbols of vLLM: LoRA's layers, slots and adapters.

Not covered: the engine's other calls (`engine.py`). Not pinned, because their modules have moved between versions and
neither is imported: the embedding's LoRA layer, told by the three dimensions of its A, and `ErrorResponse`: the answer
to a load that is refused is no text, and its `error.message` is read.
"""

from patches.pins import Class, Function, Pin

_SLOTS = ("base_layer", "lora_a_stacked", "lora_b_stacked")

_LAYERS: tuple[Pin, ...] = (
    Class(
        module="vllm.lora.layers.base_linear",
        name="BaseLinearLayerWithLoRA",
        attributes=_SLOTS,
        why="what wraps a linear layer, so that its parameters are called base_layer.weight; and its slots",
    ),
    Class(
        module="vllm.lora.layers.column_parallel_linear",
        name="MergedColumnParallelLinearWithLoRA",
        attributes=("lora_a_stacked", "lora_b_stacked"),
        why="q/k/v and gate/up: a tuple of slots in the order of the parts",
    ),
    Class(
        module="vllm.lora.layers.logits_processor",
        name="LogitsProcessorWithLoRA",
        attributes=_SLOTS,
        why="holds the slots of the head, which itself stays unwrapped",
    ),
    Function(
        module="vllm.lora.lora_weights",
        name="LoRALayerWeights.optimize",
        use="call",
        why="vLLM multiplies the scaling into B before it fills a slot",
    ),
    Class(
        module="vllm.lora.model_manager",
        name="LoRAModelManager",
        attributes=("model", "modules", "lora_index_to_id", "packed_modules_mapping"),
        why="set on the model as lora_manager: its LoRA layers by name, and which adapter has which slot",
    ),
)

_WORKER: tuple[Pin, ...] = (
    Function(
        module="vllm.lora.model_manager",
        name="LRUCacheLoRAModelManager.pin_adapter",
        use="call",
        parameters=("lora_id",),
        why="activates an adapter and keeps its slot from being evicted",
    ),
    Function(
        module="vllm.lora.model_manager",
        name="LRUCacheLoRAModelManager.activate_adapter",
        use="call",
        parameters=("lora_id",),
        why="writes the slot of an adapter that is not active, and nothing of one that is",
    ),
    Function(
        module="vllm.lora.worker_manager",
        name="LRUCacheWorkerLoRAManager.add_adapter",
        use="call",
        parameters=("lora_request",),
        why="what each step does for the adapters of its requests: touches those that are loaded",
    ),
    Class(
        module="vllm.lora.worker_manager",
        name="WorkerLoRAManager",
        attributes=("_adapter_manager",),
        why="from the runner to the manager of its slots",
    ),
    Class(
        module="vllm.v1.worker.lora_model_runner_mixin",
        name="LoRAModelRunnerMixin",
        attributes=("lora_manager",),
        why="every runner's own manager, V1, V2 and CPU",
    ),
)

_CPU: tuple[Pin, ...] = (
    *(
        Function(
            module="vllm.lora.ops.torch_ops.lora_ops",
            name=name,
            use="wrap",
            parameters=("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor"),
            why="takes the index -1 for the last slot, before 0.33",
        )
        for name in ("bgmv_expand", "bgmv_expand_slice")
    ),
    Class(
        module="vllm.lora.punica_wrapper.punica_cpu",
        name="PunicaWrapperCPU",
        attributes=("_expand_decode", "_expand_slice_decode", "add_lora_linear"),
        why="calls those kernels by names of its own module",
    ),
)

_ENGINE: tuple[Pin, ...] = (
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.add_request",
        use="wrap",
        parameters=("lora_request",),
        is_async=True,
        why="the gate before the engine: generate() gives the adapter by this keyword",
    ),
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.add_lora",
        use="replace",
        parameters=("lora_request",),
        is_async=True,
        why="the gate before the engine",
    ),
    *(
        Function(
            module="vllm.v1.engine.async_llm",
            name=f"AsyncLLM.{name}",
            use="call",
            parameters=("lora_id",),
            is_async=True,
            why="takes an adapter out of every rank, or pins it there",
        )
        for name in ("remove_lora", "pin_lora")
    ),
    Function(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM.abort",
        use="call",
        parameters=("request_id", "internal"),
        is_async=True,
        why="ends the requests of an adapter that is taken out",
    ),
    Class(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM",
        attributes=("output_processor",),
        why="knows the requests under way",
    ),
    Class(
        module="vllm.v1.engine.output_processor",
        name="OutputProcessor",
        attributes=("request_states",),
        why="the requests under way by their internal numbers",
    ),
    Class(
        module="vllm.v1.engine.output_processor",
        name="RequestState",
        attributes=("lora_request",),
        why="the adapter of each",
    ),
)

_SERVING: tuple[Pin, ...] = (
    Class(
        module="vllm.entrypoints.openai.models.serving",
        name="OpenAIServingModels",
        attributes=("lora_requests", "base_model_paths", "engine_client"),
        why="the adapters and models that requests can name",
    ),
    Function(
        module="vllm.entrypoints.openai.models.serving",
        name="OpenAIServingModels.load_lora_adapter",
        use="call",
        parameters=("request",),
        is_async=True,
        why="vLLM's own loading, which checks the adapter and serves it",
    ),
    Function(
        module="vllm.entrypoints.openai.models.serving",
        name="OpenAIServingModels.unload_lora_adapter",
        use="wrap",
        parameters=("request",),
        is_async=True,
        why="refused to strangers while an adapter is trained",
    ),
    Class(
        module="vllm.entrypoints.serve.lora.protocol",
        name="UnloadLoRAAdapterRequest",
        attributes=("lora_name",),
        why="what that is asked with",
    ),
    Class(
        module="vllm.entrypoints.serve.lora.protocol",
        name="LoadLoRAAdapterRequest",
        attributes=("lora_name", "lora_path"),
        why="what that loading is asked with",
    ),
    Class(
        module="vllm.lora.request",
        name="LoRARequest",
        attributes=("lora_name", "lora_int_id"),
        why="an adapter's name and vLLM's number for it",
    ),
    Class(
        module="vllm.config.lora",
        name="LoRAConfig",
        attributes=("max_loras",),
        why="how many slots there are",
    ),
    Class(
        module="vllm.config.vllm",
        name="VllmConfig",
        attributes=("lora_config",),
        why="None in a server without LoRA",
    ),
)

LORA: tuple[Pin, ...] = (*_LAYERS, *_WORKER, *_CPU, *_ENGINE, *_SERVING)
