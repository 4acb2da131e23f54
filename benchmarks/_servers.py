"""Stock and patched servers side by side, and their generation speed."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import _dummy_weights, _results, _sides
from benchmarks._results import say
from bridge.config import ServeConfig
from bridge.core.address import free_port
from bridge.errors import ServerUnreachableError
from bridge.processes import children
from bridge.processes.server_command import ServerCommand
from bridge.processes.vllm_flags import MOE_BACKEND, WORKER_EXTENSION
from bridge.server.client import VllmClient, open_async_http
from bridge.server.protocol import COMPLETIONS, TRANSFER_FLAG
from bridge.types import Problem, Quantization

GPUS = 2
"""GPUs needed by a trainer whose vLLM runs on a separate GPU."""
GROUP = _sides.Work().group
"""Completions per prompt in requests like those of a run."""
START_LIMIT_S = 420
NUM_STEPS = 3


class Parity:
    """A meaningless task whose rewards vary, so that three steps change every weight."""

    def __iter__(self) -> Iterator[Problem]:
        """Yield a few short prompts."""
        for number in range(64):
            yield {"prompt": f"{number} and {number * 7 % 64} make "}

    def score(self, problem: Problem, completion: str) -> float:
        """Return the share of characters with an even code point."""
        del problem
        return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options for alternating generation."""
    made = _results.parser(description)
    made.add_argument("--requests", type=_results.count, default=256, help="concurrent completions of a round")
    made.add_argument("--tokens", type=_results.count, default=256, help="tokens of each")
    made.add_argument("--rounds", type=_results.count, default=rounds, help="rounds of generation per server")
    return made


def serve_command(
    model: Path,
    folder: Path,
    *,
    max_lora_rank: int | None = None,
    max_model_len: int = 1024,
    share: float = 0.3,
    num_parts: int = 1,
    quantization: Quantization | None = None,
) -> ServerCommand:
    """Return the patched server's command: `bridge serve-vllm` with the weights of `_dummy_weights.py`."""
    config = ServeConfig(
        model=str(model), port=free_port("127.0.0.1"), max_model_len=max_model_len, tensor_parallel_size=num_parts,
        gpu_memory_utilization=share if torch.cuda.is_available() else None,
        vllm_config_path=folder / "manifest.json", max_lora_rank=max_lora_rank, quantization=quantization,
    )  # fmt: skip
    command = ServerCommand.of(config, ["--load-format", "dummy", "--no-enable-log-requests"])
    importing = {**command.environment, "PYTHONPATH": _sides.environment(_sides.Work())["PYTHONPATH"]}
    return replace(command, environment=_dummy_weights.installed(folder / "plugin", importing))


def stock(command: ServerCommand) -> ServerCommand:
    """Return the same command for stock vLLM, which chooses its own expert kernels."""
    argv = list(command.argv)
    for flag in (WORKER_EXTENSION[0], MOE_BACKEND[0]):
        if flag in argv:
            at = argv.index(flag)
            del argv[at : at + 2]
    ours = {"VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_PLUGINS", "BRIDGE_MANIFEST_PATH"}
    environment = {name: value for name, value in command.environment.items() if name not in ours}
    return replace(command, argv=tuple(argv), environment=environment)


@contextmanager
def on_another_gpu(options: argparse.Namespace) -> Iterator[str]:
    """Run a stock server that accepts weights on `--server-gpu`, and yield its URL; this process uses another GPU."""
    if (count := torch.cuda.device_count()) > 1:
        raise SystemExit(f"error: the trainer sees {count} GPUs, expected only its own: set CUDA_VISIBLE_DEVICES=1")
    options.server_log.parent.mkdir(parents=True, exist_ok=True)
    with served(fed_command(options), options.server_log) as url:
        yield url


