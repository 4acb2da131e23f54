"""Atropos as released on PyPI, end to end: its API, one of its environments, our server and our trainer.

Not covered: failures (`tests/unit/test_atropos_stream.py`), and environments of `bridge env` (`tests/cli/test_env.py`).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from cli import children
from cli.serve import free_port
from tests import scenarios
from tests.scenarios import LiveServer

START_LIMIT_S = 120
STEPS = 5
BATCH_SIZE, GROUP_SIZE = 32, 4
MOST_SAMPLED = BATCH_SIZE * 2 * 8
"""The most tokens of a batch that the model can have sampled, in two turns of eight; it read more than that."""
LR = "3e-5"
"""Environments run ahead: samples that are several steps old must still agree with the trainer."""
ENVIRONMENT = Path(__file__).with_name("atropos_environment.py")


def test_a_real_environment_of_atropos_is_trained_on_in_place(llama: LiveServer, tmp_path: Path) -> None:
    with api(tmp_path) as url:
        with environment(tmp_path, url, llama) as player:
            said = train(llama, tmp_path, url)
            assert player.exit_code() in (None, 0), player.log.read_text()[-4000:]
        assert httpx.get(f"{url}/status").json()["current_step"] >= STEPS
    rows = scenarios.metrics(tmp_path / "run")
    scenarios.check_metrics(tmp_path / "run", steps=STEPS)
    assert all(row["unscored"] == 0 for row in rows), said
    assert all(0 < row["tokens_trained"] <= MOST_SAMPLED for row in rows), rows
    assert (llama.status().state, llama.status().version) == ("serving", rows[-1]["weight_version"])
    llama.sample()  # raises if it does not answer


def train(server: LiveServer, folder: Path, url: str) -> str:
    """Train through the command line, and return its stderr."""
    return scenarios.bridge(
        *("train", "--mode", "shared_vllm", "--model-name", server.manifest.model, "--training-steps", str(STEPS)),
        *("--rollouts", "atropos", "--atropos-url", url, "--atropos-timeout-s", str(START_LIMIT_S), "--lr", LR),
        *("--batch-size", str(BATCH_SIZE), "--group-size", str(GROUP_SIZE), "--vllm-config-path", server.path),
        *("--run-dir", folder / "run", "--save-path", folder / "saved"),
        folder=folder,
    ).stderr


@contextmanager
def api(folder: Path) -> Iterator[str]:
    """Run Atropos' own API."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    program = "from atroposlib.cli.run_api import main; main()"
    argv = [sys.executable, "-c", program, "--host", "127.0.0.1", "--port", str(port)]
    child = children.start(argv, os.environ, folder / "api.log")
    try:
        ready = children.wait_until(child, lambda: _answers(url), limit_s=START_LIMIT_S, progress=lambda _: None)
        assert ready, child.log.read_text()[-4000:]
        yield url
        assert child.is_alive(), child.log.read_text()[-4000:]
    finally:
        children.stop(child)


@contextmanager
def environment(folder: Path, url: str, server: LiveServer) -> Iterator[children.Child]:
    """Run an environment that samples from `server` and feeds the API at `url`."""
    choices = {
        "env.rollout_server_url": url,
        "env.tokenizer_name": server.manifest.model,
        "env.group_size": GROUP_SIZE,
        "env.max_batches_offpolicy": 1,
        "openai.base_url": f"{server.manifest.url}/v1",
        "openai.model_name": server.manifest.model,
        "openai.server_type": "vllm",
        "slurm": "False",
    }
    flags = [text for name, value in choices.items() for text in (f"--{name}", str(value))]
    offline = {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    child = children.start([sys.executable, str(ENVIRONMENT), "serve", *flags], offline, folder / "environment.log")
    try:
        yield child
    finally:
        children.stop(child)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/info", trust_env=False).is_success
    except httpx.TransportError:
        return False
