import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.checkpoints.metrics import Summary
from bridge.checkpoints.run_directory import RunDirectory
from bridge.checks import failed, passed
from bridge.config import ServeConfig, TrainConfig
from bridge.core import mark
from bridge.errors import UsageError
from bridge.processes import accelerator
from bridge.processes.preload import Preloaded
from bridge.processes.server_command import ServerCommand
from bridge.ranks.world import ALONE
from bridge.run.trainer import Run
from bridge.server import api_key
from bridge_cli import demo, live, rank, rank_run, run, training, verify
from bridge_cli.layout import Layout
from tests.cli.test_run_directory import evaluation, metrics


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


def test_the_trainer_is_pointed_at_the_server_that_was_started(tmp_path: Path) -> None:
    train = TrainConfig.of(model_name="m").changed(**command(tmp_path, host="0.0.0.0").server_choices)
    assert (train.server.host, train.server.port) == ("127.0.0.1", 9009)
    assert train.server.config_path == tmp_path / "manifest.json"


def test_the_trainer_of_a_stock_server_looks_for_no_manifest(tmp_path: Path) -> None:
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
def test_a_server_that_is_only_restarted_is_the_stock_one(choices: dict[str, str], patched: bool) -> None:
    assert TrainConfig.model_validate({"model_name": "m", **choices}).needs_patched_server is patched


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_server_takes_adapters_of_the_rank_that_is_trained(
    capsys: pytest.CaptureFixture[str], in_memory: bool
) -> None:
    serve = ServeConfig(model="m")
    for size in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        assert run.for_adapters(serve, size, in_memory=in_memory).max_lora_rank == size
        assert f"--max-lora-rank {size}: the rank of --lora-r" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--max-lora-rank 8 is less than --lora-r 16"):
        run.for_adapters(serve.model_copy(update={"max_lora_rank": 8}), 16, in_memory=in_memory)


@pytest.mark.parametrize(
    ("rank", "choices", "flags", "slot"),
    [
        *((rank, {}, (), slot) for rank, slot in [(4, 8), (12, 16), (24, 32), (48, 64)]),
        (16, {"max_lora_rank": 64}, (), 64),
        (16, {"max_lora_rank": 17}, (), 32),
        (16, {}, ("--max_lora_rank=32",), 32),
    ],
)
def test_a_rank_other_than_the_slots_is_refused(
    rank: int, choices: dict[str, int], flags: tuple[str, ...], slot: int
) -> None:
    serve = ServeConfig.model_validate({"model": "m", **choices})
    with pytest.raises(UsageError, match=f"--lora-r {rank}: .* rank {slot}") as caught:
        run.for_adapters(serve, rank, flags, in_memory=True)
    assert "--lora-handover disk" in caught.value.hint
    assert run.for_adapters(serve, rank, flags, in_memory=False).max_lora_rank == (serve.max_lora_rank or rank)


def test_the_server_has_slots_for_the_experts_that_are_trained() -> None:
    serve = ServeConfig(model="m", max_lora_rank=16)
    assert not run.for_adapters(serve, 16, in_memory=True).lora_experts
    assert run.for_adapters(serve, 16, in_memory=True, experts=True).lora_experts
    split = serve.model_copy(update={"tensor_parallel_size": 2})
    assert run.for_adapters(split, 16, in_memory=False, experts=True).lora_experts


def test_an_adapter_that_vllm_shards_is_refused() -> None:
    split, whole = (ServeConfig(model="m", tensor_parallel_size=size) for size in (2, 1))
    flags = ["--enforce-eager", "--fully_sharded_loras"]
    with pytest.raises(UsageError, match="--fully-sharded-loras cuts an adapter in another way"):
        run.for_adapters(split, 16, flags, in_memory=True)
    for serve, in_memory in ((split, False), (whole, True)):
        assert run.for_adapters(serve, 16, flags, in_memory=in_memory).max_lora_rank == 16


