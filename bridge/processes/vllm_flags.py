"""vLLM's own flags (after `--`): those that Bridge refuses, those that it adds, and why.

Not covered: what only shows once the model is loaded, such as a quantized checkpoint: the patches refuse that by name.
Source: `vllm/engine/arg_utils.py`, and `MaxLoRARanks` in `vllm/config/lora.py`, vLLM 0.26 to 0.33.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bridge.checks import model as model_checks
from bridge.checks.software import Device
from bridge.config import ServeConfig, TrainConfig
from bridge.core import json_lines
from bridge.errors import UsageError
from bridge.planning.memory import SERVERS_GPU
from bridge.processes import accelerator
from bridge.server.protocol import TRANSFER_FLAG

SHORT_NAMES: Mapping[str, str] = {
    "-q": "--quantization", "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-dpl": "--data-parallel-size-local", "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank", "-dph": "--data-parallel-hybrid-lb", "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb", "-asc": "--api-server-count", "-n": "--nnodes",
    "-sc": "--speculative-config", "-ep": "--enable-expert-parallel", "-cc": "--compilation-config",
    "-O": "--optimization-level",
}  # fmt: skip
SHARED_NAMES = {"--device", "--max-lora-rank", "--quantization"}
"""Flags of ours that mean the same as vLLM's: they may also come after --."""
PLAIN_FORMATS = {
    "auto", "hf", "pt", "safetensors", "npcache", "dummy", "mistral", "fastsafetensors", "runai_streamer"
}  # fmt: skip
REFUSED_VARIABLES: Mapping[str, str] = {
    "VLLM_USE_RUST_FRONTEND": "that front end loads no endpoint plugin, so nothing would write the manifest",
    "VLLM_SERVER_DEV_MODE": "its development routes pause, resume and call the engine beside the fence",
}
"""Environment variable -> why vLLM cannot run with it."""
OFF = ("", "0")
WEIGHTLESS_DRAFTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that have no weights."""
EXACT_REJECTION = ("standard", "block")
"""Ways of rejecting drafts that keep the model's distribution; vLLM's third one, `synthetic`, is for benchmarks."""


@dataclass(frozen=True)
class Refusal:
    """Why one flag is refused."""

    reason: str
    """What it would break."""
    allowed: Callable[[str], bool] = lambda _: False
    """Returns whether a value does no harm."""
    any_server: bool = False
    """Whether a server that shares nothing is refused too."""


def _at_most(limit: float) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(r"\d+\.?\d*", value) is not None and float(value) <= limit


def _drafts_without_weights(value: str) -> bool:
    """Return whether the JSON of a speculation names a method that reads its drafts from the tokens themselves."""
    try:
        choices = json_lines.parsed(value)
    except ValueError:
        return False
    is_exact = isinstance(choices, dict) and choices.get("rejection_sample_method", "standard") in EXACT_REJECTION
    return is_exact and choices.get("method") in WEIGHTLESS_DRAFTS and not choices.get("model")


_QUANTIZED = (
    "quantized weights are not the bytes that a trainer updates; --quantization fp8_per_block before -- keeps both"
)
_OFFLOADED = "offloaded weights live in host memory and are copied to the GPU for each use"
_REFUSED: Mapping[tuple[str, ...], Refusal] = {
    ("--quantization",): Refusal(_QUANTIZED, {"none", "None"}.__contains__),
    ("--quantization-config",): Refusal(_QUANTIZED),
    ("--load-format",): Refusal("this loader maps or repacks the weights differently", PLAIN_FORMATS.__contains__),
    ("--worker-extension-cls",): Refusal("Bridge's own worker extension goes there, and vLLM takes one"),
    ("--worker-cls",): Refusal("Bridge's patches fit only vLLM's own workers"),
    ("--pipeline-parallel-size",): Refusal("a pipeline stage holds only some layers; a trainer needs all", _at_most(1)),
    ("--data-parallel-size", "--data-parallel-size-local"): Refusal(
        "every data-parallel replica has its own weights, and a trainer would train one", _at_most(1)
    ),
    (
        "--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-hybrid-lb",
        "--data-parallel-external-lb", "--data-parallel-multi-port-external-lb",
    ): Refusal("one server must own every weight; data-parallel replicas have their own"),
    ("--nnodes",): Refusal("memory is shared within one host", _at_most(1)),
    ("--enable-expert-parallel", "--enable-eplb", "--enable-elastic-ep"): Refusal(
        "experts are moved and repacked while serving, so their addresses change"
    ),
    ("--moe-backend",): Refusal("its kernels read repacked experts", {"auto", "triton"}.__contains__),
    ("--speculative-config", "--speculative-model", "--spec-model", "--spec-method"): Refusal(
        "a draft model is a second set of weights, which would not be trained; exact without one:"
        """ --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'""",
        _drafts_without_weights,
    ),
    ("--cpu-offload-gb", "--offload-group-size"): Refusal(_OFFLOADED, _at_most(0)),
    ("--offload-backend",): Refusal(_OFFLOADED),
    ("--api-server-count",): Refusal("the fence's version and the manifest belong to one API server", _at_most(1)),
    ("--headless",): Refusal("without its API server nothing answers the trainer", any_server=True),
    ("--grpc", "--uds", "--ssl-keyfile", "--ssl-certfile"): Refusal(
        "the trainer reaches the server over plain HTTP on its port", any_server=True
    ),
    ("--config",): Refusal("the flags in that file could not be checked; give them after --", any_server=True),
}  # fmt: skip
REFUSED: Mapping[str, Refusal] = {flag: refusal for flags, refusal in _REFUSED.items() for flag in flags}
"""vLLM's flag -> why it cannot be combined with one copy."""
OURS = {"--" + name.replace("_", "-") for name in ServeConfig.model_fields}
WHOLE_NAMES = (*OURS, *REFUSED, TRANSFER_FLAG[0])
"""What may be given shortened: argparse takes every beginning that is no other flag's."""
LOGPROBS_MODE = ("--logprobs-mode", "processed_logprobs")
"""The trainer compares with the distribution that was sampled from, after temperature."""
WORKER_EXTENSION = ("--worker-extension-cls", "bridge_patches.worker.BridgeWorker")
NO_PAGES = ("--allowed-origins", "[]")
"""No web page of another host may send requests, whatever the default of this version of vLLM allows."""
SLEEP_MODE = "--enable-sleep-mode"
"""Lets vLLM free its KV cache while a trainer needs the memory; costs nothing until then."""
CHOOSES_SLEEP = {SLEEP_MODE, "--no-enable-sleep-mode", "--kv-transfer-config"}
"""With one of these the user decides; 0.33 refuses to start with it and a KV connector that cannot sleep."""
MOE_BACKEND = ("--moe-backend", "triton")
"""Its kernels read experts as they are loaded; those that vLLM prefers on some GPUs repack them."""
PIECEWISE_GRAPHS = ("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')
"""Leaves attention out of CUDA graphs. With a sliding window in every layer, shorter than --max-model-len, the full
graphs of vLLM 0.33 on an H200 decoded 0.8 nats a token away from what it computes without graphs; pieces: 0.008."""
CHOOSES_GRAPHS = {PIECEWISE_GRAPHS[0], "--enforce-eager", "--optimization-level"}
"""With one of these the user decides."""
START_METHOD = ("VLLM_WORKER_MULTIPROC_METHOD", "fork")
"""The engine and its workers begin with all that the API server has imported, unless the caller chooses. vLLM itself
spawns them where a fork is unsafe: once CUDA is initialized, and on the CPU."""
NEEDS_SPAWN = {"--mm-tensor-ipc"}
"""vLLM refuses one of its values without `spawn`."""
ROUNDED_SCALES = ("VLLM_USE_DEEP_GEMM_E8M0", "0")
"""Else DeepGEMM quantizes FP8 once more, with scales that are powers of two; Hopper's kernels need none."""
WITHOUT_DEEP_GEMM = ("VLLM_USE_DEEP_GEMM", "0")
"""vLLM has CUTLASS's kernels instead. DeepGEMM's are compiled when they are first used, by nvcc."""
UNPACKED = ("VLLM_DISABLED_KERNELS", "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel")
"""They repack FP8. vLLM 0.33 prefers Marlin's to Triton's on GPUs without CUTLASS's for blocks, such as an L40."""
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
"""Variables with the folder of the CUDA toolkit."""
RESHAPING = ("--logits-processors", "--watermark-config")
"""They change what every request samples from; no request can turn them off."""
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with the folder of vLLM's sockets; without it, that of temporary files."""
LONGEST_SOCKETS = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Bytes of its path: the path of a socket has at most 107."""
SHORT_FOLDER = "/tmp"  # noqa: S108  where vLLM's sockets are without TMPDIR
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's sizes of an adapter slot."""
EXPERT_SLOTS = "BRIDGE_LORA_EXPERTS"  # as bridge_patches/placement.py reads it


def check(flags: Sequence[str], environment: Mapping[str, str], *, shares_weights: bool = True) -> None:
    """Refuse what would break one copy, or a server that no trainer can reach, all at once."""
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"unexpected argument {flags[0]!r}", remedy="give the model as --model, and vLLM's own flags after --"
        )
    faults = []
    for name, value in _pairs(flags):
        if name in OURS - SHARED_NAMES:
            faults.append(f"{name} after --: it is a flag of bridge serve-vllm, give it before --")
        why = REFUSED.get(name)
        if why is not None and (shares_weights or why.any_server) and not why.allowed(value):
            faults.append(f"{f'{name} {value}'.strip()}: {why.reason}")
    if shares_weights:
        values = {name: environment.get(name, "") for name in REFUSED_VARIABLES}
        faults += [f"{name}={value}: {REFUSED_VARIABLES[name]}" for name, value in values.items() if value not in OFF]
    if faults:
        what = "one copy of the weights" if shares_weights else "a trainer"
        raise UsageError("; ".join(faults), remedy=f"leave it out: it does not work with {what}")


