"""A tiny model of every tested family with its special features, from uneven heads to tied embeddings.

Not covered: the Llama and the Qwen2 that other tests use, too (`tiny.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLTextConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tests.models import processors, tiny

SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 704,
    "shared_expert_intermediate_size": 704,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes that give every family more than 100 million parameters; those of latent attention are DeepSeek's."""
BY_LAYER = "layer_types", "no_rope_layers", "per_layer_config"
"""Lists of as many elements as there are layers, which the families make themselves."""
LARGE_TOWER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "out_hidden_size": LARGE["hidden_size"],
}
"""Sizes of a vision model beside it."""
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def minimax_m2() -> PretrainedConfig:
    """MiniMax-M2: a router bias with a different name in the files. vLLM 0.32 cannot serve it on a CPU."""
    names_of_vllm = {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True}
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}  # replaces `rotary_dim`
    return MiniMaxM2Config(**SMALL | EXPERTS | names_of_vllm, head_dim=64, num_local_experts=4, rope_parameters=rope)


def _linear_llama() -> LlamaConfig:
    """DeepSeek Coder: a Llama with linearly scaled positions, an untied head, and as many KV heads as query heads."""
    rope = {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0}
    return LlamaConfig(**SMALL | {"num_key_value_heads": 4, "tie_word_embeddings": False, "rope_parameters": rope})


def _llama2() -> LlamaConfig:
    """Llama 2: no scaling, an odd intermediate size, one KV head, biases in attention and MLP."""
    odd = {"intermediate_size": 172, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}
    return LlamaConfig(**SMALL | odd | {"tie_word_embeddings": False})


def _tied_qwen2() -> Qwen2Config:
    return Qwen2Config(**SMALL | {"tie_word_embeddings": True, "num_hidden_layers": 3})


def _phi() -> PhiConfig:
    """Phi-2: biases everywhere, including the head, layer norms, half of each head rotated."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return PhiConfig(**SMALL | {"num_key_value_heads": 4, "rope_parameters": rope, "tie_word_embeddings": False})


def _phi3(partial_rotary_factor: float) -> Phi3Config:
    """Phi-3.5-mini and Phi-4-mini: different frequencies beyond 32 tokens, which the tests exceed."""
    size = int(SMALL["hidden_size"] // SMALL["num_attention_heads"] * partial_rotary_factor) // 2
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": partial_rotary_factor,
        "short_factor": [1.0 + 0.05 * index for index in range(size)],
        "long_factor": [1.1 + 1.5 * index for index in range(size)],
    }  # fmt: skip
    return Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters=rope, tie_word_embeddings=False)


def _yarn_qwen2() -> Qwen2Config:
    """Qwen2.5 with YaRN, as its model card recommends for long texts."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
    return Qwen2Config(**SMALL | {"rope_parameters": rope, "tie_word_embeddings": False})


def _gemma3() -> PretrainedConfig:
    """Gemma 3 from 4B up: linear scaling in the layers without a window."""
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    layers = ["sliding_attention", "full_attention"]
    return _gemma(
        Gemma3TextConfig, query_pre_attn_scalar=64, sliding_window=512, rope_parameters=rope, layer_types=layers
    )


def _gemma(kind: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    return kind(**SMALL, head_dim=64, tie_word_embeddings=True, **more)


def _deepseek(kind: type[PretrainedConfig], num_experts: int, **more: Any) -> PretrainedConfig:
    """DeepSeek-V2 and V3: latent attention with values narrower than keys, YaRN, shared and routed experts."""
    latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
    experts = {"n_routed_experts": num_experts, "n_shared_experts": 2, "moe_intermediate_size": 64}
    rope = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    }  # fmt: skip
    sizes = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "rope_parameters": rope}
    return kind(**SMALL | EXPERTS | latent | experts | sizes | more)


def _deepseek_v2(q_lora_rank: int | None = None) -> PretrainedConfig:
    return _deepseek(DeepseekV2Config, num_experts=4, q_lora_rank=q_lora_rank, n_group=1, topk_group=1)


