"""Build Bridge's wheel from this checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "bridge": Path("bridge"),
    "bridge_cli": Path("cli/bridge_cli"),
    "bridge_environments": Path("environments/bridge_environments"),
    "bridge_patches": Path("patches/bridge_patches"),
}
"""Folder in the repository of each package in the wheel."""
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build(scratch: Path) -> Path:
    """Return the wheel, built in the empty folder `scratch` from a copy of the sources."""
    tree = scratch / "tree"
    out = scratch / "out"
    for folder in PACKAGES.values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, check=True, capture_output=True)
    (wheel,) = out.iterdir()
    return wheel
