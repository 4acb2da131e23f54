"""Choices of `bridge serve-vllm`: how the patched vLLM is started."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from bridge.config.borrowed import SERVE_ALIASES
from bridge.config.choices import Config
from bridge.core.address import Host

DEFAULT_PORT = 9001


class ServeConfig(Config):
    """How the patched vLLM is started."""

    synonyms: ClassVar[Mapping[str, str]] = {"model_name": "model", "vllm_port": "port"}
    aliases: ClassVar[Mapping[str, str]] = SERVE_ALIASES

    model: str
    """Model to serve: a folder or a hub name."""
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65535)
    """TCP port of the server."""
    host: Host = "127.0.0.1"
    """Address to listen on (default: reachable from this machine only)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device vLLM runs on; `auto` uses a GPU if there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights; `auto` takes the model configuration's."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of GPU memory for vLLM (default: what leaves room for the trainer)."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt plus completion, in tokens (default: the model's own limit)."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs that share one copy of the weights; `bridge run` trains them with a process for each."""
    max_lora_rank: int | None = Field(default=None, ge=1)
    """Largest LoRA rank the server accepts (default: no adapters)."""
    vllm_config_path: Path | None = None
    """Where to write the manifest, a file or a folder (default: $LOGDIR, else the current folder)."""
