"""`bridge doctor`: run every check, and print what it found, what was expected and how to fix it.

Not covered: the checks (`bridge/checks`), proof that a live server's weights are shared (`verify.py`).
"""

import dataclasses
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import typer
from rich.text import Text

import bridge
from bridge.checks.result import Check, any_failed, failed, passed
from bridge.errors import IncompatibleVersionError
from cli import console
from cli.options import Json, option

if TYPE_CHECKING:
    from bridge.checks.facts import Facts
    from bridge.checks.server import Examined
    from bridge.checks.software import Device
    from bridge.server.manifest import Manifest

FAILURE_FOUND = 3
"""Exit code if a check failed."""
STATUS_WIDTH, NAME_WIDTH, LABEL_WIDTH = 4, 21, 9
NARROWEST = 60
"""Columns; on a narrower terminal lines wrap by themselves."""

Section = tuple[str, list[Check]]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        "--vllm-port",
        metavar="INTEGER",
        min=1,
        max=65535,
        envvar=["BRIDGE_PORT", "BRIDGE_VLLM_PORT"],
        show_envvar=False,
        help="Port of the server (default: the manifest's, else 9001).",
    ),
]
ManifestPath = Annotated[
    Path | None,
    option(
        "--vllm-config-path",
        "PATH",
        "The manifest (default: the first one in $LOGDIR, the current folder and /tmp/atropos_bridge, else that of the"
        " only server that runs).",
        envvar="BRIDGE_VLLM_CONFIG_PATH",
    ),
]
DEVICE = "Where vLLM will run (default: auto, on what the installed vLLM was built for)."
Where = Annotated[Literal["auto", "cpu", "cuda"], option("--device", "auto|cpu|cuda", DEVICE, envvar="BRIDGE_DEVICE")]
MODEL = "A model's folder or name: check from its configuration alone which modes can train it."
Model = Annotated[str | None, option("--model", "MODEL", MODEL, envvar="BRIDGE_MODEL")]


