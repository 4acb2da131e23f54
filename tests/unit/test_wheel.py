"""The wheel is complete: it holds every file of Bridge's packages, and otherwise only its own metadata.

Not covered: what it does once it is installed (`tests/cpu/test_demo.py`).
"""

from pathlib import Path
from zipfile import ZipFile

from tests import wheels


def test_wheel_holds_every_file_of_bridges_packages(tmp_path: Path) -> None:
    with ZipFile(wheels.build(tmp_path)) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {
        Path(package, path.relative_to(wheels.ROOT / folder)).as_posix()
        for package, folder in wheels.PACKAGES.items()
        for path in (wheels.ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == ours
