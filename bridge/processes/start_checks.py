"""Checks before a server starts: the software, the model, the port and the manifest's path."""

import contextlib
import errno
import hashlib
import logging
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from bridge.checks import model as model_checks
from bridge.checks import software
from bridge.config import DeviceChoice, ServeConfig
from bridge.core import paths
from bridge.core.address import free_port
from bridge.core.process import boot_id
from bridge.errors import IncompatibleVersionError, ManifestError, UnsupportedModelError, UsageError
from bridge.processes import accelerator, vllm_flags
from bridge.server import discovery, manifest
from bridge.server.protocol import TRANSFER_FLAG
from bridge.types import Quantization

logger = logging.getLogger(__name__)

FP8_BLOCKS: dict[Quantization, int] = {"fp8_per_block": 128, "fp8_per_channel": 16}
"""Number that must divide a layer's input width: vLLM rounds in groups of this size, or its kernels require it."""
FP8_CAPABILITY = (8, 9)


def check_software(device: DeviceChoice) -> None:
    """Run the software checks of `bridge doctor` that vLLM cannot start without."""
    built_for, _ = accelerator.choose(device)
    if fault := software.obstacle(built_for):
        raise IncompatibleVersionError(f"{fault.name}: {fault.found}", hint=f"{fault.hint}; all checks: bridge doctor")


def check_reachable(model: str) -> None:
    """Check that `model` is a folder, in the hub's cache or on the hub; download a missing configuration."""
    from bridge.core import hub

    if model_checks.read(model) is None and not paths.is_folder(paths.expanded(model)):
        hub.fetch_config(model)


def check_folder(model: str, *, needs_config: bool = True) -> None:
    """Check that a `model` written as a path is a folder, and has a configuration if the caller reads it.

    vLLM would take a missing folder for a name on the hub.
    """
    folder = paths.expanded(model)
    if paths.is_folder(folder):
        if not needs_config or paths.is_file(folder / "config.json"):
            return
        missing = "there is no config.json in it"
        if paths.is_file(folder / paths.ADAPTER_CONFIG):
            merged = f"{folder.name}-merged"
            raise UsageError(
                f"--model {model}: it holds an adapter, expected a whole model",
                hint=f"bridge export {shlex.quote(model)} --out {shlex.quote(merged)}, then --model"
                f" {shlex.quote(merged)}",
            )
    elif paths.is_file(folder):
        missing = "it is a file"
    elif model.startswith(("/", ".", "~")):
        missing = "there is no such folder"
    else:
        return
    hint = "give the folder of a Hugging Face model, or its name on the hub"
    raise UsageError(f"--model {model}: {missing}", hint=hint)


def check_model(model: str, *, shares_weights: bool = True) -> None:
    """Check that `model` exists, as a folder or on the hub, and that Bridge can serve it."""
    folder = paths.expanded(model)
    check_folder(model)
    check_reachable(model)
    config = model_checks.read(model)
    if config is None:
        if paths.is_folder(folder):
            raise UsageError(
                f"--model {model}: its config.json does not describe a model", hint="download or copy it again"
            )
        return
    mode = model_checks.SHARED if shares_weights else model_checks.NONE
    obstacles = [obstacle for obstacle in model_checks.obstacles(config) if mode in obstacle.modes]
    obstacles = obstacles or model_checks.contradictions(model, config) or model_checks.unbuildable(model, config)
    for obstacle in obstacles:
        raise UnsupportedModelError(f"--model {model}: {obstacle.reason}", hint=obstacle.hint)


def check_trained_dtype(config: ServeConfig) -> None:
    """Check that the weights have a dtype in vLLM in which they can be trained."""
    described = model_checks.read(config.model)
    by_default = model_checks.is_half(described) and _family(described) not in model_checks.SERVED_IN_BFLOAT16
    if config.dtype == "float16" or (config.dtype == "auto" and by_default):
        given = "--dtype float16" if config.dtype == "float16" else f"--model {config.model} is in float16"
        raise UsageError(f"{given}: gradients would overflow", hint="--dtype bfloat16")


