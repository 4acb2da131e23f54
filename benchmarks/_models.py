"""Benchmark models: Qwen2.5 and Qwen3 shapes with random weights, in a folder or in a server's memory."""

import json
import math
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import Qwen2Config, Qwen2Tokenizer, Qwen3Config, Qwen3MoeConfig

from bridge.weights import skeleton
from bridge.weights.model_folder import INDEX_NAME
from tests.models.tiny import write_tokenizer

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
    "72b": {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen3-tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "tie_word_embeddings": True},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "qwen3-moe-tiny": {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
                       "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
                       "tie_word_embeddings": False},
    "qwen3-30b-a3b": {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                      "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                      "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
                      "tie_word_embeddings": False},
}  # fmt: skip
"""Qwen2.5's and Qwen3's shapes, and three small ones to try on the CPU."""
CONFIGS = {"Qwen2": Qwen2Config, "Qwen3": Qwen3Config, "Qwen3Moe": Qwen3MoeConfig}
LONGEST = 2**18
"""Number of positions of the Qwen3 models here, more than any benchmark needs."""
DUMMY = "dummy"
"""vLLM's load format for dummy weights."""
SHARD_BYTES = 4 * 10**9
"""Largest size of a weight file, and of its copy in host memory while it is written."""


def model_config(size: str, *, eos_token_id: int | None = None) -> Qwen2Config | Qwen3Config | Qwen3MoeConfig:
    """Return the configuration of one size."""
    shape, kind = SIZES[size], "Qwen3" if size.startswith("qwen3") else "Qwen2"
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": eos_token_id, "dtype": "bfloat16"}
    kind += "Moe" if "num_experts" in shape else ""
    longest = 32768 if kind == "Qwen2" else LONGEST
    config = CONFIGS[kind](**shape, **tokens, max_position_embeddings=longest)
    config.architectures = [f"{kind}ForCausalLM"]
    return config


def make_model(size: str, folder: Path) -> Path:
    """Write configuration and tokenizer; vLLM creates dummy weights, which `_dummy_weights.py` fills."""
    model_config(size, eos_token_id=2).save_pretrained(folder)
    write_tokenizer(folder, 1024)
    return folder


def make_whole_model(size: str, folder: Path) -> Path:
    """Write configuration, random weights, and a tokenizer whose end token cannot be sampled.

    Every completion then has the full length, and its text determines its tokens.
    """
    make_dummy_model(size, folder)
    _write_weights(folder)
    return folder


def make_dummy_model(size: str, folder: Path) -> Path:
    """Write the same model without weight files, for vLLM's dummy weights."""
    model_config(size).save_pretrained(folder)
    _write_words(folder, int(str(SIZES[size]["vocab_size"])))
    return folder


def spread(parameter: Tensor, generator: torch.Generator, *, is_table: bool = False) -> Tensor:
    """Fill one parameter in place: logits of about +-0.5, norms around one.

    `is_table` is true for an embedding that is not tied to the head. Its standard deviation is 1. With a smaller one,
    hidden states of all tokens become similar from layer to layer, and a router sends all of them to the same experts.
    Stacked experts get twice the deviation of other matrices; otherwise their output would be so small that it barely
    matters which of them compute it.
    """
    if parameter.ndim == 1:
        return parameter.normal_(1.0, 0.1, generator=generator)
    gain = 1.0 if parameter.ndim == 3 else 0.5
    deviation = 1.0 if is_table else gain / math.sqrt(parameter.shape[-1])
    return parameter.normal_(0.0, deviation, generator=generator)


def is_table(name: str, names: Collection[str]) -> bool:
    """Return whether `name` is an embedding that is not tied to the head; `names` are those of all parameters."""
    return name.endswith("embed_tokens.weight") and "lm_head.weight" in names


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the model's weights in bf16, whether or not there are weight files."""
    shapes = skeleton.shapes(skeleton.build(str(folder), torch.bfloat16))
    return sum(2 * math.prod(shape) for shape in shapes.values())


def _write_words(folder: Path, vocabulary: int) -> None:
    """Write a byte tokenizer; all further tokens of the vocabulary are words that no text contains.

    transformers makes every Qwen2 tokenizer a BPE tokenizer, whatever its file contains.
    """
    words = ["<pad>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"t{index}" for index in range(len(words), vocabulary)]
    vocabulary_and_end = {word: index for index, word in enumerate([*words, "<eos>"])}
    Qwen2Tokenizer(
        vocab=vocabulary_and_end, merges=[], pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)


def _write_weights(folder: Path) -> None:
    """Write weight files for the folder's configuration, with one shard in memory at a time."""
    shards = list(_shards(skeleton.shapes(skeleton.build(str(folder), torch.bfloat16))))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: spread(torch.empty(shape, dtype=torch.bfloat16, device=device), generator).cpu()
            for name, shape in shard.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    num_bytes = sum(2 * math.prod(shape) for shard in shards for shape in shard.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if shard and sum(2 * math.prod(other) for other in [*shard.values(), shape]) > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


if __name__ == "__main__":  # in a separate process, which frees its GPU memory at the end
    make = make_dummy_model if sys.argv[3:] == [DUMMY] else make_whole_model
    make(sys.argv[1], Path(sys.argv[2]))
