"""Atropos as released on PyPI, end to end: its API, one of its environments, Bridge's server and trainer.

Not covered: failures (`tests/unit/atropos/`), and environments of `bridge env` (`tests/cli/test_env.py`).
"""

import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import httpx
import pytest

from bridge.core.address import free_port
from bridge.processes import children
from bridge.server import manifest
from tests import forked, scenarios
from tests.models import answering, tiny
from tests.scenarios import LiveServer

START_LIMIT_S = 120
RUN_LIMIT_S = 400.0
STEPS = 5
BATCH_SIZE, GROUP_SIZE = 32, 4
MOST_SAMPLED = BATCH_SIZE * 2 * 8
"""The most tokens per batch that the model can sample in two turns of eight tokens; it reads more than that."""
LR = "3e-5"
"""Environments run ahead, so samples that are several steps old must still agree with the trainer."""
ENVIRONMENT = Path(__file__).with_name("atropos_environment.py")
DOCUMENT = Path(__file__).parents[2] / "docs" / "atropos.md"
REPOSITORY = "ATROPOS_REPOSITORY"
"""Variable with a checkout of https://github.com/NousResearch/atropos, whose package has no environments."""
GSM8K = """
import datasets, runpy, sys
rows = [{"question": f"What is {n} - {n - 1}?", "answer": "It is 1. #### 1"} for n in range(30)]
datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_list(rows)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs an environment's file with these rows instead of the hub's dataset."""
SOME_RIGHT = ("\\boxed{1}", *(f"{one}{other} " for one in "bdfgklmnpr" for other in "aeiouyst"))
"""The vocabulary of a model; completions with the first word are right, about half of them."""


@pytest.mark.slow
@pytest.mark.core
def test_atropos_environment_is_trained_on_in_place(llama: LiveServer, tmp_path: Path) -> None:
    with api(tmp_path) as url:
        with environment(tmp_path, url, llama) as player:
            output = train(llama, tmp_path, url)
            assert player.exit_code() in (None, 0), player.log.read_text()[-4000:]
        assert httpx.get(f"{url}/status").json()["current_step"] >= STEPS
    rows = scenarios.metrics(tmp_path / "run")
    scenarios.check_metrics(tmp_path / "run", steps=STEPS)
    assert all(row["unscored"] == 0 for row in rows), output
    assert all(0 < row["tokens_trained"] <= MOST_SAMPLED for row in rows), rows
    assert (llama.status().state, llama.status().version) == ("serving", rows[-1]["weight_version"])
    llama.sample()  # raises if it does not answer


@pytest.mark.slow
def test_unmodified_atropos_gsm8k_is_trained_on(tmp_path: Path) -> None:
    file = Path(os.environ.get(REPOSITORY, "")) / "environments" / "gsm8k_server.py"
    if not os.environ.get(REPOSITORY) or not file.is_file():
        pytest.skip(f"no Atropos: git clone https://github.com/NousResearch/atropos, and {REPOSITORY}=atropos")
    model = answering.write(tmp_path / "model", answers=SOME_RIGHT)
    with scenarios.served(model, tmp_path / "server") as server, api(tmp_path) as url:
        program = ("-c", GSM8K, str(file))
        with environment(tmp_path, url, server, program, max_token_length=100, steps_per_eval=1000) as player:
            output = train(server, tmp_path, url)
            assert player.exit_code() in (None, 0), player.log.read_text()[-4000:]
    rows = scenarios.metrics(tmp_path / "run")
    assert len(rows) == STEPS, output
    assert all(row["unscored"] == 0 and row["reward_std"] > 0 for row in rows), rows
    assert rows[0]["logprob_diff_mean"] < scenarios.PARITY_LIMIT


@pytest.mark.slow
def test_atropos_environment_samples_from_every_server(tmp_path: Path) -> None:
    model, run, steps = tiny.write(tiny.llama(), tmp_path / "model", std=0.06), tmp_path / "run", 3
    port = next(port for _ in count() if is_free(1 + (port := free_port("127.0.0.1"))))
    with api(tmp_path) as url:
        choices = {
            "--gpus": 2, "--model": model, "--rollouts": "atropos", "--atropos-url": url, "--lr": scenarios.LR,
            "--training-steps": steps, "--batch-size": BATCH_SIZE, "--group-size": GROUP_SIZE, "--run-dir": run,
            "--max-model-len": scenarios.MAX_MODEL_LEN, "--port": port,
            "--vllm-config-path": tmp_path / manifest.MANIFEST_NAME,
        }  # fmt: skip
        flags = [str(word) for choice in choices.items() for word in choice]
        argv = [sys.executable, "-c", forked.BRIDGE, "run", *flags, "--", *scenarios.EAGER]
        trainer = children.start(argv, {**os.environ, **scenarios.IN_THE_ENGINE}, tmp_path / "train.log")
        try:
            servers = f"http://127.0.0.1:{port},http://127.0.0.1:{port + 1}"
            message = f"environments can sample from all servers: bridge env --server-url {servers}"
            has_logged = children.wait_until(
                trainer, lambda: message in trainer.log.read_text(), limit_s=RUN_LIMIT_S, progress=lambda _: None
            )
            assert has_logged, trainer.log.read_text()[-4000:]
            scenarios.bridge(
                *("env", f"{scenarios.ENVIRONMENT}:Vowels", "--model", model, "--atropos-url", url),
                *("--server-url", servers, "--group-size", str(GROUP_SIZE), "--max-new-tokens", "12"),
                folder=tmp_path,
            )
            children.wait_until(trainer, lambda: False, limit_s=RUN_LIMIT_S, progress=lambda _: None)
            assert trainer.exit_code() == 0, trainer.log.read_text()[-4000:]
        finally:
            children.stop(trainer)
    rows = scenarios.metrics(run)
    assert [row["weight_version"] for row in rows] == [*range(1, steps + 1)]
    assert rows[0]["staleness"] == 0
    assert rows[0]["logprob_diff_mean"] < scenarios.PARITY_LIMIT
    assert all(row["staleness"] is not None and 1 <= row["rank_token_balance"] < 2 for row in rows)
    for log in (run / "serve.log", run / "ranks" / "1" / "serve.log"):
        assert re.search(r"POST /\S*completions", log.read_text())


def is_free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


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
def environment(
    folder: Path, url: str, server: LiveServer, program: Sequence[str] = (str(ENVIRONMENT),), **env: object
) -> Iterator[children.Child]:
    """Run an environment that samples from `server` and feeds the API at `url`, as docs/atropos.md has it."""
    (document,) = re.findall(r"```yaml\n(# servers.yaml.*?)```", DOCUMENT.read_text(), re.DOTALL)
    written = document.replace("http://127.0.0.1:9001", server.manifest.url).replace("MODEL", server.manifest.model)
    (folder / "servers.yaml").write_text(written)
    choices = {
        "config": folder / "servers.yaml",
        "env.rollout_server_url": url,
        "env.tokenizer_name": server.manifest.model,
        "env.use_wandb": "false",
        "env.group_size": GROUP_SIZE,
        "env.max_batches_offpolicy": 1,
        **{f"env.{name}": value for name, value in env.items()},
    }
    flags = [text for name, value in choices.items() for text in (f"--{name}", str(value))]
    offline = {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    child = children.start([sys.executable, *program, "serve", *flags], offline, folder / "environment.log")
    try:
        yield child
    finally:
        children.stop(child)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/info", trust_env=False).is_success
    except httpx.TransportError:
        return False
