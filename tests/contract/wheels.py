"""Get the pinned modules of any vLLM version from its wheel, which is downloaded once and reduced to a few files."""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".contract"
PLATFORMS = ("manylinux1", "manylinux2014", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34", "manylinux_2_35")
"""Tags under which vLLM's wheels were published; only their Python files matter here."""


def fetch(version: str, modules: frozenset[str]) -> Path:
    """Return the folder with the source of those `modules` that exist in vLLM `version`."""
    folder = CACHE / version
    complete = folder / "modules.json"
    wanted = sorted(modules)
    if not complete.is_file() or json.loads(complete.read_text()) != wanted:
        with tempfile.TemporaryDirectory() as temporary:
            _extract(_download(version, Path(temporary)), modules, folder)
        complete.write_text(json.dumps(wanted))
    return folder


def fetch_python(version: str) -> Path:
    """Return a folder with all Python files of vLLM `version`, from which its code runs without its kernels."""
    folder = CACHE / f"{version}-whole"
    complete = folder / "complete"
    if not complete.is_file():
        with (
            tempfile.TemporaryDirectory() as temporary,
            zipfile.ZipFile(_download(version, Path(temporary))) as archive,
        ):
            kept = [name for name in archive.namelist() if name.endswith((".py", ".json", "METADATA"))]
            archive.extractall(folder, kept)
        complete.touch()
    return folder


def _download(version: str, folder: Path) -> Path:
    platforms = [f"--platform={tag}_x86_64" for tag in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run(
        [*command, "--python-version=3.12", *platforms, "--dest", str(folder), f"vllm=={version}"], check=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _extract(wheel: Path, modules: frozenset[str], folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        wanted = {module.replace(".", "/") for module in modules}
        files = {f"{path}.py" for path in wanted} | {f"{path}/__init__.py" for path in wanted}
        for name in files & set(archive.namelist()):
            archive.extract(name, folder)
