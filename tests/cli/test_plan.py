"""`bridge plan`: what fits, what it recommends, and what a run used."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.config import TrainConfig
from bridge_cli import accelerator, console
from bridge_cli.main import answer
from bridge_cli.plan import tokens
from bridge_cli.plan_rows import SETUPS
from tests.models.sizes import PARAMETERS, folder_of, qwen2


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert answer(["plan", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the printed text on one line."""
    answer(["plan", *arguments])
    return " ".join(capsys.readouterr().err.split())


def model(size: str, tmp_path: Path) -> str:
    return str(folder_of(qwen2(size), tmp_path / size))


def unreachable(_url: str, **_: object) -> str:
    """Make the hub unreachable."""
    raise ConnectionError("no such host\nand more")


def row_of(document: dict[str, Any], mode: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in document["rows"] if (row["mode"], row["name"]) == (mode, name))
    return found


@pytest.mark.parametrize(
    ("size", "gpu", "flags"),
    [
        ("7B", "139.8", ""),
        ("14B", "139.8", "--optimizer adamw-8bit"),
        ("32B", "139.8", "--offload-optimizer --kv-sleep always"),
        ("7B", "80", "--optimizer adamw-8bit"),
        ("14B", "80", "--offload-optimizer"),
        ("7B", "21", "--mode lora_only --kv-sleep always"),
        ("1.5B", "24", "--optimizer adamw-bf16"),
    ],
)
def test_the_most_exact_way_that_fits_is_recommended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, size: str, gpu: str, flags: str
) -> None:
    folder = model(size, tmp_path)
    document = planned(capsys, "--model", folder, "--gpu-memory", gpu)
    assert document["recommended"] == f"bridge run --model {folder} {flags}".strip()


