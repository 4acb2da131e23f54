"""End-to-end scenarios for the CPU and for a GPU: a real server, the real command line, real files.

Not covered: what needs no server (`tests/unit`, `tests/cli`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from bridge.checks.one_copy_proof import NEW_TOKENS, logprob_diffs, sample
from bridge.config import SamplingConfig, ServeConfig
from bridge.core.address import free_port
from bridge.passes.prepared_model import PreparedModel
from bridge.processes import children, server_log
from bridge.processes.server_command import ServerCommand
from bridge.rollouts import openai_api
from bridge.rollouts.sampler import Sampler
from bridge.server import api_key, manifest
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.manifest import Manifest
from bridge.server.protocol import Status
from bridge.types import Completion, Group, Quantization
from bridge.weights.attach import AttachedModel, attach
from bridge.weights.rank_parts import digest
from tests import forked

START_LIMIT_S = 300
MAX_MODEL_LEN = 2048
PARITY_LIMIT = 0.03
"""Limit in nats. Before training, two bf16 engines differ by about half of it on models of this size."""
FAMILY_PARITY_LIMIT = 0.05
"""Mean limit in nats, higher because rounding may route a token to different experts, which changes its log-prob."""
REROUTED_LIMIT = 0.05
"""Largest share of expert choices that rounding changes; wrong tokens, layers or weights change far more."""
ADAPTER_PARITY_LIMIT = 0.06
"""Largest difference in nats: PEFT rounds the products of A and B to bf16, vLLM only their sum."""
EAGER = ("--enforce-eager",)
"""On the CPU, vLLM starts a third faster with this flag.

Tests of faults, fences, routes and modes use it, since they do not depend on the model's graph.
"""
IN_THE_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Makes vLLM on the CPU compute in the engine's process, as on one GPU.

By default it uses a worker process on the CPU, which takes another third of the startup and polls for work. The tests
of `bridge demo` and of the end of all processes of `bridge run` use that default.
"""
FORKED_ENGINE = """
import multiprocessing, runpy, sys
import torch
from vllm.utils import system_utils
torch.cpu._init_amx()  # vLLM leaves it to oneDNN, which does not ask for it if it is held to older instructions
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Runs a vLLM module with a forked engine, which need not import everything again: a third of the remaining startup."""
TRACED = ("--compilation-config", '{"mode": 2, "backend": "eager"}')
"""Makes vLLM trace its graph but run it uncompiled, since compiling takes a third of the time of a family check."""
LR = 3e-3
"""Learning rate at which three steps move a tiny model far."""
LORA_RANK = 8
"""The smallest rank of vLLM's slots above 1."""
PROMPT = (5, 6, 7)
OWN_DEFAULTS = {
    "do_sample": True, "eos_token_id": 2, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8,
    "repetition_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
}  # fmt: skip
"""Every sampling parameter that vLLM reads from a model's generation_config.json."""
ENVIRONMENT = Path(__file__).parent / "models" / "vowels.py"


@dataclass(frozen=True)
class LiveServer:
    """A running patched vLLM."""

    manifest: Manifest
    path: Path
    """Path of the manifest."""
    child: children.Child

    def sample(self, name: str | None = None) -> list[Group]:
        """Sample completions of a fixed set of random prompts, from the model or from the named adapter.

        They include the experts of each token if the server reports them.
        """
        return sampled(self.manifest.url, name, experts=self.status().experts is not None)

    def status(self) -> Status:
        """Return the version and the state of the fence."""
        with BridgeClient(self.manifest, timeout_s=60) as client:
            return client.status()


def sampled(url: str, name: str | None = None, *, experts: bool = False) -> list[Group]:
    """Sample from the server at `url` as training does, from the model or from the adapter `name`."""
    endpoint = Endpoint(url=url, model=name, reports_experts=experts)
    with Sampler(SamplingConfig(max_new_tokens=NEW_TOKENS, request_timeout_s=120)) as sampler:
        return sample(sampler, endpoint, 301)


