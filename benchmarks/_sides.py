"""The two sides of `grpo.py`: their commands for the same work, and how to parse their output.

Both get the same engine settings and the same KV cache, which stays allocated during training unless a variant says
otherwise.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import _lengths, _work
from bridge.checkpoints.run_directory import RunDirectory
from bridge.core.address import free_port
from bridge.processes import accelerator

BRIDGE = "from bridge_cli.main import main; main()"
"""Runs the console script, which may not be on PATH."""
ENGINE_FLAGS = ("--max-num-seqs", "{completions}", "--max-num-batched-tokens", "4096", "--no-enable-log-requests")
"""TRL's vLLM settings."""
ROOT = Path(__file__).parent.parent
KV_CACHE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
SOURCES = ("cli", "environments", "patches")
"""Folders that hold one package each, besides `bridge`."""
SEVERAL = re.compile(r"\s*--(gpus|tensor-parallel-size)[= ](\d+)")
"""Flags with which a variant uses several GPUs."""
SPLIT = {"trl": {"--async", "--server"}, "bridge": {"--trainer-device"}}
"""Flags of a variant whose trainer and vLLM use separate GPUs."""
SPLIT_GPUS = "0,1"
"""The GPUs of vLLM and of the trainer, unless CUDA_VISIBLE_DEVICES names others."""
SPLIT_SHARE = 0.85
"""Share of GPU memory for a vLLM that has its own GPU."""
MEASURED = {
    "trained_per_s": "train_tokens_per_s", "mfu": "mfu", "mismatch_kl": "mismatch_kl", "rerouted": "rerouted_share",
    "busiest": "max_vio", "dead": "dead_experts",
}  # fmt: skip
"""Columns for metrics of Bridge's steps, by the metrics' names; some models do not have all of them."""
PLANNED = ("weights_gib", "gradients_gib", "state_gib", "activations_gib", "rest_gib")
"""Columns of `bridge plan` for a GPU's memory during the passes, without the KV cache."""
ENOUGH_GIB = 80
"""GPU memory to plan for on a machine without a GPU."""
OF_SERVER = re.compile(r"\s--(?=\s|$)")
"""Separates the flags of `bridge run` from vLLM's."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one step."""

    completions: int = 64
    """Completions per step and GPU."""
    group: int = 8
    """Completions per prompt."""
    tokens: int = 256
    """Exact number of tokens per completion; with `lengths`, of the longest one."""
    lengths: str | None = None
    """Varying lengths, in the format of `_lengths.Lognormal`."""
    share: float = 0.3
    """Share of GPU memory for vLLM; 0: Bridge chooses."""

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest sequence, rounded up to blocks of 128 tokens."""
        return max(1024, math.ceil((_work.PROMPT_TOKENS + self.tokens) / 128) * 128)


@dataclass(frozen=True)
class Side:
    """One side with one set of settings."""

    name: Literal["trl", "bridge"]
    """Which trainer."""
    variant: str
    """TRL: completions per pass and flags of `_trl.py`. Bridge: optimizer, flags of `bridge run`, vLLM's after --."""
    engine: tuple[str, ...] = ()
    """Additional vLLM flags, for Bridge only."""

    @property
    def num_parts(self) -> int:
        """Return the number of GPUs that share one copy of the weights."""
        return int(dict(SEVERAL.findall(self.variant)).get("tensor-parallel-size", 1))

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return 2 if self.is_split else max(self.num_parts, int(dict(SEVERAL.findall(self.variant)).get("gpus", 1)))

    @property
    def is_split(self) -> bool:
        """Whether the trainer and vLLM use separate GPUs."""
        return not SPLIT[self.name].isdisjoint(self.variant.split())

    @property
    def kv_sleeps(self) -> bool:
        """Whether vLLM frees its KV cache while training; TRL's sleep mode also frees its weights."""
        asleep = {"trl": "--sleep", "bridge": "--kv-sleep always"}[self.name]
        return f" {asleep} " in f" {' '.join(self.variant.split())} "

    @property
    def shares_weights(self) -> bool:
        """Whether Bridge's server writes a manifest; the stock vLLM of `--mode none` writes none."""
        flags = self.variant.split()
        return "none" not in flags or "in-place" in flags

    @property
    def on_one(self) -> "Side":
        """Return the same side on one GPU."""
        return replace(self, variant=SEVERAL.sub("", self.variant))

    def argv(self, work: Work, model: Path, folder: Path, steps: int) -> list[str]:
        """Return the command that trains `steps` steps on `model`, with output in `folder`."""
        if self.is_split:
            work = replace(work, share=SPLIT_SHARE)
        return (self._trl if self.name == "trl" else self._bridge)(work, model, folder, steps)

    def environment(self, work: Work, folder: Path) -> dict[str, str]:
        """Return the environment of the command; NCCL writes a log per process to `folder`.

        If TRL's vLLM runs on a separate GPU, the trainer sees only its own GPU from the start: importing transformers
        already makes CUDA read CUDA_VISIBLE_DEVICES, and TRL spreads a model over all GPUs that it sees.
        """
        logs = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%p.log")}
        shown = {"CUDA_VISIBLE_DEVICES": split_gpus()[1]} if self.name == "trl" and self.is_split else {}
        return {**environment(work), **logs, **shown}

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
            **{name: line[key] for name, key in MEASURED.items() if line.get(key) is not None},
        }

    def kv_cache_gib(self, log: Path, folder: Path) -> float | None:
        """Return the size of vLLM's KV cache according to its log; None if it is not found."""
        path = log if self.name == "trl" and not self.is_split else RunDirectory(folder / "run").server_log
        match = KV_CACHE.search(path.read_text(errors="replace")) if path.exists() else None
        return float(match[1]) if match else None

    def _trl(self, work: Work, model: Path, folder: Path, steps: int) -> list[str]:
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        given = shlex.split(self.on_one.variant)
        flags = [flag for flag in given if flag != "--async"]
        server_log = RunDirectory(folder / "run").server_log
        return [
            sys.executable, *(several if self.gpus > 1 and not self.is_split else []), "-m",
            "benchmarks._trl_async" if "--async" in given else "benchmarks._trl", *flags, "--model", str(model),
            "--steps", str(steps), "--completions", str(work.completions), "--group", str(work.group),
            "--tokens", str(work.tokens), "--share", str(work.share), "--max-model-len", str(work.max_model_len),
            *(["--lengths", work.lengths] if work.lengths else []),
            *(["--server-gpu", split_gpus()[0], "--server-log", str(server_log)] if self.is_split else []),
        ]  # fmt: skip

    def _bridge(self, work: Work, model: Path, folder: Path, steps: int) -> list[str]:
        is_shared = work.share and torch.cuda.is_available()
        share = ["--gpu-memory-utilization", str(work.share)] if is_shared else []
        num_completions = work.completions * (self.gpus if self.is_split else self.num_parts)
        engine = [*engine_flags(num_completions), *lengths_flags(work.lengths)]
        kv_cache = [] if self.is_split else ["--kv-sleep", "never"]
        manifest = ["--vllm-config-path", str(folder / "manifest.json")] if self.shares_weights else []
        arguments = shlex.split(self.variant)
        separator = arguments.index("--") if "--" in arguments else len(arguments)
        return [
            sys.executable, "-c", BRIDGE, "run", "--json", "--mode", "shared_vllm", "--model-name", str(model),
            "--environment", f"{_work.__file__}:{_work.Hashed.__name__}", "--training-steps", str(steps),
            "--batch-size", str(work.completions * self.gpus), "--group-size", str(work.group), "--max-new-tokens",
            str(work.tokens), "--max-model-len", str(work.max_model_len), "--port", str(free_port("127.0.0.1")), *share,
            "--run-dir", str(folder / "run"), "--save-path", str(folder / "saved"), "--no-save-optimizer",
            *manifest, *kv_cache, "--optimizer",
            *arguments[:separator], "--", *engine, *self.engine, *arguments[separator + 1 :],
        ]  # fmt: skip