def test_the_command_can_be_typed_where_the_folder_has_a_space(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(folder_of(qwen2("7B"), tmp_path / "my model"))
    document = planned(capsys, "--model", folder, "--gpu-memory", "139.8")
    assert shlex.split(document["recommended"])[:4] == ["bridge", "run", "--model", folder]


def test_every_mode_and_optimizer_has_a_row_with_its_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = planned(capsys, "--model", model("14B", tmp_path), "--gpu-memory", "139.8")
    places = [(row["mode"], row["trainer_device"]) for row in document["rows"]]
    number = len(SETUPS)
    assert places == [
        *[("shared_vllm", "auto")] * number, *[("lora_only", "auto")] * 2, *[("none", "auto")] * number,
        *[("none", "cuda:1")] * number,
    ]  # fmt: skip
    verdicts = {name: row_of(document, "shared_vllm", name)["verdict"] for name in ("adamw", "adamw-8bit")}
    assert verdicts == {"adamw": "does not fit", "adamw-8bit": "fits"}
    assert row_of(document, "shared_vllm", "adamw")["lacking_gib"] == pytest.approx(64, abs=3)
    assert row_of(document, "none", "adamw, offloaded")["kv_asleep_gib"] is None
    assert document["num_params"] == PARAMETERS["14B"]
    assert document["exact"] is False


def test_several_gpus_hold_an_offloaded_state_once_in_the_memory_of_their_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = planned(capsys, "--model", model("14B", tmp_path), "--gpu-memory", "139.8", "--gpus", "4")
    offloaded = row_of(document, "shared_vllm", "adamw, offloaded")
    assert offloaded["host_gib"] == pytest.approx(12 * PARAMETERS["14B"] / 2**30)
    assert offloaded["state_gib"] == 0
    shared = [row["name"] for row in document["rows"] if row["mode"] == "shared_vllm"]
    released = [name for name in shared if "released" in name]
    assert released == [f"{name}, released" for name in ("adamw", "adamw-bf16", "adamw-8bit", "adamw-4bit")]


def test_what_fits_only_while_the_kv_cache_sleeps_gets_the_flag(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = planned(capsys, "--model", model("14B", tmp_path), "--gpu-memory", "126", "--optimizer", "adamw-8bit")
    assert row_of(document, "shared_vllm", "adamw-8bit")["verdict"] == "fits asleep"
    assert document["recommended"].endswith(" --optimizer adamw-8bit --kv-sleep always")


def test_what_is_given_leaves_other_rows_out_and_stays_in_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--mode", "shared_vllm", "--optimizer", "adamw-8bit", "--batch-size", "128", "--kv-sleep", "never"]
    document = planned(capsys, "--model", model("7B", tmp_path), "--gpu-memory", "139.8", *given)
    assert [row["name"] for row in document["rows"]] == ["adamw-8bit", "adamw-8bit, released"]
    assert document["least_kv_tokens"] == 128 * 512
    assert document["recommended"].endswith(" --optimizer adamw-8bit --kv-sleep never --batch-size 128")


def test_an_optimizer_that_is_given_leaves_the_adapters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = planned(capsys, "--model", model("7B", tmp_path), "--gpu-memory", "80", "--optimizer", "adamw-4bit")
    assert {row["mode"] for row in document["rows"]} == {"shared_vllm", "lora_only", "none"}


def test_on_several_gpus_what_is_trained_in_the_servers_memory_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = "--model", model("7B", tmp_path), "--gpu-memory", "24", "--tensor-parallel-size", "2"
    document = planned(capsys, *given)
    assert {(row["mode"], row["name"]) for row in document["rows"] if row["mode"] != "shared_vllm"} == {
        ("lora_only", "memory")
    }
    assert document["recommended"].endswith("--offload-optimizer --tensor-parallel-size 2")  # the more precise one


def test_one_process_beside_a_split_server_is_planned_with_a_part_of_its_weights_and_a_copy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = "--model", model("7B", tmp_path), "--gpu-memory", "80", "--tensor-parallel-size", "2"
    for more in (("--mode", "none"), ("--mode", "lora_only", "--lora-handover", "disk")):
        document = planned(capsys, *given, *more)
        weights = 1.5 * 2 * PARAMETERS["7B"] / 2**30
        assert document["rows"][0]["weights_gib"] == pytest.approx(weights, rel=0.02)
        assert "GiB on each of 2 GPUs" in told(capsys, *given, *more)


def test_a_trainer_on_the_cpu_is_planned_with_the_memory_of_the_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--mode", "none", "--trainer-device", "cpu", "--reload", "in-place", "--no-offload-optimizer"]
    document = planned(capsys, "--model", model("7B", tmp_path), "--gpu-memory", "80", *given)
    assert {row["trainer_device"] for row in document["rows"]} == {"cpu"}
    assert document["rows"][0]["verdict"] == "fits"
    assert document["rows"][0]["host_gib"] > 14 * 7.6 / 1.074


def test_copies_on_several_gpus_share_the_optimizers_state_and_lie_beside_their_servers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ("--model", model("1.5B", tmp_path), "--gpu-memory", "80", "--mode", "none")
    alone, four = planned(capsys, *given), planned(capsys, *given, "--gpus", "4")
    one, each = (row_of(document, "none", "adamw") for document in (alone, four))
    assert each["state_gib"] == pytest.approx(one["state_gib"] / 4)
    assert {row["trainer_device"] for row in four["rows"]} == {"auto"}
    assert "--gpus 4" in four["recommended"]
    on_host = (*given, "--trainer-device", "cpu")
    alone, four = planned(capsys, *on_host), planned(capsys, *on_host, "--gpus", "4")
    one, each = (row_of(document, "none", "adamw") for document in (alone, four))
    assert each["host_gib"] > one["host_gib"]


def test_the_command_for_several_hosts_says_where_they_meet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("--model", model("1.5B", tmp_path), "--gpu-memory", "80", "--hosts", "2")
    assert "--hosts 2 --rendezvous HOST:PORT" in planned(capsys, *given)["recommended"]
    chosen = planned(capsys, *given, "--rendezvous", "10.0.0.1:29400")["recommended"]
    assert "--rendezvous 10.0.0.1:29400" in chosen
    assert "HOST:PORT" not in chosen


def test_choices_that_exclude_one_another_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--optimizer", "adamw-8bit", "--offload-optimizer"]
    assert answer(["plan", "--model", model("7B", tmp_path), "--gpu-memory", "80", *given]) == 2
    assert "--offload-optimizer keeps float32 states in host memory" in capsys.readouterr().err


def test_a_server_that_cannot_hold_the_longest_sequence_gets_a_shorter_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(folder_of({**qwen2("7B"), "max_position_embeddings": 1_000_000}, tmp_path / "m"))
    document = planned(capsys, "--model", folder, "--gpu-memory", "139.8", "--mode", "shared_vllm")
    assert document["recommended"] == f"bridge run --model {folder} --max-model-len 524288"
    assert document["rows"][0]["kv_tokens"] >= 524288


def test_the_table_holds_80_columns_and_says_what_is_an_estimate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.people, "width", 80)
    for size, gpu in (("14B", "139.8"), ("32B", "24"), ("1.5B", "180")):
        answer(["plan", "--all", "--model", model(size, tmp_path), "--gpu-memory", gpu])
        shown = capsys.readouterr().err
        table = [line for line in shown.splitlines() if not line.startswith("  bridge run")]
        assert max(map(len, table)) <= 80, max(table, key=len)
        assert "…" not in shown
        assert "estimated from its dimensions" in shown
        assert sum("adamw-bf16, released" in line for line in table) == 3


def test_float32_sums_of_many_micro_batches_are_told_and_not_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--model", model("7B", tmp_path), "--gpu-memory", "139.8", "--mode", "shared_vllm"]
    few, many = (planned(capsys, *arguments, "--batch-size", size)["rows"][0] for size in ("128", "136"))
    assert (few["sums_gib"], many["sums_gib"]) == (0, many["gradients_gib"])
    assert few["gradients_gib"] == many["gradients_gib"]
    assert "summed in float32" not in told(capsys, *arguments)
    shown = told(capsys, *arguments, "--batch-size", "136")
    assert (
        "with more than 16 micro-batches an update they are summed in float32 if that fits, in up to 14.2 GiB" in shown
    )
    assert row_of(planned(capsys, *arguments, "--batch-size", "136"), "shared_vllm", "adamw, released")["sums_gib"] == 0


def test_nothing_that_fits_is_told_and_recommends_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = model("32B", tmp_path)
    assert planned(capsys, "--model", folder, "--gpu-memory", "24")["recommended"] is None
    assert "nothing fits" in told(capsys, "--model", folder, "--gpu-memory", "24")


def test_the_best_way_is_first_and_alone_unless_all_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--model", model("7B", tmp_path), "--gpu-memory", "80"]
    best, everything = told(capsys, *arguments), told(capsys, "--all", *arguments)
    for shown in (best, everything):
        assert shown.index("--optimizer adamw-8bit") < shown.index("--mode shared_vllm, weights once")
    assert "--all lists 31 more" in best
    assert [best.count(word) for word in ("--mode none", "lacks", "offloaded")] == [0, 0, 0]
    assert everything.count("--mode none, weights twice") == 2
    assert "--all" not in everything


def test_what_a_way_takes_of_the_host_is_told_with_one_that_takes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--model", model("32B", tmp_path), "--gpu-memory", "140"]
    shown = told(capsys, *arguments)
    assert "it needs 366 GiB of host memory; --host-memory GIB sets the limit" in shown
    assert "no host memory: bridge run --model" in shown
    assert "it takes 366 of 400 GiB of host memory" in told(capsys, *arguments, "--host-memory", "400")
    unknown, little = planned(capsys, *arguments), planned(capsys, *arguments, "--host-memory", "365")
    assert (unknown["host_gib"], little["host_gib"]) == (None, 365)
    assert unknown["recommended"].endswith("--offload-optimizer --kv-sleep always")
    assert little["recommended"].endswith("--mode lora_only")
    assert (unknown["recommended_without_host"], little["recommended_without_host"]) == (little["recommended"], None)


QUANTIZED = {"quantization_config": {"quant_method": "awq", "bits": 4}}
ROUTER_BIAS = {"topk_method": "noaux_tc"}


@pytest.mark.parametrize("given", [(), ("--mode", "none")])
def test_what_doctor_refuses_is_not_recommended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: tuple[str, ...]
) -> None:
    folder = str(folder_of({**qwen2("7B"), **QUANTIZED}, tmp_path / "awq"))
    assert answer(["plan", "--json", "--model", folder, "--gpu-memory", "140", *given]) != 0
    refusal = capsys.readouterr()
    assert refusal.out == ""
    assert f"cannot be trained{' by --mode none' if given else ''}: quantized (awq)" in refusal.err
    assert "hint: use the unquantized model" in refusal.err


