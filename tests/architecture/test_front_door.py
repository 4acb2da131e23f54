"""`bridge --help` imports little, and the installed packages are those of this checkout."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bridge_cli.main import COMMANDS
from tests.wheels import PACKAGES

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "transformers", "matplotlib", "numpy", "httpx", "accelerate"}
"""Modules that no help page may import."""

HELP = """
import json, sys
sys.argv = ["bridge", *sys.argv[1:], "--help"]
from bridge_cli.main import main
try:
    main()
except SystemExit as end:
    code = end.code or 0
print(json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


def _python(program: str, *arguments: str) -> str:
    """Run `program` outside the checkout, so that only installed packages are found."""
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-P", "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded(*command: str) -> set[str]:
    """Return the modules that the help of `command` imports."""
    *shown, report = _python(HELP, *command).splitlines()
    document = json.loads(report)
    assert document["code"] == 0
    assert any("--help" in line for line in shown), "no help was printed"
    return set(document["modules"])


def test_help_imports_no_command() -> None:
    loaded = _loaded()
    assert not loaded & {target.partition(":")[0] for target, _ in COMMANDS.values()}
    assert not HEAVY & loaded


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_imports_nothing_heavy(command: str) -> None:
    assert not HEAVY & _loaded(command)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_package_is_ours(package: str) -> None:
    program = "import sys; from importlib.util import find_spec; print(find_spec(sys.argv[1]).origin)"
    assert Path(_python(program, package).strip()) == ROOT / PACKAGES[package] / "__init__.py"


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("vllm.general_plugins", "bridge_patches.plugin:register"),
        ("vllm.endpoint_plugins", "bridge_patches.routes:BridgeRoutes"),
    ],
)
def test_vllm_finds_bridges_plugins(group: str, target: str) -> None:
    program = "import sys; from importlib.metadata import entry_points; print(entry_points(group=sys.argv[1]))"
    assert target in _python(program, group)
