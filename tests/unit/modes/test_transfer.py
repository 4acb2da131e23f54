"""`none --reload transfer`: the order of calls, what is refused beforehand, and the state after failures."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bridge.config import TrainConfig
from bridge.core import address
from bridge.errors import AttachError, BridgeError, ManifestError, ServerUnreachableError, UsageError
from bridge.modes import transfer
from bridge.modes.mode import RunContext
from bridge.modes.transfer import Receivers, Transfer
from bridge.ranks.world import Ranks
from bridge.server import api_key, client, discovery
from bridge.server.fence import Update
from bridge.server.receiver import Receiver
from tests.fenced import publish
from tests.logged import logged
from tests.models import tiny
from tests.unit.modes import fed_server
from tests.unit.modes.fed_server import FedServer
from tests.unit.several_ranks import on_ranks

NORM = "model.norm.weight"
PAUSE = ["pause?mode=keep", "reset_prefix_cache?reset_running_requests=true"]
SEND = ["start_weight_update", "update_weights", "finish_weight_update", "update_weight_version", "resume"]
FIRST = [*PAUSE, "init_weight_transfer_engine", *SEND]
SOON_S = 10.0


@dataclass
class FakeProcess:
    """A server that can be restarted: a dead one then answers again."""

    server: FedServer
    started: list[str] = field(default_factory=list)

    def restart(self, model: str | Path) -> None:
        self.started.append(str(model))
        self.server.dies_at = ""
        self.server.is_dead = False
        self.server.is_paused = False
        self.server.calls.clear()


class FakeReceiver:
    """Stands in for a Bridge server that refuses."""

    def __init__(self, exported: Any, run: str, *, timeout_s: float) -> None:
        self.url = exported.url

    def check(self, model: str, vllm: str) -> int:
        raise AttachError("this one is of Bridge", hint="")

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Fed:
    """A trainer and its servers."""

    mode: Transfer
    servers: tuple[FedServer, ...]
    notes: list[str]
    """The lines that the run logs."""

    def write(self) -> None:
        with torch.no_grad():
            self.mode._model.get_parameter(NORM).add_(1)

    def publish(self) -> int:
        return publish(self.mode.publish(Update()), self.write).version

    def calls(self) -> list[list[str]]:
        """Return the calls since the previous call of this method."""
        calls = [[*server.calls] for server in self.servers]
        for server in self.servers:
            server.calls.clear()
        return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tiny.llama(), tmp_path / "model")


@pytest.fixture
def feeding(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fed]]:
    """Connect a trainer to servers of the model."""
    monkeypatch.setattr(transfer, "SENDER", fed_server.__name__)
    monkeypatch.setattr(fed_server, "SENDERS", [])
    with ExitStack() as stack:

        def connect(*servers: FedServer, is_ours: bool = False, **choices: Any) -> Fed:
            stack.enter_context(fed_server.running(*servers))
            config = TrainConfig.of(
                model_name=str(folder), mode="none", reload="transfer",
                **{"servers": ",".join(server.url for server in servers)} | choices,
            )  # fmt: skip
            process = FakeProcess(servers[0]) if is_ours else None
            context = RunContext(name="ours", scratch=tmp_path / "served", process=process)
            mode = Transfer(config, context)
            stack.callback(mode.close)
            return Fed(mode, servers, stack.enter_context(logged()))

        yield connect


@pytest.fixture
def opened(feeding: Callable[..., Fed], folder: Path) -> Callable[..., Fed]:
    """Connect to two servers, the first with two workers, and send the model."""

    def open_both(**choices: Any) -> Fed:
        fed = feeding(FedServer(str(folder), num_workers=2), FedServer(str(folder)), **choices)
        fed.mode.open()
        fed.calls()
        return fed

    return open_both


def test_all_servers_pause_receive_and_resume_together(feeding: Callable[..., Fed], folder: Path) -> None:
    fed = feeding(FedServer(str(folder), num_workers=2), FedServer(str(folder)))
    assert fed.calls() == [[], []]
    fed.mode.open()
    assert fed.calls() == [FIRST, FIRST]
    assert fed.mode.version == 0
    assert [fed.publish(), fed.publish()] == [1, 2]
    assert fed.calls() == [[*PAUSE, *SEND] * 2] * 2
    (sender,) = fed_server.SENDERS
    assert [sent[NORM][0].item() for sent in sender.sent] == [1, 2, 3]


def test_every_request_sends_the_key(
    feeding: Callable[..., Fed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(api_key.VARIABLE, "key")
    fed = feeding(FedServer(str(folder), key="key"))
    fed.mode.open()
    assert fed.publish() == 1
    monkeypatch.delenv(api_key.VARIABLE)
    with pytest.raises(UsageError, match="rejected the request with status 401"):
        feeding(FedServer(str(folder), key="key"))


def test_each_worker_joins_with_its_own_rank(opened: Callable[..., Fed]) -> None:
    infos = [info for server in opened().servers for info in server.infos]
    assert [info["rank_offset"] for info in infos] == [1, 3]
    assert {info["world_size"] for info in infos} == {4}
    assert {info["master_address"] for info in infos} == {"127.0.0.1"}
    (port,) = {info["master_port"] for info in infos}
    assert port in address.PORTS, "an outgoing connection may get another before the workers have joined"


def test_workers_of_all_data_parallel_engines_join(feeding: Callable[..., Fed], folder: Path) -> None:
    fed = feeding(FedServer(str(folder), num_workers=2, num_engines=2), FedServer(str(folder)))
    fed.mode.open()
    infos = [info for server in fed.servers for info in server.infos]
    assert [(info["rank_offset"], info["world_size"]) for info in infos] == [(1, 6), (5, 6)]


def test_rollouts_of_all_servers_have_the_request_version(opened: Callable[..., Fed]) -> None:
    fed = opened()
    fed.publish()
    first = fed.mode.endpoint
    endpoints = [first, *first.others]
    assert [(server.url, server.version) for server in endpoints] == [(server.url, 1) for server in fed.servers]
    assert fed.mode.max_model_len == 2048


def test_interval_delays_servers_until_the_next_transfer(opened: Callable[..., Fed]) -> None:
    fed = opened(vllm_restart_interval=2, in_flight="abort")
    assert fed.publish() == 0
    assert fed.calls() == [[], []]
    fed.mode.catch_up()
    assert fed.calls() == [["pause?mode=abort", PAUSE[1], *SEND]] * 2
    assert fed.mode.version == 1


def test_checkpoint_is_sent_under_its_version(opened: Callable[..., Fed], tmp_path: Path) -> None:
    fed = opened()
    (tmp_path / "saved").mkdir()
    fed.mode.save(tmp_path / "saved")
    fed.write()
    fed.mode.restore(tmp_path / "saved", version=7)
    assert fed.mode.version == 7
    assert fed_server.SENDERS[0].sent[-1][NORM][0] == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"model": "/another/model"}, "serves /another/model, expected "),
        ({"vllm": "0.31.0"}, "runs vLLM 0.31.0.*, but the trainer uses vLLM 0.32.0"),
        ({"engine": None}, "engine None, expected nccl"),
        ({"engine": "ipc"}, "engine ipc, expected nccl"),
        ({"has_dev_routes": False}, "no route /is_paused"),
        ({"is_paused": True}, "is paused: another trainer is sending weights, or exited while doing so"),
    ],
)
def test_unsupported_server_is_refused_and_unchanged(
    feeding: Callable[..., Fed], folder: Path, fault: dict[str, Any], words: str
) -> None:
    servers = FedServer(str(folder)), FedServer(**{"model": str(folder)} | fault)
    with pytest.raises(AttachError, match=words) as caught:
        feeding(*servers)
    assert "\n" not in caught.value.message + caught.value.hint
    assert [server.calls for server in servers] == [[], []]


@pytest.mark.parametrize("second", ["{url}", "{url}/", "{port}", "localhost:{port}", "http://localhost:{port}"])
def test_server_named_twice_is_refused(feeding: Callable[..., Fed], folder: Path, second: str) -> None:
    server = FedServer(str(folder))
    with fed_server.running(server):
        name = second.format(url=server.url, port=server.url.rpartition(":")[2])
        with pytest.raises(UsageError, match="are the same server"):
            feeding(servers=f"{server.url},{name}")
    assert server.calls == []


@pytest.mark.parametrize("name", ["host1", "/tmp/atropos_bridge/manifest.json", "host1:"])
def test_invalid_address_is_refused(feeding: Callable[..., Fed], name: str) -> None:
    with pytest.raises(UsageError, match=f"--servers {name}: expected HOST:PORT"):
        feeding(servers=name)


def test_missing_manifest_is_not_taken_for_an_address(feeding: Callable[..., Fed], tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=f"no manifest at {tmp_path / 'none.json'}"):
        feeding(servers="", vllm_config_path=tmp_path / "none.json")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_patched_server_is_recognized_by_any_host_name(
    feeding: Callable[..., Fed], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    exported = SimpleNamespace(url="http://127.0.0.1:9001")
    monkeypatch.setattr(discovery, "running", lambda: {Path("manifest"): exported})
    monkeypatch.setattr(transfer, "PatchedReceiver", FakeReceiver)
    with pytest.raises(AttachError, match="this one is of Bridge"):
        feeding(servers=f"{host}:9001")


def test_trainer_on_a_cpu_is_refused(
    feeding: Callable[..., Fed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fed_server, "DEVICE", "cuda")
    fed = feeding(FedServer(str(folder)))
    with pytest.raises(UsageError, match="sends from a GPU, but the trainer's weights are on cpu"):
        fed.mode.open()
    assert fed.calls() == [[]]


@pytest.mark.parametrize("fault", [{"dies_at": "pause"}, {"fails_at": "pause"}, {"drops_prefixes": False}])
def test_failed_pause_leaves_all_versions_unchanged(opened: Callable[..., Fed], fault: dict[str, Any]) -> None:
    fed = opened()
    fed.servers[0].slow_at = "pause"
    for name, value in fault.items():
        setattr(fed.servers[1], name, value)
    with pytest.raises(BridgeError) as caught:
        fed.publish()
    assert fed.servers[1].url in caught.value.message
    assert fed.calls()[0] == [*PAUSE, "resume"]
    assert not fed.servers[0].is_paused
    assert len(fed_server.SENDERS[0].sent) == 1


@pytest.mark.parametrize("fault", ["fails_at", "dies_at"])
def test_server_that_may_stay_paused_is_named(opened: Callable[..., Fed], fault: str) -> None:
    """The first server cannot resume after the second one failed to pause."""
    fed = opened()
    fed.servers[1].slow_at = "pause"
    setattr(fed.servers[0], fault, "resume")
    fed.servers[1].fails_at = "pause"
    with pytest.raises(ServerUnreachableError, match=f"{fed.servers[1].url}.*/pause.* answered 500"):
        fed.publish()
    (line,) = fed.notes
    first = fed.servers[0].url
    assert line.startswith(f"the server at {first} does not answer as expected (")
    assert ("/resume answered 500: size mismatch" in line) == (fault == "fails_at")
    assert line.endswith(f"; its weights are intact; if it is still paused: curl -X POST {first}/resume, or restart it")
    assert "\n" not in line
    assert fed.servers[0].is_paused


def test_rejected_key_while_undoing_a_pause_keeps_the_error(caplog: pytest.LogCaptureFixture) -> None:
    class Locked:
        def pause(self, _: str) -> None:
            raise AttachError("it refuses", hint="retry")

        def resume(self) -> None:
            raise UsageError("the key is rejected", hint="set it")

    with pytest.raises(AttachError, match="it refuses"):
        Receivers([cast(Receiver, Locked())], "keep").pause()
    assert caplog.messages == ["the key is rejected; set it"]


@pytest.mark.parametrize("route", ["start_weight_update", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize("way", ["dies_at", "fails_at"])
def test_receiver_failing_mid_transfer_leaves_all_paused(opened: Callable[..., Fed], route: str, way: str) -> None:
    fed = opened()
    setattr(fed.servers[1], way, route)
    start = time.perf_counter()
    with pytest.raises(ServerUnreachableError, match=fed.servers[1].url) as caught:
        fed.publish()
    assert time.perf_counter() - start < SOON_S
    assert "\n" not in caught.value.message
    assert "resume" not in fed.calls()[0]
    assert "restart it, and each server that stays paused" in caught.value.hint
    assert fed.servers[0].is_paused
    assert fed.mode.version == 0


def test_server_that_refuses_the_version_has_all_weights(opened: Callable[..., Fed]) -> None:
    fed = opened()
    fed.servers[1].fails_at = "update_weight_version"
    with pytest.raises(ServerUnreachableError, match=f"{fed.servers[1].url}.*/update_weight_version answered 500"):
        fed.publish()
    assert fed.calls() == [[*PAUSE, *SEND]] * 2
    assert not any(server.is_paused for server in fed.servers)


def test_server_that_does_not_resume_has_all_weights(opened: Callable[..., Fed]) -> None:
    fed = opened()
    fed.servers[1].fails_at = "resume"
    with pytest.raises(ServerUnreachableError, match=f"{fed.servers[1].url}.*/resume answered 500: size") as caught:
        fed.publish()
    assert f"its weights are intact; if it is still paused: curl -X POST {fed.servers[1].url}/resume" in (
        caught.value.hint
    )
    assert [server.is_paused for server in fed.servers] == [False, True]


def test_all_servers_resume_if_a_worker_cannot_join(feeding: Callable[..., Fed], folder: Path) -> None:
    fed = feeding(FedServer(str(folder)), FedServer(str(folder), fails_at="init_weight_transfer_engine"))
    start = time.perf_counter()
    with pytest.raises(ServerUnreachableError, match="size mismatch"):
        fed.mode.open()
    assert time.perf_counter() - start < SOON_S
    assert fed.calls() == [[*PAUSE, "init_weight_transfer_engine", "resume"]] * 2
    assert not any(server.is_paused for server in fed.servers)


def test_ctrl_c_while_workers_join_resumes_all_servers(
    feeding: Callable[..., Fed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(fed_server.LATE_S)

    monkeypatch.setattr(fed_server, "open_sender", interrupted)
    fed = feeding(FedServer(str(folder)), FedServer(str(folder)))
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        fed.mode.open()
    assert time.perf_counter() - start < SOON_S
    assert fed.calls() == [[*PAUSE, "resume"]] * 2


def test_all_servers_resume_if_one_has_no_ipv4_address(
    feeding: Callable[..., Fed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = feeding(FedServer(str(folder)), FedServer(str(folder)))
    monkeypatch.setattr(fed.mode._servers[1], "url", "http://[::1]:8000")
    with pytest.raises(ServerUnreachableError, match=r"\[::1\]:8000 .*over IPv4"):
        fed.mode.open()
    assert fed.calls() == [[*PAUSE, "resume"]] * 2


def test_nccl_error_is_reported_in_one_line(opened: Callable[..., Fed], monkeypatch: pytest.MonkeyPatch) -> None:
    fed = opened()

    def fails() -> None:
        raise RuntimeError("NCCL error: invalid usage\nDuplicate GPU detected")

    monkeypatch.setattr(fed_server.SENDERS[0], "send_weights", fails)
    with pytest.raises(AttachError) as caught:
        fed.publish()
    assert caught.value.message == "the weights could not be sent: NCCL error: invalid usage"
    assert fed.servers[0].is_paused


def test_no_thread_waits_for_a_server_after_an_nccl_error(
    opened: Callable[..., Fed], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = opened()
    pool = ThreadPoolExecutor(1)

    def send() -> None:
        pool.submit(fed.mode._receivers.update_weights, {})
        raise RuntimeError("NCCL error: unhandled cuda error")

    monkeypatch.setattr(fed_server.SENDERS[0], "send_weights", send)
    monkeypatch.setattr(fed_server, "SLOW_S", 60.0)
    fed.servers[1].slow_at = "update_weights"
    with pytest.raises(AttachError, match="could not be sent: NCCL error"):
        fed.publish()
    pool.shutdown(wait=True)  # as the interpreter does at exit
    assert "update_weights" not in fed.servers[1].calls, "it has not answered yet"
    fed.servers[1].answers.set()


def test_failed_server_is_named_if_nccl_was_aborted(
    opened: Callable[..., Fed], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = opened()
    sender = fed_server.SENDERS[0]
    ended = threading.Event()

    def send() -> None:
        pool.submit(sender._client.update_weights, {})
        assert ended.wait(SOON_S)
        raise RuntimeError("NCCL error: the communicator was aborted")

    monkeypatch.setattr(sender, "send_weights", send)
    monkeypatch.setattr(sender, "destroy", ended.set)
    fed.servers[1].fails_at = "update_weights"
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ServerUnreachableError, match=f"{fed.servers[1].url}.* size mismatch"),
    ):
        fed.publish()


@pytest.mark.parametrize("name", ["default", "theirs: version 1"])
def test_rollouts_from_unknown_weights_are_not_trained_on(opened: Callable[..., Fed], name: str) -> None:
    """For example, if something else restarted the server, or another trainer sent it weights."""
    fed = opened()
    fed.publish()
    assert all(str(server.weight_version).startswith("ours: version 1") for server in fed.servers)
    fed.servers[1].weight_version = name
    before = fed.mode._model.get_parameter(NORM).clone()
    fed.calls()
    with pytest.raises(
        AttachError, match=f"{fed.servers[1].url} serves weights named {name!r}, expected 'ours: ver"
    ) as caught:
        fed.publish()
    assert "\n" not in caught.value.message + caught.value.hint
    with pytest.raises(AttachError, match="serves weights named"):
        fed.mode.check_served()  # as after an evaluation
    assert fed.mode._model.get_parameter(NORM).equal(before)
    assert fed.calls() == [[], []]


def checked(ranks: Ranks, folder: Path) -> str:
    """Rename the weights on the second rank's server, and return what the check raises on this rank."""
    with pytest.MonkeyPatch.context() as patched, fed_server.running(server := FedServer(str(folder))):
        patched.setattr(transfer, "SENDER", fed_server.__name__)
        config = TrainConfig.of(model_name=str(folder), mode="none", reload="transfer", servers=server.url)
        context = RunContext(name="ours", scratch=folder.parent / str(ranks.rank), ranks=ranks)
        with closing(Transfer(config, context)) as mode:
            mode.open()
            server.weight_version = "theirs" if ranks.rank == 1 else server.weight_version
            with pytest.raises(AttachError) as caught:
                mode.check_served()
            ranks.barrier()
            return caught.value.message.partition(" weights named ")[2][:8]


