"""The proof must fail if there is a second copy: every check, with one copy and with two."""

import base64
import math
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from bridge.checks import Check, one_copy_proof
from bridge.checks.one_copy_proof import Served
from bridge.config import SamplingConfig
from bridge.core.process import ProcessIdentity
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.routing import RouterReplay
from bridge.rollouts.sampler import Sampler
from bridge.server import manifest as manifests
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import Element, Status
from bridge.types import Group, Quantization
from bridge.weights import fp8
from bridge.weights.attach import AttachedModel, attach
from bridge.weights.model_folder import stored_buffers
from bridge.weights.rank_parts import digest
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.unit import toy_server
from tests.unit.http_server import serving
from tests.unit.openai_server import choice, openai
from tests.unit.several_ranks import on_ranks
from tests.unit.toy_server import ToyServer


class FakeClient:
    """The server's answers, from the shared tensors or from a copy of them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.elements_read: list[tuple[Element, ...]] = []

    def read(self, elements: tuple[Element, ...]) -> tuple[float, ...]:
        self.elements_read.append(elements)
        return tuple(self._cell(element).item() for element in elements)

    def write(self, elements: tuple[Element, ...], values: tuple[float, ...]) -> None:
        for element, value in zip(elements, values, strict=True):
            self._cell(element).fill_(value)

    def _cell(self, element: Element) -> Tensor:
        return self.tensors[element.parameter].view(-1)[element.index]


@pytest.fixture
def server(tmp_path: Path) -> ToyServer:
    return toy_server.serve(tiny.llama(), tmp_path / "model")


@pytest.fixture
def attached(server: ToyServer) -> AttachedModel:
    return attach(server.manifest)


def copied(server: ToyServer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in server.tensors.items()}


def statuses(checks: Iterator[Check]) -> list[str]:
    return [check.status for check in checks]


def test_one_copy_passes_and_a_parameter_elsewhere_fails(attached: AttachedModel) -> None:
    assert one_copy_proof.storages(attached).status == "PASS"
    assert one_copy_proof.bytes_allocated(attached).status == "PASS"
    model: Any = attached.model
    model.model.norm.weight = nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
    assert one_copy_proof.storages(attached).status == "FAIL"
    assert "model.norm.weight" in one_copy_proof.storages(attached).found
    assert one_copy_proof.bytes_allocated(attached).status == "FAIL"
    assert "256 bytes" in one_copy_proof.bytes_allocated(attached).found


def test_marks_pass_both_ways_and_are_restored(server: ToyServer, attached: AttachedModel) -> None:
    before = copied(server)
    client = FakeClient(server.tensors)
    assert statuses(one_copy_proof.markers(attached, cast(BridgeClient, client))) == ["PASS", "PASS", "PASS"]
    assert all(torch.equal(before[name], tensor) for name, tensor in server.tensors.items())
    assert {element.parameter for element in client.elements_read[0]} == server.tensors.keys()
    assert len(client.elements_read[0]) == len(server.manifest.shards[0].param_mappings)


def test_marks_reach_the_buffers_in_a_models_files(tmp_path: Path) -> None:
    server = toy_server.serve(FAMILIES["GLM-4.5"](), tmp_path / "model")
    attached, before = attach(server.manifest), copied(server)
    client = FakeClient(server.tensors)
    assert statuses(one_copy_proof.markers(attached, cast(BridgeClient, client))) == ["PASS", "PASS", "PASS"]
    assert {element.parameter for element in client.elements_read[0]} == server.tensors.keys()
    assert stored_buffers(attached.model).keys() <= server.tensors.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in server.tensors.items())


def test_marks_do_not_reach_a_second_copy(server: ToyServer, attached: AttachedModel) -> None:
    before = copied(server)
    client = FakeClient(copied(server))
    assert statuses(one_copy_proof.markers(attached, cast(BridgeClient, client)))[:2] == ["FAIL", "FAIL"]
    assert all(torch.equal(before[name], tensor) for name, tensor in server.tensors.items())


def test_one_unshared_parameter_fails(server: ToyServer, attached: AttachedModel) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    client = FakeClient({**server.tensors, name: server.tensors[name].clone()})
    written, read, _ = one_copy_proof.markers(attached, cast(BridgeClient, client))
    total = len(server.manifest.shards[0].param_mappings)
    assert (written.status, read.status) == ("FAIL", "FAIL")
    assert f"{total - 1} of {total}" in written.found


def test_mark_differs_from_the_value_before(server: ToyServer, attached: AttachedModel) -> None:
    for tensor in server.tensors.values():
        tensor.view(-1)[:] = 1.0
    for index, (name, view) in enumerate(server.manifest.shards[0].param_mappings.items()):
        middle = view.offset + attached.model.get_parameter(name).numel() // 2
        server.tensors[view.parameter].view(-1)[middle] = 1.0 + index % 128 / 128
    client = FakeClient(copied(server))
    written, *_ = one_copy_proof.markers(attached, cast(BridgeClient, client))
    assert written.found.startswith("0 of")


def test_marks_are_restored_if_the_server_fails(server: ToyServer, attached: AttachedModel) -> None:
    class Unreachable(FakeClient):
        def write(self, elements: tuple[Element, ...], values: tuple[float, ...]) -> None:
            raise ConnectionError

    before = copied(server)
    with pytest.raises(ConnectionError):
        list(one_copy_proof.markers(attached, cast(BridgeClient, Unreachable(server.tensors))))
    assert all(torch.equal(before[name], tensor) for name, tensor in server.tensors.items())


def test_nothing_is_written_while_a_trainer_is_attached(server: ToyServer, attached: AttachedModel) -> None:
    before, total = copied(server), len(server.manifest.shards[0].param_mappings)

    class ReadOnly(FakeClient):
        def write(self, elements: tuple[Element, ...], values: tuple[float, ...]) -> None:
            pytest.fail("it wrote")

    skipped, same = one_copy_proof.values(attached, cast(BridgeClient, ReadOnly(server.tensors)))
    assert (skipped.status, same.status, same.found) == ("SKIP", "PASS", f"{total} of {total} values are equal")
    assert all(torch.equal(before[name], tensor) for name, tensor in server.tensors.items())
    stale = copied(server)
    stale["model.norm.weight"].add_(1)
    *_, other = one_copy_proof.values(attached, cast(BridgeClient, ReadOnly(stale)))
    assert (other.status, other.found) == ("FAIL", f"{total - 1} of {total} values are equal")


@pytest.mark.parametrize(
    ("status", "after", "state", "outcome"),
    [
        ("PASS", 4, "serving", "PASS"),
        ("FAIL", 3, "serving", "FAIL"),
        ("FAIL", 4, "serving", "SKIP"),
        ("FAIL", 3, "paused", "SKIP"),  # a trainer has begun to write version 4
    ],
)
def test_concurrent_update_is_not_a_failure(status: Any, after: int, state: Any, outcome: str) -> None:
    check = Check(name="log-probabilities", status=status, found="0.2", expected="0.05", hint="attach again")
    served = Status(model="m", version=after, state=state, server=ProcessIdentity.current())
    judged = one_copy_proof.unless_updated(check, 3, served)
    assert judged.status == outcome
    assert "0.2" in judged.found


def test_checksum_error_names_the_first_difference(server: ToyServer, attached: AttachedModel) -> None:
    theirs = {name: digest(tensor) for name, tensor in server.tensors.items()}
    assert one_copy_proof.digests(attached, theirs).status == "PASS"
    changed = one_copy_proof.digests(attached, {**theirs, "model.norm.weight": "0" * 16})
    assert (changed.status, "model.norm.weight" in changed.found) == ("FAIL", True)
    assert one_copy_proof.digests(attached, {}).status == "FAIL"
    assert one_copy_proof.digests(attached, {**theirs, "stranger": "0"}).status == "FAIL"


def truth(attached: AttachedModel, prompt: list[int], token_ids: list[int]) -> list[float]:
    """Return the log-probabilities that the model itself assigns to `token_ids` after `prompt`."""
    given = torch.tensor([prompt + token_ids])
    with torch.no_grad():
        logits = attached.model(input_ids=given, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs: list[float] = (
        logits.log_softmax(dim=1).gather(1, given[0, len(prompt) :].unsqueeze(1)).squeeze(1).tolist()
    )
    return logprobs


@pytest.mark.parametrize(("shift", "status"), [(0.0, "PASS"), (0.04, "PASS"), (0.2, "FAIL")])
def test_log_probabilities_pass_up_to_the_limit(attached: AttachedModel, shift: float, status: str) -> None:
    answers: dict[tuple[int, ...], list[float]] = {}

    def bend(document: dict[str, Any], request: Any) -> dict[str, Any]:
        prompt = request.body["prompt"]
        logprobs = answers.setdefault(tuple(prompt), [value - shift for value in truth(attached, prompt, [5, 9, 2])])
        choices = [choice(index, 5, 9, 2) for index in range(request.body["n"])]
        return {"choices": [{**one, "logprobs": {"token_logprobs": logprobs}} for one in choices]}

    with serving(openai(bend)) as http, Sampler(SamplingConfig(max_new_tokens=8, request_timeout_s=20)) as sampler:
        groups = one_copy_proof.sample(sampler, Endpoint(url=http.url), attached.model.config.vocab_size)
        check = one_copy_proof.logprobs(one_copy_proof.logprob_diffs(PreparedModel(attached.model), groups))
    assert check.status == status, check.found
    assert check.found.startswith(f"{3 * one_copy_proof.NUM_PROMPTS * one_copy_proof.NUM_SAMPLES} tokens")
    assert len(answers) == one_copy_proof.NUM_PROMPTS
    assert all(max(prompt) < tiny.VOCABULARY for prompt in answers)


EXPERTS = (2, 2)
"""Number of layers with experts, and number of experts per token."""


@pytest.fixture
def mixture(tmp_path: Path) -> ToyServer:
    return toy_server.serve(FAMILIES["Qwen3-MoE"](), tmp_path / "mixture")


@pytest.fixture
def url_of_other_experts(mixture: ToyServer) -> Iterator[str]:
    """A server of the MoE model that computes with experts 2 and 3 of 4 in every layer, whatever the routers choose."""
    reference, token_ids = mixture.reference, [5, 9, 2]
    replay = RouterReplay.of(reference, EXPERTS)
    assert replay is not None

    def bend(document: dict[str, Any], request: Any) -> dict[str, Any]:
        prompt = request.body["prompt"]
        given = torch.tensor([2, 3]).repeat(len(prompt) + len(token_ids), EXPERTS[0], 1)
        replay.choose(given, len(given))
        logprobs = truth(cast(AttachedModel, SimpleNamespace(model=reference)), prompt, token_ids)
        content = base64.b64encode(given[:-1].byte().numpy().tobytes()).decode()
        choices = [choice(index, *token_ids) for index in range(request.body["n"])]
        reported = {"logprobs": {"token_logprobs": logprobs}, "experts": {"kind": "uint8", "content": content}}
        return {"choices": [{**one, **reported} for one in choices]}

    with serving(openai(bend, is_bridge=True)) as http:
        yield http.url


class LiveClient(FakeClient):
    """A server whose weights are the attached tensors, and which samples at another URL."""

    def __init__(self, tensors: dict[str, Tensor], url: str) -> None:
        super().__init__(tensors)
        self.url = url

    def status(self) -> Any:
        return SimpleNamespace(version=3, state="serving", experts=EXPERTS)

    def digests(self, part: int, **_: bool) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.tensors.items()}

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(("is_replayed", "expected"), [(True, "PASS"), (False, "FAIL")])
def test_moe_model_is_verified_with_the_servers_experts(
    mixture: ToyServer,
    url_of_other_experts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_replayed: bool,
    expected: str,
) -> None:
    client = LiveClient(mixture.tensors, url_of_other_experts)
    monkeypatch.setattr(one_copy_proof, "BridgeClient", lambda *_, **__: closing(client))
    monkeypatch.setattr("bridge.server.fence.frozen", lambda _: nullcontext(True))
    if not is_replayed:
        monkeypatch.setattr(RouterReplay, "if_known", lambda *_: None)
    manifests.write(mixture.manifest, tmp_path / "m.json")
    *weights, logprobs = one_copy_proof.verify(tmp_path / "m.json", timeout_s=20)
    assert {check.status for check in weights} == {"PASS"}
    assert (logprobs.name, logprobs.status) == (one_copy_proof.LOGPROBS, expected), logprobs.found


def test_sharded_moe_is_verified_with_the_servers_experts(
    mixture: ToyServer, url_of_other_experts: str, tmp_path: Path
) -> None:
    """Two ranks each hold a part of every expert; their own routers choose if the numbers of experts differ."""
    exported = toy_server.in_parts(mixture, 2)
    manifests.write(exported, tmp_path / "m.json")
    endpoint = Endpoint(url=url_of_other_experts, reports_experts=True)
    with Sampler(SamplingConfig(max_new_tokens=8, request_timeout_s=20)) as sampler:
        groups: list[Group] = one_copy_proof.sample(sampler, endpoint, mixture.reference.config.vocab_size)
    given = one_copy_proof.diffs_of_parts(tmp_path / "m.json", 2, groups, EXPERTS, timeout_s=100)
    own, _ = on_ranks(2, one_copy_proof.diffs_of_part, exported, groups, (9, 2), tp_size=2)
    assert len(given) == len(own) == 3 * one_copy_proof.NUM_PROMPTS * one_copy_proof.NUM_SAMPLES
    assert one_copy_proof.logprobs(given).status == "PASS", given.mean()
    assert one_copy_proof.logprobs(own).status == "FAIL", own.mean()


def test_replicas_that_differ_are_named() -> None:
    equal = {path: Served(3, {"a": "1", "b": "2"}) for path in map(Path, "xyz")}
    assert one_copy_proof.replicas([*equal], equal.__getitem__).status == "PASS"
    other = equal | {Path("y"): Served(3, {"a": "1", "b": "3"})}
    check = one_copy_proof.replicas([*other], other.__getitem__)
    assert check.status == "FAIL"
    assert check.found == "1 of 2 tensors of y differ from those of x, the first: b"
    missing = equal | {Path("z"): Served(3, {"a": "1"})}
    assert "tensors of z differ" in one_copy_proof.replicas([*missing], missing.__getitem__).found


def test_fp8_weights_of_replicas_are_compared(
    monkeypatch: pytest.MonkeyPatch, server: ToyServer, tmp_path: Path
) -> None:
    digested = {False: {"w": "1"}, True: {"w": "f"}}
    monkeypatch.setattr(BridgeClient, "digests", lambda *_, quantized: digested[quantized])
    monkeypatch.setattr(BridgeClient, "status", lambda _: SimpleNamespace(version=3))
    monkeypatch.setattr("bridge.server.fence.frozen", lambda _: nullcontext(False))
    manifests.write(server.manifest, tmp_path / "m.json")
    assert one_copy_proof.served(tmp_path / "m.json") == Served(3, {"w": "1", "w in FP8": "f"})


def test_replicas_are_compared_at_the_same_version() -> None:
    num_reads = dict.fromkeys("xy", 0)

    def look(path: Path) -> Served:
        num_reads[path.name] += 1
        late = path.name == "y" and num_reads["y"] <= published
        return Served(3 if late else 4, {"a": str(late)})

    published = 2
    assert one_copy_proof.replicas([Path("x"), Path("y")], look).status == "PASS"
    assert num_reads == {"x": 3, "y": 3}
    published = 99
    check = one_copy_proof.replicas([Path("x"), Path("y")], look)
    assert check.status == "SKIP"
    assert "kept publishing" in check.found


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("how", ["fp8_per_block", "fp8_per_channel"])
def test_fp8_is_compared_with_the_shared_weights(server: ToyServer, attached: AttachedModel, how: Quantization) -> None:
    shard = attached.shard.model_copy(update={"quantized": {DOWN: how, "model.layers.0.mlp.down_proj.weight": how}})
    attached = replace(attached, shard=shard)

    def served() -> dict[str, str]:
        return {name: fp8.digest(*fp8.quantized(server.tensors[name], how)) for name in shard.quantized}

    current = served()
    assert one_copy_proof.quantized_weights(attached, current).status == "PASS"
    server.tensors[DOWN].view(-1)[7] += 1
    stale = one_copy_proof.quantized_weights(attached, current)
    assert (stale.status, stale.found) == (
        "FAIL", f"1 of 2 served tensors are not the FP8 of the shared ones: {DOWN}",
    )  # fmt: skip
    assert one_copy_proof.quantized_weights(attached, served()).status == "PASS"
    missing = {name: text for name, text in served().items() if name != DOWN}
    assert one_copy_proof.quantized_weights(attached, missing).status == "FAIL"


@pytest.mark.parametrize(
    ("mean", "have_same_weights", "expected"),
    [
        (0.04, True, "PASS"),
        (0.054, True, "WARN"),
        (0.054, False, "FAIL"),
        (0.21, True, "FAIL"),
        (math.nan, True, "FAIL"),
    ],
)
def test_engines_with_the_same_weights_may_differ(mean: float, have_same_weights: bool, expected: str) -> None:
    check = one_copy_proof.logprobs(torch.full((3,), mean), have_same_weights=have_same_weights)
    assert check.status == expected
    assert ("with equal checksums" in check.found) == (expected == "WARN")


def test_fp8_may_differ_more_from_the_trainer() -> None:
    diffs = torch.full((3,), 0.1)
    assert one_copy_proof.logprobs(diffs).status == "FAIL"
    assert one_copy_proof.logprobs(diffs, one_copy_proof.FP8_LOGPROB_MEAN_LIMIT).status == "PASS"
    assert one_copy_proof.logprobs(diffs * 3, one_copy_proof.FP8_LOGPROB_MEAN_LIMIT).status == "FAIL"
