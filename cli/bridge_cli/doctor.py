"""`bridge doctor`: run every check, and print what it found, what was expected and how to fix it.

Not covered: the checks themselves (`bridge/checks`), and the proof that weights are shared (`verify.py`).
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
from bridge.checks import environment, facts, hardware, processes, sharing, software
from bridge.checks import model as model_checks
from bridge.checks.facts import Facts
from bridge.checks.result import Check, any_failed, failed, passed
from bridge.checks.software import Device
from bridge.config import DEFAULT_PORT
from bridge.core import memory
from bridge.core.private import cleaned
from bridge.errors import IncompatibleVersionError
from bridge.server import discovery
from bridge.server.manifest import Manifest
from bridge_cli import console
from bridge_cli.options import Json, option
from bridge_patches import compatibility

if TYPE_CHECKING:
    from bridge.checks.server import Examined

FAILURE_FOUND = 3
"""Exit code if a check failed."""
STATUS_WIDTH, NAME_WIDTH, LABEL_WIDTH = 4, 21, 9
NARROWEST = 60
"""Columns. On a narrower terminal, lines are wrapped by the terminal."""

Section = tuple[str, list[Check]]
Asked = Literal["auto", "cpu", "cuda"]
PORT = "Port of the server (default: the manifest's, else 9001)."
Port = Annotated[
    int | None,
    typer.Option(
        "--port", "--vllm-port", metavar="INTEGER", min=1, max=65535, help=PORT, show_envvar=False,
        envvar=["BRIDGE_PORT", "BRIDGE_VLLM_PORT"],
    ),
]  # fmt: skip
PATH = (
    "The manifest (default: the first one in $LOGDIR, the current folder and /tmp/atropos_bridge, else that of the only"
    " running server)."
)
ManifestPath = Annotated[Path | None, option("--vllm-config-path", "PATH", PATH, envvar="BRIDGE_VLLM_CONFIG_PATH")]
DEVICE = "Device of vLLM (default: auto, the one that the installed vLLM was built for)."
Where = Annotated[Asked, option("--device", "auto|cpu|cuda", DEVICE, envvar="BRIDGE_DEVICE")]
MODEL = "Folder or name of a model: check from its configuration which modes can train it."
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
    for check in checks if as_json else ():
        console.data(json.dumps(dataclasses.asdict(check)))
    if not as_json:
        report(sections)
    if any_failed(checks):
        raise typer.Exit(FAILURE_FOUND)


def examine(port: int | None, given: Path | None, asked: Asked, model: str | None = None) -> Iterator[Section]:
    """Yield every check, section by section; outside Linux only the first one can be made."""
    from bridge.checks import server  # loads httpx, which the help text does not need

    system = software.operating_system(sys.platform)
    if system.status == "FAIL":
        yield "Software", [system]
        return
    known, examined, plugins = facts.gather(), server.examine(given), software.our_plugins()
    device = software.built_for(software.installed_vllm()) if asked == "auto" else asked
    device = device or ("cuda" if known.gpus else "cpu")
    yield "Software", [system, *_software(known, device, plugins, server_lives=examined.live is not None)]
    yield "Hardware", list(_hardware(known, device, examined.live))
    names = [name for group in plugins.values() for name in group]
    yield "Environment", environment.environment_variables(os.environ, device, names)
    if model is not None:
        yield "Model", list(model_checks.modes(model, model_checks.read(model)))
    yield "Server", [*examined.checks, *_server(examined, known, port, searched=given is None)]


def _software(known: Facts, device: Device, plugins: dict[str, list[str]], *, server_lives: bool) -> Iterator[Check]:
    installed, transformers = software.installed_vllm(), software.installed_version("transformers")
    yield software.python_version(sys.version_info[:2])
    yield software.torch_build(known, device)
    yield software.vllm_build(installed, device, server_lives=server_lives)
    for name, version in installed.items():
        requires = metadata.requires(name) or ()
        yield software.vllm_requirement(f"{name} {version}", requires, "torch", known.torch)
        yield software.vllm_requirement(f"{name} {version}", requires, "transformers", transformers)
    if installed:
        yield patches_fit()
    yield software.transformers_imports(known, transformers)
    yield software.torchvision_fits(known, software.installed_version("torchvision"))
    yield software.nothing_shadows(Path.cwd())
    yield software.plugins_registered(plugins)


def patches_fit() -> Check:
    versions = compatibility.TESTED_VERSIONS
    expected = f"vLLM {versions[0]} to {versions[-1]} with every symbol that is patched"
    try:
        return passed("Patches", f"fit vLLM {compatibility.check_installed()}", expected)
    except IncompatibleVersionError as error:
        return failed("Patches", error.message, expected, error.remedy)


def _hardware(known: Facts, device: Device, live: Manifest | None) -> Iterator[Check]:
    yield hardware.gpu_visible(known, device, os.environ, driver_loaded=hardware.nvidia_driver_loaded())
    if device == "cuda":
        yield hardware.driver_runs_torch(known)
        yield from (hardware.gpu_memory(gpu, server_lives=live is not None) for gpu in known.gpus)
        yield sharing.over_cuda_ipc(trial_gpu(known, live), os.environ)
    else:
        yield sharing.over_memfd()
    yield hardware.main_memory(memory.available_bytes(), memory.cgroup_left_bytes())
    yield hardware.shm_space(memory.shm_free_bytes())


def trial_gpu(known: Facts, live: Manifest | None) -> str | None:
    """Return the GPU to try CUDA IPC on: the server's if it is visible, else the first; None without a GPU."""
    visible = [gpu.uuid for gpu in known.gpus]
    own = live.shard(0).gpu_uuid if live else None
    return own if own in visible else next(iter(visible), None)


def _server(examined: "Examined", known: Facts, port: int | None, *, searched: bool) -> Iterator[Check]:
    from bridge.checks import server

    live = examined.live
    if live:
        transformers = software.installed_version("transformers")
        here = {"bridge": bridge.__version__, "torch": known.torch, "transformers": transformers}
        yield server.same_versions(live, here)
        yield server.same_gpu(live, [gpu.uuid for gpu in known.gpus])
        yield server.weights_open(live)
        yield from server.answers(live)
    if searched:
        yield from server.others(examined.path)
    own = urlsplit(live.url).port if live else None
    wanted = port or own or DEFAULT_PORT
    named = {exported.server.pid: discovery.choice(path, exported) for path, exported in discovery.running().items()}
    yield processes.port(wanted, live.server.pid if live and wanted == own else None, named)
    yield processes.engines_have_servers(processes.running())
    yield processes.mailboxes_have_ranks(processes.leftover_mailboxes())


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
    """Yield what was found and, unless the check passed, what was expected and how to fix it."""
    status = Text(f"{check.status:{STATUS_WIDTH}}", console.STATUS_STYLES[check.status])
    label = " " * (STATUS_WIDTH + 4)
    parts = [(Text.assemble("  ", status, "  ", f"{check.name:{NAME_WIDTH}}", "  "), check.found)]
    if check.status in ("WARN", "FAIL"):
        parts.append((Text(f"{label}{'expected':{LABEL_WIDTH}} ", "dim"), check.expected))
    if check.remedy:
        heading = "next" if check.status == "SKIP" else "fix"
        parts.append((Text(f"{label}{heading:{LABEL_WIDTH}} ", "bold"), check.remedy))
    for head, text in parts:
        wrapped = textwrap.fill(
            cleaned(text), width, initial_indent=" " * len(head), subsequent_indent=" " * len(head),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        yield Text.assemble(head, wrapped[len(head) :])