@pytest.mark.parametrize(
    ("own", "starts"),
    [
        (Layout(1, "", [None]), True),
        (Layout(1, "cuda", ["0", "1"]), False),  # the launcher's ranks do
        (Layout(1, "cuda", ["0"], hosts=2), False),
        (0, True),
        (1, False),
        (2, True),
    ],
)
def test_vllm_is_imported_where_a_server_will_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: Layout | int, starts: bool
) -> None:
    started = (
        own
        if isinstance(own, Layout)
        else rank.OwnRank(
            rank=own, world_size=4, local_rank=own, tp_size=2, device="cpu", address="", port=0, scratch=tmp_path
        )
    )
    monkeypatch.setattr(rank_run, "preloading", lambda: nullcontext(Preloaded(None)))
    with rank_run.preloaded(started) as process:
        assert isinstance(process, Preloaded) is starts


@pytest.mark.parametrize(
    ("flags", "key"),
    [([], "exported"), (["--api-key", "given", "second"], "given"), (["--api_key=given"], "given")],
)
def test_the_trainer_sends_the_key_that_vllm_is_started_with(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], key: str
) -> None:
    monkeypatch.setenv(api_key.VARIABLE, "exported")
    rank_run.send_key(["--enforce-eager", *flags])
    assert api_key.headers() == {"authorization": f"Bearer {key}"}
    monkeypatch.setenv(api_key.VARIABLE, "broken\n")
    if not flags:
        with pytest.raises(UsageError, match="line break"):
            rank_run.send_key([])


def test_a_step_is_one_line() -> None:
    step = metrics(3, rollout_s=2.0, fence_pause_s=0.004, fence_write_s=0.002, fence_publish_s=0.001,
                   tokens_generated=4000, completion_tokens_mean=37.2)  # fmt: skip
    line = live.step_line(step, 60)
    assert "\n" not in line
    for part in (
        "step  3/60", "reward  0.500", "len    37", "truncated  50%", "entropy 0.500", "grad 0.500",
        "|dlogprob| 0.5000",         "fence   7.0 ms", "2,000 tok/s",
    ):  # fmt: skip
        assert part in line
    assert "max" not in line
    nothing = live.step_line(metrics(3, completion_tokens_mean=math.nan, truncated_share=math.nan), 60)
    assert "len     -  truncated    -" in nothing


def summary(folder: Path, *, reward_before: float, reward_after: float) -> Summary:
    return Summary(
        steps=2, updates=1, weight_version=2, checkpoint=folder / "step_2", reward_before=reward_before,
        reward_after=reward_after, rewards=(0.5, 0.5), logprob_diff_max=math.nan, fence_p50_ms=1.0, attach_ms=2.0,
        weight_bytes=0,
    )  # fmt: skip


def test_the_json_of_a_run_is_steps_evaluations_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    came_to = summary(tmp_path, reward_before=0.25, reward_after=0.5)

    def trained(run: Run) -> Summary:
        run._reporter.phase("evaluation")
        run._reporter.evaluation(evaluation(0, 0.25))
        run._reporter.step(metrics(1, loss=math.nan), [])
        return came_to

    monkeypatch.setattr(Run, "train", trained)
    folder = RunDirectory.create(tmp_path / "run", environment="letters")
    config = TrainConfig.of(model_name="m", rollouts="atropos", tensorboard=False)
    assert training.train_in(folder, config, None, as_json=True, resume=None, ranks=ALONE) is came_to
    out, err = capfd.readouterr()
    first, second, last = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert (first["evaluation"]["step"], first["evaluation"]["reward_mean"]) == (0, 0.25)
    assert (second["step"], second["loss"]) == (1, None)
    assert last["summary"]["checkpoint"] == str(tmp_path / "step_2")
    assert last["summary"]["run_dir"] == str(tmp_path / "run")
    assert (last["summary"]["updates"], last["summary"]["logprob_diff_max"]) == (1, None)
    assert "max   -" in err
    assert "nan" not in err.splitlines()[-1]


def test_every_check_is_shown_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [passed("storages", "2 of 2", "all"), failed("digests", "1 differs", "0 differ", "restart the server")]
    assert verify.shown(iter(checks), as_json=True) == checks
    out, err = capsys.readouterr()
    assert [json.loads(line)["status"] for line in out.splitlines()] == ["PASS", "FAIL"]
    assert "restart the server" in err


def test_the_demo_replaces_its_own_run_and_nothing_else(tmp_path: Path) -> None:
    ours = demo._fresh(tmp_path / "demo")
    ours.summary.write_text("{}")
    (ours.checkpoints / "step_60").mkdir(parents=True)
    (ours.path / ".config.json.4711-ab").touch()  # of a process that was killed
    renewed = demo._fresh(tmp_path / "demo")
    assert [path.name for path in renewed.path.iterdir()] == [mark.NAME]


