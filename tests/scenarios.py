"""End-to-end scenarios that run alike on the CPU and on a GPU: a real server, the real command line, real files.

Not covered: what needs no server (`tests/unit`, `tests/cli`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bridge.config import ServeConfig
from bridge.rollouts import Endpoint, Sampler
from bridge.types import Group
from bridge.verify import NEW_TOKENS, logprob_diffs, sample
from bridge.weights import manifest
from bridge.weights.manifest import Manifest
from cli import children
from cli.serve import free_port
from cli.server_command import ServerCommand

START_LIMIT_S = 300
PARITY_LIMIT = 0.03
"""Nats: two bf16 engines differ by about half of it on models of this size before any training."""
ENVIRONMENT = Path(__file__).parent / "models" / "vowels.py"


@dataclass(frozen=True)
class LiveServer:
    """A patched vLLM that runs."""

    manifest: Manifest
    path: Path
    """Where the manifest lies."""
    child: children.Child

    @property
    def sampler(self) -> Sampler:
        """A connection that samples as training does."""
        return Sampler(Endpoint(url=self.manifest.url), max_new_tokens=NEW_TOKENS, temperature=1.0, timeout_s=120)

    def sample(self) -> list[Group]:
        """Sample completions of the same random prompts as always."""
        return sample(self.sampler, 301)


@contextmanager
def served(model: Path, folder: Path, *flags: str) -> Iterator[LiveServer]:
    """Run a server for `model` and wait until it can be attached to."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ServeConfig(
        model=str(model),
        port=free_port("127.0.0.1"),
        max_model_len=2048,
        gpu_memory_utilization=0.2 if torch.cuda.is_available() else None,
        vllm_config_path=folder / manifest.MANIFEST_NAME,
    )
    command = ServerCommand.of(config, list(flags))
    log = folder / "serve.log"
    child = children.start(command.argv, command.environment, log)
    try:
        ready = children.wait_until(child, command.manifest.exists, limit_s=START_LIMIT_S, tell=lambda _: None)
        assert ready, log.read_text()[-4000:]
        yield LiveServer(manifest.load(command.manifest), command.manifest, child)
    finally:
        children.stop(child)


def bridge(*arguments: str | Path, folder: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the `bridge` command in `folder` and check its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", "from cli.main import main; main()", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == expect, f"exit code {done.returncode}, expected {expect}\n{done.stdout}\n{done.stderr}"
    return done


def trains_in_place(server: LiveServer, folder: Path, *flags: str, mode: str = "shared_vllm") -> None:
    """Train three steps through the command line; the server must then equal the checkpoint in plain transformers."""
    before = server.sample()
    bridge(
        *("train", "--mode", mode, *flags, "--model-name", server.manifest.model, "--training-steps", "3"),
        *("--environment", f"{ENVIRONMENT}:Vowels", "--lr", "3e-3", "--max-new-tokens", "16"),
        *("--vllm-config-path", server.path, "--run-dir", folder / "run", "--save-path", folder / "saved"),
        folder=folder,
    )
    device = "cpu" if server.manifest.gpu_uuid is None else "cuda"
    equals_the_samples_after(folder / "saved" / "step_3", before, server.sample(), device=device)
    steps = metrics(folder / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["weight_version"] - steps[0]["weight_version"] for step in steps] == [0, 1, 2]
    assert all(step["changed_weight_share"] > 0.01 for step in steps), steps
    assert all(step["logprob_diff_mean"] < PARITY_LIMIT for step in steps), steps


def equals_the_samples_after(checkpoint: Path, before: list[Group], after: list[Group], *, device: str) -> None:
    """Check that `checkpoint` in plain transformers made the samples `after` training, and not those `before`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
    parity, moved = (logprob_diffs(model, samples).max().item() for samples in (after, before))
    assert parity < PARITY_LIMIT, (parity, moved)
    assert moved > 10 * parity, (moved, parity)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the steps of a run, one after the other."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def verifies(server: LiveServer, folder: Path) -> None:
    """Run `bridge verify --json` and check that every line passes and nothing was changed."""
    before = server.sample()
    printed = bridge("verify", "--json", "--vllm-config-path", server.path, folder=folder).stdout
    rows: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
    assert [row["status"] for row in rows] == ["PASS"] * len(rows), rows
    assert len(rows) >= 7, rows
    after = server.sample()
    assert [group.completions for group in before] == [group.completions for group in after]
