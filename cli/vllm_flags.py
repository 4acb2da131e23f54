"""Which of vLLM's own flags (after `--`) would break one copy, and why.

Not covered: what only shows once the model is loaded, such as a quantised checkpoint: the patches refuse that by name.
Source: `vllm/engine/arg_utils.py`, vLLM 0.26 to 0.33.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bridge.config import ServeConfig
from bridge.errors import UsageError

SHORT_NAMES: Mapping[str, str] = {
    "-q": "--quantization", "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-dpl": "--data-parallel-size-local", "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank", "-dph": "--data-parallel-hybrid-lb", "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb", "-asc": "--api-server-count", "-n": "--nnodes",
    "-sc": "--speculative-config", "-ep": "--enable-expert-parallel", "-cc": "--compilation-config",
    "-O": "--optimization-level",
}  # fmt: skip
SHARED_NAMES = {"--device", "--max-lora-rank"}
"""Flags of ours that mean the same as vLLM's: they may come after -- as well."""
PLAIN_FORMATS = {
    "auto", "hf", "pt", "safetensors", "npcache", "dummy", "mistral", "fastsafetensors", "runai_streamer"
}  # fmt: skip
REFUSED_VARIABLES: Mapping[str, str] = {
    "VLLM_USE_RUST_FRONTEND": "that front end loads no endpoint plugin, so nothing would write the manifest",
    "VLLM_SERVER_DEV_MODE": "its development routes pause, resume and call the engine beside the fence",
}
"""Environment variable -> why vLLM cannot run with it switched on."""
OFF = ("", "0")


@dataclass(frozen=True)
class Refusal:
    """Why one flag is refused."""

    reason: str
    """What it would break."""
    allowed: Callable[[str], bool] = lambda _: False
    """Whether a value does no harm."""
    any_server: bool = False
    """Whether it also rules out a server that shares nothing."""


def _at_most(limit: float) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(r"[0-9.]+", value) is not None and float(value) <= limit


_QUANTISED = "quantised weights are not the bytes that a trainer updates"
_OFFLOADED = "offloaded weights live in host memory and are copied to the GPU for each use"
_REFUSED: Mapping[tuple[str, ...], Refusal] = {
    ("--quantization",): Refusal(_QUANTISED, {"none", "None"}.__contains__),
    ("--quantization-config",): Refusal(_QUANTISED),
    ("--load-format",): Refusal("this loader maps or repacks the weights in its own way", PLAIN_FORMATS.__contains__),
    ("--worker-extension-cls",): Refusal("Bridge's own worker extension goes there, and vLLM takes one"),
    ("--worker-cls",): Refusal("Bridge's patches fit only vLLM's own workers"),
    ("--weight-transfer-config",): Refusal("a second way of writing weights would race with the fence"),
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
        "the draft model is a second set of weights, which would not be trained"
    ),
    ("--cpu-offload-gb", "--offload-group-size"): Refusal(_OFFLOADED, _at_most(0)),
    ("--offload-backend",): Refusal(_OFFLOADED),
    ("--api-server-count",): Refusal("the fence's version and the manifest belong to one API server", _at_most(1)),
    ("--headless",): Refusal("the API server's process must be the one that answers", any_server=True),
    ("--grpc", "--uds", "--ssl-keyfile", "--ssl-certfile"): Refusal(
        "the trainer reaches the server over plain HTTP on its port", any_server=True
    ),
    ("--config",): Refusal("the flags in that file could not be checked; give them after --", any_server=True),
}  # fmt: skip
REFUSED: Mapping[str, Refusal] = {flag: refusal for flags, refusal in _REFUSED.items() for flag in flags}
"""vLLM's flag -> why it cannot be combined with one copy."""


def check(flags: Sequence[str], environment: Mapping[str, str], *, shares_weights: bool = True) -> None:
    """Refuse what would break one copy, or a server that no trainer can reach, all at once."""
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"unexpected argument {flags[0]!r}", remedy="give the model as --model, and vLLM's own flags after --"
        )
    faults = [*_faults(flags, shares_weights)]
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
    return next((value for found, value in _pairs(flags) if found == name), "")


def _faults(flags: Sequence[str], shares_weights: bool) -> Iterator[str]:
    ours = {"--" + name.replace("_", "-") for name in ServeConfig.model_fields} - SHARED_NAMES
    for name, value in _pairs(flags):
        if name in ours:
            yield f"{name} after --: it is a flag of bridge serve-vllm, give it before --"
        refused = name if name in REFUSED else next((flag for flag in REFUSED if _abbreviates(name, flag)), None)
        if refused is not None:
            why = REFUSED[refused]
            if (shares_weights or why.any_server) and not why.allowed(value):
                yield f"{f'{refused} {value}'.strip()}: {why.reason}"


def _abbreviates(name: str, flag: str) -> bool:
    return len(name) > 5 and flag.startswith(name)  # argparse takes abbreviations


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (long name, value or an empty string) of every flag."""
    for place, flag in enumerate(flags):
        if re.match(r"--?[A-Za-z]", flag):
            name, _, value = flag.partition("=")
            name = name.partition(".")[0]
            name = SHORT_NAMES.get(name.rstrip("0123456789"), name.replace("_", "-"))
            following = flags[place + 1] if place + 1 < len(flags) else ""
            yield name, value or ("" if following.startswith("-") else following)