def doctor(
    port: Port = None,
    vllm_config_path: ManifestPath = None,
    device: Where = "auto",
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Check software, hardware, environment and server, and say how to fix faults."""
    with console.waiting("Checking software, hardware, environment and server"):
        sections = list(examine(port, vllm_config_path, device, model))
    checks = [check for _, found in sections for check in found]
    if as_json:
        for check in checks:
            console.data(json.dumps(dataclasses.asdict(check)))
    else:
        report(sections)
    if any_failed(checks):
        raise typer.Exit(FAILURE_FOUND)


def examine(
    port: int | None, given: Path | None, asked: Literal["auto", "cpu", "cuda"], model: str | None = None
) -> Iterator[Section]:
    """Yield every check, section by section, in reading order; outside Linux only the first one can be made."""
    from bridge.checks import environment, facts, server, software
    from bridge.checks import model as model_checks

    system = software.operating_system(sys.platform)
    if system.status == "FAIL":
        yield "Software", [system]
        return
    known = facts.gather()
    device = asked if asked != "auto" else software.built_for(software.installed_vllm())
    device = device or ("cuda" if known.gpus else "cpu")
    examined = server.examine(given)
    yield "Software", [system, *_software_checks(known, device, server_lives=examined.live is not None)]
    yield "Hardware", _hardware_checks(known, device, examined.live)
    plugins = [name for names in software.our_plugins().values() for name in names]
    yield "Environment", environment.environment_variables(os.environ, device, plugins)
    if model is not None:
        yield "Model", list(model_checks.modes(model, model_checks.read(model)))
    yield "Server", _server_checks(examined, known, port, searched=given is None)


def _software_checks(known: "Facts", device: "Device", *, server_lives: bool) -> list[Check]:
    from bridge.checks import software

    installed, transformers_version = software.installed_vllm(), software.installed_version("transformers")
    return [
        software.python_version(sys.version_info[:2]),
        software.torch_build(known, device),
        software.vllm_build(installed, device, server_lives=server_lives),
        *(
            software.vllm_requirement(f"{name} {version}", metadata.requires(name) or (), package, package_version)
            for name, version in installed.items()
            for package, package_version in (("torch", known.torch), ("transformers", transformers_version))
        ),
        *([patches_fit()] if installed else []),
        software.transformers_imports(known, transformers_version),
        software.torchvision_fits(known, software.installed_version("torchvision")),
        software.packages_are_ours(software.imported_folders()),
        software.nothing_shadows(Path.cwd()),
        software.plugins_registered(software.our_plugins()),
    ]


def patches_fit() -> Check:
    """Check that Bridge's patches fit the installed vLLM."""
    from patches import compatibility

    versions = compatibility.TESTED_VERSIONS
    expected = f"vLLM {versions[0]} to {versions[-1]} with every symbol that is patched"
    try:
        version = compatibility.check_installed()
    except IncompatibleVersionError as error:
        return failed("Patches", error.message, expected, error.remedy)
    return passed("Patches", f"fit vLLM {version}", expected)


def _hardware_checks(known: "Facts", device: "Device", live: "Manifest | None") -> list[Check]:
    from bridge.checks import hardware, sharing
    from bridge.core import memory

    gpu = [hardware.gpu_visible(known, device, os.environ, driver_loaded=hardware.nvidia_driver_loaded())]
    if device == "cuda":
        gpu += [hardware.driver_runs_torch(known)]
        gpu += [hardware.gpu_memory(each, server_lives=live is not None) for each in known.gpus]
    return [
        *gpu,
        sharing.over_cuda_ipc(trial_gpu(known, live), os.environ) if device == "cuda" else sharing.over_memfd(),
        hardware.main_memory(memory.available_bytes(), memory.cgroup_left_bytes()),
        hardware.shm_space(memory.shm_free_bytes()),
    ]


def trial_gpu(known: "Facts", live: "Manifest | None") -> str | None:
    """Return the GPU to try CUDA IPC on: the server's if it is visible, else the first; None without a GPU."""
    visible = [each.uuid for each in known.gpus]
    own = live.shard(0).gpu_uuid if live else None
    return own if own in visible else next(iter(visible), None)


def _server_checks(examined: "Examined", known: "Facts", port: int | None, *, searched: bool) -> list[Check]:
    from bridge.checks import processes, server, software
    from bridge.config import DEFAULT_PORT
    from bridge.server import discovery

    live, checks = examined.live, list(examined.checks)
    if live:
        transformers = software.installed_version("transformers")
        here = {"bridge": bridge.__version__, "torch": known.torch, "transformers": transformers}
        checks += [server.same_versions(live, here), server.same_gpu(live, [each.uuid for each in known.gpus])]
        checks += [server.weights_open(live), *server.answers(live)]
    if searched:
        checks += server.others(examined.path)
    own = urlsplit(live.url).port if live else None
    wanted = port or own or DEFAULT_PORT
    named = {exported.server.pid: discovery.choice(path, exported) for path, exported in discovery.running().items()}
    listener = processes.port(wanted, live.server.pid if live and wanted == own else None, named)
    return [*checks, listener, processes.engines_have_servers(processes.running())]


def report(sections: Iterable[Section]) -> None:
    """Print the checks for a person, and count them."""
    counts: Counter[str] = Counter()
    for title, checks in sections:
        console.people.print(Text(f"\n{title}", style="bold"))
        for check in checks:
            counts[check.status] += 1
            for line in lines(check, max(console.people.width, NARROWEST)):
                console.people.print(line)
    total = ", ".join(f"{counts[status]} {status}" for status in console.STATUS_STYLES)
    console.people.print(Text(f"\n{total}", style="bold"))


def lines(check: Check, width: int) -> Iterator[Text]:
    """Yield what was found and, unless it passed, what was expected and how to fix it."""
    status = Text(f"{check.status:{STATUS_WIDTH}}", console.STATUS_STYLES[check.status])
    yield from _hanging(Text.assemble("  ", status, "  ", f"{check.name:{NAME_WIDTH}}", "  "), check.found, width)
    label = " " * (STATUS_WIDTH + 4)
    if check.status in ("WARN", "FAIL"):
        yield from _hanging(Text(f"{label}{'expected':{LABEL_WIDTH}} ", "dim"), check.expected, width)
    if check.remedy:
        heading = "next" if check.status == "SKIP" else "fix"
        yield from _hanging(Text(f"{label}{heading:{LABEL_WIDTH}} ", "bold"), check.remedy, width)


def _hanging(head: Text, text: str, width: int) -> Iterator[Text]:
    """Yield `text` behind `head`, its further lines indented as far; a word, such as a path, is never cut."""
    text, rest = console.cleaned(text), width - len(head)
    for number, part in enumerate(textwrap.wrap(text, rest, break_long_words=False, break_on_hyphens=False) or [""]):
        yield Text.assemble(head if number == 0 else " " * len(head), part)
