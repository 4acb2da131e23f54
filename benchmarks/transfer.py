"""Sending weights to servers on other GPUs: GB/s of a transfer, and the seconds in which a server does not generate.

    python -m benchmarks.transfer --sizes 7b
    python -m benchmarks.transfer --sizes 7b --servers 3
    python -m benchmarks.transfer --sizes tiny           # also without a GPU, over gloo

The trainer's random weights are on the first GPU, and a stock vLLM with dummy weights is on each of the next GPUs.
Updates are measured on idle servers, and with requests in flight, which are kept. At the end each server samples, and
its log-probs are compared with those of the trainer's model.

Not covered: whole steps (`benchmarks.grpo --ours "adamw-8bit --mode none --reload transfer --trainer-device cuda:1"`).
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import _servers
from benchmarks._models import SIZES, make_model
from benchmarks._results import say, write
from bridge.checks.one_copy_proof import logprob_diffs, sample
from bridge.config import SamplingConfig, TrainConfig
from bridge.core import logs
from bridge.modes.mode import RunContext
from bridge.modes.transfer import Transfer
from bridge.passes.prepared_model import PreparedModel
from bridge.processes.server_command import ServerCommand
from bridge.rollouts.sampler import Sampler
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update
from bridge.server.protocol import TRANSFER_FLAG
from bridge.weights import loaded
from bridge.weights.attach import OpenedModel
from tests import gloo_transfer
from tests.fenced import publish

ON_GPU = torch.cuda.is_available()
SETTLE_S = 1.0
"""Seconds to wait until all requests of a round are in flight."""


def main() -> None:
    """Measure each size."""
    flags = _servers.parser(__doc__, rounds=10)
    flags.add_argument("--sizes", nargs="+", choices=SIZES, default=["7b"])
    flags.add_argument("--servers", type=int, default=1, help="servers to send to, one a GPU")
    options = flags.parse_args()
    results = {size: measure(size, options) for size in options.sizes}
    say(f"written: {write('transfer', results, options.out)}")


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Send weights to idle and busy servers of one size, and compare their samples with the trainer's model."""
    with TemporaryDirectory(prefix="bridge-bench-") as scratch, ExitStack() as running:
        folder = Path(scratch)
        model = make_model(size, folder / "model")
        if not ON_GPU:
            gloo_transfer.install(folder / "site")
            gloo_transfer.send_over_gloo()
        urls = [
            running.enter_context(_servers.served(server_command(model, folder, gpu), folder / f"{gpu}.log"))
            for gpu in range(1, options.servers + 1)
        ]
        loaded.load = random_copy
        config = TrainConfig.of(
            model_name=str(model), mode="none", reload="transfer", servers=tuple(urls),
            trainer_device="cuda:0" if ON_GPU else "cpu",
        )  # fmt: skip
        running.enter_context(logs.handled_by(logging.StreamHandler()))
        mode = Transfer(config, RunContext(name="benchmark", scratch=folder))
        running.callback(mode.close)
        opened = mode.open()
        say("the first transfer is done")
        idle = [publish(mode.publish(Update())) for _ in range(options.rounds)]
        busy = list[FenceTimes]()
        for _ in range(options.rounds):
            with requests_in_flight(urls, options):
                busy.append(publish(mode.publish(Update())))
        num_bytes = sum(parameter.nbytes for parameter in opened.model.parameters())
        result = {
            "weight_gb": num_bytes / 1e9,
            "servers": options.servers,
            "idle": summary(idle, num_bytes),
            "busy": summary(busy, num_bytes),
            "parity_mean": [parity(url, opened) for url in urls],
        }
        say(f"{size}: {json.dumps(result, indent=1)}")
        return result


def server_command(model: Path, folder: Path, gpu: int) -> ServerCommand:
    """Return the command of a stock server on one GPU that accepts weights."""
    command = _servers.stock(_servers.serve_command(model, folder))
    outer = {"VLLM_SERVER_DEV_MODE": "1"}
    if ON_GPU:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        outer["CUDA_VISIBLE_DEVICES"] = shown[gpu] if len(shown) > gpu else str(gpu)
    else:
        outer["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{Path.cwd()}"
    argv = (*command.argv, *TRANSFER_FLAG, "--enforce-eager")
    return replace(command, argv=argv, environment={**command.environment, **outer})


def random_copy(model: str, *, device: str, **_: Any) -> OpenedModel:
    """Return a model with random weights on the device, without writing a file."""
    target = torch.device(device)
    with target:
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    num_bytes = sum(parameter.nbytes for parameter in made.parameters())
    return OpenedModel(model=made.eval(), device=target, lr_factors={}, open_s=0.0, weight_bytes=num_bytes)


@contextmanager
def requests_in_flight(urls: Sequence[str], options: argparse.Namespace) -> Iterator[None]:
    """Generate on every server during the block, and wait for the completions after it."""

    def generate(url: str) -> None:
        with suppress(httpx.HTTPError):
            asyncio.run(_servers.one_round(url, options))

    threads = [threading.Thread(target=generate, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    threading.Event().wait(SETTLE_S)
    yield
    for thread in threads:
        thread.join()


def summary(updates: Sequence[FenceTimes], num_bytes: int) -> dict[str, float]:
    """Return medians: the seconds of the fence, of its pause, and of the transfer and resumption together."""
    sent_s = statistics.median(times.publish_s for times in updates)
    return {
        "fence_s": statistics.median(times.pause_s + times.publish_s for times in updates),
        "pause_s": statistics.median(times.pause_s for times in updates),
        "sent_s": sent_s,
        "gb_per_s": num_bytes / 1e9 / sent_s,
        "slowest_fence_s": max(times.pause_s + times.publish_s for times in updates),
    }


def parity(url: str, opened: OpenedModel) -> float:
    """Return the mean difference of log-probs between the server's samples and the trainer's model."""
    with Sampler(SamplingConfig(max_new_tokens=24, request_timeout_s=600)) as sampler:
        groups = sample(sampler, Endpoint(url=url), opened.model.config.vocab_size)
    return logprob_diffs(PreparedModel(opened.model), groups).mean().item()


if __name__ == "__main__":
    main()
