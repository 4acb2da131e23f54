"""Measure one copy on one GPU: attaching, the fence, parity after training, and what the patches cost generation.

    python -m benchmarks.one_copy --sizes 0.5b 7b

For each size a Qwen2 configuration with random weights is served twice, side by side: by the stock vLLM and by
`bridge serve-vllm`, both with CUDA graphs and torch.compile on, and take turns in generating. The patched server
is then attached to, verified, trained for three steps in place, and compared with its own checkpoint in plain
transformers.

Not covered: training speed, which depends on the task (`bridge train` prints it for yours).
"""

import argparse
import asyncio
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import bridge
from bridge.client import BridgeClient
from bridge.config import ServeConfig, TrainConfig
from bridge.rollouts import Sampler
from bridge.run_directory import RunDirectory
from bridge.training.loop import train
from bridge.types import Problem
from bridge.verify import logprob_diffs, sample, verify
from bridge.weights import fence, manifest
from bridge.weights.attach import AttachedModel, attach
from cli import children
from cli.serve import free_port
from cli.server_command import ServerCommand
from patches.compatibility import installed_version
from tests.models.tiny import write_tokenizer

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
"""Qwen2.5's own shapes, and one for a try on the CPU."""
NUM_STEPS = 3
START_LIMIT_S = 420


class Parity:
    """A task without meaning whose rewards differ, so that three steps change every weight."""

    def __iter__(self) -> Iterator[Problem]:
        """Yield a few short prompts."""
        for number in range(64):
            yield {"prompt": f"{number} and {number * 7 % 64} make "}

    def score(self, problem: Problem, completion: str) -> float:
        """Return the share of characters with an even code."""
        del problem
        return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))


def main() -> None:
    """Measure every size and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5b", "7b"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--requests", type=int, default=256, help="concurrent completions of a round")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of generation per server")
    options = parser.parse_args()
    results = {size: measure(size, options) for size in options.sizes}
    write(results, options.out)


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Serve one size twice and return every figure."""
    with TemporaryDirectory(prefix="bridge-bench-") as scratch:
        folder = Path(scratch)
        model = make_model(size, folder / "model")
        command = serve_command(model, folder)
        with served(command, folder / "patched.log") as url:
            with served(stock(serve_command(model, folder)), folder / "stock.log") as stock_url:
                stock_rates, patched_rates = rates((stock_url, url), options)
            figures = in_place(manifest.load(command.manifest), model, folder)
    result = {
        "stock_tokens_per_s": statistics.median(stock_rates),
        "patched_tokens_per_s": statistics.median(patched_rates),
        "patched_over_stock": statistics.median(
            patched / plain for patched, plain in zip(patched_rates, stock_rates, strict=True)
        ),
        "rounds": {"stock": stock_rates, "patched": patched_rates},
        **figures,
    }
    say(f"{size}: {json.dumps({k: v for k, v in result.items() if k != 'rounds'}, indent=1)}")
    return result


