"""LoRA hot-swapping on one GPU: generation compared with stock vLLM, both ways of publishing, parity after training.

    python -m benchmarks.lora --size 1.5b --rank 16

Stock vLLM with `--enable-lora` and `bridge serve-vllm --max-lora-rank` serve the same random-weight Qwen2 side by
side, both with CUDA graphs and torch.compile. An adapter on all linear layers is trained for three steps and published
repeatedly, in both ways; the server is compared with the base model and the saved adapter in PEFT; and both servers
generate with the same adapter, alternately. `--base` adds generation without an adapter.
"""

import argparse
import gc
import json
import re
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks._models import SIZES, make_model
from benchmarks._results import say, write
from benchmarks._servers import NUM_STEPS, Parity, compared, parser, rates, serve_command, served, stock
from bridge.checkpoints.run_directory import RunDirectory
from bridge.checks.one_copy_proof import logprob_diffs, sample
from bridge.config import SamplingConfig, TrainConfig
from bridge.modes import WAYS
from bridge.modes.mode import RunContext
from bridge.passes.prepared_model import PreparedModel
from bridge.rollouts.sampler import Sampler
from bridge.run.trainer import Run
from bridge.server import manifest, protocol
from bridge.server.client import VllmClient, open_http
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update
from bridge.types import Group
from bridge.weights import model_folder
from bridge.weights.attach import attach
from tests.listener import Listener

ADAPTER = "compared"
"""Name of the adapter that both servers serve while their speeds are compared."""


