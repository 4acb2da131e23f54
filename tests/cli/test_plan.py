"""`bridge plan`: what fits, and what it recommends."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.planning.setups import SETUPS
from bridge.processes import accelerator
from bridge_cli import console
from bridge_cli.main import answer
from bridge_cli.plan import WIDTHS, tokens
from tests.models.sizes import PARAMETERS, folder_of, qwen2

Document = dict[str, Any]
Planned = Callable[..., Document]
"""Size of a model, memory of a GPU in GiB, flags -> the JSON of the plan."""


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    def planned(size: str, gpu: str | None, *flags: str, config: Document | None = None) -> Document:
        folder = folder_of({**qwen2(size), **(config or {})}, tmp_path / size)
        memory = [] if gpu is None else ["--gpu-memory", gpu]
        assert answer(["plan", "--json", "--model", str(folder), *memory, *flags]) == 0
        document: Document = json.loads(capsys.readouterr().out)
        return document

    return planned


@pytest.fixture
def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the printed text on one line."""

    def printed(size: str, gpu: str | None, *flags: str, config: Document | None = None) -> str:
        folder = folder_of({**qwen2(size), **(config or {})}, tmp_path / size)
        memory = [] if gpu is None else ["--gpu-memory", gpu]
        answer(["plan", "--model", str(folder), *memory, *flags])
        return " ".join(capsys.readouterr().err.split())

    return printed


def row_of(document: Document, mode: str, name: str) -> Document:
    row: Document = next(row for row in document["rows"] if (row["mode"], row["name"]) == (mode, name))
    return row


INSIDE = {"model_type": "mistral3", "text_config": qwen2("7B")}
LONG = {"max_position_embeddings": 1_000_000}
HOSTS = "--hosts 2 --rendezvous "


@pytest.mark.parametrize(
    ("size", "gpu", "given", "recommended"),
    [
        ("7B", "139.8", "", ""),
        ("14B", "139.8", "", "--optimizer adamw-8bit"),
        ("32B", "139.8", "", "--offload-optimizer --kv-sleep always"),
        ("7B", "80", "", "--optimizer adamw-8bit"),
        ("14B", "80", "", "--offload-optimizer"),
        ("7B", "21", "", "--mode lora_only --kv-sleep always"),
        ("1.5B", "24", "", "--optimizer adamw-8bit"),
        ("14B", "126", "--optimizer adamw-8bit", "--optimizer adamw-8bit --kv-sleep always"),
        ("7B", "24", "--tensor-parallel-size 2", "--offload-optimizer --tensor-parallel-size 2"),
        ("7B", "139.8", "--mode shared_vllm --optimizer adamw-8bit --batch-size 128 --kv-sleep never",
         "--optimizer adamw-8bit --kv-sleep never --batch-size 128"),
        ("1.5B", "80", "--gpus 4", "--gpus 4"),
        ("1.5B", "80", "--hosts 2", f"{HOSTS}HOST:PORT"),
        ("1.5B", "80", f"{HOSTS}10.0.0.1:29400", f"{HOSTS}10.0.0.1:29400"),
        ("32B", "24", "", None),
        ("32B", "140", "--host-memory 365", "--mode lora_only"),
    ],
)  # fmt: skip
def test_most_precise_setup_that_fits_is_recommended(
    plan: Planned, tmp_path: Path, size: str, gpu: str, given: str, recommended: str | None
) -> None:
    document = plan(size, gpu, *given.split())
    command = None if recommended is None else f"bridge run --model {tmp_path / size} {recommended}".strip()
    assert document["recommended"] == command


@pytest.mark.parametrize(
    ("config", "gpu", "given", "ending"),
    [(INSIDE, "21", "", None), (LONG, "139.8", "--mode shared_vllm", " --max-model-len 524288")],
)
def test_recommended_command_depends_on_the_model(
    plan: Planned, config: Document, gpu: str, given: str, ending: str | None
) -> None:
    document = plan("7B", gpu, *given.split(), config=config)
    if ending is None:  # any other model would be trained by --mode lora_only
        assert document["recommended"] is None
    else:
        assert document["recommended"].endswith(ending)
        assert document["rows"][0]["kv_tokens"] >= 524288


