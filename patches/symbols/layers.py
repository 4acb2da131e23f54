"""Symbols of vLLM: how its models load their weights, and what they pad.

Not covered: the runners that hold them (`loading.py`).
"""

from patches.pins import Class, Function, Pin

LAYERS: tuple[Pin, ...] = (
    Function(
        module="vllm.model_executor.model_loader.base_loader",
        name="BaseModelLoader.load_model",
        use="wrap",
        parameters=("vllm_config", "model_config", "prefix"),
        why="what a model's weights become is seen from before they are loaded until vLLM is done with them",
    ),
    Function(
        module="vllm.model_executor.model_loader.base_loader",
        name="BaseModelLoader.load_weights",
        use="wrap",
        parameters=("model", "model_config"),
        why="the model has its parameters, and nothing in them yet",
    ),
    Function(
        module="vllm.model_executor.models.llama",
        name="LlamaForCausalLM.load_weights",
        use="call",
        parameters=("weights",),
        why="every family has it: what it copies where is the layout",
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
    Class(
        module="vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope",
        name="Phi3LongRoPEScaledRotaryEmbedding",
        attributes=("use_long_rope", "short_mscale", "long_mscale"),
        why="the trainer takes the frequencies that it chooses, by rules of ours (`bridge/weights/rope.py`)",
    ),
)
