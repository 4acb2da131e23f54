"""Check the environment variables that change what server and trainer do.

Names with the prefix VLLM_ are those of `vllm/envs.py` of 0.26 to 0.33, except VLLM_ENABLE_SHARED_WEIGHTS and
VLLM_SKIP_WEIGHT_DAEMON, which are Bridge's own. CUDA_VISIBLE_DEVICES is checked with the GPU (`hardware.py`).
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bridge.checks.result import Check, failed, passed, warned
from bridge.checks.sharing import ALLOCATOR_VARIABLES, EXPANDABLE
from bridge.checks.software import Device
from bridge.errors import UsageError
from bridge.server import api_key

Environment = Mapping[str, str]


class Rule(NamedTuple):
    """A variable that causes trouble with some of its values."""

    name: str
    is_bad: Callable[[str], bool]
    """Returns whether a value is bad; an unset variable never is."""
    expected: str
    then: str = ""
    """What fails with a bad value; empty: nothing fails for sure, and the result is a warning."""
    remedy: str = ""
    """How to fix it; empty: unset it."""
    device: Device | None = None
    """The only device that it matters on; None: both."""


def _is_on(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "no", "off")


def _is_set(value: str) -> bool:
    return value not in ("", "0")


OFFLINE = "unset, unless the model is a local folder or already downloaded"
UNSHARED = f"without {EXPANDABLE}: such memory cannot always be shared with another process"
RULES = (
    Rule("VLLM_ENABLE_SHARED_WEIGHTS", lambda value: value.lower() not in ("1", "true"),
         "1: bridge serve-vllm sets it; with this, a vllm serve started by hand exports no weights"),
    Rule("VLLM_SKIP_WEIGHT_DAEMON", lambda value: not _is_on(value),
         "unset or 1: there is no weight daemon, weights are written in place"),
    Rule("NUM_INFERENCE_NODES", _is_set, "unset or 0: memory is shared on one host"),
    *(Rule(name, lambda value: EXPANDABLE in value, UNSHARED, device="cuda") for name in ALLOCATOR_VARIABLES),
    Rule("VLLM_USE_V2_MODEL_RUNNER", _is_on, "unset on the CPU: model runner V2 needs Triton", device="cpu"),
    Rule("VLLM_PORT", lambda value: not value.isdigit(),  # Kubernetes sets it to a URI for a service named vllm
         "unset or a number, for vLLM's inner traffic; in Kubernetes rename a service that is called vllm",
         then="vLLM refuses to start"),
    Rule("VLLM_USE_RUST_FRONTEND", lambda value: value == "1",
         "unset: that front end has no /bridge/* routes and writes no manifest",
         then="vLLM does not load the routes of plugins"),
    Rule("VLLM_CPU_KVCACHE_SPACE", lambda value: bool(value) and not value.strip().isdigit(),
         "unset, or whole GiB such as 1",
         then="vLLM refuses to start", remedy="export VLLM_CPU_KVCACHE_SPACE=1", device="cpu"),
    Rule("VLLM_SERVER_DEV_MODE", _is_set, "unset, or 0", then="bridge serve-vllm refuses to start"),
    Rule("VLLM_USE_MODELSCOPE", lambda value: value.strip().lower() in ("1", "true"),
         "unset: the trainer reads the model's configuration from the Hugging Face hub",
         remedy="unset VLLM_USE_MODELSCOPE, or serve and train a local folder"),
    *(Rule(name, _is_on, OFFLINE, remedy=f"unset {name}, or give the model's folder instead of its name")
      for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")),
)  # fmt: skip


def environment_variables(environment: Environment, device: Device, plugins: Collection[str]) -> list[Check]:
    """Return one result per variable that causes trouble, or one PASS."""
    found = [*_bad_values(environment, device), *_bad_places(environment), *_missing_plugins(environment, plugins)]
    return found or [passed("Environment variables", "none causes trouble", "none that causes trouble")]


def _bad_values(environment: Environment, device: Device) -> Iterator[Check]:
    for rule in RULES:
        value = environment.get(rule.name)
        if value is None or rule.device not in (None, device) or not rule.is_bad(value):
            continue
        report, found = (failed, f"{value!r}: {rule.then}") if rule.then else (warned, repr(value))
        yield report(rule.name, found, rule.expected, rule.remedy or f"unset {rule.name}")


def _bad_places(environment: Environment) -> Iterator[Check]:
    """Check the folder of the manifest, and the key that goes into a header with every request."""
    if value := environment.get("LOGDIR"):
        folder = Path(value).absolute()
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        is_folder = nearest.is_dir()
        if not (is_folder and os.access(nearest, os.W_OK | os.X_OK)):
            found = f"{nearest} is not {'writable' if is_folder else 'a folder'}"
            expected = "a writable folder: the manifest goes there"
            yield failed("LOGDIR", found, expected, "export LOGDIR=FOLDER, or: unset LOGDIR")
    try:
        api_key.headers(environment)
    except UsageError as error:
        yield failed(api_key.VARIABLE, error.message, "a key that a header can carry, or unset", error.remedy)


def _missing_plugins(environment: Environment, plugins: Collection[str]) -> Iterator[Check]:
    value = environment.get("VLLM_PLUGINS")
    if value is None or set(plugins) <= set(value.split(",")):
        return
    whole = ",".join([*filter(None, value.split(",")), *plugins])
    expected = f"with {','.join(plugins)}: bridge serve-vllm adds them; a vllm serve started by hand loads no others"
    yield warned("VLLM_PLUGINS", repr(value), expected, f"unset VLLM_PLUGINS, or: export VLLM_PLUGINS={whole}")