def with_defaults_of_its_own(model: Path) -> Path:
    """Give the model in a folder its own sampling defaults, as many published models have; return the folder."""
    (model / "generation_config.json").write_text(json.dumps(OWN_DEFAULTS))
    return model


def samples_the_whole_distribution(server: LiveServer, http: httpx.Client) -> None:
    """Check that Bridge's sampling requests ignore the model's defaults, and requests without parameters use them."""
    model, plain = server.manifest.model, Path(server.manifest.model)
    common = {"n": 8, "seed": 3}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        dialect: (openai_api.ROUTES[dialect], openai_api.request(dialect, SamplingConfig(max_new_tokens=NEW_TOKENS)))
        for dialect in ("bridge", "vllm")
    }
    requests["generate"] = ("/generate", {"max_tokens": NEW_TOKENS, "logprobs": 0})
    requests["left out"] = ("/v1/completions", {"max_tokens": NEW_TOKENS, "logprobs": 0, "return_token_ids": True})
    reference = loaded(plain).to(device_of(server))
    differences = {}
    for name, (route, fields) in requests.items():
        prompt = {"prompt_token_ids": PROMPT} if name == "generate" else PROMPT
        answer = http.post(route, json={**common, **fields, "model": model, "prompt": prompt})
        assert answer.status_code == httpx.codes.OK, answer.text
        differences[name] = logprob_diffs(PreparedModel(reference), [_group(server.manifest.url, answer)]).max().item()
    assert max(differences[name] for name in ("bridge", "vllm", "generate")) < PARITY_LIMIT, differences
    assert differences["left out"] > 10 * PARITY_LIMIT, differences


def _group(url: str, answer: httpx.Response) -> Group:
    """Parse the answer of any route."""
    document = answer.json()
    if "choices" in document:
        choices = openai_api.in_order(openai_api.Completions.model_validate(document), len(document["choices"]))
        completions = [openai_api.completion(url, choice, "", None, len(PROMPT)) for choice in choices]
    else:
        completions = [
            Completion(
                token_ids=tuple(ids),
                logprobs=tuple(next(iter(entry[0].values())) for entry in logprobs),
                text=text,
                finish_reason=reason,
            )
            for ids, logprobs, text, reason in zip(
                document["token_ids"], document["logprobs"], document["text"], document["finish_reasons"], strict=True
            )
        ]
    rewards = (0.0,) * len(completions)
    return Group(problem={"prompt": ""}, prompt_token_ids=PROMPT, completions=tuple(completions), rewards=rewards)


def with_forked_engine(command: ServerCommand) -> ServerCommand:
    """Fork the engine on the CPU, and let it compute in its own process."""
    python, safe_path, _, module, *arguments = command.argv
    argv = (python, safe_path, "-c", FORKED_ENGINE, module, *arguments)
    return replace(command, argv=argv, environment={**command.environment, **IN_THE_ENGINE})


@contextmanager
def served(
    model: Path,
    folder: Path,
    *flags: str,
    max_lora_rank: int | None = None,
    lora_experts: bool = False,
    compiled: bool = False,
    dtype: Literal["auto", "float16", "float32"] = "auto",
    port: int | None = None,
    num_parts: int = 1,
    quantization: Quantization | None = None,
) -> Iterator[LiveServer]:
    """Run a server for `model`, and wait until trainers can attach to it; on a GPU it is always compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ServeConfig(
        model=str(model),
        port=port or free_port("127.0.0.1"),
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=0.2 if torch.cuda.is_available() else None,
        max_lora_rank=max_lora_rank,
        lora_experts=lora_experts,
        tensor_parallel_size=num_parts,
        quantization=quantization,
        vllm_config_path=folder / manifest.MANIFEST_NAME,
    )
    eager = () if compiled or torch.cuda.is_available() else EAGER
    command = ServerCommand.of(config, [*flags, *eager])
    command = command if torch.cuda.is_available() else with_forked_engine(command)
    log = folder / "serve.log"
    child = children.start(command.argv, command.environment, log)
    try:
        ready = children.wait_until(child, command.manifest.exists, limit_s=START_LIMIT_S, progress=lambda _: None)
        assert ready, why_it_ended(log)
        yield LiveServer(manifest.load(command.manifest), command.manifest, child)
    except Exception as error:
        if not child.is_alive():
            error.add_note(f"its server ended: {why_it_ended(log)}")
        raise
    finally:
        children.stop(child)


def why_it_ended(log: Path) -> str:
    """Return a server's first error and its engine's last lines, since the API server's traceback shows no cause."""
    lines = log.read_text().splitlines()
    of_engine = [line for line in lines if line.startswith(("(EngineCore", "(Worker"))]
    return "\n".join([f"{server_log.own_error(log) or server_log.root_error(log)}\n", *(of_engine or lines)[-40:]])