def names(flags: Sequence[str]) -> set[str]:
    """Return the long names of the given flags."""
    return {name for name, _ in _pairs(flags)}


def value(flags: Sequence[str], name: str) -> str:
    """Return the value of flag `name`, the first of several; empty if it is not given."""
    return next((value for given, value in _pairs(flags) if given == name), "")


@dataclass
class Added:
    """What Bridge adds to a command."""

    argv: list[str] = field(default_factory=list)
    """Flags of vLLM."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of vLLM."""
    notes: list[str] = field(default_factory=list)
    """What a user would not expect, and why, a line each."""


def added(
    config: ServeConfig,
    flags: Sequence[str],
    device: Device,
    outer: Mapping[str, str],
    *,
    shares_weights: bool,
    trainer: TrainConfig,
) -> Added:
    """Return what lets `trainer` use the server: its log-probabilities, its weights and its memory."""
    given, on_gpu, extra = names(flags), device == "cuda", Added()
    beside = trainer.trainer_device if on_gpu else "cpu"
    _add_transfer(extra, given, trainer.publishing.reload, replicas=trainer.replicas, beside=beside)
    model = model_checks.read(config.model) if on_gpu else None
    if config.gpu_memory_utilization:
        extra.argv += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    elif on_gpu and "--kv-cache-memory-bytes" not in given:
        derived = accelerator.derive(
            config.model,
            gpu_bytes=min(accelerator.gpu_memory_bytes()),
            tensor_parallel_size=config.tensor_parallel_size,
            trainer=trainer,
            max_model_len=config.max_model_len,
            quantization=config.quantization,
        )
        extra.argv += ["--gpu-memory-utilization", str(derived.share)]
        extra.notes.append(f"--gpu-memory-utilization {derived.share}: {derived.reason}")
    extra.argv += LOGPROBS_MODE if LOGPROBS_MODE[0] not in given else ()
    if shares_weights:
        extra.argv += WORKER_EXTENSION
        extra.argv += NO_PAGES if NO_PAGES[0] not in given else ()
        extra.argv += [SLEEP_MODE] if on_gpu and given.isdisjoint(CHOOSES_SLEEP) else []  # no such mode on a CPU
        extra.argv += MOE_BACKEND if MOE_BACKEND[0] not in given and model_checks.has_experts(model) else ()
        if START_METHOD[0] not in outer and given.isdisjoint(NEEDS_SPAWN):
            extra.environment |= dict([START_METHOD])
    why = "it changes what is sampled, which the trainer cannot reproduce: importance weights and KL are off"
    extra.notes += [f"{flag}: {why}" for flag in RESHAPING if flag in given]
    window = model_checks.window(model, config.max_model_len)
    if window is not None and given.isdisjoint(CHOOSES_GRAPHS):
        extra.argv += PIECEWISE_GRAPHS
        why = f"every layer's window, {window:,} tokens, may be shorter than a sequence: vLLM's full CUDA graphs err"
        extra.notes.append(f"{' '.join(PIECEWISE_GRAPHS)}: {why}")
    if config.max_lora_rank is not None:
        _add_adapters(extra, config.max_lora_rank, given, experts=config.lora_experts)
    _add_kernels(extra, config, outer, on_gpu=on_gpu)
    _add_sockets(extra, outer)
    return extra


