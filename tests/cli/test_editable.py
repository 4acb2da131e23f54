"""An editable install takes precedence over folders named like its packages, and over nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

import bridge_editable

FINDER = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, {file!r}) if name == "bridge_probe" else None

sys.meta_path.append(Finder)
"""
PROGRAM = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import __editable___bridge_rl_0_finder
if sys.argv[3] == "setup":
    import bridge_editable
    bridge_editable.install()
import bridge_probe
print(getattr(bridge_probe, "WHOSE", "nobody's"))
"""


@pytest.mark.parametrize(
    ("beside", "how", "whose"),
    [
        ("bridge_probe/docs/a.md", "pip", "nobody's"),
        ("bridge_probe/docs/a.md", "setup", "ours"),
        ("bridge_probe/__init__.py", "setup", "theirs"),
        ("bridge_probe.py", "setup", "theirs"),
        ("other.py", "setup", "ours"),
    ],
)
def test_folder_next_to_the_program_does_not_shadow_bridge(tmp_path: Path, beside: str, how: str, whose: str) -> None:
    packages, clone, work = (tmp_path / name for name in ("packages", "clone", "work"))
    for file, text in (
        (clone / "__init__.py", "WHOSE = 'ours'"),
        (packages / "__editable___bridge_rl_0_finder.py", FINDER.format(file=str(clone / "__init__.py"))),
        (packages / "bridge_editable.py", Path(bridge_editable.__file__).read_text()),
        (work / beside, "WHOSE = 'theirs'"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(work), str(packages), how]  # without Bridge's own finder
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{whose}\n"
