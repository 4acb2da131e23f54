"""Check that what Python imports as `cli`, `patches` and `environments` is ours, and that vLLM finds our plugins.

Not covered: other people's packages (`software.py`).
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import bridge
from bridge.checks.result import Check, failed, passed, warned

COMMON_NAMES = ("cli", "patches", "environments")
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
OUR_MODULE = "patches."
ROOT = Path(bridge.__file__).parents[1]


def imported_folders() -> dict[str, Path | None]:
    """Return where Python would import each of our commonly named packages from; None: nowhere."""
    found: dict[str, Path | None] = {}
    for name in COMMON_NAMES:
        spec = importlib.util.find_spec(name)
        found[name] = Path(spec.origin).parent if spec and spec.origin else None
    return found


def packages_are_ours(found: Mapping[str, Path | None], root: Path = ROOT) -> Check:
    """Check that the commonly named packages lie beside `bridge`."""
    name, expected = "Bridge's packages", f"{', '.join(found)} in {root}"
    foreign = {package: folder for package, folder in found.items() if folder != root / package}
    if not foreign:
        return passed(name, f"{', '.join(found)} in {root}", expected)
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
    return warned(
        name, f"{folder} holds {', '.join(taken)}", expected, "start Bridge from another folder, or rename it"
    )


def our_plugins() -> dict[str, list[str]]:
    """Return the names under which vLLM finds our plugins, by group."""
    return {
        group: sorted({e.name for e in importlib.metadata.entry_points(group=group) if e.value.startswith(OUR_MODULE)})
        for group in PLUGIN_GROUPS
    }


def plugins_registered(plugins: Mapping[str, list[str]]) -> Check:
    """Check that both of our plugins are registered in this environment."""
    name, expected = "vLLM plugins", f"one of ours in {' and '.join(PLUGIN_GROUPS)}"
    missing = [group for group, names in plugins.items() if not names]
    if missing:
        found = f"none of ours in {' and '.join(missing)}"
        return failed(
            name,
            f"{found}: vLLM would start unpatched",
            expected,
            "pip install --force-reinstall bridge-rl (in a clone: pip install -e .)",
        )
    return passed(name, ", ".join(plugin for names in plugins.values() for plugin in names), expected)