def _deepseek_v3() -> PretrainedConfig:
    """DeepSeek-V3: experts in groups, chosen by scores with a bias that gets no gradient."""
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    names_of_vllm = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return _deepseek(DeepseekV3Config, num_experts=8, q_lora_rank=32, **groups, **names_of_vllm)


def _gemma4() -> PretrainedConfig:
    """Gemma 4 E2B: a buffer scales each layer, layers without a window have wider heads, and the last share keys."""
    return Gemma4TextConfig(
        **SMALL | {"num_hidden_layers": 4}, head_dim=64, global_head_dim=128, tie_word_embeddings=True,
        sliding_window=512, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=tiny.VOCABULARY,
    )  # fmt: skip


def _hybrid(kind: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    """Qwen3.5 and Qwen3-Next: two layers of GatedDeltaNet, and one of gated attention with a quarter of it rotated."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    state = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4}
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    kinds = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    return kind(**SMALL | kinds | state | heads | {"rope_parameters": rope} | more)


def _seeing(kind: type[PretrainedConfig], text: PretrainedConfig, **vision: Any) -> PretrainedConfig:
    """Qwen3-VL and Qwen3.5: a vision tower next to the language model."""
    rotated = int(text.head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    section = [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3]
    text.rope_parameters |= {"mrope_section": section, "mrope_interleaved": True}
    sizes = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "in_channels": 3, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64,
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: processors.FIRST_TOKEN + index for index, name in enumerate(names)}
    return kind(text_config=text.to_dict(), vision_config=sizes | vision, tie_word_embeddings=True, **ids)


def _mistral3() -> PretrainedConfig:
    """Mistral 3: a different vision tower, and a projector."""
    vision = PixtralVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=4
    )
    text = MistralConfig(**SMALL, head_dim=64, sliding_window=None, tie_word_embeddings=True)
    return Mistral3Config(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        image_token_index=processors.FIRST_TOKEN,
        tie_word_embeddings=True,
    )


FAMILIES: Mapping[str, Callable[[], PretrainedConfig]] = {
    "Qwen2, Qwen2.5": tiny.qwen2,
    "Qwen2, tied": _tied_qwen2,
    "Qwen2.5, YaRN": _yarn_qwen2,
    "Llama 3, 3.1": tiny.llama,
    "Llama 2": _llama2,
    "DeepSeek Coder, Yi": _linear_llama,
    "Mistral": lambda: MistralConfig(**SMALL, head_dim=64, sliding_window=512, tie_word_embeddings=False),
    "Mixtral": lambda: MixtralConfig(**SMALL, **EXPERTS, num_local_experts=4),
    "Phi-2": _phi,
    "Phi-3": lambda: Phi3Config(**SMALL, sliding_window=512, tie_word_embeddings=False),
    "Phi-3.5-mini": lambda: _phi3(1.0),
    "Phi-4-mini": lambda: _phi3(0.75),
    "Gemma": lambda: _gemma(GemmaConfig),
    "Gemma 2": lambda: _gemma(Gemma2Config, query_pre_attn_scalar=64, sliding_window=512),
    "Gemma 3 (text)": _gemma3,
    "Gemma 4 (text)": _gemma4,
    "DeepSeek-V2-Lite": _deepseek_v2,
    "DeepSeek-V2": lambda: _deepseek_v2(q_lora_rank=32),
    "DeepSeek-V3": _deepseek_v3,
    "StarCoder2": lambda: Starcoder2Config(**SMALL, sliding_window=512, tie_word_embeddings=True),
    "Qwen3": lambda: Qwen3Config(**SMALL, head_dim=64, tie_word_embeddings=True),
    "Qwen3-MoE": lambda: Qwen3MoeConfig(
        **SMALL, **EXPERTS, head_dim=64, num_experts=4, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "Qwen3.5 (text)": lambda: _hybrid(Qwen3_5TextConfig, tie_word_embeddings=True),
    "Qwen3-Next": lambda: _hybrid(Qwen3NextConfig, **SHARED_EXPERT),
    "OLMo 2": lambda: Olmo2Config(**SMALL, tie_word_embeddings=False),
    "OLMo 3": lambda: Olmo3Config(**SMALL, sliding_window=512, tie_word_embeddings=False),
    "GLM-4": lambda: Glm4Config(**SMALL, head_dim=64, tie_word_embeddings=False),
    "GLM-4.5": lambda: Glm4MoeConfig(
        **SMALL, **EXPERTS, head_dim=64, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=64,
        first_k_dense_replace=1, use_qk_norm=True, routed_scaling_factor=2.5,
    ),
    "SmolLM3": lambda: SmolLM3Config(**{**SMALL, "num_hidden_layers": 4}, tie_word_embeddings=True),  # one without RoPE
    "Granite": lambda: GraniteConfig(
        **SMALL, tie_word_embeddings=True, embedding_multiplier=12.0, logits_scaling=8.0,
        residual_multiplier=0.22, attention_multiplier=0.0156,
    ),
    "Qwen3.5": lambda: _seeing(Qwen3_5Config, _hybrid(Qwen3_5TextConfig, tie_word_embeddings=True)),
    "Qwen3.5-MoE": lambda: _seeing(
        Qwen3_5MoeConfig, _hybrid(Qwen3_5MoeTextConfig, **SHARED_EXPERT, tie_word_embeddings=True)
    ),
    "Qwen3-VL": lambda: _seeing(
        Qwen3VLConfig,
        Qwen3VLTextConfig(
            **SMALL, head_dim=64, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        deepstack_visual_indexes=[0, 1],
    ),
    "Mistral 3": _mistral3,
}  # fmt: skip
"""Family name -> its configuration."""
ON_GPUS: Mapping[str, Callable[[], PretrainedConfig]] = {"MiniMax-M2": minimax_m2}
"""Families that vLLM's build for CPUs cannot serve."""
INSIDE = {"Qwen3.5", "Qwen3.5-MoE", "Qwen3-VL", "Mistral 3"}
"""Families whose language model is one of several parts."""


def large(config: PretrainedConfig) -> PretrainedConfig:
    """Return `config` with the sizes of `LARGE`, keeping all its special features."""
    if (text := config.get_text_config()) is not config:
        whole = config.to_dict()
        whole["text_config"] = large(text).to_dict()
        whole["vision_config"] |= {name: size for name, size in LARGE_TOWER.items() if name in whole["vision_config"]}
        return type(config).from_dict(whole)
    own = config.to_dict()
    sizes = {name: size for name, size in LARGE.items() if own.get(name) is not None}
    if own["num_key_value_heads"] == own["num_attention_heads"]:
        sizes["num_key_value_heads"] = LARGE["num_attention_heads"]
    elif own["num_key_value_heads"] == 1:
        sizes["num_key_value_heads"] = 1
    if "per_layer_config" in own:  # Gemma 4 keeps the wider heads of the layers without a window there
        sizes["global_head_dim"] = 2 * LARGE["head_dim"]
    known = {name: value for name, value in {**own, **sizes}.items() if name not in BY_LAYER}
    if "long_factor" in (rope := dict(known.get("rope_parameters") or {})):
        heads = LARGE["hidden_size"] // LARGE["num_attention_heads"]
        size = int(heads * rope["partial_rotary_factor"]) // 2
        for name in ("short_factor", "long_factor"):
            rope[name] = [rope[name][index * len(rope[name]) // size] for index in range(size)]
        known["rope_parameters"] = rope
    return type(config).from_dict(known)


VARIANTS = {
    "Qwen2, tied", "Qwen2.5, YaRN", "Llama 2", "DeepSeek Coder, Yi", "Phi-3.5-mini", "Phi-4-mini", "DeepSeek-V2",
}  # fmt: skip
"""Families that differ from an earlier one in values of the configuration alone: the same classes on both sides."""
WITH_BUFFERS = ("Gemma 4 (text)", "DeepSeek-V3", "GLM-4.5", "MiniMax-M2")
"""Families whose files have buffers, which no gradient reaches: a router's bias, or a scale of each layer."""
SHARING_KEYS = {"Gemma 4 (text)"}
"""Families in which a layer takes keys and values from an earlier one: tensor parallelism refuses them."""
WITH_VISION = {"Qwen3.5 (text)", *INSIDE}
"""Families whose module in vLLM has a vision model."""
