"""Both hand-overs against a server that takes adapters: in which order it is asked, and where the adapter lies."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import AttachError, BridgeError, ServerUnreachableError, UsageError
from bridge.modes.disk_handover import DiskHandover
from bridge.modes.handover import Handover
from bridge.modes.memory_handover import MemoryHandover
from bridge.run.run_directory import RunDirectory
from bridge.weights.adapter import Adapter
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import Answer, HttpServer, as_json, serving
from tests.unit.lora_server import SLOT, LoraServer, refusal
from tests.unit.toy_server import FILLER, ToyServer

RANK = 4
EARLIER = ["bridge-adapter-3", "mine"]
"""What an earlier run left, and what somebody else serves."""


@dataclass
class Running:
    handover: Handover
    adapter: Adapter
    server: LoraServer
    run: RunDirectory
    http: HttpServer

    def write(self) -> None:
        """Train, as far as a hand-over can tell."""
        self.server.calls.append("write")
        with torch.no_grad():
            for matrices in self.adapter.modules.values():
                matrices.lora_a.add_(1)
                matrices.lora_b.add_(1)

    def publish(self, last_checkpoint: Path | None = None) -> int:
        return self.handover.publish(self.adapter, self.write, last_checkpoint=last_checkpoint).version

    def served_folders(self) -> list[str]:
        return sorted(path.name for path in self.run.served.iterdir()) if self.run.served.exists() else []


@pytest.fixture
def toy(tmp_path: Path) -> ToyServer:
    return toy_server.with_slots(toy_server.serve(tiny.llama(), tmp_path / "model"), RANK)


@pytest.fixture
def start(toy: ToyServer, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Prepare a hand-over; `how` changes the server first."""
    server = LoraServer(toy)
    with serving(server) as http:

        def running(
            handover: str, how: Callable[[LoraServer], None] = lambda _: None, *, stock: bool = False, **choices: Any
        ) -> Running:
            how(server)
            exported = server.toy.edited(url=http.url)
            fixed = {"model_name": exported.model, "mode": "lora_only", "lora_r": RANK, "lora_handover": handover}
            config = TrainConfig.model_validate(fixed | choices)
            run = RunDirectory.create(tmp_path / "run", environment="letters")
            model = AutoModelForCausalLM.from_pretrained(exported.model, dtype=torch.bfloat16).requires_grad_(False)
            made = _made(config, run, http.url, None if stock else exported)
            return Running(made, Adapter(model, config), server, run, http)

        yield running


def _made(config: TrainConfig, run: RunDirectory, url: str, manifest: Any) -> Handover:
    if config.lora_handover == "memory":
        return MemoryHandover(config, run, manifest)
    return DiskHandover(config, run, url, manifest)


def refused(running: Running, kind: type[BridgeError], words: str) -> str:
    """Take the adapter, see it refused with `words`, and return the remedy."""
    with pytest.raises(kind, match=words) as caught:
        running.handover.take(running.adapter)
    return caught.value.remedy


def slot_of(server: LoraServer, name: str, slot: int = SLOT) -> tuple[Tensor, Tensor]:
    a, b = server.toy.slots[name]
    return a[slot, 0], b[slot, 0]


def lies_in_the_slot(running: Running) -> bool:
    """Tell whether the server sees every change of the adapter, because there is one copy of it."""
    found = []
    for name, matrices in running.adapter.modules.items():
        a, b = slot_of(running.server, name)
        found += [torch.equal(matrices.lora_a, a), torch.equal(matrices.lora_b, b)]
        with torch.no_grad():
            matrices.lora_a[0, 0], matrices.lora_b[-1, -1] = 5.0, 6.0
        found += [a[0, 0].item() == 5.0, b[-1, -1].item() == 6.0]
    return all(found)


def serve_earlier(server: LoraServer) -> None:
    server.adapters.update({name: {} for name in EARLIER})


def tear(server: LoraServer) -> None:
    server.state = "torn"