def test_a_demo_of_a_missing_model_keeps_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "check_software", lambda _: None)
    monkeypatch.setattr(rank_run, "preloaded", lambda _: nullcontext())
    earlier = demo._fresh(tmp_path / "demo")
    earlier.summary.write_text("{}")
    with pytest.raises(UsageError, match="there is no such folder"):
        demo.demo(out=earlier.path, device="cpu", model=str(tmp_path / "missing"))
    assert earlier.summary.exists()


@pytest.mark.parametrize(("after", "least_gain", "is_passed"), [(0.5, 0.2, True), (0.3, 0.2, False), (0.1, None, True)])
def test_only_the_tiny_model_has_to_learn(
    tmp_path: Path, after: float, least_gain: float | None, is_passed: bool
) -> None:
    ended = summary(tmp_path, reward_before=0.25, reward_after=after)
    one_copy = passed("storages", "2 of 2", "all")
    assert demo.conclusion(ended, [one_copy], least_gain=least_gain)["passed"] == is_passed
    assert not demo.conclusion(replace(ended, updates=0, reward_after=0.25), [one_copy], least_gain=least_gain)[
        "passed"
    ]
    two_copies = failed("storages", "1 of 2", "2 of 2", "restart the server")
    assert not demo.conclusion(ended, [one_copy, two_copies], least_gain=least_gain)["passed"]


def test_a_model_of_the_users_has_a_task_for_it(tmp_path: Path) -> None:
    serve, train = demo._choices(tmp_path, 5, "cpu", 1, "mine")
    assert (serve.model, train.model_name, train.task.environment) == ("mine", "mine", "word_problems")
    with pytest.raises(UsageError, match="--model and --model-only exclude each other"):
        demo.demo(model="mine", model_only=tmp_path)


@pytest.mark.parametrize(("dtype", "served"), [("float16", "bfloat16"), ("bfloat16", "auto")])
def test_a_demo_serves_a_model_in_a_type_that_can_be_trained(dtype: str, served: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
    serve, _ = demo._choices(tmp_path / "out", 5, "cpu", 1, str(tmp_path))
    assert serve.dtype == served


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file, expected a folder") as caught:
        demo._fresh(tmp_path / "file")
    assert "--out" in caught.value.hint


def a_model(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")


def a_run(folder: Path) -> None:
    RunDirectory.create(folder, environment="math").write_config(TrainConfig.of(model_name="m").document())


def a_demo_with_a_thesis(folder: Path) -> None:
    demo._fresh(folder).summary.write_text("{}")
    (folder / "thesis.txt").write_text("precious")


@pytest.mark.parametrize("make", [a_model, a_run, a_demo_with_a_thesis])
def test_nothing_but_its_own_earlier_result_is_removed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    make(folder)
    (tmp_path / "link").symlink_to(folder)
    before = sorted(folder.rglob("*"))
    for out in (folder, tmp_path / "link"):
        with pytest.raises(UsageError, match=r"is not empty and holds no|did not make: thesis") as refused:
            demo._fresh(out)
        assert "--out" in refused.value.hint
    assert sorted(folder.rglob("*")) == before


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
    """On the device of vLLM, whatever else this machine has."""
    calls = list[tuple[Any, ...]]()

    def compiling_ahead(*args: Any) -> nullcontext[None]:
        calls.append(args)
        return nullcontext()

    monkeypatch.setattr("bridge.engine.compile_ahead.compiling_ahead", compiling_ahead)
    monkeypatch.setattr(accelerator, "choose", lambda _: (vllm_device, "a test"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    train = TrainConfig.of(model_name="m").changed(**choices)
    ranks: Any = SimpleNamespace(tp_size=tp_size, cp_size=1)
    opened = rank_run.Opened(train, tmp_path, None)
    with rank_run._compiling_ahead(ranks, ServeConfig(model="m", dtype="float32"), opened, [command(tmp_path)]):
        pass
    assert len(calls) == compiles_ahead
    for make, config, *_ in calls:
        assert (make.args[0], make.args[1], make.args[2].type) == ("m", torch.float32, vllm_device)
        assert config is train