def _family(config: model_checks.Config | None) -> str:
    return str((config or {}).get("model_type", ""))


def check_quantization(config: ServeConfig, flags: Sequence[str] = (), *, shares_weights: bool = True) -> None:
    """Check that vLLM can quantize this model to FP8 here, and does so again after each update of the weights.

    A server that does not share its weights quantizes what the trainer sends, with vLLM's own code.
    """
    given = f"--quantization {config.quantization}"
    if config.quantization is None:
        return
    if "--quantization" in vllm_flags.names(flags):
        raise UsageError(f"{given}, but after -- another --quantization, which vLLM would use", hint="give only one")
    device, _ = accelerator.choose(config.device)
    capability = accelerator.capability() if device == "cuda" else None
    if capability is not None and capability < FP8_CAPABILITY:
        version = ".".join(map(str, capability))
        raise UsageError(
            f"{given} needs a GPU that multiplies in FP8, of compute capability 8.9 or more, found {version}",
            hint="leave it out",
        )
    if shares_weights:
        _refuse_other_fp8(config, flags, given, device)
    num_gpus = config.tensor_parallel_size
    block = FP8_BLOCKS[config.quantization]
    width = model_checks.unblocked(model_checks.read(config.model), block, num_gpus)
    if width:
        where = f" on each of {num_gpus} GPUs" if num_gpus > 1 else ""
        may_scale_by_channel = config.quantization == "fp8_per_block" and num_gpus == 1
        raise UsageError(
            f"{given} needs layer widths that {block} divides{where}, found {width}",
            hint="--quantization fp8_per_channel" if may_scale_by_channel else "leave it out",
        )


def _refuse_other_fp8(config: ServeConfig, flags: Sequence[str], given: str, device: software.Device) -> None:
    """Refuse FP8 that would not follow the shared weights: in formats that Bridge's kernel lacks, or sent as FP8."""
    has_experts = model_checks.has_experts(model_checks.read(config.model))
    if has_experts and config.quantization == "fp8_per_channel":
        hint = "leave it out" if device == "cpu" else "--quantization fp8_per_block"
        raise UsageError(f"{given}: experts need one scale per block", hint=hint)
    if has_experts and device == "cpu":
        raise UsageError(f"{given}: vLLM repacks experts on a CPU", hint="leave it out")
    if TRANSFER_FLAG[0] in vllm_flags.names(flags):
        raise UsageError(
            f"{given}: vLLM's transfer would write the FP8, not the weights that it is made from",
            hint=f"omit {TRANSFER_FLAG[0]}",
        )


def check_length(config: ServeConfig) -> None:
    """Check that vLLM has RoPE frequencies for the longest sequence."""
    limit = model_checks.dynamic_limit(model_checks.read(config.model))
    if limit is not None and (config.max_model_len is None or config.max_model_len > limit):
        given = f"--max-model-len {config.max_model_len}" if config.max_model_len else "vLLM's default"
        raise UsageError(
            f"--model {config.model} has dynamic RoPE: vLLM has frequencies for {limit} tokens, but {given} is longer",
            hint=f"--max-model-len {limit}",
        )


def check_experts(config: ServeConfig) -> None:
    """Check that vLLM has slots for adapters of routed experts, which need its GPU kernels."""
    if not config.lora_experts:
        return
    from bridge.weights import experts

    device, why = accelerator.choose(config.device)
    kind = _family(model_checks.read(config.model))
    without = "leave experts out, here and in --lora-target-modules"
    if config.max_lora_rank is None:
        raise UsageError("adapters of routed experts: the server does not accept adapters", hint="--max-lora-rank R")
    if not experts.stores_each(kind):
        raise UsageError(
            f"adapters of routed experts: checkpoints of a {kind} model do not store {experts.STORED}", hint=without
        )
    if device == "cpu":
        raise UsageError(
            f"adapters of routed experts: vLLM computes them only on a GPU, found {device} ({why})", hint=without
        )


