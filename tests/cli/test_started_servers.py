"""The servers that `bridge run` starts: their commands, what their trainer needs to know, and what runs meanwhile.

Not covered: vLLM itself (`tests/cpu`), and starting and stopping it (`tests/unit/processes/test_server_process.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.config import LoraConfig, ServeConfig, TrainConfig
from bridge.errors import UsageError
from bridge.processes import accelerator
from bridge.processes.preload import Preloaded
from bridge.processes.server_command import ServerCommand
from bridge.ranks.world import Ranks
from bridge.server import api_key
from bridge_cli import started_servers
from bridge_cli.rank_process import OWN_RANK, OwnRank
from bridge_cli.started_servers import StartedServers, for_adapters, send_key


def command(tmp_path: Path, *, host: str = "127.0.0.1", shares_weights: bool = True) -> ServerCommand:
    return ServerCommand(
        argv=("/bin/true", "m"),
        environment={},
        model="m",
        host=host,
        port=9009,
        manifest=tmp_path / "manifest.json",
        shares_weights=shares_weights,
    )


def test_trainer_uses_the_server_that_was_started(tmp_path: Path) -> None:
    train = TrainConfig.of(model_name="m").changed(**command(tmp_path, host="0.0.0.0").server_choices)
    assert (train.server.host, train.server.port) == ("127.0.0.1", 9009)
    assert train.server.config_path == tmp_path / "manifest.json"


def test_trainer_of_a_stock_server_needs_no_manifest(tmp_path: Path) -> None:
    stock = command(tmp_path, shares_weights=False)
    train = TrainConfig.of(model_name="m", mode="none").changed(**stock.server_choices)
    assert (train.server.url(), train.server.config_path) == ("http://127.0.0.1:9009", None)


@pytest.mark.parametrize(
    ("choices", "patched"),
    [
        ({"mode": "shared_vllm"}, True),
        ({"mode": "lora_only"}, True),
        ({"mode": "none"}, False),
        ({"mode": "none", "reload": "in-place"}, True),
    ],
)
def test_server_that_is_only_restarted_is_stock_vllm(choices: dict[str, str], patched: bool) -> None:
    assert TrainConfig.model_validate({"model_name": "m", **choices}).needs_patched_server is patched


@pytest.mark.parametrize("in_memory", [True, False])
def test_server_takes_adapters_of_the_trained_rank(capsys: pytest.CaptureFixture[str], in_memory: bool) -> None:
    serve = ServeConfig(model="m")
    for size in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        assert for_adapters(serve, size, in_memory=in_memory).max_lora_rank == size
        assert f"--max-lora-rank {size}: the rank of --lora-r" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--max-lora-rank 8 is less than --lora-r 16"):
        for_adapters(serve.model_copy(update={"max_lora_rank": 8}), 16, in_memory=in_memory)


@pytest.mark.parametrize(
    ("rank", "choices", "flags", "slot"),
    [
        *((rank, {}, (), slot) for rank, slot in [(4, 8), (12, 16), (24, 32), (48, 64)]),
        (16, {"max_lora_rank": 64}, (), 64),
        (16, {"max_lora_rank": 17}, (), 32),
        (16, {}, ("--max_lora_rank=32",), 32),
    ],
)
def test_adapter_rank_other_than_the_slots_is_refused(
    rank: int, choices: dict[str, int], flags: tuple[str, ...], slot: int
) -> None:
    serve = ServeConfig.model_validate({"model": "m", **choices})
    with pytest.raises(UsageError, match=f"--lora-r {rank}: .* whose rank is {slot}") as caught:
        for_adapters(serve, rank, flags, in_memory=True)
    assert "--lora-handover disk" in caught.value.hint
    assert for_adapters(serve, rank, flags, in_memory=False).max_lora_rank == (serve.max_lora_rank or rank)


def test_server_has_slots_for_the_trained_experts() -> None:
    serve = ServeConfig(model="m", max_lora_rank=16)
    assert not for_adapters(serve, 16, in_memory=True).lora_experts
    assert for_adapters(serve, 16, in_memory=True, experts=True).lora_experts
    split = serve.model_copy(update={"tensor_parallel_size": 2})
    assert for_adapters(split, 16, in_memory=False, experts=True).lora_experts


def test_adapter_that_vllm_shards_differently_is_refused() -> None:
    split, whole = (ServeConfig(model="m", tensor_parallel_size=size) for size in (2, 1))
    flags = ["--enforce-eager", "--fully_sharded_loras"]
    with pytest.raises(UsageError, match="--fully-sharded-loras shards an adapter differently"):
        for_adapters(split, 16, flags, in_memory=True)
    for serve, in_memory in ((split, False), (whole, True)):
        assert for_adapters(serve, 16, flags, in_memory=in_memory).max_lora_rank == 16


@pytest.mark.parametrize(("rank", "starts"), [(None, True), (0, True), (1, False), (2, True)])
def test_vllm_is_imported_where_a_server_will_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int | None, starts: bool
) -> None:
    own = rank is not None and OwnRank(
        rank=rank, world_size=4, local_rank=rank, tp_size=2, device="cpu", address="", port=0, scratch=tmp_path
    )
    calls = list[str]()

    @contextmanager
    def preloading() -> Iterator[Preloaded]:
        calls.append("begun")
        yield Preloaded(None)
        calls.append("ended")

    monkeypatch.setattr(started_servers, "preloading", preloading)
    token = OWN_RANK.set(own or None)
    try:
        with StartedServers(ServeConfig(model="m"), TrainConfig.of(model_name="m"), start_limit_s=1).preloading():
            assert calls == ["begun"] * starts
    finally:
        OWN_RANK.reset(token)
    assert calls == ["begun", "ended"] * starts


@pytest.mark.parametrize(
    ("flags", "key"),
    [([], "exported"), (["--api-key", "given", "second"], "given"), (["--api_key=given"], "given")],
)
def test_trainer_sends_the_api_key_that_vllm_was_started_with(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], key: str
) -> None:
    monkeypatch.setenv(api_key.VARIABLE, "exported")
    send_key(["--enforce-eager", *flags])
    assert api_key.headers() == {"authorization": f"Bearer {key}"}
    monkeypatch.setenv(api_key.VARIABLE, "broken\n")
    if not flags:
        with pytest.raises(UsageError, match="line break"):
            send_key([])


@pytest.mark.parametrize(
    ("choices", "is_patched", "is_known"),
    [
        ({"mode": "none"}, False, False),
        ({"mode": "none", "reload": "in-place"}, True, False),
        ({"rollouts": "atropos"}, True, True),
    ],
    ids=["stock", "in place", "atropos"],
)
def test_rank_starts_the_server_that_its_mode_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any], is_patched: bool, is_known: bool
) -> None:
    started = list[tuple[int, bool]]()

    def prepare(serve: ServeConfig, _: Sequence[str], *, shares_weights: bool, **options: Any) -> ServerCommand:
        started.append((serve.port, shares_weights))
        return ServerCommand.of(serve, [], shares_weights=shares_weights, **options)

    monkeypatch.setattr(started_servers, "prepare", prepare)
    train = TrainConfig.of(model_name="m", gpus=4, batch_size=32, **choices)
    servers = StartedServers(ServeConfig(model="m", port=9001), train, start_limit_s=1)
    path = tmp_path / "2" / "manifest"
    assert servers._command(Ranks(2, 4), train.sampling, path).manifest == path
    ((port, shares),) = started
    assert shares is is_patched
    assert (port == 9003) is is_known


@pytest.mark.parametrize(
    ("vllm_device", "choices", "tp_size", "compiles_ahead"),
    [
        ("cuda", {}, 1, True),
        ("cuda", {"mode": "lora_only"}, 1, True),
        ("cuda", {"compile_layers": False}, 1, False),
        ("cuda", {"mode": "lora_only", "lora_handover": "disk"}, 1, False),
        ("cuda", {"mode": "none"}, 1, False),
        ("cuda", {}, 2, False),
        ("cpu", {}, 1, False),
        ("cpu", {"compile_layers": True}, 1, True),
    ],
)
def test_layers_are_compiled_while_vllm_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vllm_device: str,
    choices: dict[str, Any],
    tp_size: int,
    compiles_ahead: bool,
) -> None:
    """On vLLM's device, whatever other devices this machine has."""
    calls = list[tuple[Any, ...]]()

    def compiling_ahead(*args: Any, lora: LoraConfig | None, **_: Any) -> nullcontext[None]:
        assert lora is (train.lora if train.mode == "lora_only" else None)
        calls.append(args)
        return nullcontext()

    monkeypatch.setattr("bridge.engine.compile_ahead.compiling_ahead", compiling_ahead)
    monkeypatch.setattr(accelerator, "choose", lambda _: (vllm_device, "a test"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    train = TrainConfig.of(model_name="m").changed(**choices)
    ranks: Any = SimpleNamespace(tp_size=tp_size, cp_size=1)
    servers = StartedServers(ServeConfig(model="m", dtype="float32"), train, start_limit_s=1)
    servers.command = command(tmp_path)
    with servers._compiling_ahead(ranks):
        pass
    assert len(calls) == compiles_ahead
    for make, compute, optimizer in calls:
        assert (make.args[0], make.args[1], make.args[2].type) == ("m", torch.float32, vllm_device)
        assert (compute, optimizer) == (train.compute, train.optimizer)
