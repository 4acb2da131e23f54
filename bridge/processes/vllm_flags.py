"""vLLM's own flags (after `--`): those that Bridge passes on, refuses or adds, and why.

A flag is passed on if it is known to leave results unchanged except for rounding: it may affect speed, memory, logs and
routes. The trainer would not notice a flag that changes the model, its configuration, its tokenizer or the sampling for
the server only, because it builds all of these from the model's folder. An unreviewed flag might do that.

Not covered: what only shows once the model is loaded, such as a quantized checkpoint, which the patches refuse by name.
Source: `vllm/engine/arg_utils.py`, and `MaxLoRARanks` in `vllm/config/lora.py`, vLLM 0.26 to 0.33.
"""

import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bridge.checks import model as model_checks
from bridge.checks.software import Device
from bridge.config import ServeConfig
from bridge.core import json_lines
from bridge.errors import UsageError
from bridge.planning.memory import SERVERS_GPU
from bridge.processes.accelerator import MemoryShare
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
"""Bridge's flags that mean the same as vLLM's: they may also come after --."""
PLAIN_FORMATS = {
    "auto", "hf", "pt", "safetensors", "npcache", "dummy", "mistral", "fastsafetensors", "runai_streamer"
}  # fmt: skip
OTHER_VARIABLES: Mapping[str, str] = {
    "VLLM_MODEL_REDIRECT_PATH": "the server would load a different model than the trainer",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "it chooses experts at random",
    "VLLM_TEST_FORCE_LOAD_FORMAT": "it replaces --load-format, for example with random weights",
}
"""Environment variable that changes only the server's model -> how."""
REFUSED_VARIABLES: Mapping[str, str] = {
    "VLLM_USE_RUST_FRONTEND": "that front end loads no endpoint plugin, so nothing would write the manifest",
    "VLLM_SERVER_DEV_MODE": "its development routes pause, resume and call the engine, bypassing the fence",
}
"""Environment variable -> why vLLM cannot run with it."""
OFF = ("", "0")
HEAD_KEYS = {"head_dtype"}
"""Configuration keys that only vLLM has, and that change only how its logits are rounded."""
WEIGHTLESS_DRAFTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that have no weights."""
THE_TRAINERS_REVISION = "main"
"""The revision of a model on the hub that the trainer reads."""
EXACT_REJECTION = ("standard", "block")
"""Ways of rejecting drafts that keep the model's distribution; vLLM's third one, `synthetic`, is for benchmarks."""


@dataclass(frozen=True)
class Refusal:
    """Why one flag is refused."""

    reason: str
    """What it would break."""
    allowed: Callable[[str], bool] = lambda _: False
    """Returns whether a value is harmless."""
    any_server: bool = False
    """Whether the flag is also refused for a server that shares nothing."""
    hint: str = ""
    """What to do instead; empty: leave it out."""
    may_insist: bool = False
    """Whether it changes only how numbers are rounded, which importance sampling may correct."""


def _at_most(limit: float) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(r"\d+\.?\d*", value) is not None and float(value) <= limit


def _drafts_without_weights(value: str) -> bool:
    """Return whether the JSON names a speculative decoding method that drafts from the tokens themselves."""
    try:
        choices = json_lines.parsed(value)
    except ValueError:
        return False
    is_exact = isinstance(choices, dict) and choices.get("rejection_sample_method", "standard") in EXACT_REJECTION
    return is_exact and choices.get("method") in WEIGHTLESS_DRAFTS and not choices.get("model")


def _overrides_the_heads_type(value: str) -> bool:
    """Return whether the JSON overrides only the dtype in which vLLM computes logits; the trainer's is float32."""
    try:
        overrides = json_lines.parsed(value)
    except ValueError:
        return False
    return isinstance(overrides, dict) and overrides.keys() <= HEAD_KEYS