def check_port(host: str, port: int, *, flag: str = "--port") -> None:
    """Check that a server can listen on `port` of `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except PermissionError as error:
        raise UsageError(f"port {port} is reserved for root", hint=f"choose 1024 or higher with {flag}") from error
    except socket.gaierror as error:
        raise UsageError(f"--host {host} does not resolve: {error.strerror}", hint="--host 127.0.0.1") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"{host}:{port}: {error.strerror}", hint="--host 127.0.0.1") from error
        from bridge.checks import server  # loads httpx, which a start needs only here

        hint = f"choose another with {flag}, such as {free_port(host)}"
        holder = server.describe(server.listening().get(port))
        by = f" by {holder}" if holder.pid else ""
        for running in discovery.running().values():  # a preloaded server has the command line of the preloading
            if running.server.pid == holder.pid:
                by = f" by pid {holder.pid}: a server of Bridge with {running.model}"
        raise UsageError(f"port {port} is taken{by}", hint=hint) from error


@contextlib.contextmanager
def taking(host: str, port: int, path: Path | None, *, inherits: bool = False) -> Iterator[None]:
    """Reserve `port` and the manifest `path` inside the block, because vLLM claims them late.

    With `inherits`, this lasts until the program that replaces this one has ended.
    """
    check_port(host, port)
    with contextlib.ExitStack() as marks:
        marks.enter_context(_mark(f"port {port}", str(port), "--port", inherits=inherits))
        if path is not None:
            disk = _nearest_folder(path).stat().st_dev  # in a container, the same path may be on a different disk
            name = f"{disk} {path.resolve()}"
            marks.enter_context(_mark(f"manifest {path}", name, "--vllm-config-path", inherits=inherits))
        yield


def _mark(taken: str, name: str, flag: str, *, inherits: bool) -> socket.socket:
    """Return a mark that only one process can hold: an abstract socket, which leaves no file behind."""
    mark = socket.socket(socket.AF_UNIX)
    mark.set_inheritable(inherits)
    try:
        mark.bind(f"\0bridge-{hashlib.sha256(name.encode()).hexdigest()}")
    except OSError as error:
        mark.close()
        raise UsageError(
            f"{taken} is about to be taken: another run of Bridge is starting a server with it",
            hint=f"choose another with {flag}; bridge doctor shows what is left of a server that was killed",
        ) from error
    return mark


def _nearest_folder(path: Path) -> Path:
    """Return the innermost parent that exists."""
    return next(parent for parent in path.parents if os.access(parent, os.F_OK))


def clear_manifest(path: Path) -> None:
    """Remove a stale manifest at the absolute `path`, whose existence means that the new server can be attached to.

    Raises:
        UsageError: the manifest is a live server's, or nothing can be written there.
        ManifestError: the file at `path` is not a manifest.
    """
    folder = _nearest_folder(path)
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UsageError(
            f"cannot write the manifest {path}: {folder} is not a writable folder",
            hint="choose another path with --vllm-config-path",
        )
    if not os.path.lexists(path):
        return
    manifest.refuse_other_file(path)
    existing = None
    try:
        existing = manifest.read(path)
        manifest.check_server(existing, path)
    except ManifestError as error:
        if existing is not None:  # None: it cannot be read, so a different version of Bridge wrote it
            _refuse_invisible_server(existing, path)
        logger.warning(f"replacing the manifest of a server that is gone: {error.message}")
        path.unlink()
        return
    raise UsageError(
        f"{path} belongs to a live server: pid {existing.server.pid} at {existing.url}",
        hint=f"attach to it, stop it (kill {existing.server.pid}), or choose another path with --vllm-config-path",
    )


def _refuse_invisible_server(existing: manifest.Manifest, path: Path) -> None:
    """Refuse a manifest whose server may be alive on another host or in another container."""
    is_here = existing.boot_id == boot_id()
    if existing.server.is_visible() if is_here else existing.host == socket.gethostname():
        return
    where = "another container" if is_here else f"host {existing.host}"
    raise UsageError(
        f"{path} belongs to a server on {where}, which may be alive (pid {existing.server.pid} there)",
        hint=f"choose another path with --vllm-config-path or, if that server is gone: rm {path}",
    )