def test_folder_with_a_space_is_quoted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(folder_of(qwen2("7B"), tmp_path / "my model"))
    assert answer(["plan", "--json", "--model", folder, "--gpu-memory", "139.8"]) == 0
    recommended = json.loads(capsys.readouterr().out)["recommended"]
    assert shlex.split(recommended)[:4] == ["bridge", "run", "--model", folder]


def test_every_mode_and_optimizer_has_a_row(plan: Planned) -> None:
    document = plan("14B", "139.8")
    number = len(SETUPS)
    assert [(row["mode"], row["trainer_device"]) for row in document["rows"]] == [
        *[("shared_vllm", "auto")] * number, *[("lora_only", "auto")] * 2, *[("none", "auto")] * number,
        *[("none", "cuda:1")] * number,
    ]  # fmt: skip
    whole, small = (row_of(document, "shared_vllm", name) for name in ("adamw", "adamw-8bit"))
    assert (whole["verdict"], small["verdict"]) == ("does not fit", "fits")
    assert whole["lacking_gib"] == pytest.approx(64, abs=3)
    assert row_of(document, "none", "adamw, offloaded")["kv_asleep_gib"] is None
    assert (document["num_params"], document["exact"]) == (PARAMETERS["14B"], False)


def test_weights_are_sent_from_a_different_gpu(plan: Planned) -> None:
    document = plan("7B", "139.8", "--mode", "none", "--reload", "transfer")
    assert {row["trainer_device"] for row in document["rows"]} == {"cuda:1"}
    assert "--reload transfer" in document["recommended"]
    assert "--trainer-device cuda:1" in document["recommended"]


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ("--mode shared_vllm --optimizer adamw-8bit", {"adamw-8bit", "adamw-8bit, released"}),
        ("--optimizer adamw-4bit", {"adamw-4bit", "adamw-4bit, released", "memory", "disk"}),
        ("--mode lora_only --tensor-parallel-size 2", {"memory"}),
        ("--mode shared_vllm --gpus 4 --gradient-release",
         {f"{name}, released" for name in ("adamw", "adamw-8bit", "adamw-4bit")}),
    ],
)  # fmt: skip
def test_given_choices_narrow_the_list(plan: Planned, given: str, rows: set[str]) -> None:
    assert {row["name"] for row in plan("7B", "80", *given.split())["rows"]} == rows


def test_offloaded_state_is_counted_once_per_host(plan: Planned) -> None:
    offloaded = row_of(plan("14B", "139.8", "--gpus", "4"), "shared_vllm", "adamw, offloaded")
    assert offloaded["host_gib"] == pytest.approx(12 * PARAMETERS["14B"] / 2**30)
    assert offloaded["state_gib"] == 0


def test_trainer_beside_a_sharded_server_needs_a_copy(plan: Planned, page: Callable[..., str]) -> None:
    for mode in (("--mode", "none"), ("--mode", "lora_only", "--lora-handover", "disk")):
        given = (*mode, "--tensor-parallel-size", "2")
        weights = 1.5 * 2 * PARAMETERS["7B"] / 2**30
        assert plan("7B", "80", *given)["rows"][0]["weights_gib"] == pytest.approx(weights, rel=0.02)
        assert "GiB on each of 2 GPUs" in page("7B", "80", *given)


def test_trainer_on_the_cpu_needs_host_memory(plan: Planned) -> None:
    given = ["--mode", "none", "--trainer-device", "cpu"]
    alone, four = plan("7B", "80", *given, "--no-offload-optimizer"), plan("7B", "80", *given, "--gpus", "4")
    assert {row["trainer_device"] for row in alone["rows"]} == {"cpu"}
    assert alone["rows"][0]["verdict"] == "fits"
    assert alone["rows"][0]["host_gib"] > 14 * 7.6 / 1.074
    assert row_of(four, "none", "adamw")["host_gib"] > row_of(alone, "none", "adamw")["host_gib"]


def test_replicas_share_the_optimizer_state(plan: Planned) -> None:
    alone, four = (plan("1.5B", "80", "--mode", "none", *gpus) for gpus in ((), ("--gpus", "4")))
    one, shared = (row_of(document, "none", "adamw") for document in (alone, four))
    assert shared["state_gib"] == pytest.approx(one["state_gib"] / 4)
    assert {row["trainer_device"] for row in four["rows"]} == {"auto"}


