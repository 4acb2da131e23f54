"""Which running servers `bridge train` trains on: named by manifest or address, consistent, and each only once."""

import re
from pathlib import Path
from typing import Any

import pytest

from bridge.config import TrainConfig
from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, BridgeError
from bridge.server import discovery
from bridge.server import manifest as manifests
from bridge.server.client import BridgeClient
from bridge.server.manifest import Manifest
from bridge.server.protocol import Holder, Lease, Status
from bridge_cli import rank_gpus, running_servers
from bridge_cli.rank_gpus import RankLayout
from bridge_cli.running_servers import RunningServer
from tests.unit.checks_sample import cuda_handle, manifest

OTHER = ProcessIdentity.current().model_copy(update={"start_ticks": 1})
"""A server other than this process."""


class Host:
    """Servers of Bridge that appear to run on this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[Path, Manifest] = {}

    def add(self, name: str, *, port: int, **changes: Any) -> Path:
        path = self.folder / name / manifests.MANIFEST_NAME
        path.parent.mkdir()
        exported = manifest(url=f"http://127.0.0.1:{port}", server=OTHER, **changes)
        exported = exported.model_copy(update={"server": OTHER.model_copy(update={"pid": port})})
        manifests.write(exported, path)
        self.running[path] = exported
        return path


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    monkeypatch.setattr(discovery, "running", lambda: made.running)
    monkeypatch.setattr(manifests, "check_server", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return made


def config(*named: object, **choices: Any) -> TrainConfig:
    servers_option = {"servers": ",".join(map(str, named))} if named else {}
    return TrainConfig.of(model_name="tiny", **servers_option, **choices)


def running(config: TrainConfig) -> list[RunningServer]:
    return running_servers.find(config.server, attaches=config.needs_patched_server)


def planned_for(config: TrainConfig) -> RankLayout:
    return rank_gpus.of_running(
        [server.manifest for server in running(config)], config.tp_size, cp_size=1, restarts=config.restarts
    )


def refusal(config: TrainConfig) -> str:
    with pytest.raises(BridgeError) as caught:
        running(config)
    assert "\n" not in caught.value.message
    return f"{caught.value.message}; {caught.value.hint}"


def test_servers_are_named_by_manifest_folder_address_or_port(host: Host) -> None:
    paths = [host.add(name, port=port) for name, port in (("a", 9001), ("b", 9002), ("c", 9003), ("d", 9004))]
    named = config(paths[0], paths[1].parent, "127.0.0.1:9003", "9004")
    assert [server.path for server in running(named)] == paths
    assert [server.path for server in running(config("http://127.0.0.1:9002"))] == [paths[1]]


def test_manifest_is_searched_for_without_server_names(host: Host) -> None:
    path = host.add("a", port=9001)
    assert [server.path for server in running(config(vllm_config_path=path))] == [path]
    assert running(config()) == [], "the mode reports the error"


def test_mode_that_does_not_attach_needs_no_server(host: Host) -> None:
    host.add("a", port=9001)
    alone = config(mode="none")
    assert running(alone) == []
    assert planned_for(alone).gpus == [None]


def test_wrong_address_error_lists_the_running_servers(host: Host) -> None:
    assert "--servers 9007: no server of Bridge listens there; start it with" in refusal(config("9007"))
    host.add("a", port=9001)
    assert "listens there, only at http://127.0.0.1:9001" in refusal(config("127.0.0.1:9007"))
    assert "no manifest at" in refusal(config("nowhere.json"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "large"}, "the servers differ in their model: tiny at 9001, large at 9002"),
        ({"dtype": "bfloat16"}, "the servers differ in their dtype"),
        ({"versions": {"vllm": "0.26.0"}}, "the servers differ in their version of vLLM: 0.32.0 at 9001, 0.26.0"),
    ],
)
def test_servers_with_different_settings_are_refused(host: Host, changes: dict[str, Any], words: str) -> None:
    host.add("a", port=9001)
    host.add("b", port=9002, **changes)
    assert words in refusal(config("9001", "9002"))


def test_server_named_twice_is_refused(host: Host) -> None:
    path = host.add("a", port=9001)
    assert f"--servers: 9001 and {path} are the same server (pid 9001)" in refusal(config("9001", path))


def shard(rank: int, gpu: str | None) -> dict[str, Any]:
    exported = manifest().model_dump()
    names = "rank", "gpu_uuid", "model_class", "ipc_handles", "param_mappings", "padding", "lora_slots"
    return {name: exported[name] for name in names} | {"rank": rank, "gpu_uuid": gpu}


def test_each_shard_has_a_rank_and_each_server_a_replica(host: Host) -> None:
    cut = {"tp_degree": 2, "other_shards": (shard(1, None),)}
    host.add("a", port=9001, **cut)
    host.add("b", port=9002, **cut)
    named = config("9001", "9002", restarts=1)
    planned = planned_for(named)
    assert (planned.tp_size, planned.device, planned.gpus, planned.restarts) == (2, "cpu", [None] * 4, 1)
    by_disk = config("9001", "9002", mode="lora_only", lora_handover="disk")
    assert planned_for(by_disk).gpus == [None, None]


def test_ranks_see_the_gpus_of_their_server(host: Host) -> None:
    gpu: dict[str, Any] = {"backend": "cuda_ipc", "ipc_handles": {"w": cuda_handle()}}
    other = shard(1, "GPU-1") | {"ipc_handles": {"w": cuda_handle()}}
    host.add("a", port=9001, gpu_uuid="GPU-0", tp_degree=2, other_shards=(other,), **gpu)
    named = config("9001")
    planned = planned_for(named)
    assert (planned.device, planned.gpus) == ("cuda", ["GPU-0,GPU-1"] * 2)
    host.add("b", port=9002, gpu_uuid="GPU-5", **gpu)
    single = config("9002")
    assert planned_for(single).gpus == [None]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"lease": Lease(holder=Holder(processes=(OTHER,)), run="runs/one")}, "run runs/one) is updating"),
        ({"state": "torn"}, "the weights may be half-written"),
    ],
)
def test_servers_in_use_are_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], words: str
) -> None:
    for name, port in (("a", 9001), ("b", 9002)):
        host.add(name, port=port)
    fixed = Status(model="tiny", version=3, state="serving", server=OTHER)
    monkeypatch.setattr(BridgeClient, "status", lambda _: fixed)
    replicas = running(config("9001", "9002"))
    running_servers.check_free(replicas, 1.0, resumes=False)
    monkeypatch.setattr(BridgeClient, "status", lambda _: fixed.model_copy(update=status))
    with pytest.raises(AttachError, match=re.escape(words)):
        running_servers.check_free(replicas, 1.0, resumes=False)
    if "lease" not in status:
        running_servers.check_free(replicas, 1.0, resumes=True)