def bridge(
    *arguments: str | Path, folder: Path, expect: int = 0, limit_s: float = 600, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the `bridge` command in `folder` and check its exit code.

    It is forked from a process that has imported everything, unless there is a GPU or it must start `cold`, as a user's
    command does.
    """
    run_it = _cold if cold or torch.cuda.is_available() else forked.ended
    done = run_it(arguments, folder, limit_s=limit_s)
    assert done.returncode == expect, f"exit code {done.returncode}, expected {expect}\n{done.stdout}\n{done.stderr}"
    return done


def _cold(arguments: Sequence[str | Path], folder: Path, *, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", forked.BRIDGE, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def trains_in_place(
    server: LiveServer, folder: Path, *flags: str, mode: str = "shared_vllm", cold: bool = False
) -> None:
    """Train three steps through the command line; the server must then match the checkpoint in transformers."""
    before = server.sample()
    trained(server, folder, "--mode", mode, *flags, cold=cold)
    equals_the_samples_after(folder / "saved" / "step_3", before, server.sample(), device=device_of(server))
    check_metrics(folder / "run")


def trains_an_adapter(server: LiveServer, folder: Path, handover: str) -> None:
    """Train an adapter for three steps; the server must then match the base with the saved adapter in PEFT."""
    base = server.sample()
    trained(server, folder, "--mode", "lora_only", "--lora-handover", handover, "--lora-r", str(LORA_RANK))
    serves_the_adapter(server, folder / "saved" / "adapter_step_3", base)
    check_metrics(folder / "run")


def trained(
    server: LiveServer, folder: Path, *flags: str, steps: int = 3, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Train through the command line."""
    return bridge(
        *("train", "--model-name", server.manifest.model, "--training-steps", str(steps)),
        *("--environment", f"{ENVIRONMENT}:Vowels", "--lr", str(LR), "--max-new-tokens", "16"),
        *("--vllm-config-path", server.path, "--run-dir", folder / "run", "--save-path", folder / "saved"),
        *flags,
        folder=folder,
        cold=cold,
    )


def check_metrics(run: Path, *, steps: int = 3, parity_limit: float = PARITY_LIMIT) -> None:
    """Check that each step moved weights, became the next version, and was trained on its own samples."""
    rows = metrics(run)
    assert [step["step"] for step in rows] == [*range(1, steps + 1)]
    idle = [step["step"] for step in rows if step["no_signal_share"] == 1]
    assert not idle, f"steps {idle} trained on nothing: the rewards of each of their groups are equal; {rows}"
    assert all(step["changed_weight_share"] > 0.01 for step in rows), rows
    assert all(step["logprob_diff_mean"] < parity_limit for step in rows), rows
    assert [step["weight_version"] - rows[0]["weight_version"] for step in rows] == [*range(steps)]


def check_replay(run: Path, *, is_on: bool) -> None:
    """Check that all or no steps replayed the server's experts, from which the trainer's routers rarely differ."""
    shares = [step["rerouted_share"] for step in metrics(run) if step["tokens_trained"]]
    assert shares
    if is_on:
        assert all(share is not None and 0 <= share < REROUTED_LIMIT for share in shares), shares
    else:
        assert not any(share is not None for share in shares), shares


def device_of(server: LiveServer) -> str:
    """Return the device of the server's weights."""
    return "cpu" if server.manifest.shards[0].gpu_uuid is None else "cuda"


def adapter_name(url: str) -> str:
    """Return the name of the only adapter that the server at `url` serves."""
    models = httpx.get(f"{url}/v1/models", headers=api_key.headers(), trust_env=False).json()["data"]
    (name,) = [model["id"] for model in models if model["parent"]]
    return str(name)


def serves_the_adapter(server: LiveServer, folder: Path, base: list[Group]) -> None:
    """Check that the server serves the adapter in `folder`, and that its base still samples as in `base`."""
    after = sampled(server.manifest.url, adapter_name(server.manifest.url))
    equals_the_adapters_samples(Path(server.manifest.model), folder, after, device=device_of(server))
    assert same_samples(server.sample(), base)
    assert not same_samples(after, base)


def equals_the_adapters_samples(model: Path, folder: Path, after: list[Group], *, device: str) -> None:
    """Check that PEFT with the adapter in `folder` explains the samples `after`, and `model` without it does not."""
    plain = loaded(model).to(device)
    moved = logprob_diffs(PreparedModel(plain), after)
    with_adapter = PeftModel.from_pretrained(plain, str(folder), autocast_adapter_dtype=False)
    parity = logprob_diffs(PreparedModel(with_adapter.get_base_model()), after)
    measures = parity.mean().item(), parity.max().item(), moved.mean().item(), moved.max().item()
    assert measures[0] < PARITY_LIMIT, measures
    assert measures[1] < ADAPTER_PARITY_LIMIT, measures
    assert measures[3] > 10 * measures[1], measures


def same_samples(before: list[Group], after: list[Group]) -> bool:
    """Return whether the same weights produced both, given the same prompts and seeds.

    They cannot be compared for equality: arrival times decide which requests are batched together, shapes decide how
    products are rounded, and a nearly tied token may flip.
    """
    pairs = [
        pair
        for groups in zip(before, after, strict=True)
        for pair in zip(*(group.completions for group in groups), strict=True)
    ]
    num_equal = sum(one.token_ids == other.token_ids for one, other in pairs)
    differences = [difference for pair in pairs for difference in _differences(*pair)]
    return 2 * num_equal > len(pairs) and max(differences) < PARITY_LIMIT


def _differences(one: Completion, other: Completion) -> list[float]:
    """Return the absolute log-prob differences of the tokens before the first differing token."""
    tokens = zip(one.token_ids, other.token_ids, strict=False)
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens))
    return [abs(a - b) for a, b in zip(one.logprobs[:num_common], other.logprobs[:num_common], strict=True)]


