"""Where the ranks of a run are: how many, on which GPUs, and which of them share a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from bridge.processes import accelerator
from bridge_cli import rank_gpus
from bridge_cli.rank_gpus import VISIBLE, RankLayout


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "choose", lambda _: ("cuda", "eight GPUs"))
    monkeypatch.setattr(accelerator, "gpu_memory_bytes", lambda: [80 * 2**30] * 8)
    monkeypatch.setenv(VISIBLE, "7,6,5,4,3,2,1,0")


def layout_of(num_parts: int = 1, *, port: int = 9001, **choices: Any) -> RankLayout:
    train = TrainConfig.of(model_name="m", **choices)
    tp_size = train.tp_size(num_parts)
    return rank_gpus.of_started(
        ServeConfig(model="m", port=port, tensor_parallel_size=num_parts), tp_size, train.dp_size(tp_size),
        gpus=train.gpus, cp_size=train.context_parallel_size, hosts=train.hosts, rendezvous=train.rendezvous,
        restarts=train.restarts, samples_here=train.rollouts.samples_here,
    )  # fmt: skip


def gpus_of(num_parts: int = 1, **choices: Any) -> list[str | None]:
    return [*layout_of(num_parts, **choices).gpus]


@pytest.mark.usefixtures("eight_gpus")
def test_replica_and_its_server_see_the_same_gpus() -> None:
    assert layout_of(2, gpus=4) == RankLayout(2, "cuda", ["7,6", "7,6", "5,4", "5,4"])


@pytest.mark.usefixtures("eight_gpus")
def test_rank_has_its_own_gpu_without_tensor_parallelism() -> None:
    assert gpus_of(gpus=2) == ["7", "6"]
    assert gpus_of() == [None]


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only"])
def test_one_replica_has_as_many_ranks_as_its_server(mode: str) -> None:
    assert layout_of(4, mode=mode) == RankLayout(4, "cuda", ["7,6,5,4"] * 4)


@pytest.mark.parametrize("mode", ["shared_vllm", "none"])
@pytest.mark.parametrize("nest", [lambda config: config, lambda config: {"text_config": config}])
def test_sizes_that_do_not_divide_the_heads_are_refused(tmp_path: Path, mode: Any, nest: Callable[[Any], Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nest({"num_attention_heads": 12})))
    train, model = TrainConfig.of(model_name=str(tmp_path), mode=mode), str(tmp_path)
    rank_gpus.check_divides(model, 6)
    assert train.tp_size(6) == (1 if mode == "none" else 6)
    with pytest.raises(UsageError, match="--tensor-parallel-size 8 does not divide the 12 attention heads") as caught:
        rank_gpus.check_divides(model, 8)
    assert caught.value.hint == "--tensor-parallel-size 6"


@pytest.mark.parametrize(
    ("widths", "parts", "undivided", "fitting"),
    [((28, 4, 18944), 8, "28 attention heads", 4), ((24, 8, 24576), 3, "8 key-value heads", 2),
     ((12, 2, 8960), 6, "8960 intermediate columns", 4), ((16, 2, 64), 8, "", 8)],
    ids=["attention heads", "key-value heads", "intermediate columns", "shared key-value heads"],
)  # fmt: skip
def test_unshardable_size_is_refused_with_one_that_fits(
    tmp_path: Path, widths: tuple[int, ...], parts: int, undivided: str, fitting: int
) -> None:
    names = "num_attention_heads", "num_key_value_heads", "intermediate_size"
    (tmp_path / "config.json").write_text(json.dumps(dict(zip(names, widths, strict=True))))
    rank_gpus.check_divides(str(tmp_path), fitting)
    if undivided:
        with pytest.raises(UsageError, match=f"does not divide the {undivided}") as caught:
            rank_gpus.check_divides(str(tmp_path), parts)
        assert caught.value.hint == f"--tensor-parallel-size {fitting}"


@pytest.mark.usefixtures("eight_gpus")
def test_batch_is_divided_among_replicas_not_gpus() -> None:
    assert len(gpus_of(2, gpus=4, batch_size=16, group_size=8)) == 4
    assert len(gpus_of(4, gpus=8, hosts=3, batch_size=48, group_size=8)) == 8
    with pytest.raises(UsageError, match="4 replicas do not divide the 6 groups of a batch") as caught:
        gpus_of(2, gpus=4, hosts=2, batch_size=48, group_size=8)
    assert caught.value.hint == "--batch-size 64"
    with pytest.raises(UsageError, match="2 replicas do not divide the 3 groups of a batch") as caught:
        gpus_of(gpus=2, batch_size=24, group_size=8, updates_per_batch=3)
    assert caught.value.hint == "--batch-size 48"


@pytest.mark.usefixtures("eight_gpus")
def test_atropos_batches_may_be_uneven_but_ports_must_fit() -> None:
    assert len(gpus_of(gpus=4, batch_size=48, group_size=8, rollouts="atropos", port=65532)) == 4
    with pytest.raises(UsageError, match="--port 65533: the servers of all replicas use consecutive ports") as caught:
        gpus_of(gpus=4, rollouts="atropos", port=65533)
    assert caught.value.hint == "--port 65532 or lower"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:1"])
def test_each_rank_trains_on_its_servers_gpu(device: str) -> None:
    choices = {"model_name": "m", "mode": "none", "gpus": 2, "trainer_device": device}
    if device != "cuda:1":
        assert TrainConfig.of(**choices).replicas == 2
        return
    with pytest.raises(ValueError, match="--trainer-device cuda:1 trains on one GPU, found --gpus 2"):
        TrainConfig.of(**choices)


@pytest.mark.usefixtures("eight_gpus")
def test_context_parallel_replicas_keep_their_own_servers() -> None:
    cut = layout_of(gpus=4, context_parallel_size=2)
    assert (cut.tp_size, cut.cp_size, cut.gpus) == (1, 2, ["7", "6", "5", "4"])


@pytest.mark.parametrize(
    ("parts", "choices", "message", "hint"),
    [
        (1, {}, "--context-parallel-size 2 does not divide the 1 replicas of a host", "use a multiple of 2 as --gpus"),
        (1, {"gpus": 3, "batch_size": 48}, "--context-parallel-size 2 does not divide the 3 replicas", "a multiple"),
        (
            2,
            {"gpus": 4},
            "trains on servers with one GPU each, found --tensor-parallel-size 2",
            "leave out one of them",
        ),
    ],
)
def test_context_parallel_size_that_does_not_divide_is_refused(
    parts: int, choices: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        layout_of(parts, context_parallel_size=2, **choices)
    assert hint in caught.value.hint


def test_context_parallelism_with_released_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="--gradient-release cannot be combined with --context-parallel-size 2"):
        TrainConfig.of(model_name="m", gradient_release=True, context_parallel_size=2)


@pytest.mark.parametrize(
    ("config", "size", "message", "hint"),
    [
        ({"num_attention_heads": 12}, 8, "8 does not divide the 12 attention heads", "--context-parallel-size 6"),
        ({"num_attention_heads": 7}, 2, "2 does not divide the 7 attention heads", "leave it out"),
        (
            {"num_attention_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
            2,
            "2 cannot cut layers that carry a state from token to token",
            "leave it out",
        ),
    ],
)
def test_models_that_cannot_be_sliced_are_refused_early(
    tmp_path: Path, config: dict[str, Any], size: int, message: str, hint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    rank_gpus.check_cuts(str(tmp_path), 1)
    with pytest.raises(UsageError, match=f"--context-parallel-size {message}") as caught:
        rank_gpus.check_cuts(str(tmp_path), size)
    assert caught.value.hint == hint


@pytest.mark.usefixtures("eight_gpus")
def test_too_many_gpus_are_refused_with_a_number_that_fits() -> None:
    for parts, gpus, hint in ((3, 9, "--gpus 6"), (16, 16, "--gpus 8 --tensor-parallel-size 8"), (1, 9, "--gpus 8")):
        with pytest.raises(UsageError, match=f"--gpus {gpus}: this host has only 8 visible") as caught:
            gpus_of(parts, gpus=gpus, batch_size=8 * gpus)
        assert caught.value.hint == hint


def test_host_has_ranks_for_all_gpus_of_its_servers() -> None:
    hosts: list[tuple[int, dict[str, Any]]] = [(2, {}), (2, {"gpus": 4}), (1, {"gpus": 4}), (2, {"mode": "none"})]
    trainers = [(parts, TrainConfig.of(model_name="m", **choices)) for parts, choices in hosts]
    assert [train.dp_size(train.tp_size(parts)) * parts for parts, train in trainers] == [2, 4, 4, 2]


def test_ranks_on_a_cpu_see_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "choose", lambda _: ("cpu", "no GPU"))
    assert layout_of(2, gpus=4) == RankLayout(2, "cpu", [None] * 4)


@pytest.mark.parametrize(
    "choices", [{"mode": "none"}, {"mode": "lora_only", "lora_handover": "disk"}], ids=["none", "by disk"]
)
def test_modes_with_a_copy_have_one_rank_per_server(choices: dict[str, Any]) -> None:
    assert gpus_of(2, **choices) == [None]


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("num_parts", "choices", "words"),
    [
        (2, {"gpus": 3, "batch_size": 24}, "--gpus 3 is not a multiple of --tensor-parallel-size 2"),
        (4, {"gpus": 2}, "--gpus 2 is not a multiple of --tensor-parallel-size 4"),
        (16, {}, "--tensor-parallel-size 16: this host has only 8 visible"),
        (2, {"gpus": 16, "batch_size": 128}, "--gpus 16: this host has only 8 visible"),
        (2, {"mode": "lora_only", "lora_handover": "disk", "gpus": 2}, "with several servers, each must have one GPU"),
        (2, {"mode": "none", "gpus": 2}, "--mode none: with several servers, each must have one GPU"),
        (
            2,
            {"gradient_release": True},
            "--gradient-release trains on servers with one GPU each, found --tensor-parallel",
        ),
        (
            2,
            {"offload_optimizer": True, "gradient_release": True},
            "--offload-optimizer with --gradient-release trains on one GPU, found --tensor-parallel-size 2",
        ),
    ],
)
def test_choices_that_cannot_train_shards_are_refused(num_parts: int, choices: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        gpus_of(num_parts, **choices)
    assert words in caught.value.message
    assert caught.value.hint


def test_offloading_with_released_gradients_trains_on_one_gpu() -> None:
    flags = {"offload_optimizer": True, "gradient_release": True}
    with pytest.raises(ValueError, match="with --gradient-release trains on one GPU, found --gpus 2"):
        TrainConfig.of(model_name="m", gpus=2, **flags)
    for name in flags:
        TrainConfig.of(model_name="m", gpus=2, top_entropy=0.5, **{name: True})
