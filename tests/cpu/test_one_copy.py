"""One copy on the CPU with the real vLLM: a Llama (llama3 RoPE, tied embeddings, grouped heads, padded vocabulary).

Not covered: compiled servers (`test_demo.py`, `test_families.py`), failures (`test_accidents.py`), GPUs (`tests/gpu`).
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from bridge.checks.one_copy_proof import NUM_SAMPLES, logprob_diffs
from bridge.config import SamplingConfig
from bridge.errors import AttachError
from bridge.passes.prepared_model import PreparedModel
from bridge.rollouts.sampler import Sampler
from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update
from bridge.server.protocol import VERSION_HEADER, Element, InFlight
from bridge.types import Group
from bridge.weights.attach import attach
from tests import scenarios
from tests.cpu.test_generate import metric
from tests.fenced import publish
from tests.models import tiny
from tests.scenarios import LiveServer

BLOCK_TOKENS = 128
"""vLLM's cache block on the CPU: prefixes are cached from this length on."""


def test_llama_trains_in_place_and_matches_its_checkpoint(llama: LiveServer, tmp_path: Path) -> None:
    assert llama.manifest.max_model_len == scenarios.MAX_MODEL_LEN
    scenarios.trains_in_place(llama, tmp_path, cold=True)


def test_verify_passes_without_changing_weights(llama: LiveServer, tmp_path: Path) -> None:
    scenarios.verifies(llama, tmp_path)


def test_training_never_changes_vocabulary_padding(llama: LiveServer) -> None:
    (parameter, spare), *others = llama.manifest.shards[0].padding.items()
    tail = attach(llama.manifest).server_tensors[parameter].view(-1)[-spare:]
    assert not others
    assert spare == (320 - tiny.VOCABULARY) * 128
    assert not tail.any()


def test_fence_drops_cached_prefixes(llama: LiveServer) -> None:
    attached = attach(llama.manifest)
    values = attached.model.get_parameter("model.layers.0.self_attn.v_proj.weight").detach()
    prompt = tuple(3 + number % 97 for number in range(BLOCK_TOKENS + 40))
    endpoint = Endpoint(url=llama.manifest.url)

    def largest_difference() -> float:
        with Sampler(SamplingConfig(max_new_tokens=8, request_timeout_s=60)) as sampler:
            (completions,) = sampler.sample([endpoint], [prompt], num_samples=NUM_SAMPLES, seed=1)
        group = Group(problem={"prompt": ""}, prompt_token_ids=prompt, completions=completions, rewards=(0.0,) * 4)
        return logprob_diffs(PreparedModel(attached.model), [group]).max().item()

    assert largest_difference() < scenarios.PARITY_LIMIT
    values.neg_()  # without telling the server, which keeps using its cached keys and values
    assert largest_difference() > 10 * scenarios.PARITY_LIMIT
    with BridgeClient(llama.manifest, timeout_s=60) as client:
        publish(fence.publish(client, Update()))
        assert largest_difference() < scenarios.PARITY_LIMIT
        with fence.publish(client, Update()):
            _negate(values)
    assert largest_difference() < scenarios.PARITY_LIMIT


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_requests_in_flight_are_kept_drained_or_aborted(llama: LiveServer, in_flight: InFlight) -> None:
    for length in (800, 1200, 1600, 2000):  # tokens: takes a second or more, less on a fast machine
        whole = 16 * length
        before, times, answer = _fence_into_a_request(llama, in_flight, whole)
        tokens, versions = answer.json()["usage"]["completion_tokens"], answer.headers[VERSION_HEADER]
        ended_before_the_fence = tokens == whole and versions == str(before)
        if in_flight == "wait" or not ended_before_the_fence:
            break
    else:
        pytest.skip("the server had finished before the fence: nothing was in flight")
    assert times.version == before + 1
    assert (tokens < whole) == (in_flight == "abort"), (tokens, times)
    assert tokens > 0
    both = f"{before}-{before + 1}"
    assert versions in ({both} if in_flight == "keep" else {both, str(before)})


def _fence_into_a_request(
    server: LiveServer, in_flight: InFlight, whole: int
) -> tuple[int, FenceTimes, httpx.Response]:
    """Run an update while a request is in flight; return the version before, the fence's times and the answer."""
    body = {"model": server.manifest.model, "prompt": [5, 6, 7], "n": 16, "max_tokens": whole // 16, "ignore_eos": True}
    http = httpx.Client(base_url=server.manifest.url, timeout=120)
    with http, BridgeClient(server.manifest, timeout_s=120) as client, ThreadPoolExecutor() as background:
        before = client.status().version
        sampled = metric(http, "vllm:generation_tokens_total")
        pending = background.submit(http.post, "/v1/completions", json=body)
        while metric(http, "vllm:generation_tokens_total") == sampled and not pending.done():
            time.sleep(0.01)
        times = publish(fence.publish(client, Update(), in_flight=in_flight))
        return before, times, pending.result().raise_for_status()


def test_fence_requires_the_token_and_its_holder(llama: LiveServer) -> None:
    element = (Element(parameter=next(iter(llama.manifest.shards[0].ipc_handles)), index=0),)
    assert httpx.get(f"{llama.manifest.url}/bridge/status").status_code == 401
    with BridgeClient(llama.manifest, timeout_s=60) as client:
        before = client.read(element)
        with pytest.raises(AttachError, match="does not hold the fence"):
            client.write(element, (1.0,))
        with pytest.raises(AttachError, match="does not hold the fence"):
            client.publish()
        assert client.read(element) == before


def test_two_trainers_see_the_same_memory(llama: LiveServer) -> None:
    first, second = attach(llama.manifest), attach(llama.manifest)
    ours, theirs = (dict(attached.model.named_parameters()) for attached in (first, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        ours["model.norm.weight"].add_(1)
        assert torch.equal(ours["model.norm.weight"], theirs["model.norm.weight"])
        ours["model.norm.weight"].sub_(1)


def _negate(weight: torch.Tensor) -> None:
    weight.neg_()
