"""Check the environment variables that change what server and trainer do.

Names beginning with VLLM_ are those of `vllm/envs.py` of 0.26 to 0.33, but for VLLM_ENABLE_SHARED_WEIGHTS and
VLLM_SKIP_WEIGHT_DAEMON, which are Bridge's own by its documentation.

Not covered: CUDA_VISIBLE_DEVICES (`gpu.py`, `manifest.py`).
"""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from bridge.checks.result import Check, failed, passed, warned
from bridge.checks.software import Device
from bridge.errors import UsageError
from bridge.server import api_key

Environment = Mapping[str, str]
OFF = ("", "0", "false", "no", "off")
EXPANDABLE = "expandable_segments:True"


def environment_variables(environment: Environment, device: Device, plugins: Collection[str]) -> list[Check]:
    """Return one finding per variable that gets in the way; one PASS if none does."""
    findings = [found for look in LOOKS if (found := look(environment, device))]
    if found := vllm_plugins(environment, plugins):
        findings.append(found)
    return findings or [
        passed("Environment variables", "none is set that gets in the way", "none that gets in the way")
    ]


def vllm_plugins(environment: Environment, plugins: Collection[str]) -> Check | None:
    """VLLM_PLUGINS, when set, is the whole list of plugins that vLLM loads."""
    value = environment.get("VLLM_PLUGINS")
    if value is None or set(plugins) <= set(value.split(",")):
        return None
    whole = ",".join([*filter(None, value.split(",")), *plugins])
    expected = f"with {','.join(plugins)}: bridge serve-vllm adds them, a vllm serve started by hand loads no others"
    return warned("VLLM_PLUGINS", repr(value), expected, f"unset VLLM_PLUGINS, or: export VLLM_PLUGINS={whole}")


def shared_weights(environment: Environment, _: Device) -> Check | None:
    """VLLM_ENABLE_SHARED_WEIGHTS=0 switches Bridge's patches off."""
    name = "VLLM_ENABLE_SHARED_WEIGHTS"
    value = environment.get(name)
    if value is None or value.lower() in ("1", "true"):
        return None
    return warned(
        name,
        repr(value),
        "1: bridge serve-vllm sets it, a vllm serve started by hand exports no weights with this",
        f"unset {name}",
    )


def weight_daemon(environment: Environment, _: Device) -> Check | None:
    """VLLM_SKIP_WEIGHT_DAEMON=0 asks for a process that Bridge does not need."""
    name = "VLLM_SKIP_WEIGHT_DAEMON"
    value = environment.get(name)
    if value is None or value.lower() not in OFF:
        return None
    return warned(
        name, repr(value), "unset or 1: there is no weight daemon, weights are written in place", f"unset {name}"
    )


def inference_nodes(environment: Environment, _: Device) -> Check | None:
    """NUM_INFERENCE_NODES other than 0 asks for servers on other hosts."""
    name = "NUM_INFERENCE_NODES"
    value = environment.get(name, "0")
    if value in ("", "0"):
        return None
    return warned(name, repr(value), "unset or 0: memory is shared on one host", f"unset {name}")


def log_folder(environment: Environment, _: Device) -> Check | None:
    """LOGDIR is where the manifest is written and first looked for."""
    value = environment.get("LOGDIR")
    if not value:
        return None
    expected = "a folder that you may write to: the manifest goes there"
    folder = Path(value).absolute()
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if not nearest.is_dir():
        return failed("LOGDIR", f"{nearest} is no folder", expected, "export LOGDIR=FOLDER, or: unset LOGDIR")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return failed("LOGDIR", f"{nearest} may not be written to", expected, "export LOGDIR=FOLDER, or: unset LOGDIR")
    return None


def allocator(environment: Environment, device: Device) -> Check | None:
    """Expandable segments have no legacy CUDA IPC handle."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if device == "cuda" and EXPANDABLE in environment.get(name, ""):
            expected = f"without {EXPANDABLE}: such memory cannot always be shared with another process"
            return warned(name, repr(environment[name]), expected, f"unset {name}")
    return None


def model_runner(environment: Environment, device: Device) -> Check | None:
    """Model runner V2 needs Triton, which the CPU build has not."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    if device == "cuda" or environment.get(name, "").lower() in OFF:
        return None
    return warned(name, repr(environment[name]), "unset on the CPU: model runner V2 needs Triton", f"unset {name}")


def own_port(environment: Environment, _: Device) -> Check | None:
    """VLLM_PORT is for vLLM's inner traffic; Kubernetes sets it to a URI for a service named vllm."""
    value = environment.get("VLLM_PORT")
    if value is None or value.isdigit():
        return None
    expected = "unset or a number; in Kubernetes rename a service that is called vllm"
    return failed("VLLM_PORT", f"{value!r}: vLLM refuses to start", expected, "unset VLLM_PORT")


def front_end(environment: Environment, _: Device) -> Check | None:
    """VLLM_USE_RUST_FRONTEND=1 starts a server that loads no plugin's routes."""
    name = "VLLM_USE_RUST_FRONTEND"
    if environment.get(name, "0") != "1":
        return None
    return failed(name, "'1'", "unset: that front end has no /bridge/* routes and writes no manifest", f"unset {name}")


def kv_cache_space(environment: Environment, device: Device) -> Check | None:
    """VLLM_CPU_KVCACHE_SPACE is read by `int`."""
    name = "VLLM_CPU_KVCACHE_SPACE"
    value = environment.get(name, "")
    if device == "cuda" or not value or value.strip().isdigit():
        return None
    return failed(name, f"{value!r}: vLLM refuses to start", "unset, or whole GiB such as 1", f"export {name}=1")


def dev_mode(environment: Environment, _: Device) -> Check | None:
    """VLLM_SERVER_DEV_MODE=1 adds routes that call the engine beside the fence."""
    name = "VLLM_SERVER_DEV_MODE"
    value = environment.get(name, "")
    if value in ("", "0"):
        return None
    return failed(name, f"{value!r}: bridge serve-vllm refuses to start", "unset, or 0", f"unset {name}")


def unsendable_key(environment: Environment, _: Device) -> Check | None:
    """VLLM_API_KEY goes into a header with every request."""
    try:
        api_key.headers(environment)
    except UsageError as error:
        return failed(api_key.VARIABLE, error.message, "a key that a header can carry, or unset", error.remedy)
    return None


def model_source(environment: Environment, _: Device) -> Check | None:
    """VLLM_USE_MODELSCOPE lets vLLM and transformers fetch a model from two places."""
    name = "VLLM_USE_MODELSCOPE"
    if environment.get(name, "").strip().lower() not in ("1", "true"):
        return None
    expected = "unset: the trainer reads the model's configuration from the Hugging Face hub"
    return warned(name, repr(environment[name]), expected, f"unset {name}, or serve and train a local folder")


def hub_offline(environment: Environment, _: Device) -> Check | None:
    """HF_HUB_OFFLINE forbids downloads."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environment.get(name, "").lower() not in OFF:
            expected = "unset, unless the model is a local folder or already downloaded"
            return warned(name, repr(environment[name]), expected, f"unset {name}, or name the model by its folder")
    return None


LOOKS: tuple[Callable[[Environment, Device], Check | None], ...] = (
    shared_weights, weight_daemon, inference_nodes, log_folder, allocator,
    model_runner, own_port, front_end, kv_cache_space, dev_mode, unsendable_key, model_source, hub_offline,
)  # fmt: skip