def test_in_memory_earlier_adapters_go_first_then_the_slot_is_filled_and_moved_into_behind_the_fence(
    start: Callable[..., Running],
) -> None:
    running = start("memory", serve_earlier)
    parameters = [m.lora_b for m in running.adapter.modules.values()]
    running.handover.take(running.adapter)
    assert running.server.calls == [
        "POST lease", "GET models", "POST unload_lora_adapter", "POST adapter", "POST pause", "POST publish",
    ]  # fmt: skip
    assert list(running.server.adapters) == ["mine"]
    assert running.server.bodies["POST adapter"]["name"] == "bridge-adapter" == running.handover.endpoint.model
    assert running.server.bodies["POST pause"]["writes"] == "adapter"
    assert running.handover.version == running.server.version == 5
    assert running.handover.endpoint.version is None  # the server tells it
    assert all(m.lora_b is old for m, old in zip(running.adapter.modules.values(), parameters, strict=True))
    assert lies_in_the_slot(running)
    assert running.handover.beside_bytes(running.adapter) == 0


@pytest.mark.parametrize("handover", ["memory", "disk"])
def test_beside_another_trainer_nothing_of_the_server_changes(start: Callable[..., Running], handover: str) -> None:
    servers: list[LoraServer] = []

    def trained(server: LoraServer) -> None:
        server.refuses["POST lease"] = refusal("another trainer is updating this server", "wait")
        servers.append(server)

    with pytest.raises(AttachError, match="another trainer is updating this server"):
        start(handover, trained)
    assert servers[0].calls == ["POST lease"]


def test_the_lease_is_given_back_at_the_end(start: Callable[..., Running]) -> None:
    for handover in ("memory", "disk"):
        running = start(handover)
        assert running.server.bodies["POST lease"]["run"] == str(running.run.path.absolute())
        running.handover.close()
        assert running.server.calls == ["POST lease", "DELETE lease"]
        running.server.calls.clear()


def test_in_memory_the_other_slots_are_left_alone(start: Callable[..., Running]) -> None:
    running = start("memory")
    running.handover.take(running.adapter)
    running.publish()
    others = [side for name in running.server.toy.slots for side in slot_of(running.server, name, slot=0)]
    assert len(others) == 28
    assert all((side == FILLER).all() for side in others)