@cache
def planned_gib(side: Side, work: Work, model: Path) -> float | None:
    """Return the memory per GPU that `bridge plan` predicts for passes, without the KV cache; None: no prediction."""
    if side.name == "trl" or side.is_split:
        return None
    argv = [
        sys.executable, "-c", BRIDGE, "plan", "--json", "--gpu-memory", f"{gpu_gib():.1f}", "--model", str(model),
        "--batch-size", str(work.completions * side.gpus), "--group-size", str(work.group), "--max-new-tokens",
        str(work.tokens), "--max-model-len", str(work.max_model_len), "--optimizer",
        *shlex.split(OF_SERVER.split(side.variant)[0]),
    ]  # fmt: skip
    shown = subprocess.run(argv, env=environment(work), capture_output=True, text=True, check=False)
    rows = json.loads(shown.stdout)["rows"] if shown.stdout else []
    return float(sum(rows[0][column] for column in PLANNED)) if rows else None


def gpu_gib() -> float:
    """Return the memory of this host's GPU, without creating a CUDA context."""
    return min(accelerator.gpu_memory_bytes(), default=ENOUGH_GIB * 2**30) / 2**30


def split_gpus() -> list[str]:
    """Return the two GPUs of a vLLM and a trainer that use separate ones."""
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or SPLIT_GPUS).split(",")
    if len(visible) < 2:
        raise SystemExit(f"error: a trainer and its vLLM need one GPU each, but CUDA_VISIBLE_DEVICES is {visible[0]}")
    return visible[:2]


def engine_flags(completions: int) -> list[str]:
    """Return vLLM's flags for steps with this number of completions."""
    return [flag.format(completions=completions) for flag in ENGINE_FLAGS]


def lengths_flags(lengths: str | None) -> list[str]:
    """Return the flags with which a server gives each completion its own length, if there are `lengths`."""
    return ["--middleware", _lengths.MIDDLEWARE] if lengths else []


def source_roots(tree: Path) -> list[str]:
    """Return the folders of a checkout from which its packages are imported; older checkouts have one folder."""
    return [str(tree), *(str(tree / name) for name in SOURCES if (tree / name / f"bridge_{name}").is_dir())]


def of_checkout(tree: Path, argv: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return a command and environment that use another checkout's packages and task; run it in that folder."""
    task = str(tree / "benchmarks" / "_work.py")
    paths = [*source_roots(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [word.replace(_work.__file__, task) for word in argv], {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def environment(work: Work) -> dict[str, str]:
    """Return the environment of both sides, in which vLLM logs its memory, finds this package and gets the lengths."""
    path = os.pathsep.join([*source_roots(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    return {**os.environ, **fixed, **({_lengths.VARIABLE: work.lengths} if work.lengths else {})}