def test_a_mode_that_doctor_refuses_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--model", str(folder_of({**qwen2("7B"), **ROUTER_BIAS}, tmp_path / "m")), "--gpu-memory", "139.8"]
    document = planned(capsys, *arguments)
    assert {row["mode"] for row in document["rows"]} == {"lora_only", "none"}
    assert document["recommended"].endswith("--mode lora_only")
    assert [obstacle["modes"] for obstacle in document["obstacles"]] == [["shared_vllm"]]
    assert "not with --mode shared_vllm: mlp.gate.e_score_correction_bias" in told(capsys, *arguments)
    assert answer(["plan", *arguments, "--mode", "shared_vllm"]) != 0
    assert "by --mode shared_vllm: mlp.gate" in capsys.readouterr().err


def test_of_a_model_that_is_not_here_the_configuration_is_downloaded_and_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = folder_of(qwen2("7B"), tmp_path / "hub"), list[object]()

    def download(name: str, file: str, **_: object) -> str:
        asked.append((name, file))
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda _url, **_: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    document = planned(capsys, "--model", "org/model", "--gpu-memory", "139.8")
    assert document["recommended"] == "bridge run --model org/model"
    assert asked == [("org/model", "config.json")]


def test_the_smallest_gpu_here_is_planned_for_with_the_memory_of_this_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "gpu_memory_bytes", lambda: [180 * 2**30, 80 * 2**30])
    monkeypatch.setattr("bridge.core.memory.available_bytes", lambda: 64 * 2**30)
    monkeypatch.setattr("bridge.core.memory.cgroup_left_bytes", lambda: 100 * 2**30)
    document = planned(capsys, "--model", model("7B", tmp_path))
    assert document["gpu_gib"] == 80
    offloaded = row_of(document, "shared_vllm", "adamw, offloaded")
    assert offloaded["verdict"] == "does not fit"
    assert offloaded["lacking_gib"] == pytest.approx(12 * 7.6156 / 1.0737 - 64, abs=0.1)