def equals_the_samples_after(checkpoint: Path, before: list[Group], after: list[Group], *, device: str) -> None:
    """Check that `checkpoint` in transformers explains the samples `after` training, but not those `before`."""
    prepared = PreparedModel(loaded(checkpoint).to(device))
    parity, moved = (logprob_diffs(prepared, samples).max().item() for samples in (after, before))
    assert parity < PARITY_LIMIT, (parity, moved)
    assert moved > 10 * parity, (moved, parity)


def different(server: LiveServer, checkpoint: Path) -> list[str]:
    """Return the parameters that differ between the server and the checkpoint."""
    served, whole = attach(server.manifest).model, loaded(checkpoint)
    return [name for name, held in whole.named_parameters() if not torch.equal(held, served.get_parameter(name))]


def loaded(checkpoint: Path) -> PreTrainedModel:
    """Load a checkpoint with transformers."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, one entry per step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def verifies(server: LiveServer, folder: Path) -> None:
    """Run `bridge verify --json` and check that every line passes and nothing was changed."""
    attached = attach(server.manifest)
    before = digests(attached)
    printed = bridge("verify", "--json", "--vllm-config-path", server.path, folder=folder).stdout
    rows: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
    assert [row["status"] for row in rows] == ["PASS"] * len(rows), rows
    assert len(rows) >= 7, rows
    assert digests(attached) == before


def digests(attached: AttachedModel) -> dict[str, str]:
    """Return the current digest of each of the server's weights."""
    return {name: digest(tensor) for name, tensor in attached.server_tensors.items()}
