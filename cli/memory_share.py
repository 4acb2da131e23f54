"""How much of a GPU vLLM may take so that training fits beside it.

Not covered: measuring what training really takes; it is derived from the model's size and printed.
Source: bytes per parameter of AdamW on bf16 weights with a split float32 master (`bridge/training/optimizer.py`).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.config import TrainConfig

GIB = 2**30
WEIGHT_BYTES = 2
FULL_TRAINING_BYTES = 12
"""Per parameter, beside the weight: gradient 2, remainder of the master 2, two float32 moments 8."""
CONTEXTS_BYTES = 1 * GIB
LEAST_KV_BYTES = 3 * GIB
"""Below it vLLM has no room for its CUDA graphs and a KV cache worth serving from."""
LARGEST_SHARE = 0.9
UNKNOWN_SHARE = 0.45


@dataclass(frozen=True)
class MemoryShare:
    """vLLM's share of one GPU."""

    share: float
    """Value for `--gpu-memory-utilization`."""
    reason: str
    """What it was derived from, for a person."""


@dataclass(frozen=True)
class Trainer:
    """What a trainer keeps on vLLM's GPU, beside its activations."""

    purpose: str
    """What it is for, for a person."""
    bytes_per_parameter: int
    """Bytes for each parameter of the model."""
    other_bytes: int = 0
    """Bytes whatever the model's size."""


FULL = Trainer("gradients and optimizer", FULL_TRAINING_BYTES)
"""Trains the server's own weights."""
ADAPTER = Trainer("an adapter, its gradients and its optimizer", 0, GIB)
"""Trains an adapter beside the server's own weights: 40M parameters for rank 16 on 7B, 16 bytes each."""
SECOND_COPY = Trainer("weights of its own, gradients and optimizer", WEIGHT_BYTES + FULL_TRAINING_BYTES)
"""Trains weights of its own on the same GPU, whole: they are not split where the server's are."""


def derive(model: str, *, gpu_bytes: int, tensor_parallel_size: int, trainer: Trainer | None = FULL) -> MemoryShare:
    """Derive vLLM's share of a GPU of `gpu_bytes` from the size of `model`; None: the trainer is somewhere else."""
    if trainer is None:
        return MemoryShare(LARGEST_SHARE, "the trainer is on another device")
    num_params = count_parameters(Path(model))
    if num_params is None:
        return MemoryShare(UNKNOWN_SHARE, f"the size of {model} is not known before it is loaded")
    served = num_params / tensor_parallel_size
    trained = num_params if trainer == SECOND_COPY else served
    training = trained * trainer.bytes_per_parameter + trainer.other_bytes
    activations = max(4 * GIB, 0.15 * gpu_bytes)
    left = 1 - (training + activations + CONTEXTS_BYTES) / gpu_bytes
    least = (served * WEIGHT_BYTES + LEAST_KV_BYTES) / gpu_bytes
    share = math.floor(100 * min(max(left, least), LARGEST_SHARE)) / 100
    reason = (
        f"{num_params / 1e9:.2f}B parameters: training needs {training / GIB:.0f} GiB for {trainer.purpose} and "
        f"about {activations / GIB:.0f} GiB for activations of {gpu_bytes / GIB:.0f} GiB"
    )
    return MemoryShare(
        share, reason + ("; that is more than is left, it may run out of memory" if least > left else "")
    )


def trainer_of(config: TrainConfig) -> Trainer | None:
    """Return what the trainer of `config` keeps on vLLM's GPU; None: it is on a device of its own."""
    if config.mode == "shared_vllm":
        return FULL
    if config.mode == "lora_only":
        return ADAPTER
    return SECOND_COPY if config.trainer_device in {"auto", "cuda", "cuda:0"} else None


def count_parameters(model: Path) -> int | None:
    """Return the number of parameters of the model in the folder `model`; None if it cannot be told cheaply."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        return int(_read(index)["metadata"]["total_size"]) // WEIGHT_BYTES
    weights = model / "model.safetensors"
    if weights.is_file():
        return sum(_header_sizes(weights))
    config = model / "config.json"
    return _from_dimensions(_read(config)) if config.is_file() else None


def _header_sizes(weights: Path) -> list[int]:
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]


def _from_dimensions(config: dict[str, Any]) -> int | None:
    """Count the matrices of a dense decoder with gated feed-forward layers, within a percent."""
    try:
        hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        head = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head * (heads + config.get("num_key_value_heads", heads))
        embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
        return int(embeddings + layers * (attention + 3 * hidden * config["intermediate_size"]))
    except KeyError:
        return None


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document
