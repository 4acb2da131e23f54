"""`bridge doctor`: run every check, and print what it found, what was expected and how to fix it.

Not covered: the checks themselves (`bridge/checks`), and the proof of one copy (`bridge/checks/one_copy_proof.py`).
"""

import dataclasses
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import typer
from rich.text import Text

import bridge
from bridge.checks import Check, any_failed, hardware, probe, software, tried
from bridge.checks import model as model_checks
from bridge.checks.probe import Facts
from bridge.checks.software import Device
from bridge.config import DEFAULT_PORT, DeviceChoice
from bridge.core.host_memory import available_bytes, cgroup_left_bytes, shm_free_bytes
from bridge.core.redaction import escaped
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
"""Columns; a narrower terminal wraps the lines itself."""

Section = tuple[str, list[Check]]
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
DEVICE = "vLLM's device (default: auto, the one that the installed vLLM was built for)."
Where = Annotated[DeviceChoice, option("--device", "auto|cpu|cuda", DEVICE, envvar="BRIDGE_DEVICE")]
MODEL = "Folder or name of a model; checks from its configuration which modes can train it."
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
    checks = [check for _, section in sections for check in section]
    for check in checks if as_json else ():
        console.data(json.dumps(dataclasses.asdict(check)))
    if not as_json:
        report(sections)
    if any_failed(checks):
        raise typer.Exit(FAILURE_FOUND)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Everything that the checks examine."""

    facts: Facts
    device: Device
    plugins: dict[str, list[str]]
    examined: "Examined"
    model: str | None
    port: int | None
    has: frozenset[str]
    """Which of these it has: the device by name, "vllm", a "model", a live "server", a "search" for the manifest."""
    transformers: str | None = dataclasses.field(default_factory=lambda: software.installed_version("transformers"))


class Row(NamedTuple):
    """One or more checks, and what they need the machine to have (see `Machine.has`)."""

    section: str
    needs: Literal["", "cuda", "cpu", "vllm", "model", "server", "search"]
    checks: Callable[[Any], Iterable[Check] | Check]


def table() -> tuple[Row, ...]:
    """Return every check in the order of the report, with what it needs."""
    from bridge.checks import server  # loads httpx, which the help text does not need

    return (
        Row("Software", "", lambda _: software.operating_system(sys.platform)),
        Row("Software", "", lambda _: software.python_version(sys.version_info[:2])),
        Row("Software", "", lambda _: packages_complete()),
        Row("Software", "", lambda m: software.torch_build(m.facts, m.device)),
        Row("Software", "", lambda m: software.vllm_build(
            software.installed_vllm(), m.device, server_lives=m.examined.live is not None)),
        Row("Software", "vllm", requirements),
        Row("Software", "vllm", lambda _: patches_fit()),
        Row("Software", "", lambda m: software.transformers_imports(m.facts, m.transformers)),
        Row("Software", "", lambda m: software.torchvision_fits(
            m.facts, software.installed_version("torchvision"))),
        Row("Software", "", lambda _: software.bytecode_kept("torch")),
        Row("Software", "", lambda _: software.nothing_shadows(Path.cwd())),
        Row("Software", "", lambda m: software.plugins_registered(m.plugins)),
        Row("Hardware", "", lambda m: hardware.gpu_visible(
            m.facts, m.device, os.environ, driver_loaded=hardware.nvidia_driver_loaded())),
        Row("Hardware", "cuda", lambda m: hardware.driver_runs_torch(m.facts)),
        Row("Hardware", "cuda", lambda m: [
            hardware.gpu_memory(gpu, server_lives=m.examined.live is not None) for gpu in m.facts.gpus]),
        Row("Hardware", "cuda", lambda m: hardware.over_cuda_ipc(trial_gpu(m.facts, m.examined.live), os.environ)),
        Row("Hardware", "cpu", lambda _: hardware.over_memfd()),
        Row("Hardware", "", lambda _: hardware.main_memory(available_bytes(), cgroup_left_bytes())),
        Row("Hardware", "", lambda _: hardware.shm_space(shm_free_bytes())),
        Row("Environment", "", lambda m: software.environment_variables(os.environ, m.device)),
        Row("Model", "model", lambda m: model_checks.modes(m.model, model_checks.read(m.model))),
        Row("Model", "model", lambda m: model_checks.saving(m.model)),
        Row("Model", "model", lambda m: model_checks.tokens(probe.ask("tokens", model=m.model))),
        Row("Server", "", lambda m: m.examined.checks),
        Row("Server", "server", lambda m: server.same_versions(m.examined.live, {
            "bridge": bridge.__version__, "torch": m.facts.torch, "transformers": m.transformers})),
        Row("Server", "server", lambda m: server.same_gpu(m.examined.live, [gpu.uuid for gpu in m.facts.gpus])),
        Row("Server", "server", lambda m: server.weights_open(m.examined.live)),
        Row("Server", "server", lambda m: server.answers(m.examined.live)),
        Row("Server", "search", lambda m: server.others(m.examined.path)),
        Row("Server", "", lambda m: server.port(*ports(m))),
        Row("Server", "", lambda _: server.engines_have_servers(server.running())),
    )  # fmt: skip


def examine(
    port: int | None, given: Path | None, requested: DeviceChoice, model: str | None = None
) -> Iterator[Section]:
    """Yield every check, section by section; without Linux or a required package, only the checks that report it."""
    system = software.operating_system(sys.platform)
    packages = packages_complete()
    if packages.status == "FAIL" and find_spec("httpx") is None:  # the server checks need httpx
        yield "Software", [system, packages]
        return
    if system.status == "FAIL":
        yield "Software", [system]
        return
    from bridge.checks import server

    facts = probe.ask("imports", "cuda")
    installed = software.installed_vllm()
    examined = server.examine(given)
    device = software.built_for(installed) if requested == "auto" else requested
    if device is None:
        device = "cuda" if facts.gpus else "cpu"
    has = {"", device}
    if installed:
        has.add("vllm")
    if model is not None:
        has.add("model")
    if examined.live is not None:
        has.add("server")
    if given is None:
        has.add("search")
    machine = Machine(facts, device, software.our_plugins(), examined, model, port, frozenset(has))
    rows = (row for row in table() if row.needs in machine.has)
    for section, group in groupby(rows, key=lambda row: row.section):
        checks: list[Check] = []
        for row in group:
            found = row.checks(machine)
            checks += [found] if isinstance(found, Check) else found
        yield section, checks


def packages_complete() -> Check:
    return software.packages_complete(software.our_requirements(), software.installed_version)


def requirements(machine: Machine) -> Iterator[Check]:
    """Check torch and transformers against the metadata of each installed vLLM."""
    for name, version in software.installed_vllm().items():
        requires = metadata.requires(name) or ()
        yield software.vllm_requirement(f"{name} {version}", requires, "torch", machine.facts.torch)
        yield software.vllm_requirement(f"{name} {version}", requires, "transformers", machine.transformers)


def patches_fit() -> Check:
    versions = compatibility.TESTED_VERSIONS
    expected = f"vLLM {versions[0]} to {versions[-1]} with every symbol that Bridge patches"
    return tried("Patches", lambda: f"fit vLLM {compatibility.check_installed()}", expected)


def trial_gpu(facts: Facts, live: Manifest | None) -> str | None:
    """Return the GPU to try CUDA IPC on: the server's if it is visible, otherwise the first; None without a GPU."""
    visible = [gpu.uuid for gpu in facts.gpus]
    own = live.shards[0].gpu_uuid if live else None
    return own if own in visible else next(iter(visible), None)


def ports(machine: Machine) -> tuple[int, int | None, dict[int, str]]:
    """Return the port to check, the pid of the server that may listen there, and all running servers by pid."""
    live = machine.examined.live
    own = urlsplit(live.url).port if live else None
    wanted = machine.port or own or DEFAULT_PORT
    named = {exported.server.pid: discovery.choice(path, exported) for path, exported in discovery.running().items()}
    return wanted, live.server.pid if live and wanted == own else None, named


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
    if check.hint:
        heading = "next" if check.status == "SKIP" else "fix"
        parts.append((Text(f"{label}{heading:{LABEL_WIDTH}} ", "bold"), check.hint))
    for head, text in parts:
        wrapped = textwrap.fill(
            escaped(text), width, initial_indent=" " * len(head), subsequent_indent=" " * len(head),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        yield Text.assemble(head, wrapped[len(head) :])