_QUANTIZED = (
    "quantized weights are not the bytes that a trainer updates; --quantization fp8_per_block before -- keeps both"
)
_OFFLOADED = "offloaded weights live in host memory and are copied to the GPU for each use"
_ALONE = "only for the server: the trainer builds its model from the model's folder, and would compute differently"
_IN_CONFIG = "put it into the config.json of the model's folder, or of a copy, which server and trainer both read"
_TOKENIZED = "only for the server: the trainer encodes prompts with the model's own tokenizer and chat template"
_IN_FOLDER = (
    "put it into the model's folder, or into a copy (a template as chat_template.jinja), which server and trainer read"
)
_DRAFTED = (
    "a draft model is a second set of weights, which would not be trained; exact without one:"
    """ --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'"""
)
_REFUSED: Mapping[tuple[str, ...], Refusal] = {
    ("--hf-overrides",): Refusal(_ALONE, _overrides_the_heads_type, any_server=True, hint=_IN_CONFIG),
    ("--hf-config-path", "--model-class-overrides", "--disable-sliding-window"): Refusal(
        _ALONE, any_server=True, hint=_IN_CONFIG
    ),
    ("--revision", "--code-revision"): Refusal(
        _ALONE, THE_TRAINERS_REVISION.__eq__, any_server=True,
        hint="download that revision, and give its folder as --model: hf download MODEL --revision REVISION",
    ),
    ("--config-format",): Refusal(_ALONE, ("auto", "hf").__contains__, any_server=True, hint=_IN_CONFIG),
    ("--runner",): Refusal(_ALONE, ("auto", "generate").__contains__, any_server=True),
    ("--convert",): Refusal(_ALONE, ("auto", "none").__contains__, any_server=True),
    ("--tokenizer", "--chat-template", "--default-chat-template-kwargs"): Refusal(
        _TOKENIZED, any_server=True, hint=_IN_FOLDER
    ),
    ("--tokenizer-revision",): Refusal(
        _TOKENIZED, THE_TRAINERS_REVISION.__eq__, any_server=True, hint=_IN_FOLDER
    ),
    ("--tokenizer-mode",): Refusal(_TOKENIZED, ("auto", "hf").__contains__, any_server=True, hint=_IN_FOLDER),
    ("--skip-tokenizer-init",): Refusal("the server has to detokenize completions", any_server=True),
    ("--mm-processor-kwargs", "--media-io-kwargs"): Refusal(
        "only for the server: the trainer processes images as the model's folder says", any_server=True,
        hint="put it into preprocessor_config.json in the model's folder, which server and trainer both read",
    ),
    ("--generation-config",): Refusal(
        "only for the server: where completions end, and what a request samples from by default, would be different",
        ("auto", "vllm").__contains__, any_server=True,
        hint="put it into the model's folder as generation_config.json",
    ),
    ("--override-generation-config",): Refusal(
        "it changes the sampling parameters that a request leaves out", any_server=True,
        hint="--temperature, --top-k, --top-p and --min-p, or generation_config.json in the model's folder",
    ),
    ("--logprobs-mode",): Refusal(
        "the trainer compares with the distribution that was sampled from, after temperature and filters",
        "processed_logprobs".__eq__, any_server=True,
    ),
    ("--kv-cache-dtype",): Refusal(
        "keys and values would be rounded only on the server", ("auto", "bfloat16").__contains__, any_server=True,
        may_insist=True,
    ),
    ("--mamba-cache-dtype", "--mamba-ssm-cache-dtype"): Refusal(
        "states would be rounded only on the server", ("auto", "float32").__contains__, any_server=True,
        may_insist=True,
    ),
    ("--lora-target-modules",): Refusal("an adapter's other modules would be ignored", any_server=True),
    ("--lora-dtype",): Refusal("the server would round adapters differently", "auto".__eq__, any_server=True),
    ("--quantization",): Refusal(_QUANTIZED, {"none", "None"}.__contains__),
    ("--quantization-config",): Refusal(_QUANTIZED),
    ("--load-format",): Refusal("this loader maps or repacks the weights differently", PLAIN_FORMATS.__contains__),
    ("--worker-extension-cls",): Refusal("vLLM takes one worker extension, and Bridge needs its own"),
    ("--worker-cls",): Refusal("Bridge's patches fit only vLLM's own workers"),
    ("--pipeline-parallel-size",): Refusal("a pipeline stage holds only some layers; a trainer needs all", _at_most(1)),
    ("--data-parallel-size", "--data-parallel-size-local"): Refusal(
        "every data-parallel replica has its own weights, and a trainer would train one", _at_most(1)
    ),
    (
        "--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-hybrid-lb",
        "--data-parallel-external-lb", "--data-parallel-multi-port-external-lb",
    ): Refusal("one server must own every weight; data-parallel replicas have their own"),
    ("--nnodes",): Refusal("memory is shared only within one host", _at_most(1)),
    ("--enable-expert-parallel", "--enable-eplb", "--enable-elastic-ep"): Refusal(
        "experts are moved and repacked while serving, so their addresses change"
    ),
    ("--moe-backend",): Refusal("its kernels read repacked experts", {"auto", "triton"}.__contains__),
    ("--speculative-config", "--speculative-model", "--spec-model"): Refusal(_DRAFTED, _drafts_without_weights),
    ("--spec-method",): Refusal(_DRAFTED, WEIGHTLESS_DRAFTS.__contains__),
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
_HARMLESS = """
aggregate-engine-logging all2all-backend allow-credentials allowed-headers allowed-local-media-path
allowed-media-domains allowed-methods allowed-origins api-key async-scheduling attention-backend attention-config
block-size chat-template-content-format collect-detailed-traces compilation-config cp-kv-cache-interleave-size
cpu-distributed-timeout-seconds cpu-offload-params cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets
data-parallel-address data-parallel-backend data-parallel-rpc-port data-parallel-supervisor-port
dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size
decode-context-parallel-size device-ids disable-access-log-for-endpoints disable-cascade-attn
disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs disable-frontend-multiprocessing
disable-hybrid-kv-cache-manager disable-log-requests disable-log-stats disable-nccl-for-dp-synchronization
disable-uvicorn-access-log distributed-executor-backend distributed-timeout-seconds download-dir
dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-sync-interval
enable-auto-tool-choice enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo
enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage
enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details
enable-lora enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras
enable-nccl-comm-suspend enable-offline-docs enable-per-request-metrics enable-prefix-caching enable-prompt-embeds
enable-prompt-tokens-details enable-request-id-headers enable-return-routed-experts enable-server-load-tracking
enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint enable-tower-connector-lora
enforce-eager exclude-tools-when-tool-choice-none expert-placement-strategy fail-on-environ-validation
fault-tolerance-config fingerprint-mode fingerprint-value fully-sharded-loras gdn-prefill-backend grpc-port
h11-max-header-count h11-max-incomplete-event-size help hf-token ignore-patterns interleave-mm-strings ir-op-priority
jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config kv-cache-memory-bytes
kv-cache-metrics kv-cache-metrics-sample kv-events-config kv-offloading-backend kv-offloading-size kv-transfer-config
language-model-only limit-mm-per-prompt linear-backend log-config-file log-error-stack log-level logging-config
logits-processors long-prefill-token-threshold long-prefill-token-threshold-adaptive lora-modules mamba-backend
mamba-block-size mamba-cache-mode master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len
max-logprobs max-long-partial-prefills max-loras max-num-active-seqs max-num-batched-tokens max-num-partial-prefills
max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens max-num-seqs max-parallel-loading-workers middleware
mm-encoder-attn-backend mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb
mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-tensor-ipc model-impl model-loader-extra-config node-rank
num-gpu-blocks-override numa-bind numa-bind-cpus numa-bind-nodes offload-num-in-group offload-params
offload-prefetch-step optimization-level otlp-traces-endpoint per-request-spec-decode-metrics performance-mode
prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo
prefix-match-unit profiler-config pt-load-map-location ray-workers-use-nsight reasoning-config reasoning-parser
reasoning-parser-plugin renderer-num-workers response-role return-sampling-mask return-tokens-as-token-ids root-path
safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls
scheduler-reserve-full-isl scheduling-policy seed served-model-name show-hidden-metrics-for-version shutdown-timeout
skip-mm-profiling sleep-mode-backend sleep-mode-offload-cudagraph sleep-preserve-parameter-names
sparse-indexer-topk-backend specialize-active-lora spec-tokens sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs
ssl-ciphers stream-interval structured-outputs-config swap-space tool-call-parser tool-parser-plugin tool-server
tool-strict-level trust-remote-code trust-request-chat-template trust-request-mm-kwargs ubatch-size use-fp64-gumbel
use-tqdm-on-load uvicorn-log-level watchdog-config watermark watermark-config weight-transfer-config
"""
HARMLESS = frozenset(f"--{name}" for name in _HARMLESS.split()) | {"-h"}
"""Flags of vLLM 0.26 to 0.33 that a server may have without the trainer knowing. Two of them change what is sampled
from, which is noted (`RESHAPING`)."""
INSIST = "--allow-vllm-flags"
CLOSE = 0.8
"""Smallest similarity of an unknown flag to a known one that is suggested; 1 for the same name."""
NEGATION = "--no-"
"""Prefix that turns a vLLM flag off."""
WHOLE_NAMES = (*OURS, *REFUSED, *sorted(HARMLESS))
"""Flags that may be abbreviated: argparse accepts every unambiguous prefix."""
LOGPROBS_MODE = ("--logprobs-mode", "processed_logprobs")
"""The trainer compares with the distribution that was sampled from, after temperature."""
WORKER_EXTENSION = ("--worker-extension-cls", "bridge_patches.worker.BridgeWorker")
NO_PAGES = ("--allowed-origins", "[]")
"""Forbids requests from web pages of other hosts, whatever this version of vLLM allows by default."""
SLEEP_MODE = "--enable-sleep-mode"
"""Lets vLLM free its KV cache while a trainer needs the memory; until then it has no cost."""
CHOOSES_SLEEP = {SLEEP_MODE, "--no-enable-sleep-mode", "--kv-transfer-config"}
"""With one of these flags the user decides; vLLM 0.33 refuses sleep mode with a KV connector that cannot sleep."""
MOE_BACKEND = ("--moe-backend", "triton")
"""Its kernels read experts as they are loaded; those that vLLM prefers on some GPUs repack them."""
PIECEWISE_GRAPHS = ("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')
"""Leaves attention out of CUDA graphs. With a sliding window in every layer, shorter than --max-model-len, the full
graphs of vLLM 0.33 on an H200 decoded 0.8 nats per token away from its results without graphs; piecewise: 0.008."""
CHOOSES_GRAPHS = {PIECEWISE_GRAPHS[0], "--enforce-eager", "--optimization-level"}
"""With one of these flags the user decides."""
START_METHOD = ("VLLM_WORKER_MULTIPROC_METHOD", "fork")
"""Lets the engine and its workers inherit what the API server has imported, unless the caller chooses. vLLM spawns
them anyway where a fork is unsafe: once CUDA is initialized, and on the CPU."""
NEEDS_SPAWN = {"--mm-tensor-ipc"}
"""vLLM refuses one of its values without `spawn`."""
ROUNDED_SCALES = ("VLLM_USE_DEEP_GEMM_E8M0", "0")
"""Keeps DeepGEMM from quantizing FP8 again with power-of-two scales, which Hopper's kernels do not need."""
WITHOUT_DEEP_GEMM = ("VLLM_USE_DEEP_GEMM", "0")
"""Makes vLLM use CUTLASS's kernels. It needs nvcc to compile DeepGEMM's when they are first used."""
UNPACKED = ("VLLM_DISABLED_KERNELS", "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel")
"""Disables kernels that repack FP8. Where CUTLASS has no block kernels, as on an L40, vLLM 0.33 prefers Marlin's."""
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
"""Variables with the folder of the CUDA toolkit."""
RESHAPING = ("--logits-processors", "--watermark-config")
"""Flags that change what every request samples from; a request cannot turn them off."""
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with the folder for vLLM's sockets (default: the folder for temporary files)."""
LONGEST_SOCKETS = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Maximum number of bytes in that folder's path: the path of a socket has at most 107."""
SHORT_FOLDER = "/tmp"  # noqa: S108  where vLLM's sockets are without TMPDIR
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's adapter slots can have."""
EXPERT_SLOTS = "BRIDGE_LORA_EXPERTS"  # read by bridge_patches/placement.py


def check(
    flags: Sequence[str], environment: Mapping[str, str], *, shares_weights: bool = True, insisted: str = ""
) -> None:
    """Refuse all flags and variables that would break one copy, or that hide the server or its changes from a trainer.

    `insisted` names flags, separated by commas, that are passed on even though they have not been reviewed.
    """
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"unexpected argument {flags[0]!r}", hint="give the model as --model, and vLLM's own flags after --"
        )
    allowed_anyway = _listed(insisted)
    faults = list[str]()
    hints = list[str]()
    unknown = list[str]()
    for name, value in _pairs(flags):
        given = f"{name} {value}".strip()
        why = REFUSED.get(name)
        if name in OURS - SHARED_NAMES:
            faults.append(f"{given} after --: it is a flag of Bridge")
            hints.append(f"{given} before --")
        elif why is not None:
            is_passed = why.allowed(value) or (why.may_insist and name in allowed_anyway)
            if (shares_weights or why.any_server) and not is_passed:
                faults.append(f"{given}: {why.reason}")
                if why.hint:
                    hints.append(why.hint)
                if why.may_insist:
                    unknown.append(name)
        elif name not in HARMLESS | OURS | allowed_anyway and not _turns_off(name):
            faults.append(f"{given}: not known to keep the server's results equal to the trainer's")
            unknown.append(name)
            close = difflib.get_close_matches(name, sorted({*WHOLE_NAMES}), n=1, cutoff=CLOSE)
            hints += [f"did you mean {close[0]}?"] if close else []
    variables = {**OTHER_VARIABLES, **(REFUSED_VARIABLES if shares_weights else {})}
    for name, reason in variables.items():
        if environment.get(name, "") not in OFF:
            faults.append(f"{name}={environment[name]}: {reason}")
    if unknown:
        listed = ",".join(dict.fromkeys(name.lstrip("-") for name in (*sorted(allowed_anyway), *unknown)))
        them = "it out, or, if it does" if "," not in listed else "them out, or, if they do"
        hints.append(f"leave {them} no harm: {INSIST} {listed}")
    if faults:
        what = "one copy of the weights" if shares_weights else "a trainer"
        leave_out = f"leave it out: it does not work with {what}"
        raise UsageError("; ".join(faults), hint="; ".join(dict.fromkeys(hints)) or leave_out)


def _listed(insisted: str) -> set[str]:
    """Return the long names of comma-separated flags."""
    return {"--" + name.strip().lstrip("-").replace("_", "-") for name in insisted.split(",") if name.strip()}


def _turns_off(name: str) -> bool:
    """Return whether `name` turns off a known flag; argparse also accepts abbreviations."""
    beginning = name.replace(NEGATION, "--", 1)
    return name.startswith(NEGATION) and any(other.startswith(beginning) for other in HARMLESS | REFUSED.keys())


def names(flags: Sequence[str]) -> set[str]:
    """Return the long names of the given flags."""
    return {name for name, _ in _pairs(flags)}


def value(flags: Sequence[str], name: str) -> str:
    """Return the value of flag `name`, the first of several; empty if it is not given."""
    return next((value for given, value in _pairs(flags) if given == name), "")


@dataclass
class Added:
    """Flags, variables and notes that Bridge adds to a command."""

    argv: list[str] = field(default_factory=list)
    """vLLM flags."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables for vLLM."""
    notes: list[str] = field(default_factory=list)
    """What may surprise the user, with the reason, one line each."""


def added(
    config: ServeConfig,
    flags: Sequence[str],
    device: Device,
    outer: Mapping[str, str],
    *,
    shares_weights: bool,
    sent_from: str | None = None,
    share: Callable[[], MemoryShare] | None = None,
) -> Added:
    """Return what lets a trainer use the server's log-probabilities, weights and memory.

    `sent_from` is the trainer's device if it sends its weights to the server. `share` derives vLLM's share of the GPU
    if the user did not choose it; None: vLLM's own default.
    """
    extra = Added()
    given = names(flags)
    on_gpu = device == "cuda"
    model = model_checks.read(config.model) if on_gpu else None
    if sent_from is not None:
        _add_transfer(extra, given, sent_from if on_gpu else "cpu")
    if config.gpu_memory_utilization:
        extra.argv += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    elif on_gpu and share is not None and "--kv-cache-memory-bytes" not in given:
        derived = share()
        extra.argv += ["--gpu-memory-utilization", str(derived.share)]
        extra.notes.append(f"--gpu-memory-utilization {derived.share}: {derived.reason}")
    if LOGPROBS_MODE[0] not in given:
        extra.argv += LOGPROBS_MODE
    if shares_weights:
        _add_sharing(extra, given, outer, on_gpu=on_gpu, has_experts=model_checks.has_experts(model))
    _note_passed_on(extra, given, insisted=_listed(config.allow_vllm_flags))
    window = model_checks.window(model, config.max_model_len)
    if window is not None and given.isdisjoint(CHOOSES_GRAPHS):
        extra.argv += PIECEWISE_GRAPHS
        extra.notes.append(
            f"{' '.join(PIECEWISE_GRAPHS)}: every layer's window, {window:,} tokens, may be shorter than a sequence:"
            " vLLM's full CUDA graphs are inexact then"
        )
    if config.max_lora_rank is not None:
        _add_adapters(extra, config.max_lora_rank, given, experts=config.lora_experts)
    if not on_gpu:
        _add_cpu(extra, config, outer)
    elif config.quantization is not None:
        extra.environment |= _fp8_kernels(outer)
    _add_sockets(extra, outer)
    return extra


def _add_sharing(extra: Added, given: set[str], outer: Mapping[str, str], *, on_gpu: bool, has_experts: bool) -> None:
    """Let the server share its weights, and free its KV cache while a trainer needs the memory."""
    extra.argv += WORKER_EXTENSION
    if NO_PAGES[0] not in given:
        extra.argv += NO_PAGES
    if on_gpu and given.isdisjoint(CHOOSES_SLEEP):  # vLLM has no sleep mode on a CPU
        extra.argv.append(SLEEP_MODE)
    if has_experts and MOE_BACKEND[0] not in given:
        extra.argv += MOE_BACKEND
    if START_METHOD[0] not in outer and given.isdisjoint(NEEDS_SPAWN):
        extra.environment |= dict([START_METHOD])


def _note_passed_on(extra: Added, given: set[str], *, insisted: set[str]) -> None:
    """Add notes about flags that are passed on although the trainer cannot reproduce or does not see their effect."""
    for flag in RESHAPING:
        if flag in given:
            extra.notes.append(
                f"{flag}: it changes what is sampled, which the trainer cannot reproduce: importance weights and KL"
                " are off"
            )
    for flag in sorted(given & insisted):
        extra.notes.append(f"{flag}: passed on; the trainer does not know of it")


def _add_sockets(extra: Added, outer: Mapping[str, str]) -> None:
    """Put vLLM's sockets into a folder with a short path, if the path of their usual folder is too long."""
    variable = next((name for name in (SOCKETS, "TMPDIR") if outer.get(name)), "TMPDIR")
    folder = outer.get(variable) or tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length <= LONGEST_SOCKETS:
        return
    what = f"{variable} has {length} bytes, but vLLM's sockets in it allow only {LONGEST_SOCKETS}"
    if variable == SOCKETS or not os.access(SHORT_FOLDER, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {folder}", hint=f"{SOCKETS}=/path/to/a/short/folder, or a shorter {variable}")
    extra.environment[SOCKETS] = SHORT_FOLDER
    extra.notes.append(f"{SOCKETS}={SHORT_FOLDER}: {what}")


def _add_transfer(extra: Added, given: set[str], trainer_device: str) -> None:
    """Let the server receive weights, which the trainer sends from a GPU that the server does not use."""
    if trainer_device == "cpu" or trainer_device in SERVERS_GPU:
        device = "a CPU" if trainer_device == "cpu" else f"the server's: --trainer-device {trainer_device}"
        raise UsageError(
            f"--reload transfer sends from one GPU to another, found {device}",
            hint="--trainer-device cuda:N, a GPU that the server does not use, or --reload restart",
        )
    if TRANSFER_FLAG[0] not in given:
        extra.argv += TRANSFER_FLAG
    extra.environment["VLLM_SERVER_DEV_MODE"] = "1"


def slot_rank(rank: int) -> int | None:
    """Return the rank of vLLM's smallest slot that takes an adapter of `rank`; None: no slot is large enough."""
    return next((size for size in RANKS if size >= rank), None)


def _add_adapters(extra: Added, rank: int, given: set[str], *, experts: bool) -> None:
    """Let the server take one adapter of `rank` at a time, of routed `experts` too."""
    size = slot_rank(rank)
    if size is None:
        raise UsageError(
            f"--max-lora-rank {rank}: vLLM takes adapters up to rank {RANKS[-1]}",
            hint=f"--lora-r {RANKS[-1]}, or train all weights with --mode shared_vllm",
        )
    if size != rank and "--max-lora-rank" not in given:
        extra.notes.append(f"--max-lora-rank {size}: vLLM's smallest slot that takes rank {rank}")
    for flag, *values in (["--enable-lora"], ["--max-lora-rank", str(size)], ["--max-loras", "1"]):
        if flag not in given:
            extra.argv += [flag, *values]
    extra.environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", EXPERT_SLOTS: str(int(experts))}


def _fp8_kernels(outer: Mapping[str, str]) -> dict[str, str]:
    """Return variables that stop vLLM from rounding or repacking FP8 a second time, unless the caller set them."""
    folders = [outer.get("PATH", os.defpath)]
    folders += [f"{outer[name]}/bin" for name in CUDA_HOMES if outer.get(name)] or ["/usr/local/cuda/bin"]
    derived = dict([ROUNDED_SCALES, UNPACKED])
    if shutil.which("nvcc", path=os.pathsep.join(folders)) is None:
        derived |= dict([WITHOUT_DEEP_GEMM])
    return {name: value for name, value in derived.items() if name not in outer}


def _add_cpu(extra: Added, config: ServeConfig, outer: Mapping[str, str]) -> None:
    """Give vLLM on a CPU a small KV cache, and each rank its own cores, which vLLM does not split on one NUMA node."""
    derived = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if config.tensor_parallel_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // config.tensor_parallel_size)
        groups = [cores[rank * share : (rank + 1) * share] for rank in range(config.tensor_parallel_size)]
        derived["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    unset = {name: value for name, value in derived.items() if not outer.get(name)}
    extra.environment |= unset
    extra.notes += [f"{name}={value}: Bridge's default on a CPU" for name, value in unset.items()]


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (long name, value or an empty string) of every flag."""
    for flag, following in pairwise([*flags, ""]):
        if re.match(r"--?[A-Za-z]", flag):
            name, _, value = flag.partition("=")
            name = name.partition(".")[0]
            if not name.startswith("--"):  # argparse accepts -qfp8, and -t for -tp
                short = next((other for other in SHORT_NAMES if other.startswith(name)), name[:2])
                value = value or name[len(short) :]
                name = SHORT_NAMES.get(short, name)
            name = name.replace("_", "-")
            if name not in WHOLE_NAMES:
                name = next((other for other in WHOLE_NAMES if other.startswith(name)), name)
            if not value and not following.startswith("-"):
                value = following
            yield name, value
