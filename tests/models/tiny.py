"""Tiny models on disk, with a tokenizer, built from a configuration."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from bridge.weights import skeleton
from bridge.weights.model_folder import stored_buffers
from tests.models import processors

VOCABULARY = 301
"""Not a multiple of 64: vLLM pads it."""


def llama(vocabulary: int = VOCABULARY) -> LlamaConfig:
    """Llama with llama3 RoPE scaling, tied embeddings and grouped-query attention."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def qwen2(vocabulary: int = VOCABULARY) -> Qwen2Config:
    """Qwen2 with biases and an untied head."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def frozen_llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the base model of an adapter, always with the same weights."""
    torch.manual_seed(7)
    config = llama()
    config.initializer_range = 0.08
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def with_longrope(folder: Path, original: int) -> torch.Tensor:
    """Give the Llama in `folder` longrope with long factors beyond `original` tokens, and return their frequencies."""
    path = folder / "config.json"
    document = json.loads(path.read_text())
    long_factor = [1.0 + index for index in range(16)]
    document["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 16,
        "long_factor": long_factor,
        "original_max_position_embeddings": original,
    }
    path.write_text(json.dumps(document))
    return 1 / (torch.tensor(long_factor) * 10_000 ** (torch.arange(0, 32, 2) / 32))


def write(config: PretrainedConfig, folder: Path, *, seed: int = 0, std: float = 0.08) -> Path:
    """Write a bf16 model with random weights of standard deviation `std`, and its tokenizer, to `folder`.

    Attention scores are so small that no single token gets all attention: rounding would decide which one.
    """
    torch.manual_seed(seed)
    config.initializer_range = std
    config.get_text_config().initializer_range = std
    model = skeleton.auto_class(config).from_config(config, dtype=torch.bfloat16)
    for buffer in stored_buffers(model).values():  # such as the bias of a router, which is 0 in a new model
        buffer.sub_(torch.linspace(0.5, -0.5, buffer.numel()).view(buffer.shape) if buffer.numel() > 1 else 0.1)
    for module in model.modules():
        if getattr(module, "scaling", None) == 1 and hasattr(module, "q_norm"):  # Gemma 4's scores are as large as that
            torch.nn.init.constant_(module.q_norm.weight, module.head_dim**-0.5)
    if config.model_type == "gemma":  # Gemma scales its embeddings up, and with the tied head it would repeat tokens
        model.get_input_embeddings().weight.data.div_(2)
    model.save_pretrained(folder)
    is_seeing = hasattr(config, "vision_config")
    write_tokenizer(folder, config.get_text_config().vocab_size, processors.TOKENS if is_seeing else ())
    if is_seeing:
        processors.write(config, folder)
    return folder


def write_tokenizer(folder: Path, vocabulary: int, image_tokens: Sequence[str] = ()) -> None:
    """Write a tokenizer that fills the vocabulary with single characters, except for a few image tokens."""
    special = ["<pad>", "<unk>", "<eos>"]
    characters = [chr(code) for code in range(32, 127)]
    filler = [chr(0x4E00 + index) for index in range(max(0, vocabulary - len(special) - len(characters)))]
    words = [*special, *characters, *filler][:vocabulary]
    words[processors.FIRST_TOKEN : processors.FIRST_TOKEN + len(image_tokens)] = image_tokens
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=[*image_tokens],
    ).save_pretrained(folder)
