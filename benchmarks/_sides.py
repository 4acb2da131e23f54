"""The two sides of `grpo.py`: commands on the same work, and how to read their output.

Both get the same engine settings and the same KV cache, which stays allocated during training.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import _work
from bridge.run.run_directory import RunDirectory
from cli.serve import free_port

BRIDGE = "from cli.main import main; main()"
"""The console script, which is not on every PATH."""
ENGINE_FLAGS = ("--max-num-seqs", "{completions}", "--max-num-batched-tokens", "4096", "--no-enable-log-requests")
"""TRL's vLLM settings."""
MAX_MODEL_LEN = "1024"
KV_CACHE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one step."""

    completions: int = 64
    """Completions per step."""
    group: int = 8
    """Completions per prompt."""
    tokens: int = 256
    """Tokens per completion, exactly."""
    share: float = 0.3
    """Share of GPU memory for vLLM."""


@dataclass(frozen=True)
class Side:
    """One side with one choice of settings."""

    name: Literal["trl", "bridge"]
    """`trl` or `ours`."""
    variant: str
    """TRL: completions per pass and flags of `_trl.py`. Bridge: the optimizer and flags of `bridge run`."""
    engine: tuple[str, ...] = ()
    """Bridge: further flags of vLLM."""

    def argv(self, work: Work, model: Path, folder: Path, steps: int) -> list[str]:
        """Return the command that trains `steps` steps on `model`, with output in `folder`."""
        return (self._trl if self.name == "trl" else self._bridge)(work, model, folder, steps)

    def parts(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return the seconds of a step's parts, its sampled tokens, and torch's peak memory."""
        if self.name == "trl":
            return {name: value for name, value in line.items() if name != "step"}
        return {
            "generation_s": line["rollout_s"],
            "training_s": line["train_s"],
            "optimizer_s": line["fence_write_s"],
            "sync_s": line["fence_pause_s"] + line["fence_publish_s"],
            "peak_allocated_gib": line["peak_memory_gib"],
            "tokens": line["tokens_generated"],
        }

    def kv_cache_gib(self, log: Path, folder: Path) -> float | None:
        """Return the size of vLLM's KV cache from its log; None if not found."""
        path = log if self.name == "trl" else RunDirectory(folder / "run").server_log
        found = KV_CACHE.search(path.read_text(errors="replace")) if path.exists() else None
        return float(found[1]) if found else None

    def _trl(self, work: Work, model: Path, folder: Path, steps: int) -> list[str]:
        del folder
        return [
            sys.executable, "-m", "benchmarks._trl", *shlex.split(self.variant), "--model", str(model),
            "--steps", str(steps), "--completions", str(work.completions), "--group", str(work.group),
            "--tokens", str(work.tokens), "--share", str(work.share),
        ]  # fmt: skip

    def _bridge(self, work: Work, model: Path, folder: Path, steps: int) -> list[str]:
        share = ["--gpu-memory-utilization", str(work.share)] if torch.cuda.is_available() else []
        engine = [flag.format(completions=work.completions) for flag in ENGINE_FLAGS]
        return [
            sys.executable, "-c", BRIDGE, "run", "--json", "--mode", "shared_vllm", "--model-name", str(model),
            "--environment", f"{_work.__file__}:{_work.Hashed.__name__}", "--training-steps", str(steps),
            "--batch-size", str(work.completions), "--group-size", str(work.group), "--max-new-tokens",
            str(work.tokens), "--max-model-len", MAX_MODEL_LEN, "--port", str(free_port("127.0.0.1")), *share,
            "--run-dir", str(folder / "run"), "--save-path", str(folder / "saved"), "--no-save-optimizer",
            "--vllm-config-path", str(folder / "manifest.json"), "--kv-sleep", "never", "--optimizer",
            *shlex.split(self.variant), "--", *engine, *self.engine,
        ]  # fmt: skip


def environment() -> dict[str, str]:
    """Return the environment of both sides: vLLM logs its memory, and loads no unnamed plugin."""
    return {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