def test_conflicting_choices_are_refused(page: Callable[..., str]) -> None:
    refusal = page("7B", "80", "--optimizer", "adamw-8bit", "--offload-optimizer")
    assert "--offload-optimizer keeps float32 states in host memory" in refusal


def test_table_has_80_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.people, "width", 80)
    for size, gpu in (("14B", "139.8"), ("32B", "24"), ("1.5B", "180")):
        answer(["plan", "--all", "--model", str(folder_of(qwen2(size), tmp_path / size)), "--gpu-memory", gpu])
        shown = capsys.readouterr().err
        table = [line for line in shown.splitlines() if not line.startswith("  bridge run")]
        assert max(map(len, table)) <= 80, max(table, key=len)
        assert "…" not in shown
        assert "estimated from its dimensions" in shown
        assert sum("adamw-8bit, released" in line for line in table) == 3


def test_float32_sums_are_explained_but_not_counted(plan: Planned, page: Callable[..., str]) -> None:
    given = "7B", "139.8", "--mode", "shared_vllm", "--batch-size"
    few, many = (plan(*given, size)["rows"] for size in ("128", "136"))
    assert (few[0]["sums_gib"], many[0]["sums_gib"]) == (0, many[0]["gradients_gib"])
    assert few[0]["gradients_gib"] == many[0]["gradients_gib"]
    assert "summed in float32" not in page(*given, "128")
    expected = "with more than 16 micro-batches per update they are summed in float32 if that fits, in up to 14.2 GiB"
    assert expected in page(*given, "136")
    assert next(row["sums_gib"] for row in many if row["name"] == "adamw, released") == 0


def test_only_the_best_setup_is_shown_unless_all_are_requested(page: Callable[..., str]) -> None:
    best, everything = page("7B", "80"), page("7B", "80", "--all")
    for shown in (best, everything):
        assert shown.index("--optimizer adamw-8bit") < shown.index("--mode shared_vllm, weights once")
    assert "--all lists 25 more" in best
    assert [best.count(word) for word in ("--mode none", "lacks", "offloaded")] == [0, 0, 0]
    assert everything.count("--mode none, weights twice") == 2
    assert "--all" not in everything
    assert "nothing fits" in page("32B", "24")


def test_host_memory_setup_comes_with_an_alternative(plan: Planned, page: Callable[..., str]) -> None:
    shown = page("32B", "140")
    assert "it needs 366 GiB of host memory; --host-memory GIB sets the limit" in shown
    assert "no host memory: bridge run --model" in shown
    assert "it takes 366 of 400 GiB of host memory" in page("32B", "140", "--host-memory", "400")
    unknown, little = plan("32B", "140"), plan("32B", "140", "--host-memory", "365")
    assert (unknown["host_gib"], little["host_gib"]) == (None, 365)
    assert (unknown["recommended_without_host"], little["recommended_without_host"]) == (little["recommended"], None)


@pytest.mark.parametrize("given", [(), ("--mode", "none")])
def test_model_that_doctor_refuses_is_refused(page: Callable[..., str], given: tuple[str, ...]) -> None:
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    refusal = page("7B", "140", *given, config=awq)
    assert f"cannot be trained{' by --mode none' if given else ''}: quantized (awq)" in refusal
    assert "hint: use the unquantized model" in refusal


def test_mode_that_doctor_refuses_is_left_out(plan: Planned, page: Callable[..., str]) -> None:
    document = plan("7B", "139.8", config=INSIDE)
    assert {row["mode"] for row in document["rows"]} == {"shared_vllm"}
    assert [obstacle["modes"] for obstacle in document["obstacles"]] == [["lora_only", "none"]]
    assert "cannot use --mode lora_only or --mode none: a mistral3" in page("7B", "139.8", config=INSIDE)
    assert "by --mode none: a mistral3" in page("7B", "139.8", "--mode", "none", config=INSIDE)


def test_images_are_named_with_the_model(plan: Planned, page: Callable[..., str]) -> None:
    assert plan("7B", "139.8")["sight"] == ""
    seeing = {"model_type": "qwen3_vl", "vision_config": {}, "text_config": qwen2("7B")}
    printed = page("7B", "139.8", config=seeing)
    assert "prompts may have images; its vision model stays frozen in vLLM's memory" in printed
    odd = plan("7B", "139.8", config={**seeing, "model_type": "odd"})
    assert odd["sight"] == "trained on text only, without images"


