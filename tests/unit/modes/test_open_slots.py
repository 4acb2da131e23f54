"""Adapters that take turns in a server's slots, over a patched server without vLLM: the bits of what is served.

Not covered: which slot the server chooses (`tests/unit/patches/test_adapter_slots.py`), vLLM (`tests/cpu`).
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import bridge
from bridge.core.concurrency import in_thread
from bridge.errors import AttachError, BridgeError, ServerUnreachableError, UsageError
from bridge.modes.lora import MOST_SAVING, AdapterSnapshot, LoraOnRequest
from bridge.modes.open_slots import OpenSlots
from bridge.server.client import BridgeClient
from bridge.weights.adapter import AdapterCopy
from tests.scenarios import LiveServer
from tests.unit import patched_server
from tests.unit.engine.test_policy_calls import in_fork

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("several adapters")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with patched_server.tiny_llama(tmp_path_factory.mktemp("server"), num_slots=2) as served:
        yield served


@pytest.fixture
def policy(server: LiveServer) -> Iterator[bridge.Policy]:
    with bridge.attach(server.path, lora=bridge.LoraConfig(r=8, alpha=16), several_adapters=True) as made:
        yield made


def trained(policy: bridge.Policy, *, noise: int = 0, **choices: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Start an adapter with random A and B, as if it had been trained, and return a copy of them."""
    policy.new_adapter(**choices)
    adapter = policy.opened.adapter
    assert adapter is not None
    r, generator = adapter.shape.r, torch.Generator().manual_seed(noise)
    with torch.no_grad():
        for name in adapter.shape.modules:
            for used in (adapter.modules[name].lora_a[:r], adapter.modules[name].lora_b[:, :r]):
                used.copy_(torch.randn(used.shape, generator=generator))
    return {name: (held.lora_a.clone(), held.lora_b.clone()) for name, held in adapter.modules.items()}


def slots(policy: bridge.Policy) -> OpenSlots:
    assert isinstance(policy.mode, LoraOnRequest)
    assert policy.mode._slots is not None
    return policy.mode._slots


