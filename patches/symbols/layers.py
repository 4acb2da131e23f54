"""Symbols of vLLM: how layers tell what they fuse and pad.

Not covered: the runners that hold them (`loading.py`).
"""

from patches.pins import Class, Function, Pin

LAYERS: tuple[Pin, ...] = (
    Function(
        module="vllm.model_executor.layers.linear",
        name="QKVParallelLinear._get_shard_offset_mapping",
        use="call",
        parameters=("loaded_shard_id",),
        why="first row of q, k and v in the fused weight",
    ),
    Function(
        module="vllm.model_executor.layers.linear",
        name="QKVParallelLinear._get_shard_size_mapping",
        use="call",
        parameters=("loaded_shard_id",),
        why="rows of q, k and v in the fused weight",
    ),
    Class(
        module="vllm.model_executor.layers.linear",
        name="MergedColumnParallelLinear",
        attributes=("output_sizes", "tp_size"),
        why="rows of gate and up in the fused weight, of all ranks together",
    ),
    Class(
        module="vllm.model_executor.models.llama",
        name="LlamaForCausalLM",
        attributes=("packed_modules_mapping", "hf_to_vllm_mapper"),
        why="how a family tells which of its modules are fused; Qwen and others do as Llama does",
    ),
    Class(
        module="vllm.model_executor.layers.vocab_parallel_embedding",
        name="VocabParallelEmbedding",
        attributes=("org_vocab_size", "num_embeddings_per_partition", "shard_indices"),
        why="which rows are tokens and which are padding",
    ),
    Class(
        module="vllm.model_executor.layers.vocab_parallel_embedding",
        name="VocabParallelEmbeddingShardIndices",
        attributes=("org_vocab_start_index", "org_vocab_end_index", "num_org_elements"),
        why="the tokens of one rank",
    ),
    Function(
        module="vllm.model_executor.models.utils",
        name="WeightsMapper._map_name_with_shard",
        use="call",
        parameters=("key",),
        why="from Hugging Face's name to vLLM's parameter and the shard of it (0.31 may return several shards)",
    ),
)
