"""The real client against `bridge tinker` on a patched server without vLLM; Ctrl-C, a kill and a restart.

Not covered: what vLLM samples (`tests/cpu/test_tinker.py`).
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tinker_sdk
from tests.dropping_proxy import dropping
from tests.scenarios import LiveServer
from tests.unit import patched_server

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("tinker"), tinker_sdk.needs_client]
PAIRS = [([5, 6, 7, 8, 9], [10, 11]), ([12, 13, 14], [15, 16, 17, 18]), ([20, 9], [21])]
TRAIN = """
import sys, tinker
from tinker import types

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=sys.argv[1], rank=4).result()
inputs = {"target_tokens": [6, 7], "weights": [1.0, 1.0]}
datum = types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs=inputs)
client.forward_backward([datum], "cross_entropy").result()
client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
print(client.model_id, flush=True)
input()
"""

EVERY_CALL = """
import sys, tinker
from tinker import types

def made(client):
    return client.result() if hasattr(client, "result") else client

service = tinker.ServiceClient()
client = made(service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=1))
client.get_info()
inputs = {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}
data = [
    types.Datum(model_input=types.ModelInput.from_ints([5, 6, number]), loss_fn_inputs=inputs) for number in range(9)
]
adam = types.AdamParams(learning_rate=1e-2)
for _ in range(4):
    for part in (data[:5], data[5:]):
        client.forward_backward(part, "cross_entropy")
    print(client.optim_step(adam).result().metrics["unclipped_grad_l2:mean"])
saved = client.save_state("one").result().path.split("/")[-1]
path = client.save_weights_for_sampler("two").result().path
named = made(service.create_sampling_client(model_path=path))
for sampler in (named, made(client.save_weights_and_get_sampling_client())):
    sampler.sample(types.ModelInput.from_ints([5, 6]), 2, types.SamplingParams(max_tokens=4)).result()
print(saved, client.forward(data, "cross_entropy").result().metrics["loss:sum"])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with patched_server.tiny_llama(tmp_path_factory.mktemp("server")) as served:
        yield served


@contextmanager
def door(server: LiveServer, folder: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Run `bridge tinker` on a server; yield its address, the process and its log."""
    argv = [
        *(() if "--max-lora-rank" in more else ("--all-weights",)),
        "--model",
        server.manifest.model,
        "--vllm-config-path",
        str(server.path),
        *more,
    ]
    with tinker_sdk.door(folder, *argv) as opened:
        yield opened


@contextmanager
def client(url: str, model: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a client that trains one step and then waits; yield it with its model's id."""
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "PYTHONPATH": ""}
    log = (folder / "client.log").open("w")
    process = subprocess.Popen(
        [tinker_sdk.PYTHON, "-c", TRAIN, model],
        env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        model_id = process.stdout.readline().strip()
        assert model_id, (folder / "client.log").read_text()
        yield process, model_id
    finally:
        process.kill()
        process.wait()
        log.close()


def about(server: LiveServer, *, is_lora: bool = False) -> dict[str, Any]:
    return tinker_sdk.expected(
        Path(server.manifest.model), base=server.manifest.model, pairs=PAIRS, lr=3e-2 if is_lora else 1e-3,
        tolerance=0.05, is_real=False, is_lora=is_lora,
    )  # fmt: skip


# adapters first: they are compared with the base, which the other test's client trains
@pytest.mark.parametrize("flags", [("--max-lora-rank", "8"), ()], ids=["adapters", "all weights"])
def test_the_real_client_passes_its_checks(server: LiveServer, tmp_path: Path, flags: tuple[str, ...]) -> None:
    with door(server, tmp_path, *flags) as (url, _, _):
        printed = tinker_sdk.checks(url, about(server, is_lora=bool(flags)), tmp_path, limit_s=500)
    assert printed.count("PASS") > 60, printed


def test_ctrl_c_saves_the_model_and_prints_its_path(server: LiveServer, tmp_path: Path) -> None:
    with (
        door(server, tmp_path) as (url, process, log),
        client(url, server.manifest.model, tmp_path) as (_, model_id),
        httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": "tml-x"}, trust_env=False, timeout=60) as http,
        ThreadPoolExecutor(1) as threads,
    ):
        out_of_turn = {"model_id": model_id, "seq_id": 1000, "adam_params": {}}
        promise = http.post("optim_step", json=out_of_turn).json()
        poll = threads.submit(http.post, "retrieve_future", json={"request_id": promise["request_id"]})
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert poll.result().json()["type"] == "try_again"
        assert process.wait(60) == 0, log.read_text()
        assert f"saved: tinker://{model_id}/weights/interrupted-1" in log.read_text()
    folder = tmp_path / "runs" / model_id.replace(":", "_") / "weights" / "interrupted-1"
    assert (folder / "model.safetensors").is_file()
    assert "Traceback" not in log.read_text()


def test_a_killed_door_starts_again_on_the_same_server(server: LiveServer, tmp_path: Path) -> None:
    with door(server, tmp_path) as (url, process, _), client(url, server.manifest.model, tmp_path):
        process.send_signal(signal.SIGKILL)
        process.wait()
    with door(server, tmp_path) as (url, _, _):
        printed = tinker_sdk.checks(url, about(server), tmp_path, limit_s=500)
    assert "PASS  forward: log-probs of every position" in printed, "it begins with the base's weights"


def test_a_killed_client_frees_its_model(server: LiveServer, tmp_path: Path) -> None:
    with door(server, tmp_path) as (url, _, log):
        with client(url, server.manifest.model, tmp_path) as (process, model_id):
            process.kill()
        until = time.monotonic() + 120
        while "is freed" not in log.read_text():
            assert time.monotonic() < until
            time.sleep(1)
        assert f"its weights are at tinker://{model_id}/weights/freed-1" in log.read_text().replace("\n", " ")
        headers = {"x-api-key": "tml-x"}
        with httpx.Client(base_url=f"{url}/api/v1", headers=headers, trust_env=False, timeout=60) as http:
            session = http.post("create_session", json={}).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": server.manifest.model}
            made = http.post("create_model", json=body).json()
            result = http.post("retrieve_future", json={"request_id": made["request_id"]}).json()
    assert result == {"model_id": f"{session}:train:0", "type": "create_model"}, json.dumps(result)


def test_lost_answers_change_no_weight(server: LiveServer, tmp_path: Path) -> None:
    """Every route's first answer is lost, and a tenth of the others: the client repeats what was done already."""

    def printed(url: str) -> str:
        environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "PYTHONPATH": ""}
        done = subprocess.run(
            [tinker_sdk.PYTHON, "-c", EVERY_CALL, server.manifest.model],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    with door(server, tmp_path, "--max-lora-rank", "4") as (url, _, _):
        expected = printed(url)
        with dropping(url, share=0.1) as (through, proxy):
            assert printed(through) == expected
    routes = {route.rpartition("/")[2] for route in proxy.lost}
    assert {
        "create_session", "create_model", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler",
        "create_sampling_session", "asample", "retrieve_future", "get_info",
    } <= routes  # fmt: skip
