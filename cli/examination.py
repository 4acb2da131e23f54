"""Every check of `bridge doctor`, in the order in which a person reads them.

Not covered: the checks themselves (`bridge/checks/`) and how they are printed (`doctor.py`).
"""

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import bridge
from bridge.checks import (
    cuda_ipc,
    facts,
    gpu,
    installation,
    leftovers,
    memfd,
    memory,
    model,
    port,
    server,
    software,
)
from bridge.checks.result import Check, failed, passed
from bridge.checks.surroundings import environment_variables
from bridge.config import ServeConfig
from bridge.core import memory as host
from bridge.errors import IncompatibleVersionError
from bridge.server import discovery
from bridge.server.manifest import Manifest

DEFAULT_PORT: int = ServeConfig.model_fields["port"].default


def examine(
    asked_port: int | None,
    given: Path | None,
    asked_device: Literal["auto", "cpu", "cuda"],
    asked_model: str | None = None,
) -> Iterator[tuple[str, list[Check]]]:
    """Yield every check, section by section; outside Linux nothing but the first can be looked at."""
    system = software.operating_system(sys.platform)
    if system.status == "FAIL":
        yield "Software", [system]
        return
    known = facts.gather()
    device = asked_device if asked_device != "auto" else likely_device(known)
    examined = server.examine(given)
    yield "Software", [system, *software_checks(known, device, server_lives=examined.live is not None)]
    yield "Hardware", hardware_checks(known, device, examined.live)
    plugins = [name for names in installation.our_plugins().values() for name in names]
    yield "Environment", environment_variables(os.environ, device, plugins)
    if asked_model is not None:
        yield "Model", list(model.modes(asked_model, model.read(asked_model)))
    yield "Server", server_checks(examined, known, asked_port, searched=given is None)


def likely_device(known: facts.Facts) -> software.Device:
    """Return where `bridge serve-vllm` would run: what the installed vLLM was built for decides, else the GPU."""
    return software.built_for(software.installed_vllm()) or ("cuda" if known.gpus() else "cpu")


def software_checks(known: facts.Facts, device: software.Device, *, server_lives: bool) -> list[Check]:
    """Check Python, torch, vLLM, transformers and Bridge's own installation."""
    installed = software.installed_vllm()
    torch_version = known.torch.version if known.torch else None
    transformers_version = software.installed_version("transformers")
    fits = [
        software.vllm_requirement(f"{name} {version}", metadata.requires(name) or (), package, package_version)
        for name, version in installed.items()
        for package, package_version in (("torch", torch_version), ("transformers", transformers_version))
    ]
    return [
        software.python_version(sys.version_info[:2]),
        software.torch_build(known, device),
        software.vllm_build(installed, device, server_lives=server_lives),
        *fits,
        *([patches_fit()] if installed else []),
        software.transformers_imports(known, transformers_version),
        software.torchvision_fits(known, software.installed_version("torchvision")),
        installation.packages_are_ours(installation.imported_folders()),
        installation.nothing_shadows(Path.cwd()),
        installation.plugins_registered(installation.our_plugins()),
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


def hardware_checks(known: facts.Facts, device: software.Device, live: Manifest | None) -> list[Check]:
    """Check the GPU and what is shared through it, or main memory and what is shared through that."""
    seen = gpu.gpu_visible(known, device, os.environ, driver_loaded=gpu.nvidia_driver_loaded())
    checks = [seen]
    if device == "cuda":
        checks += [gpu.driver_runs_torch(known)]
        checks += [gpu.gpu_memory(each, server_lives=live is not None) for each in known.gpus()]
        checks += [cuda_ipc.two_processes_share(trial_gpu(known, live), os.environ)]
    else:
        checks += [memfd.two_processes_share()]
    return [
        *checks,
        memory.main_memory(host.available_bytes(), host.cgroup_left_bytes()),
        memory.shm_space(host.shm_free_bytes()),
    ]


def trial_gpu(known: facts.Facts, live: Manifest | None) -> str | None:
    """Return the GPU to try CUDA IPC on: the server's if we see it, else the first; None without a GPU."""
    visible = [each.uuid for each in known.gpus()]
    if live and live.shard(0).gpu_uuid in visible:
        return live.shard(0).gpu_uuid
    return visible[0] if visible else None


def server_checks(
    examined: server.Examined, known: facts.Facts, asked_port: int | None, *, searched: bool
) -> list[Check]:
    """Check the manifest, its server, and the port."""
    checks = list(examined.checks)
    live = examined.live
    if live:
        checks += [server.same_versions(live, versions_here(known))]
        checks += [server.same_gpu(live, [each.uuid for each in known.gpus()]), server.weights_open(live)]
        checks += server.answers(live)
    if searched:
        checks += server.others(examined.path)
    own = port_of(live) if live else None
    wanted = asked_port or own or DEFAULT_PORT
    named = {exported.server.pid: discovery.choice(path, exported) for path, exported in discovery.running().items()}
    listener = port.check(wanted, live.server.pid if live and wanted == own else None, named)
    return [*checks, listener, leftovers.engines_have_servers(leftovers.running())]


def port_of(live: Manifest) -> int | None:
    """Return the port of the manifest's server."""
    return urlsplit(live.url).port


def versions_here(known: facts.Facts) -> dict[str, str | None]:
    """Return the versions on the trainer's side of what has to be the same on both."""
    torch = known.torch.version if known.torch else None
    return {"bridge": bridge.__version__, "torch": torch, "transformers": software.installed_version("transformers")}