def test_only_a_missing_configuration_is_downloaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, requests = folder_of(qwen2("7B"), tmp_path / "hub"), list[object]()

    def download(name: str, file: str, **_: object) -> str:
        requests.append((name, file))
        return str(folder / file)

    monkeypatch.setattr("bridge.core.hub.get_hf_file_metadata", lambda _url, **_: None)
    monkeypatch.setattr("bridge.core.hub.hf_hub_download", download)
    assert answer(["plan", "--json", "--model", "org/model", "--gpu-memory", "139.8"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] == "bridge run --model org/model"
    assert requests == [("org/model", "config.json")]


def test_unreachable_hub_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_url: str, **_: object) -> str:
        raise ConnectionError("no such host\nand more")

    monkeypatch.setattr("bridge.core.hub.get_hf_file_metadata", unreachable)
    assert answer(["plan", "--model", "org/no-such-model-anywhere", "--gpu-memory", "80"]) == 2
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --model org/no-such-model-anywhere: not downloaded yet, and the hub at ")
    assert first.endswith("does not answer (no such host and more)")


def test_plan_defaults_to_this_machines_smallest_gpu(
    plan: Planned, page: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "gpu_memory_bytes", lambda: [180 * 2**30, 80 * 2**30])
    monkeypatch.setattr("bridge.core.host_memory.available_bytes", lambda: 64 * 2**30)
    monkeypatch.setattr("bridge.core.host_memory.cgroup_left_bytes", lambda: 100 * 2**30)
    document = plan("7B", None)
    offloaded = row_of(document, "shared_vllm", "adamw, offloaded")
    assert (document["gpu_gib"], offloaded["verdict"]) == (80, "does not fit")
    assert offloaded["lacking_gib"] == pytest.approx(12 * 7.6156 / 1.0737 - 64, abs=0.1)
    monkeypatch.setattr(accelerator, "gpu_memory_bytes", list)
    assert "--gpu-memory 80" in page("7B", None)


def test_plan_loads_neither_torch_nor_vllm(tmp_path: Path) -> None:
    heavy = ("torch", "vllm", "transformers", "numpy", "matplotlib")
    code = (
        "import sys; from bridge_cli.main import answer; answer(sys.argv[1:]);"
        f"sys.exit(' '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    arguments = ["plan", "--json", "--model", str(folder_of(qwen2("7B"), tmp_path / "m")), "--gpu-memory", "80"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rows"]


@pytest.mark.parametrize(
    ("count", "shown"), [(999_499, "999k"), (1_000_000, "1.00M"), (52_300, "52k"), (147_700_000, "148M")]
)
def test_token_counts_are_abbreviated(count: int, shown: str) -> None:
    assert tokens(count) == shown
    assert len(shown) <= WIDTHS["tokens"]


def test_fp8_is_counted_and_kept_in_the_command(plan: Planned) -> None:
    plain, quantized = (plan("7B", "139.8", *flags) for flags in ((), ("--quantization", "fp8_per_block")))
    assert "--quantization fp8_per_block" in quantized["recommended"]
    one, other = (row_of(document, "shared_vllm", "adamw-8bit") for document in (plain, quantized))
    assert other["weights_gib"] - one["weights_gib"] == pytest.approx(6.5e9 / 2**30, rel=0.01)
    assert quantized["num_params"] == plain["num_params"]


def test_fp8_is_planned_only_where_it_is_served(plan: Planned) -> None:
    document = plan("7B", "80", "--quantization", "fp8_per_block")
    assert {row["mode"] for row in document["rows"]} == {"shared_vllm", "lora_only"}
    in_place = plan("7B", "80", "--quantization", "fp8_per_block", "--mode", "none", "--reload", "in-place")
    assert "--reload in-place" in in_place["recommended"]


def test_fp8_replaces_the_weights_of_a_transfer_server(plan: Planned) -> None:
    flags = "--mode", "none", "--reload", "transfer", "--trainer-device", "cuda:1"
    plain, quantized = (plan("7B", "139.8", *flags, *more) for more in ((), ("--quantization", "fp8_per_block")))
    assert "--quantization fp8_per_block" in quantized["recommended"]
    one, other = (row_of(document, "none", "adamw-8bit") for document in (plain, quantized))
    assert one["weights_gib"] - other["weights_gib"] == pytest.approx(6.5e9 / 2**30, rel=0.01)
