"""One copy on one GPU: attaching, the fence, parity after training, and the patches' effect on generation speed.

    python -m benchmarks.one_copy --sizes 0.5b 7b
    python -m benchmarks.one_copy --sizes 7b --as-rollouts
    python -m benchmarks.one_copy --sizes qwen3-30b-a3b --generation-only --tensor-parallel-size 2 --share 0.44

For each size, stock vLLM and `bridge serve-vllm` serve a random-weight model side by side, both with CUDA graphs and
torch.compile, and generate alternately: single completions without log-probabilities, or with `--as-rollouts` what a
run samples, groups with log-probabilities, each server by its own route. Unless `--generation-only` is given, the
trainer then attaches to the patched server, verifies it, trains three steps in place, and compares it with its
checkpoint in transformers. The weights are vLLM's dummies, refilled by `_dummy_weights.py`. Stock vLLM chooses its own
expert kernels; `backends` shows what both servers chose.
"""

import argparse
import gc
import json
import re
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks._models import SIZES, make_model
from benchmarks._results import count, say, write
from benchmarks._servers import NUM_STEPS, Parity, compared, parser, rates, serve_command, served, stock
from bridge.checkpoints.run_directory import RunDirectory
from bridge.checks.one_copy_proof import logprob_diffs, sample, verify
from bridge.config import SamplingConfig, TrainConfig
from bridge.passes.prepared_model import PreparedModel
from bridge.rollouts.sampler import Sampler
from bridge.run.trainer import Run
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update
from bridge.weights.attach import attach
from tests.listener import Listener


def main() -> None:
    flags = parser(__doc__, rounds=10)
    flags.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5b", "7b"])
    flags.add_argument("--generation-only", action="store_true", help="attach to nothing, and train nothing")
    flags.add_argument("--tensor-parallel-size", type=count, default=1, help="GPUs of each server")
    flags.add_argument("--as-rollouts", action="store_true", help="generate groups with log-probabilities")
    flags.add_argument("--share", type=float, default=0.3, help="share of a GPU for each server")
    options = flags.parse_args()
    if options.tensor_parallel_size > 1 and not options.generation_only:
        flags.error("--tensor-parallel-size goes with --generation-only: one process cannot train on parts")
    results = {size: measure(size, options) for size in options.sizes}
    say(f"written: {write('one_copy', results, options.out)}")


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Serve one size twice and measure."""
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        folder = Path(scratch)
        model = make_model(size, folder / "model")
        how: dict[str, Any] = {"share": options.share, "num_parts": options.tensor_parallel_size}
        command, figures = serve_command(model, folder, **how), {}
        with served(command, folder / "patched.log") as url:
            with served(stock(serve_command(model, folder, **how)), folder / "stock.log") as stock_url:
                stock_rates, patched_rates = rates(
                    (stock_url, url), options, as_rollouts=options.as_rollouts, stock=(stock_url,)
                )
            if not options.generation_only:
                figures = in_place(manifest.load(command.manifest), model, folder)
        backends = {name: backend(folder / f"{name}.log") for name in ("stock", "patched")}
    result = {**compared(stock_rates, patched_rates), "backends": backends, **figures}
    say(f"{size}: {json.dumps({k: v for k, v in result.items() if k != 'rounds'}, indent=1)}")
    return result


def backend(log: Path) -> str | None:
    """Return the expert kernels that a server chose, from its log; None: it has no experts."""
    chosen = re.search(r"Using (.+) Unquantized MoE (?:LoRA )?backend", log.read_text(errors="replace"))
    return chosen[1] if chosen else None


def in_place(exported: manifest.Manifest, model: Path, folder: Path) -> dict[str, Any]:
    """Attach, verify, time the idle fence, train, and compare with the checkpoint."""
    with BridgeClient(exported, timeout_s=600) as client:
        attached = attach(exported)
        attach_ms = [attached.attach_s * 1e3]
        checks = list(verify(folder / "manifest.json"))
        idle = list[FenceTimes]()
        for _ in range(200):
            with fence.publish(client, Update()) as window:
                pass
            idle.append(window.times)
    endpoint, sampler = Endpoint(url=exported.url), Sampler(SamplingConfig(max_new_tokens=24, request_timeout_s=600))
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    before = sample(sampler, endpoint, vocabulary)
    config = TrainConfig.of(
        model_name=str(model), training_steps=NUM_STEPS, lr=3e-5, max_new_tokens=64, micro_batch_tokens=4096,
        gradient_checkpointing=True, vllm_config_path=folder / "manifest.json", save_path=folder / "saved",
    )  # fmt: skip
    metrics: list[dict[str, Any]] = []
    run = RunDirectory.create(folder / "run", environment="parity")
    summary = Run(config, Parity(), run, Listener(lambda step: metrics.append(dict(step)))).train()
    attach_ms.append(summary.attach_ms)
    gc.collect()
    torch.cuda.empty_cache()
    after = sample(sampler, endpoint, vocabulary)
    sampler.close()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = AutoModelForCausalLM.from_pretrained(summary.checkpoint, dtype=torch.bfloat16).to(device)
    prepared = PreparedModel(checkpoint)
    parity, moved = logprob_diffs(prepared, after), logprob_diffs(prepared, before)
    pauses = sorted(1e3 * (times.pause_s + times.publish_s) for times in idle)
    return {
        "num_params": exported.num_params,
        "attach_ms": attach_ms,
        "weight_bytes_allocated": summary.weight_bytes,
        "fence_idle_ms": {"p50": statistics.median(pauses), "p90": pauses[int(0.9 * len(pauses))], "max": pauses[-1]},
        "fence_training_p50_ms": summary.fence_p50_ms,
        "verify": [f"{check.status} {check.name}: {check.found}" for check in checks],
        "checkpoint_parity": {"mean": parity.mean().item(), "max": parity.max().item()},
        "moved_by_training": {"mean": moved.mean().item(), "max": moved.max().item()},
        "steps": metrics,
    }


if __name__ == "__main__":
    main()
