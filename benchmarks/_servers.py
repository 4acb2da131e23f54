"""What the benchmarks share: models with random weights, servers side by side, and where results go.

Not covered: what is measured (a file each).
"""

import argparse
import asyncio
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen2Config

import bridge
from bridge.config import ServeConfig
from bridge.types import Problem
from bridge.weights.attach import AttachedModel
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
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
"""Qwen2.5's own shapes, and one for a try on the CPU."""
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


def make_model(size: str, folder: Path) -> Path:
    """Write configuration and tokenizer; the weights are vLLM's dummies until `scatter` gives them a spread."""
    config = Qwen2Config(
        **SIZES[size], max_position_embeddings=4096, bos_token_id=None, eos_token_id=2, dtype="bfloat16"
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    write_tokenizer(folder, 1024)
    return folder


def serve_command(model: Path, folder: Path, *, max_lora_rank: int | None = None) -> ServerCommand:
    """Return the patched server's command: `bridge serve-vllm --gpu-memory-utilization 0.3`."""
    share = 0.3 if torch.cuda.is_available() else None
    config = ServeConfig(
        model=str(model), port=free_port("127.0.0.1"), gpu_memory_utilization=share, max_model_len=1024,
        vllm_config_path=folder / "manifest.json", max_lora_rank=max_lora_rank,
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


def rates(
    urls: Sequence[str], options: argparse.Namespace, models: Sequence[str | None] = (None, None)
) -> list[list[float]]:
    """Return each server's tokens/s per round, after one that warms up; who goes first alternates."""
    columns: list[list[float]] = [[] for _ in urls]
    for number in range(options.rounds + 1):
        for place in sorted(range(len(urls)), reverse=number % 2 == 1):
            columns[place].append(asyncio.run(one_round(urls[place], options, models[place])))
    return [column[1:] for column in columns]


async def one_round(url: str, options: argparse.Namespace, model: str | None = None) -> float:
    """Generate `requests` x `tokens` tokens at once by `model`, else the first that is served; return tokens/s."""
    limits = httpx.Limits(max_connections=options.requests)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        name = model or (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": name, "max_tokens": options.tokens, "ignore_eos": True, "temperature": 1.0}
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json={**body, "prompt": [5 + i % 90] * 32}) for i in range(options.requests))
        )
    for answer in answers:
        answer.raise_for_status()
    return float(options.requests * options.tokens / (time.perf_counter() - start))


def scatter(attached: AttachedModel) -> None:
    """Give the live weights a spread that says something: logits of about +-0.5, norms around one."""
    generator = torch.Generator(device=attached.device).manual_seed(0)
    with torch.no_grad():
        for parameter in attached.model.parameters():
            centre, spread = (1.0, 0.1) if parameter.ndim == 1 else (0.0, 0.5 / math.sqrt(parameter.shape[-1]))
            parameter.normal_(centre, spread, generator=generator)


def write(benchmark: str, results: Mapping[str, Any], out: Path) -> None:
    """Write the figures to a file named by hardware, vLLM and date."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    vllm = installed_version()
    document = {
        "command": f"python -m benchmarks.{benchmark} {' '.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
        "versions": {"bridge": bridge.__version__, "vllm": vllm, "torch": str(torch.__version__)},
        "results": results,
    }
    out.mkdir(parents=True, exist_ok=True)
    name = f"{benchmark}-{hardware.replace(' ', '-').lower()}-vllm-{vllm}-{document['date']}.json"
    (out / name).write_text(json.dumps(document, indent=1) + "\n")
    say(f"written: {out / name}")


def say(line: str) -> None:
    """Tell a person how far it is."""
    print(line, file=sys.stderr, flush=True)