def assert_held(policy: bridge.Policy, expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Check that one of the slots holds exactly these matrices."""
    held = [slots(policy).holds(number) for number in slots(policy).numbers]
    same = [
        all(torch.equal(one[name][side], expected[name][side]) for name in expected for side in (0, 1)) for one in held
    ]
    assert sum(same) == 1


def served(server: LiveServer) -> list[str]:
    answer = httpx.get(f"{server.manifest.url}/v1/models", trust_env=False).json()
    return [model["id"] for model in answer["data"][1:]]


def test_snapshots_wait_if_too_many_are_written(policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writable, save = threading.Event(), AdapterCopy.save

    def save_later(copied: AdapterCopy, folder: Path) -> None:
        assert is_writable.wait(60)
        save(copied, folder)

    monkeypatch.setattr(AdapterCopy, "save", save_later)
    snapshots = [policy.snapshot(f"early-{number}") for number in range(MOST_SAVING)]
    assert not any(snapshot.folder.done() for snapshot in snapshots)
    late = in_thread(lambda: policy.snapshot("late"), "late snapshot")
    with pytest.raises(TimeoutError):
        late.result(timeout=0.3)
    is_writable.set()
    snapshots.append(late.result(timeout=60))
    assert all(snapshot.folder.result(timeout=60).is_dir() for snapshot in snapshots)


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"r": 3, "alpha": 5},  # a scaling that is no power of two
        {"r": 2, "alpha": 64, "modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]},
    ],
)
def test_a_slot_holds_the_bits_of_its_snapshot(
    policy: bridge.Policy, server: LiveServer, choices: dict[str, Any], is_written: bool
) -> None:
    for number in (0, 1):  # a slot that was in use before
        trained(policy, noise=1 + number)
        policy.serve_snapshot(f"before-{number}", policy.snapshot(f"before-{number}"))
    expected = trained(policy, **choices)
    snapshot = policy.snapshot("mine")
    if is_written:
        snapshot.folder.result()
    policy.new_adapter()
    policy.serve_snapshot("mine", snapshot)
    assert served(server) == ["before-1", "mine"]
    assert_held(policy, expected)
    policy.unload_snapshot("mine")
    policy.unload_snapshot("before-0")  # which has made room already
    assert served(server) == ["before-1"]


def saved(folder: Path) -> AdapterSnapshot:
    written = Future[Path]()
    written.set_result(folder)
    return AdapterSnapshot(written)


@pytest.mark.parametrize("fault", ["module", "shape", "rank", "missing"])
def test_an_adapter_that_does_not_fit_is_refused(
    policy: bridge.Policy, server: LiveServer, tmp_path: Path, fault: str
) -> None:
    trained(policy)
    folder = policy.save(tmp_path / "saved")
    file = folder / "adapter_model.safetensors"
    tensors, words = load_file(file), "1 of 14 modules differ, the first: model.layers"
    first = sorted(tensors)[0]
    if fault == "module":
        other = first.replace("layers.0", "layers.7")
        tensors = {
            name.replace(first.partition(".lora")[0], other.partition(".lora")[0]): t for name, t in tensors.items()
        }
    elif fault == "shape":
        tensors[first] = tensors[first][:, 1:].contiguous()
    elif fault == "rank":
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace('"r": 8', '"r": 9'))
        words = "the adapter has rank 9, and the server's slots have room for 8"
    if fault == "missing":
        file.unlink()
        words = "does not contain a readable adapter"
    else:
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UsageError, match=words):
        policy.serve_snapshot("odd", saved(folder))
    assert served(server) == []


def test_a_failed_write_gives_the_slot_back(
    policy: bridge.Policy, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(policy)
    snapshot = policy.snapshot("mine")

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(OpenSlots, "_write", fail)
        for number in range(3):  # more often than there are slots
            with pytest.raises(RuntimeError, match="out of memory"):
                policy.serve_snapshot(f"failed-{number}", snapshot)
    policy.serve_snapshot("mine", snapshot)
    assert served(server) == ["mine"]
    assert_held(policy, expected)


def test_an_interrupted_reservation_gives_the_slot_back(
    policy: bridge.Policy, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = BridgeClient.reserve_slot

    def interrupted(client: BridgeClient, name: str, keep: tuple[str, ...]) -> int:
        reserve(client, name, keep)
        raise KeyboardInterrupt

    snapshot = policy.snapshot("mine")
    with monkeypatch.context() as patched:
        patched.setattr(BridgeClient, "reserve_slot", interrupted)
        for number in range(3):  # more often than there are slots
            with pytest.raises(KeyboardInterrupt):
                policy.serve_snapshot(f"interrupted-{number}", snapshot)
    policy.serve_snapshot("mine", snapshot)
    assert served(server) == ["mine"]


def test_a_served_name_is_not_written_again(policy: bridge.Policy, server: LiveServer) -> None:
    expected = trained(policy, noise=1)
    policy.serve_snapshot("mine", policy.snapshot("first"))
    trained(policy, noise=2)
    with pytest.raises(AttachError, match="another adapter is served as mine"):
        policy.serve_snapshot("mine", policy.snapshot("second"))
    assert_held(policy, expected)
    assert served(server) == ["mine"]


def test_a_name_whose_serving_failed_is_not_used_again(
    policy: bridge.Policy, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have served it, and cached keys and values under it."""
    names = list[str]()
    serve = BridgeClient.serve_slot

    def lost(client: BridgeClient, name: str) -> None:
        names.append(name)
        serve(client, name)
        if len(names) == 1:
            raise ServerUnreachableError("the answer was lost", hint="")

    monkeypatch.setattr(BridgeClient, "serve_slot", lost)
    with pytest.raises(ServerUnreachableError, match="the answer was lost"):
        policy.sample(["1+1="], n=1, max_tokens=2)
    policy.sample(["1+1="], n=1, max_tokens=2)
    assert names == ["bridge-adapter-1", "bridge-adapter-2"]
    assert served(server) == names[1:]


def test_a_forked_process_leaves_the_slots_alone(
    policy: bridge.Policy, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = AdapterCopy.save

    def later(copied: AdapterCopy, folder: Path) -> None:
        assert may_write.wait(60)
        write(copied, folder)

    monkeypatch.setattr(AdapterCopy, "save", later)
    policy.serve_snapshot("mine", policy.snapshot("mine"))
    assert in_fork(policy.close) == 0, "a fork has no thread that writes"
    may_write.set()
    assert served(server) == ["mine"]


def test_a_closed_policy_writes_no_slot(policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = BridgeClient.reserve_slot

    def close_meanwhile(client: BridgeClient, name: str, keep: tuple[str, ...]) -> int:
        number = reserve(client, name, keep)
        policy.close()
        return number

    trained(policy, noise=1)
    copied, open_slots = policy.snapshot("mine").read(), slots(policy)
    before = {name: (a.clone(), b.clone()) for name, (a, b) in open_slots.holds(0).items()}
    monkeypatch.setattr(BridgeClient, "reserve_slot", close_meanwhile)
    with pytest.raises(BridgeError, match="the policy was closed"):
        open_slots.serve("mine", copied)
    assert all(
        torch.equal(new, old)
        for name, pair in open_slots.holds(0).items()
        for new, old in zip(pair, before[name], strict=True)
    )
    with pytest.raises(ServerUnreachableError, match="another thread has closed the connection"):
        open_slots.serve("mine", copied)


def test_slots_are_given_back_at_the_end(server: LiveServer, policy: bridge.Policy) -> None:
    policy.serve_snapshot("mine", policy.snapshot("mine"))
    policy.close()
    assert served(server) == []
    with bridge.attach(server.path, lora=bridge.LoraConfig(r=8, alpha=16), several_adapters=True) as later:
        assert len(slots(later).numbers) == 2


def test_another_trainers_slots_cannot_be_filled(policy: bridge.Policy, server: LiveServer, tmp_path: Path) -> None:
    """A request of another client of the same process, without a lease, is the trainer's; one with a name is not."""
    with BridgeClient(server.manifest, timeout_s=20) as client, pytest.raises(BridgeError, match="no LoRA slot is"):
        client.serve_slot("never reserved")
    reply = httpx.post(
        f"{server.manifest.url}/v1/unload_lora_adapter", json={"lora_name": "bridge-adapter-1"}, trust_env=False
    )
    assert reply.status_code == 409


def test_vllm_loads_folders_where_slots_are_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        patched_server.tiny_llama(tmp_path) as server,
        bridge.attach(server.path, lora=bridge.LoraConfig(r=8, alpha=16), several_adapters=True) as policy,
    ):
        policy.serve_snapshot("mine", policy.snapshot("mine"))
        assert served(server) == ["mine"]
        policy.unload_snapshot("mine")
        assert served(server) == []
    assert (
        "vLLM loads adapters from folders, which takes longer: the server shares no slots for 14 modules" in caplog.text
    )
