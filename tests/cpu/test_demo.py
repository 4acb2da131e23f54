"""The wheel as a user installs it: `bridge demo` and a script with the library, beside the user's own modules.

The demo builds its model, trains it in place on a compiled vLLM, learns, and verifies.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import wheels
from tests.models import tiny

STEPS = 24
"""Number of steps: fewer than the demo's default, but enough to pass."""
LIMIT_S = 600
SCRIPT = """
import bridge, cli, environments.mine, patches
with bridge.serve("model", "--enforce-eager", max_model_len=64) as policy:
    print(cli.MINE, policy.version)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` folder of an environment with the wheel, which uses this one's other packages."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    wheel = wheels.build(folder / "build")
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel], check=True)
    assert (packages / "bridge_cli").is_dir()
    return environment / "bin"


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """Return a folder with the user's own modules `cli`, `environments` and `patches`."""
    (tmp_path / "cli.py").write_text("MINE = 'my cli'\n")
    for name in ("environments", "patches"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "mine.py").touch()
    return tmp_path


def ended(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BRIDGE_"))}
    return subprocess.run(
        command, cwd=folder, env=plain, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.core
def test_demo_of_the_wheel_passes(installed: Path, crowded: Path) -> None:
    done = ended([installed / "bridge", "demo", "--out", "demo", "--steps", str(STEPS), "--json"], crowded)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["passed"], summary["steps"], summary["weight_bytes_copied"]) == (True, STEPS, 0), done.stderr
    assert json.loads((crowded / "demo" / "summary.json").read_text()) == summary
    assert (crowded / "demo" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.core
def test_script_with_the_wheel_attaches_in_place(installed: Path, crowded: Path) -> None:
    tiny.write(tiny.llama(), crowded / "model")
    (crowded / "script.py").write_text(SCRIPT)
    done = ended([installed / "python", "script.py"], crowded)
    assert (done.returncode, done.stdout) == (0, "my cli 0\n"), done.stderr
