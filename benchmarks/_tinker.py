"""A program that serves Tinker's API and trains by it on the task of `_work.py`: one side of `two_trees --tinker`.

It takes the flags of `bridge run` about optimization, computation and the adapter, starts a server with `bridge.serve`,
answers clients, and starts one (`_tinker_client.py`), which prints one JSON object per step.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bridge
from benchmarks import _sides
from benchmarks._library import Program, choices
from benchmarks._sides import Work
from bridge.config import TrainConfig
from bridge.core.address import free_port
from bridge.tinker import serving

BASE = "base"
"""The model's name for clients."""
MOST_ADAPTERS = 4
KEY = "tml-benchmark"


def main() -> None:
    """Serve and train until this process is killed, and print one line per step."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout, which is reserved for results
    model, work, *variant = sys.argv[1:]
    program = Program(Path(model), Work(**json.loads(work)), variant)
    config = TrainConfig.of(model_name=model, **choices(variant))
    port = free_port("127.0.0.1")
    with client(program.model, program.work, port, output=lines, rank=config.lora.r) as process:
        take_steps(process, sys.maxsize)
        threading.Thread(target=_end_with, args=(process,), daemon=True).start()
        serve(program, config, port)


def serve(program: Program, config: TrainConfig, port: int) -> None:
    """Answer clients until this process is killed or interrupted."""
    work = program.work
    server: dict[str, Any] = {"max_model_len": work.max_model_len}
    flags = _sides.engine_flags(work.completions)
    if work.share:
        server["gpu_memory_utilization"] = work.share
    is_lora = config.mode == "lora_only"
    if is_lora:
        server |= {"lora": config.lora, "several_adapters": True}
        flags += ["--max-loras", str(MOST_ADAPTERS), "--max-cpu-loras", str(4 * MOST_ADAPTERS)]
    with (
        TemporaryDirectory(prefix="bridge-bench-") as folder,
        bridge.serve(
            program.model,
            *flags,
            optimizer=config.optimizer,
            compute=config.compute,
            publishing=bridge.PublishingConfig(kv_sleep="never"),
            **server,
        ) as policy,
    ):
        most = MOST_ADAPTERS if is_lora else None
        trainer = serving.trainer_of(policy, Path(folder), base_name=BASE, most_adapters=most)
        serving.serve(trainer, host="127.0.0.1", port=port, key=None)


def _end_with(process: "subprocess.Popen[bytes]") -> None:
    """End this process if its client ends."""
    process.wait()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def client(model: Path, work: Work, port: int, *, output: Any, rank: int) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a client that prints its steps to `output`; it is killed at the end of the block."""
    argv = [
        sys.executable, "-m", "benchmarks._tinker_client", f"http://127.0.0.1:{port}", str(model),
        json.dumps(asdict(work)), str(rank),
    ]  # fmt: skip
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def take_steps(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Let a client take steps."""
    assert process.stdin is not None
    process.stdin.write(f"{number}\n".encode())
    process.stdin.flush()


if __name__ == "__main__":
    main()