def _add_sockets(extra: Added, outer: Mapping[str, str]) -> None:
    """Let vLLM's processes meet in a folder with a short path, if that of temporary files is too long for a socket."""
    variable = next((name for name in (SOCKETS, "TMPDIR") if outer.get(name)), "TMPDIR")
    folder = outer.get(variable) or tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length <= LONGEST_SOCKETS:
        return
    what = f"{variable} has {length} bytes, and vLLM's sockets in it allow {LONGEST_SOCKETS}"
    if variable == SOCKETS or not os.access(SHORT_FOLDER, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {folder}", remedy=f"{SOCKETS}=/path/to/a/short/folder, or a shorter {variable}")
    extra.environment[SOCKETS] = SHORT_FOLDER
    extra.notes.append(f"{SOCKETS}={SHORT_FOLDER}: {what}")


def _add_transfer(extra: Added, given: set[str], reload: str, *, replicas: int, beside: str) -> None:
    """Let the server take weights, if they are sent from another GPU than its own; `beside` is the trainer's device."""
    if reload != "transfer":
        return
    if replicas > 1:
        raise UsageError(
            f"--reload transfer sends from one trainer, found {replicas} (--gpus, --hosts)",
            remedy="leave out --gpus and --hosts; one trainer feeds several servers with bridge train --servers",
        )
    if beside in {*SERVERS_GPU, "cpu"}:
        what = "a CPU" if beside == "cpu" else f"the server's: --trainer-device {beside}"
        raise UsageError(
            f"--reload transfer sends from one GPU to another, found {what}",
            remedy="--trainer-device cuda:N, a GPU that the server does not use, or --reload restart",
        )
    extra.argv += TRANSFER_FLAG if TRANSFER_FLAG[0] not in given else ()
    extra.environment["VLLM_SERVER_DEV_MODE"] = "1"


def slot_rank(rank: int) -> int | None:
    """Return the rank of vLLM's smallest slot that takes an adapter of `rank`; None: there is none."""
    return next((size for size in RANKS if size >= rank), None)


def _add_adapters(extra: Added, rank: int, given: set[str], *, experts: bool) -> None:
    """Let the server take one adapter of `rank` at a time, of routed `experts` too."""
    size = slot_rank(rank)
    if size is None:
        raise UsageError(
            f"--max-lora-rank {rank}: vLLM takes adapters up to rank {RANKS[-1]}",
            remedy=f"--lora-r {RANKS[-1]}, or train all weights with --mode shared_vllm",
        )
    if size != rank and "--max-lora-rank" not in given:
        extra.notes.append(f"--max-lora-rank {size}: vLLM's smallest slot that takes rank {rank}")
    for flag, *values in (["--enable-lora"], ["--max-lora-rank", str(size)], ["--max-loras", "1"]):
        extra.argv += [flag, *values] if flag not in given else []
    extra.environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", EXPERT_SLOTS: str(int(experts))}


def _add_kernels(extra: Added, config: ServeConfig, outer: Mapping[str, str], *, on_gpu: bool) -> None:
    """Add what vLLM's kernels need: for FP8, that none changes it; on a CPU, room for the trainer."""
    if not on_gpu:
        _add_cpu(extra, config, outer)
    elif config.quantization is not None:
        extra.environment |= _fp8_kernels(outer)


def _fp8_kernels(outer: Mapping[str, str]) -> dict[str, str]:
    """Return variables that stop vLLM from rounding or repacking FP8 a second time, unless the caller set them."""
    homes = [f"{outer[name]}/bin" for name in CUDA_HOMES if outer.get(name)] or ["/usr/local/cuda/bin"]
    has_compiler = shutil.which("nvcc", path=os.pathsep.join([outer.get("PATH", os.defpath), *homes]))
    derived = dict([ROUNDED_SCALES, UNPACKED] if has_compiler else [ROUNDED_SCALES, UNPACKED, WITHOUT_DEEP_GEMM])
    return {name: value for name, value in derived.items() if name not in outer}


def _add_cpu(extra: Added, config: ServeConfig, outer: Mapping[str, str]) -> None:
    """Give vLLM on a CPU little memory for KV, and each rank its own cores, which it cannot tell apart on one node."""
    derived = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if config.tensor_parallel_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // config.tensor_parallel_size)
        groups = [cores[rank * share : (rank + 1) * share] for rank in range(config.tensor_parallel_size)]
        derived["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    unset = {name: value for name, value in derived.items() if not outer.get(name)}
    extra.environment |= unset
    extra.notes += [f"{name}={value}: not set, derived" for name, value in unset.items()]


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (long name, value or an empty string) of every flag."""
    for flag, following in pairwise([*flags, ""]):
        if re.match(r"--?[A-Za-z]", flag):
            name, _, value = flag.partition("=")
            name = name.partition(".")[0]
            if not name.startswith("--"):  # argparse takes -qfp8, and -t for -tp
                short = next((other for other in SHORT_NAMES if other.startswith(name)), name[:2])
                name, value = SHORT_NAMES.get(short, name), value or name[len(short) :]
            name = name.replace("_", "-")
            if name not in WHOLE_NAMES:
                name = next((other for other in WHOLE_NAMES if other.startswith(name)), name)
            yield name, value or ("" if following.startswith("-") else following)