def main() -> None:
    """Measure one size and write one JSON file."""
    flags = parser(__doc__, rounds=8)
    flags.add_argument("--size", choices=SIZES, default="1.5b")
    flags.add_argument("--rank", type=int, default=16)
    flags.add_argument("--handovers", type=int, default=50, help="hand-overs of each way")
    flags.add_argument("--base", action="store_true", help="also generate by the base model, without an adapter")
    options = flags.parse_args()
    say(f"written: {write('lora', {options.size: measure(options)}, options.out)}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Serve the model twice and measure."""
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        folder = Path(scratch)
        model = make_model(options.size, folder / "model")
        command = serve_command(model, folder, max_lora_rank=options.rank)
        with served(command, folder / "patched.log") as url:
            by_disk = trained(options, folder, model, "disk", Sampled(url, options))
            by_memory = trained(options, folder, model, "memory", Sampled(url, options))
            plain = stock(serve_command(model, folder, max_lora_rank=options.rank))
            with served(plain, folder / "stock.log") as stock_url:
                speeds = compare_speed(options, (stock_url, url), by_memory.pop("adapter"))
            by_disk.pop("adapter")
        graphs = [*graphs_captured(folder / "patched.log"), *graphs_captured(folder / "stock.log")]
    result = {"rank": options.rank, "cuda_graphs": graphs, **speeds, "memory": by_memory, "disk": by_disk}
    say(json.dumps({k: v for k, v in result.items() if k != "rounds"}, indent=1))
    return result


class Sampled:
    """Samples completions of fixed prompts."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        self._vocabulary = int(str(SIZES[options.size]["vocab_size"]))

    def by(self, name: str | None) -> list[Group]:
        """Sample completions with the model or adapter `name`."""
        endpoint = Endpoint(url=self.url, model=name)
        with Sampler(SamplingConfig(max_new_tokens=24, request_timeout_s=600)) as sampler:
            return sample(sampler, endpoint, self._vocabulary)


def trained(options: argparse.Namespace, folder: Path, model: Path, way: str, sampled: Sampled) -> dict[str, Any]:
    """Train three steps with one way of publishing, publish repeatedly, and compare with PEFT."""
    config = TrainConfig.model_validate(
        {
            "model_name": str(model), "mode": "lora_only", "lora_handover": way, "lora_r": options.rank,
            "lora_alpha": 2.0 * options.rank, "training_steps": NUM_STEPS, "lr": 1e-3, "max_new_tokens": 64,
            "micro_batch_tokens": 4096, "gradient_checkpointing": True, "vllm_config_path": folder / "manifest.json",
            "save_path": folder / f"saved-{way}",
        }
    )  # fmt: skip
    steps: list[dict[str, Any]] = []
    run = RunDirectory.create(folder / f"run-{way}", environment="parity")
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    summary = Run(config, Parity(), run, Listener(lambda step: steps.append(dict(step)))).train()
    gc.collect()
    parity = compare_with_peft(folder, summary.checkpoint, sampled)
    return {
        "adapter": summary.checkpoint,
        "base_bytes_beside_the_servers": summary.weight_bytes - adapter_bytes(summary.checkpoint, way),
        "gpu_bytes_left_behind": torch.cuda.memory_allocated() - before if torch.cuda.is_available() else None,
        "parity": parity,
        "steps": steps,
        **handed_over(options, config, run),
    }


def adapter_bytes(checkpoint: Path, way: str) -> int:
    """Return the bytes of the trainer's own copy of the adapter; 0 with `memory`."""
    return 0 if way == "memory" else sum(tensor.nbytes for tensor in load(checkpoint).values())


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    matrices: dict[str, torch.Tensor] = load_file(checkpoint / "adapter_model.safetensors")
    return matrices


def handed_over(options: argparse.Namespace, config: TrainConfig, run: RunDirectory) -> dict[str, Any]:
    """Publish an unchanged adapter repeatedly; return the milliseconds, with and without the first token."""
    mode = WAYS[config.way](config, RunContext(name=str(run.path), scratch=run.served))
    try:
        mode.open()
        bare, with_token = [], []
        for _ in range(options.handovers):
            start = time.perf_counter()
            with mode.publish(Update()) as window:
                pass
            times = window.times
            first_token(mode.endpoint)
            with_token.append(1e3 * (time.perf_counter() - start))
            bare.append(1e3 * (times.pause_s + times.publish_s))
    finally:
        mode.close()
    return {
        "handover_ms": {"p50": statistics.median(bare), "p90": sorted(bare)[int(0.9 * len(bare))], "max": max(bare)},
        "handover_and_first_token_ms": {"p50": statistics.median(with_token), "max": max(with_token)},
    }


def first_token(endpoint: Endpoint) -> None:
    body = {"model": endpoint.model, "prompt": [5] * 32, "max_tokens": 1}
    with open_http(endpoint.url) as http:
        http.post("/v1/completions", json=body).raise_for_status()


def compare_speed(options: argparse.Namespace, urls: tuple[str, str], adapter: Path) -> dict[str, Any]:
    """Generate on both servers alternately: stock vLLM with the saved adapter, Bridge with the trained slot."""
    with VllmClient(urls[0], timeout_s=60) as plain:
        plain.load_adapter(ADAPTER, adapter)
    stock_rates, patched_rates = rates(urls, options, (ADAPTER, protocol.ADAPTER))
    figures = compared(stock_rates, patched_rates)
    if options.base:
        figures["base_tokens_per_s"] = statistics.median(rates(urls, options)[1])
    return figures


def compare_with_peft(folder: Path, checkpoint: Path, sampled: Sampled) -> dict[str, float]:
    """Compare the server's log-probs with those of the base model and the saved adapter in PEFT."""
    base = folder / "base"
    if not base.is_dir():
        base.mkdir()
        model_folder.save(attach(manifest.load(folder / "manifest.json")).model, folder / "model", base)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device)
    without = logprob_diffs(PreparedModel(plain), served_groups := sampled.by(newest_adapter(sampled)))
    with_adapter = PeftModel.from_pretrained(plain, checkpoint).eval().base_model.model
    parity = logprob_diffs(PreparedModel(with_adapter), served_groups)
    alone = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device)
    of_base = logprob_diffs(PreparedModel(alone), sampled.by(None))
    return {
        "mean": parity.mean().item(), "max": parity.max().item(), "base_alone_max": without.max().item(),
        "base_served_max": of_base.max().item(),
    }  # fmt: skip


def newest_adapter(sampled: Sampled) -> str:
    """Return the name of the adapter that the server lists in addition to the base model."""
    with VllmClient(sampled.url) as server:
        return next(model.id for model in server.models() if model.id.startswith(protocol.ADAPTER))


def graphs_captured(log: Path) -> list[str]:
    """Return vLLM's log lines about captured CUDA graphs."""
    return [line for line in log.read_text().splitlines() if re.search(r"[Gg]raph capturing finished", line)][:1]


if __name__ == "__main__":
    main()