def fed_command(options: argparse.Namespace) -> ServerCommand:
    """Return the command of a stock server with the engine settings of both sides; `trl vllm-serve` runs the same."""
    engine = [*_sides.engine_flags(GPUS * options.completions), *_sides.lengths_flags(options.lengths)]
    config = ServeConfig(
        model=str(options.model), port=free_port("127.0.0.1"), max_model_len=options.max_model_len,
        gpu_memory_utilization=options.share if torch.cuda.is_available() else None,
    )  # fmt: skip
    command = ServerCommand.of(config, [*engine, *TRANSFER_FLAG], shares_weights=False)
    outer = {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": options.server_gpu}
    return replace(command, environment={**command.environment, **outer})


@contextmanager
def served(command: ServerCommand, log: Path) -> Iterator[str]:
    """Run a server and yield its address once it responds."""
    port = command.argv[command.argv.index("--port") + 1]
    url = f"http://127.0.0.1:{port}"
    patched = "--worker-extension-cls" in command.argv

    def is_ready() -> bool:
        try:
            with VllmClient(url, timeout_s=2) as server:
                server.check_health()
        except ServerUnreachableError:
            return False
        return not patched or command.manifest.exists()

    start = time.perf_counter()
    child = children.start(command.argv, command.environment, log)
    try:
        if not children.wait_until(child, is_ready, limit_s=START_LIMIT_S, progress=lambda _: None):
            raise SystemExit(log.read_text()[-6000:])
        say(f"{log.stem} server up after {time.perf_counter() - start:.0f} s")
        yield url
    finally:
        children.stop(child)


def rates(
    urls: Sequence[str],
    options: argparse.Namespace,
    models: Sequence[str | None] | None = None,
    *,
    as_rollouts: bool = False,
    stock: Collection[str] = (),
) -> list[list[float]]:
    """Return tokens/s per server and round, after one warm-up round; the order alternates. See `one_round`.

    `stock` are the URLs of the servers that are not patched.
    """
    columns: list[list[float]] = [[] for _ in urls]
    names = models or [None] * len(urls)
    for number in range(options.rounds + 1):
        for index in sorted(range(len(urls)), reverse=number % 2 == 1):
            is_stock = urls[index] in stock
            completed = one_round(urls[index], options, names[index], as_rollouts=as_rollouts, is_stock=is_stock)
            columns[index].append(asyncio.run(completed))
    return [column[1:] for column in columns]


def compared(stock_rates: Sequence[float], patched_rates: Sequence[float]) -> dict[str, Any]:
    """Return both medians, and the median of the per-round ratios."""
    return {
        "stock_tokens_per_s": statistics.median(stock_rates),
        "patched_tokens_per_s": statistics.median(patched_rates),
        "patched_over_stock": statistics.median(
            patched / plain for patched, plain in zip(patched_rates, stock_rates, strict=True)
        ),
        "rounds": {"stock": list(stock_rates), "patched": list(patched_rates)},
    }


async def one_round(
    url: str,
    options: argparse.Namespace,
    model: str | None = None,
    *,
    as_rollouts: bool = False,
    is_stock: bool = False,
) -> float:
    """Generate `requests` x `tokens` tokens concurrently with `model` (default: the first served); return tokens/s.

    With `as_rollouts`, request what a run samples, groups with log-probabilities: from a patched server by its rollout
    route, from a stock server by OpenAI's.
    """
    if as_rollouts and is_stock:
        route, own = "/v1/completions", {"n": GROUP, "logprobs": 0, "ignore_eos": True}
    elif as_rollouts:
        route, own = COMPLETIONS, {"n": GROUP}
    else:
        route, own = "/v1/completions", {"ignore_eos": True}
    async with open_async_http(timeout_s=600) as http:
        name = model or (await http.get(f"{url}/v1/models")).json()["data"][0]["id"]
        body = {"model": name, "max_tokens": options.tokens, "temperature": 1.0, **own}
        prompts = [[5 + i % 90] * 32 for i in range(-(-options.requests // own.get("n", 1)))]
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(http.post(f"{url}{route}", json={**body, "prompt": prompt}) for prompt in prompts)
        )
        seconds = time.perf_counter() - start
    for answer in answers:
        answer.raise_for_status()
    if not as_rollouts or is_stock:  # the rollout route's completions always end at their limit
        return float(options.requests * options.tokens / seconds)
    choices = (choice for answer in answers for choice in answer.json()["choices"])  # some may end early
    num_tokens: int = sum(len(choice["token_ids"]) for choice in choices)
    return num_tokens / seconds