def test_renamed_weights_on_one_server_stop_all_ranks(folder: Path) -> None:
    assert on_ranks(2, checked, folder) == ["'theirs'"] * 2


def test_another_trainer_with_the_same_name_is_detected(feeding: Callable[..., Fed], folder: Path) -> None:
    """For example, in two containers that start from the same step in a folder with the same path."""
    server = FedServer(str(folder))
    first = feeding(server)
    first.mode.open()
    second = feeding(servers=server.url)
    second.mode.open()
    with pytest.raises(AttachError, match="another trainer sends it weights"):
        first.publish()
    assert second.publish() == 1


def test_check_of_served_weights_times_out(
    feeding: Callable[..., Fed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is deferred meanwhile, and a killed engine never answers."""
    monkeypatch.setattr(client, "CONTROL_LIMIT_S", 0.2)
    monkeypatch.setattr(fed_server, "SLOW_S", 60.0)
    fed = feeding(FedServer(str(folder), slow_at="weight_info"))
    fed.mode.open()
    start = time.perf_counter()
    with pytest.raises(ServerUnreachableError, match="ReadTimeout"):
        fed.publish()
    assert time.perf_counter() - start < SOON_S
    fed.servers[0].answers.set()


def test_server_that_reports_no_version_is_not_checked(feeding: Callable[..., Fed], folder: Path) -> None:
    fed = feeding(FedServer(str(folder), weight_version=None))
    fed.mode.open()
    assert [fed.publish(), fed.publish()] == [1, 2]


def test_dead_server_is_restarted_and_gets_the_weights(feeding: Callable[..., Fed], folder: Path) -> None:
    fed = feeding(FedServer(str(folder)), is_ours=True)
    fed.mode.open()
    fed.publish()
    fed.servers[0].dies_at = "update_weights"
    with pytest.raises(ServerUnreachableError):
        fed.publish()
    fed.calls()
    fed.mode.revive(None)
    assert fed.calls() == [FIRST]
    assert fed.mode.version == 2
    assert fed.mode.endpoint.starts == 1
    assert fed_server.SENDERS[-1].sent[-1][NORM][0] == 3
