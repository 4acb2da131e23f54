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
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-asc": "--api-server-count",
    "-n": "--nnodes",
    "-sc": "--speculative-config",
    "-ep": "--enable-expert-parallel",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
}


SHARED_NAMES = {"--device", "--max-lora-rank"}
"""Flags of ours that mean what vLLM's of the same name means, so that they may stand after -- as well."""


@dataclass(frozen=True)
class Refusal:
    """Why one flag is refused."""

    reason: str
    """What it would break."""
    allowed: Callable[[str], bool] = lambda _: False
    """Tells which of its values do no harm."""
    any_server: bool = False
    """Whether a server that shares nothing cannot be used with it either."""


def _at_most(limit: float) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(r"[0-9.]+", value) is not None and float(value) <= limit


def _plain_format(value: str) -> bool:
    return value in {
        "auto",
        "hf",
        "pt",
        "safetensors",
        "npcache",
        "dummy",
        "mistral",
        "fastsafetensors",
        "runai_streamer",
    }


_REPLICAS = Refusal(
    "every data-parallel replica has weights of its own, a trainer would train one of them", _at_most(1)
)
_RANK = Refusal("one server has to own every weight; data-parallel replicas have their own")
_DRAFT = Refusal("the draft model is a second set of weights, which would not be trained")
_OFFLOAD = Refusal("offloaded weights live in host memory and are copied to the GPU for each use", _at_most(0))
_MOVING = Refusal("experts are moved and repacked while serving, so that their addresses change")
_NO_HTTP = Refusal("the trainer reaches the server over plain HTTP on its port", any_server=True)
_HIDDEN = Refusal("the API server's process has to be the one that answers", any_server=True)

REFUSED: Mapping[str, Refusal] = {
    "--quantization": Refusal(
        "quantised weights are not the bytes that a trainer updates", {"none", "None"}.__contains__
    ),
    "--quantization-config": Refusal("quantised weights are not the bytes that a trainer updates"),
    "--load-format": Refusal("this loader maps or repacks the weights in a way of its own", _plain_format),
    "--worker-extension-cls": Refusal("Bridge's own worker extension goes there, and vLLM takes one"),
    "--worker-cls": Refusal("Bridge's patches fit vLLM's own workers alone"),
    "--weight-transfer-config": Refusal("a second way of writing weights would race with the fence"),
    "--pipeline-parallel-size": Refusal(
        "a pipeline stage holds some layers alone; a trainer needs them all", _at_most(1)
    ),
    "--data-parallel-size": _REPLICAS,
    "--data-parallel-size-local": _REPLICAS,
    "--data-parallel-rank": _RANK,
    "--data-parallel-start-rank": _RANK,
    "--data-parallel-hybrid-lb": _RANK,
    "--data-parallel-external-lb": _RANK,
    "--data-parallel-multi-port-external-lb": _RANK,
    "--nnodes": Refusal("memory is shared within one host", _at_most(1)),
    "--enable-expert-parallel": _MOVING,
    "--enable-eplb": _MOVING,
    "--enable-elastic-ep": _MOVING,
    "--moe-backend": Refusal("its kernels read experts that were packed anew", {"auto", "triton"}.__contains__),
    "--speculative-config": _DRAFT,
    "--speculative-model": _DRAFT,
    "--spec-model": _DRAFT,
    "--spec-method": _DRAFT,
    "--cpu-offload-gb": _OFFLOAD,
    "--offload-group-size": _OFFLOAD,
    "--offload-backend": Refusal("offloaded weights live in host memory and are copied to the GPU for each use"),
    "--api-server-count": Refusal("the fence's version and the manifest belong to one API server", _at_most(1)),
    "--headless": _HIDDEN,
    "--grpc": _NO_HTTP,
    "--uds": _NO_HTTP,
    "--ssl-keyfile": _NO_HTTP,
    "--ssl-certfile": _NO_HTTP,
    "--config": Refusal("the flags in that file could not be checked; write them after --", any_server=True),
}
"""vLLM's flag -> why it cannot be combined with one copy."""

REFUSED_VARIABLES: Mapping[str, str] = {
    "VLLM_USE_RUST_FRONTEND": "that front end loads no endpoint plugin, so that nothing would write the manifest",
    "VLLM_SERVER_DEV_MODE": "its development routes pause, resume and call the engine beside the fence",
}
"""Environment variable -> why vLLM cannot run with it switched on."""

OFF = ("", "0")


def check(flags: Sequence[str], environment: Mapping[str, str], *, shares_weights: bool = True) -> None:
    """Refuse what would break one copy, or a server that nobody can reach, all of it at once.

    Raises:
        UsageError: names each flag and the reason.
    """
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"unexpected argument {flags[0]!r}", remedy="the model goes to --model, vLLM's own flags go after --"
        )
    faults = [*_faults(flags, shares_weights)]
    if shares_weights:
        values = {name: environment.get(name, "") for name in REFUSED_VARIABLES}
        faults += [f"{name}={value}: {REFUSED_VARIABLES[name]}" for name, value in values.items() if value not in OFF]
    if faults:
        whom = "one copy of the weights does" if shares_weights else "a trainer does"
        raise UsageError("; ".join(faults), remedy=f"leave it out: {whom} not go together with it")


def names(flags: Sequence[str]) -> set[str]:
    """Return the long names of the given flags."""
    return {name for name, _ in _pairs(flags)}


def value(flags: Sequence[str], name: str) -> str:
    """Return the value of flag `name`, the first one where it takes several; empty where it is not given."""
    return next((value for found, value in _pairs(flags) if found == name), "")


def _faults(flags: Sequence[str], shares_weights: bool) -> Iterator[str]:
    ours = {"--" + name.replace("_", "-") for name in ServeConfig.model_fields} - SHARED_NAMES
    for name, value in _pairs(flags):
        if name in ours:
            yield f"{name} after --: it is a flag of bridge serve-vllm, give it before --"
        for refused in _meant(name):
            why = REFUSED[refused]
            if (shares_weights or why.any_server) and not why.allowed(value):
                yield f"{f'{refused} {value}'.strip()}: {why.reason}"


def _meant(name: str) -> list[str]:
    """Return the refused flag that `name` is or abbreviates (argparse takes abbreviations)."""
    return [name] if name in REFUSED else [flag for flag in REFUSED if len(name) > 5 and flag.startswith(name)][:1]


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (long name, value or an empty string) of every flag."""
    for place, flag in enumerate(flags):
        if re.match(r"--?[A-Za-z]", flag):
            name, _, value = flag.partition("=")
            name = name.partition(".")[0]
            name = SHORT_NAMES.get(name.rstrip("0123456789"), name.replace("_", "-"))
            following = flags[place + 1] if place + 1 < len(flags) else ""
            yield name, value or ("" if following.startswith("-") else following)
