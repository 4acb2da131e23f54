"""How the patched vLLM is started.

Not covered: how choices are given and merged (`bridge/config/choices.py`).
"""

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
    """The model to serve: a folder or a hub name."""
    port: int = Field(default=DEFAULT_PORT, ge=1, le=65535)
    """TCP port of the server."""
    host: Host = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where vLLM runs; `auto` takes the GPU when there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Element type of the one copy; `auto` takes the one that the model's configuration names."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, lt=1)
    """Share of the GPU that vLLM may use; when absent it is derived so that training fits beside it."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens, prompt and completion together; absent: the model's own limit."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share each layer."""
    max_lora_rank: int | None = Field(default=None, ge=1)
    """Largest rank of the adapters that the server takes; absent: it takes none."""
    vllm_config_path: Path | None = None
    """Where to write the manifest: a file or a folder; absent: $LOGDIR, else the current folder."""