def make_model(size: str, folder: Path) -> Path:
    """Write configuration and tokenizer; the weights are vLLM's dummies until `scatter` gives them a spread."""
    config = Qwen2Config(
        **SIZES[size], max_position_embeddings=4096, bos_token_id=None, eos_token_id=2, dtype="bfloat16"
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    write_tokenizer(folder, 1024)
    return folder


def serve_command(model: Path, folder: Path) -> ServerCommand:
    """Return the patched server's command: `bridge serve-vllm --gpu-memory-utilization 0.3`."""
    share = 0.3 if torch.cuda.is_available() else None
    config = ServeConfig(
        model=str(model), port=free_port("127.0.0.1"), gpu_memory_utilization=share, max_model_len=1024,
        vllm_config_path=folder / "manifest.json",
    )  # fmt: skip
    return ServerCommand.of(config, ["--load-format", "dummy", "--no-enable-log-requests"])


def stock(command: ServerCommand) -> ServerCommand:
    """Return the same command without anything of Bridge."""
    argv = list(command.argv)
    at = argv.index("--worker-extension-cls")
    del argv[at : at + 2]
    ours = {"VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_PLUGINS", "BRIDGE_MANIFEST_PATH"}
    environment = {name: value for name, value in command.environment.items() if name not in ours}
    return replace(command, argv=tuple(argv), environment=environment)


@contextmanager
def served(command: ServerCommand, log: Path) -> Iterator[str]:
    """Run a server and give its address once it answers."""
    port = command.argv[command.argv.index("--port") + 1]
    url = f"http://127.0.0.1:{port}"
    patched = "--worker-extension-cls" in command.argv

    def is_ready() -> bool:
        try:
            answers = httpx.get(f"{url}/health", timeout=2).is_success
        except httpx.TransportError:
            return False
        return answers and (not patched or command.manifest.exists())

    start = time.perf_counter()
    child = children.start(command.argv, command.environment, log)
    try:
        if not children.wait_until(child, is_ready, limit_s=START_LIMIT_S, tell=lambda _: None):
            raise SystemExit(log.read_text()[-6000:])
        say(f"{log.stem} server up after {time.perf_counter() - start:.0f} s")
        yield url
    finally:
        children.stop(child)


def rates(urls: Sequence[str], options: argparse.Namespace) -> list[list[float]]:
    """Return each server's tokens/s per round, after one that warms up; who goes first alternates."""
    columns: list[list[float]] = [[] for _ in urls]
    for number in range(options.rounds + 1):
        for place in sorted(range(len(urls)), reverse=number % 2 == 1):
            columns[place].append(asyncio.run(one_round(urls[place], options)))
    return [column[1:] for column in columns]


async def one_round(url: str, options: argparse.Namespace) -> float:
    """Generate `requests` x `tokens` tokens at once and return tokens/s."""
    limits = httpx.Limits(max_connections=options.requests)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": name, "max_tokens": options.tokens, "ignore_eos": True, "temperature": 1.0}
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json={**body, "prompt": [5 + i % 90] * 32}) for i in range(options.requests))
        )
    for answer in answers:
        answer.raise_for_status()
    return float(options.requests * options.tokens / (time.perf_counter() - start))


def in_place(exported: manifest.Manifest, model: Path, folder: Path) -> dict[str, Any]:
    """Attach, prove one copy, pass the idle fence, train, and compare with the checkpoint."""
    with BridgeClient(exported, timeout_s=600) as client:
        attached = attach(exported)
        attach_ms = [attached.attach_s * 1e3]
        fence.update(client, lambda: scatter(attached), in_flight="keep")
        checks = list(verify(folder / "manifest.json"))
        idle = [fence.update(client, lambda: None, in_flight="keep") for _ in range(200)]
    sampler = Sampler(exported.url, max_new_tokens=24, temperature=1.0, timeout_s=600)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    before = sample(sampler, vocabulary)
    config = TrainConfig(
        model_name=str(model), training_steps=NUM_STEPS, lr=3e-5, max_new_tokens=64, micro_batch_tokens=4096,
        gradient_checkpointing=True, vllm_config_path=folder / "manifest.json", save_path=folder / "saved",
    )  # fmt: skip
    metrics: list[dict[str, Any]] = []
    run = RunDirectory.create(folder / "run", environment="parity")
    summary = train(config, Parity(), run, lambda step: metrics.append(asdict(step)))
    attach_ms.append(summary.attach_ms)
    gc.collect()
    torch.cuda.empty_cache()
    after = sample(sampler, vocabulary)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = AutoModelForCausalLM.from_pretrained(summary.checkpoint, dtype=torch.bfloat16).to(device)
    parity, moved = logprob_diffs(checkpoint, after), logprob_diffs(checkpoint, before)
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


def scatter(attached: AttachedModel) -> None:
    """Give the live weights a spread that says something: logits of about +-0.5, norms around one."""
    generator = torch.Generator(device=attached.device).manual_seed(0)
    with torch.no_grad():
        for parameter in attached.model.parameters():
            centre, spread = (1.0, 0.1) if parameter.ndim == 1 else (0.0, 0.5 / math.sqrt(parameter.shape[-1]))
            parameter.normal_(centre, spread, generator=generator)


def write(results: dict[str, Any], out: Path) -> None:
    """Write the figures to a file named by hardware, vLLM and date."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    vllm = installed_version()
    document = {
        "command": f"python -m benchmarks.one_copy {' '.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
        "versions": {"bridge": bridge.__version__, "vllm": vllm, "torch": str(torch.__version__)},
        "results": results,
    }
    out.mkdir(parents=True, exist_ok=True)
    name = f"one_copy-{hardware.replace(' ', '-').lower()}-vllm-{vllm}-{document['date']}.json"
    (out / name).write_text(json.dumps(document, indent=1) + "\n")
    say(f"written: {out / name}")


def say(line: str) -> None:
    """Tell a person how far it is."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
