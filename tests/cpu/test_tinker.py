"""The real `tinker` client trains all weights or adapters of a real vLLM on the CPU: a random model."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests import tinker_sdk
from tests.models import tiny
from tests.unit.tinker.test_client import PAIRS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), tinker_sdk.needs_client]


@pytest.mark.parametrize("is_lora", [False, True], ids=["all weights", "adapters"])
def test_the_real_client_passes_its_checks_on_vllm(tmp_path: Path, is_lora: bool) -> None:
    model = tmp_path / "model"
    tiny.write(tiny.llama(), model)
    about = tinker_sdk.expected(
        model, base="tiny", pairs=PAIRS, lr=3e-2 if is_lora else 1e-3, tolerance=0.05, is_real=True, is_lora=is_lora
    )
    argv = [
        *(("--max-lora-rank", "8") if is_lora else ("--all-weights",)),
        "--model",
        str(model),
        "--base-model",
        "tiny",
        "--max-model-len",
        "512",
    ]
    with tinker_sdk.door(tmp_path, *argv) as (url, process, log):
        printed = tinker_sdk.checks(url, about, tmp_path, limit_s=900)
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
        assert "vLLM loads adapters from folders" not in log.read_text()
    assert printed.count("PASS") > 60, printed


SURVIVES = """
import sys, tinker
from tinker import types

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="tiny", rank=4)
client = client.result() if hasattr(client, "result") else client
inputs = {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}
datum = types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)

def step():
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=3e-2)).result()

def found(sampler):
    return sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()[1:]

step()
sampler = client.save_weights_and_get_sampling_client()
sampler = sampler.result() if hasattr(sampler, "result") else sampler
before = found(sampler)
print("ready", flush=True)
input()
step()
newer = client.save_weights_and_get_sampling_client()
newer = newer.result() if hasattr(newer, "result") else newer
after, of_newer = found(sampler), found(newer)
trained = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data

def apart(one, other):
    return max(abs(a - b) for a, b in zip(one, other))

assert apart(before, after) < 0.02, (before, after)
assert apart(of_newer, trained) < 0.1 < apart(of_newer, after), (of_newer, trained, after)
print("survived", flush=True)
"""


def test_adapters_survive_the_death_of_vllm(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.write(tiny.llama(), model)
    argv = ["--model", str(model), "--base-model", "tiny", "--max-model-len", "512", "--max-lora-rank", "8"]
    environment = {**os.environ, "TINKER_API_KEY": "tml-local", "PYTHONPATH": ""}
    with tinker_sdk.door(tmp_path, *argv) as (url, process, log):
        client = subprocess.Popen(
            [tinker_sdk.PYTHON, "-c", SURVIVES],
            env=environment | {"TINKER_BASE_URL": url}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n", log.read_text()
        started = re.findall(r"vLLM \(pid (\d+)", log.read_text().replace("\n", " "))
        os.kill(int(started[-1]), signal.SIGKILL)
        printed, _ = client.communicate("\n", timeout=300)
        assert client.returncode == 0, log.read_text()
        assert "survived" in printed
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, log.read_text()
    assert "vLLM was restarted; 1 models and their optimizers are unchanged" in log.read_text().replace("\n", " ")
    assert "saved: tinker://" in log.read_text()