def test_without_a_gpu_its_memory_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "gpu_memory_bytes", list)
    assert answer(["plan", "--model", model("7B", tmp_path)]) == 2
    assert "--gpu-memory 80" in capsys.readouterr().err


def test_a_model_that_is_not_here_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    assert answer(["plan", "--model", "org/no-such-model-anywhere", "--gpu-memory", "80"]) == 2
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --model org/no-such-model-anywhere: not downloaded yet, and the hub at ")
    assert first.endswith("does not answer (no such host and more)")


def run_of(tmp_path: Path, *steps: dict[str, Any], **choices: Any) -> str:
    """Write the files that a run with these choices and steps leaves."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = TrainConfig.model_validate({"model_name": "m", **choices})
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 3, "rew')
    return str(folder)


def test_a_run_is_compared_with_what_its_own_choices_need(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = [{"peak_memory_gib": 90.0, "device": "cuda"}, {"peak_memory_gib": 93.5, "device": "cuda"}]
    run = run_of(tmp_path, *steps, micro_batch_tokens=4096, gradient_checkpointing=True)
    arguments = ["--model", model("7B", tmp_path), "--gpu-memory", "139.8", "--run", run]
    found = planned(capsys, *arguments)["run"]
    assert (found["steps"], found["measured_gib"], found["weights_gib"]) == (2, 93.5, 0)
    assert found["gradients_gib"] + found["state_gib"] == pytest.approx(12 * 7.6156 / 1.0737, rel=1e-3)
    assert found["ratio"] == pytest.approx(93.5 / found["planned_gib"])
    assert found["least_activations_gib"] == found["most_activations_gib"]
    assert "measured 93.5 1.04 times the plan" in told(capsys, *arguments)


def test_a_run_with_micro_batches_of_its_own_choice_says_how_far_they_may_go(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path, {"peak_memory_gib": 120.0, "device": "cuda"})
    shown = told(capsys, "--model", model("7B", tmp_path), "--gpu-memory", "139.8", "--run", run)
    assert "its micro-batches could grow, up to 111.7" in shown


@pytest.mark.parametrize(("device", "why"), [("cpu", "on the CPU"), (None, "did not record its device")])
def test_a_run_that_measured_something_else_is_not_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str | None, why: str
) -> None:
    step = {"peak_memory_gib": 2.5} | ({"device": device} if device else {})
    arguments = ["--model", model("7B", tmp_path), "--gpu-memory", "80", "--run", run_of(tmp_path, step)]
    assert planned(capsys, *arguments)["run"]["ratio"] is None
    assert why in told(capsys, *arguments)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is not a run"),
        ({"config.json": "{}"}, "was not written by this Bridge"),
        ({"config.json": '{"derived": null}'}, "was not written by this Bridge"),
        ({"config.json": "{"}, "is damaged"),
        ({"config.json": "[]"}, "is damaged"),
        ({"config.json": '{"model_name": "m"}'}, "has no step"),
        ({"config.json": '{"model_name": "m"}', "metrics.jsonl": '{"st'}, "has no step"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert answer(["plan", "--model", model("7B", tmp_path), "--gpu-memory", "80", "--run", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_loads_neither_torch_nor_vllm(tmp_path: Path) -> None:
    heavy = ("torch", "vllm", "transformers", "numpy", "matplotlib")
    code = (
        "import sys; from bridge_cli.main import answer; answer(sys.argv[1:]);"
        f"sys.exit(' '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    arguments = ["plan", "--json", "--model", model("7B", tmp_path), "--gpu-memory", "80"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rows"]


@pytest.mark.parametrize(("count", "shown"), [(999_499, "999k"), (1_000_000, "1.00M"), (52_300, "52k")])
def test_tokens_are_short(count: int, shown: str) -> None:
    assert tokens(count) == shown
