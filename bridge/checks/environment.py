"""Check the environment variables that change what server and trainer do.

Names beginning with VLLM_ are those of `vllm/envs.py` of 0.26 to 0.33, but for VLLM_ENABLE_SHARED_WEIGHTS and
VLLM_SKIP_WEIGHT_DAEMON, which are Bridge's own.

Not covered: CUDA_VISIBLE_DEVICES (`hardware.py`, `manifest.py`).
"""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from bridge.checks.result import Check, failed, passed, warned
from bridge.checks.sharing import ALLOCATOR_VARIABLES, EXPANDABLE
from bridge.checks.software import Device
from bridge.errors import UsageError
from bridge.server import api_key

Environment = Mapping[str, str]
OFF = ("", "0", "false", "no", "off")


class Rule(NamedTuple):
    """A variable that gets in the way for some of its values."""

    name: str
    """The variable."""
    is_bad: Callable[[str], bool]
    """Tells its bad values; an unset variable is never bad."""
    expected: str
    """What it should be."""
    then: str = ""
    """What cannot work otherwise: a failure; empty: a warning."""
    remedy: str = ""
    """How to fix it; empty: unset it."""
    device: Device | None = None
    """The only device that it matters on."""


def _is_on(value: str) -> bool:
    return value.lower() not in OFF


def _offline(name: str) -> Rule:
    expected = "unset, unless the model is a local folder or already downloaded"
    return Rule(name, _is_on, expected, remedy=f"unset {name}, or name the model by its folder")


def _expandable(name: str) -> Rule:
    expected = f"without {EXPANDABLE}: such memory cannot always be shared with another process"
    return Rule(name, lambda value: EXPANDABLE in value, expected, device="cuda")


RULES = (
    Rule(
        "VLLM_ENABLE_SHARED_WEIGHTS",
        lambda value: value.lower() not in ("1", "true"),
        "1: bridge serve-vllm sets it; a vllm serve started by hand exports no weights with this",
    ),
    Rule(
        "VLLM_SKIP_WEIGHT_DAEMON",
        lambda value: value not in ("", "1"),
        "unset or 1: there is no weight daemon, weights are written in place",
    ),
    Rule("NUM_INFERENCE_NODES", lambda value: value not in ("", "0"), "unset or 0: memory is shared on one host"),
    *map(_expandable, ALLOCATOR_VARIABLES),
    Rule("VLLM_USE_V2_MODEL_RUNNER", _is_on, "unset on the CPU: model runner V2 needs Triton", device="cpu"),
    Rule(
        "VLLM_PORT",  # for vLLM's inner traffic; Kubernetes sets it to a URI for a service named vllm
        lambda value: not value.isdigit(),
        "unset or a number; in Kubernetes rename a service that is called vllm",
        then="vLLM refuses to start",
    ),
    Rule(
        "VLLM_USE_RUST_FRONTEND",
        lambda value: value == "1",
        "unset: that front end has no /bridge/* routes and writes no manifest",
        then="vLLM loads no plugin's routes",
    ),
    Rule(
        "VLLM_CPU_KVCACHE_SPACE",
        lambda value: bool(value) and not value.strip().isdigit(),
        "unset, or whole GiB such as 1",
        then="vLLM refuses to start",
        remedy="export VLLM_CPU_KVCACHE_SPACE=1",
        device="cpu",
    ),
    Rule(
        "VLLM_SERVER_DEV_MODE",
        lambda value: value not in ("", "0"),
        "unset, or 0",
        then="bridge serve-vllm refuses to start",
    ),
    Rule(
        "VLLM_USE_MODELSCOPE",
        lambda value: value.strip().lower() in ("1", "true"),
        "unset: the trainer reads the model's configuration from the Hugging Face hub",
        remedy="unset VLLM_USE_MODELSCOPE, or serve and train a local folder",
    ),
    _offline("HF_HUB_OFFLINE"),
    _offline("TRANSFORMERS_OFFLINE"),
)


def environment_variables(environment: Environment, device: Device, plugins: Collection[str]) -> list[Check]:
    """Return one finding per variable that gets in the way, or one PASS."""
    rules = [rule for rule in RULES if rule.device in (None, device) and rule.name in environment]
    findings = [_finding(rule, environment[rule.name]) for rule in rules if rule.is_bad(environment[rule.name])]
    others = (_log_folder(environment), _unsendable_key(environment), _vllm_plugins(environment, plugins))
    findings += [check for check in others if check]
    return findings or [passed("Environment variables", "none gets in the way", "none that gets in the way")]


def _finding(rule: Rule, value: str) -> Check:
    remedy = rule.remedy or f"unset {rule.name}"
    if rule.then:
        return failed(rule.name, f"{value!r}: {rule.then}", rule.expected, remedy)
    return warned(rule.name, repr(value), rule.expected, remedy)


def _log_folder(environment: Environment) -> Check | None:
    """Check where the manifest is written and first looked for."""
    if not (value := environment.get("LOGDIR")):
        return None
    folder = Path(value).absolute()
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return None
    found = f"{nearest} is not writable" if nearest.is_dir() else f"{nearest} is not a folder"
    return failed(
        "LOGDIR", found, "a writable folder: the manifest goes there", "export LOGDIR=FOLDER, or: unset LOGDIR"
    )


def _unsendable_key(environment: Environment) -> Check | None:
    """Check the key that goes into a header with every request."""
    try:
        api_key.headers(environment)
    except UsageError as error:
        return failed(api_key.VARIABLE, error.message, "a key that a header can carry, or unset", error.remedy)
    return None


def _vllm_plugins(environment: Environment, plugins: Collection[str]) -> Check | None:
    """Check the list of all plugins that vLLM loads, if there is one."""
    value = environment.get("VLLM_PLUGINS")
    if value is None or set(plugins) <= set(value.split(",")):
        return None
    whole = ",".join([*filter(None, value.split(",")), *plugins])
    expected = f"with {','.join(plugins)}: bridge serve-vllm adds them; a vllm serve started by hand loads no others"
    return warned("VLLM_PLUGINS", repr(value), expected, f"unset VLLM_PLUGINS, or: export VLLM_PLUGINS={whole}")