def test_in_memory_a_step_writes_between_pause_and_publish_and_nothing_else_is_asked(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    running = start("memory", in_flight="abort")
    running.handover.take(running.adapter)
    running.server.calls.clear()
    assert running.publish(tmp_path / "adapter_step_1") == running.handover.version == 6
    assert running.server.calls == ["POST pause", "write", "POST publish"]
    pause = running.server.bodies["POST pause"]
    assert (pause["in_flight"], pause["writes"], pause["takeover"]) == ("abort", "adapter", False)
    assert pause["last_checkpoint"] == str(tmp_path / "adapter_step_1")
    assert lies_in_the_slot(running)


def test_in_memory_a_step_may_compute_inside_of_the_fence_in_the_memory_of_the_kv_cache(
    start: Callable[..., Running],
) -> None:
    running = start("memory")
    running.handover.take(running.adapter)
    assert running.server.bodies["POST pause"]["sleep"] is False
    running.server.calls.clear()
    assert running.handover.can_sleep
    running.handover.publish(
        running.adapter, running.write, prepare=lambda: running.server.calls.append("prepare"), sleep=True,
        last_checkpoint=None,
    )  # fmt: skip
    assert running.server.calls == ["POST pause", "prepare", "write", "POST publish"]
    assert running.server.bodies["POST pause"]["sleep"] is True


def test_in_memory_what_the_server_was_given_mends_it_before_the_first_checkpoint(
    start: Callable[..., Running],
) -> None:
    running = start("memory")
    before = {name: m.lora_a.detach().clone() for name, m in running.adapter.modules.items()}
    running.handover.take(running.adapter)
    assert running.server.bodies["POST pause"]["last_checkpoint"] == str(running.run.served / "bridge-adapter")
    running.publish()
    named = Path(running.server.bodies["POST pause"]["last_checkpoint"])
    stored = load_file(named / "adapter_model.safetensors")
    assert all(torch.equal(stored[f"base_model.model.{name}.lora_A.weight"], a) for name, a in before.items())


def test_in_memory_a_checkpoint_comes_back_as_its_version_through_a_fence_that_may_be_torn(
    start: Callable[..., Running],
) -> None:
    running = start("memory")
    running.handover.take(running.adapter)
    tear(running.server)
    running.handover.restore(running.adapter, running.write, version=9)
    assert running.handover.version == 9
    assert running.server.calls[-3:] == ["POST pause", "write", "POST publish"]
    assert running.server.state == "serving"


def test_in_memory_a_torn_server_is_refused_with_the_command_that_mends_it(start: Callable[..., Running]) -> None:
    with pytest.raises(AttachError, match="the adapter may be half-written") as caught:
        start("memory", tear)
    assert caught.value.remedy.startswith("bridge restore ADAPTER")


def test_in_memory_going_on_mends_a_torn_adapter(start: Callable[..., Running]) -> None:
    running = start("memory", tear, resume=True)
    running.handover.take(running.adapter)
    assert running.server.state == "serving"
    assert running.server.bodies["POST pause"]["takeover"] is True


def test_in_memory_going_on_does_not_mend_torn_weights(start: Callable[..., Running]) -> None:
    def tear_weights(server: LoraServer) -> None:
        server.state, server.writes = "torn", "weights"

    with pytest.raises(AttachError, match="the weights may be half-written"):
        start("memory", tear_weights, resume=True)


def test_in_memory_slots_of_another_rank_are_refused_before_anything_is_asked(start: Callable[..., Running]) -> None:
    running = start("memory", lora_r=2)
    remedy = refused(running, AttachError, f"slots have rank {RANK}, and the adapter has rank 2")
    assert f"--lora-r {RANK};" in remedy
    assert "bridge serve-vllm --max-lora-rank 2" in remedy
    assert "--lora-handover disk" in remedy
    assert running.server.calls == ["POST lease"]
    assert running.served_folders() == []


def test_in_memory_a_module_without_slot_is_refused_by_name(start: Callable[..., Running], toy: ToyServer) -> None:
    def without_down_proj(server: LoraServer) -> None:
        server.toy = toy_server.with_slots(toy, RANK, without="down_proj")

    running = start("memory", without_down_proj)
    remedy = refused(running, AttachError, r"no slot .* 2 modules, the first: model\.layers\.0\.mlp\.down_proj")
    assert "--lora-target-modules" in remedy
    assert running.server.calls == ["POST lease"]


def test_in_memory_a_server_without_slots_is_refused_with_the_flag_that_it_lacks(
    start: Callable[..., Running], toy: ToyServer
) -> None:
    def without_any(server: LoraServer) -> None:
        server.toy = ToyServer(toy.edited(lora_slots={}), toy.tensors, toy.reference)

    remedy = refused(start("memory", without_any), AttachError, "takes no adapters")
    assert remedy == f"bridge serve-vllm --max-lora-rank {RANK}"


def test_in_memory_an_adapter_that_the_server_refuses_leaves_no_trace(start: Callable[..., Running]) -> None:
    running = start("memory")
    running.server.refuses["POST adapter"] = as_json({"error": "no room", "remedy": "make some"}, 409)
    assert refused(running, AttachError, "no room") == "make some"
    assert not running.run.served.exists()


def test_in_memory_a_slot_that_holds_something_else_is_refused_before_it_is_trained(
    start: Callable[..., Running],
) -> None:
    running = start("memory")
    running.server.seats = lambda value: 2 * value
    refused(running, AttachError, "does not hold the adapter")
    assert "POST pause" not in running.server.calls


@pytest.mark.parametrize("stock", [False, True])
def test_by_disk_each_version_has_a_name_and_the_old_one_goes_once_the_new_one_is_served(
    start: Callable[..., Running], stock: bool
) -> None:
    running = start("disk", serve_earlier, stock=stock)
    handover = running.handover
    handover.take(running.adapter)
    asked = [] if stock else ["POST lease", "GET status", "DELETE adapter"]
    assert running.server.calls == [*asked, "GET models", "POST unload_lora_adapter", "POST load_lora_adapter"]
    assert list(running.server.adapters) == ["mine", "bridge-adapter-0"]
    running.server.calls.clear()
    assert running.publish() == handover.version == 1
    assert running.server.calls == ["write", "POST load_lora_adapter", "POST unload_lora_adapter"]
    assert (handover.endpoint.model, handover.endpoint.version) == ("bridge-adapter-1", 1)
    assert list(running.server.adapters) == ["mine", "bridge-adapter-1"]
    assert running.served_folders() == ["bridge-adapter-1"]
    stored = running.server.adapters["bridge-adapter-1"]
    for name, matrices in running.adapter.modules.items():
        assert torch.equal(stored[f"base_model.model.{name}.lora_A.weight"], matrices.lora_a)
        assert torch.equal(stored[f"base_model.model.{name}.lora_B.weight"] * 8, matrices.lora_b)
    assert handover.beside_bytes(running.adapter) == running.adapter.num_bytes() > 0


def test_by_disk_a_step_computes_while_the_server_generates_and_never_has_its_memory(
    start: Callable[..., Running],
) -> None:
    running = start("disk")
    running.handover.take(running.adapter)
    running.server.calls.clear()
    times = running.handover.publish(
        running.adapter, running.write, prepare=lambda: running.server.calls.append("prepare"), last_checkpoint=None
    )
    assert running.server.calls[:3] == ["prepare", "write", "POST load_lora_adapter"]
    assert times.pause_s == 0 < times.prepare_s
    assert not running.handover.can_sleep


def test_by_disk_an_interrupt_acts_at_once_before_the_adapter_changes(start: Callable[..., Running]) -> None:
    running = start("disk")
    running.handover.take(running.adapter)
    running.server.calls.clear()
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        running.handover.publish(
            running.adapter, running.write, prepare=lambda: os.kill(os.getpid(), signal.SIGINT), last_checkpoint=None
        )
    assert running.server.calls == []


def test_by_disk_a_checkpoint_comes_back_as_its_version_or_the_next(start: Callable[..., Running]) -> None:
    running = start("disk")
    running.handover.take(running.adapter)
    for version, expected in ((7, 7), (3, 8)):
        running.handover.restore(running.adapter, running.write, version=version)
        assert running.handover.version == expected
        assert list(running.server.adapters) == [f"bridge-adapter-{expected}"]
        assert running.served_folders() == [f"bridge-adapter-{expected}"]


@pytest.mark.parametrize("resume", [False, True])
def test_by_disk_a_torn_server_is_refused_before_anything_changes(start: Callable[..., Running], resume: bool) -> None:
    running = start("disk", tear, resume=resume)
    assert refused(running, AttachError, "the adapter may be half-written").startswith("bridge restore ADAPTER")
    assert running.server.calls == ["POST lease", "GET status"]
    assert running.served_folders() == []


def test_by_disk_a_server_that_takes_no_adapter_is_refused_with_what_it_lacks(start: Callable[..., Running]) -> None:
    running = start("disk")
    running.server.refuses["POST load_lora_adapter"] = Answer('{"detail":"Not Found"}', 404)
    remedy = refused(running, UsageError, "takes no adapter: 404")
    assert "bridge serve-vllm --max-lora-rank" in remedy
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in remedy
    assert not running.run.served.exists()


@pytest.mark.parametrize("answer", [Answer("engine dead", 500), None])
@pytest.mark.parametrize("call", ["GET models", "POST load_lora_adapter"])
def test_by_disk_a_server_that_is_unwell_is_no_fault_of_the_users(
    start: Callable[..., Running], call: str, answer: Answer | None
) -> None:
    running = start("disk")
    running.server.refuses[call] = answer
    refused(running, ServerUnreachableError, "does not answer as expected")
    assert running.handover.version == -1


def test_by_disk_a_version_that_failed_is_handed_over_again_without_writing_twice(
    start: Callable[..., Running],
) -> None:
    running = start("disk")
    running.handover.take(running.adapter)
    running.server.refuses["POST load_lora_adapter"] = None
    with pytest.raises(ServerUnreachableError):
        running.publish()
    assert running.handover.version == 0
    assert list(running.server.adapters) == ["bridge-adapter-0"]
    del running.server.refuses["POST load_lora_adapter"]
    running.handover.publish(running.adapter, lambda: None, last_checkpoint=None)
    assert (running.handover.version, running.served_folders()) == (1, ["bridge-adapter-1"])
