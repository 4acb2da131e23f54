"""What `bridge --help` loads, and that the packages with common names are ours."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ("", "serve-vllm", "train", "run", "plan", "verify", "doctor", "demo", "env", "report")
HEAVY = ("torch", "vllm", "transformers", "matplotlib", "numpy")

HELP = """
import json, sys
sys.argv = ["bridge", *sys.argv[1:], "--help"]
from cli.main import main
try:
    main()
except SystemExit as end:
    code = end.code or 0
print(json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


def _python(program: str, *arguments: str) -> str:
    """Run `program` away from the checkout, so that only what is installed is found."""
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-P", "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command or "bridge")
def test_help_answers_without_loading_anything_heavy(command: str) -> None:
    *shown, report = _python(HELP, *filter(None, [command])).splitlines()
    found = json.loads(report)
    assert found["code"] == 0
    assert any("--help" in line for line in shown), "help was not shown"
    assert not set(HEAVY) & set(found["modules"])


@pytest.mark.parametrize("package", ["bridge", "cli", "environments", "patches"])
def test_the_installed_package_is_ours(package: str) -> None:
    program = "import sys; from importlib.util import find_spec; print(find_spec(sys.argv[1]).origin)"
    assert Path(_python(program, package).strip()) == ROOT / package / "__init__.py"


@pytest.mark.parametrize(
    ("group", "target"),
    [("vllm.general_plugins", "patches.plugin:register"), ("vllm.endpoint_plugins", "patches.routes:BridgeRoutes")],
)
def test_vllm_finds_our_plugins(group: str, target: str) -> None:
    program = "import sys; from importlib.metadata import entry_points; print(entry_points(group=sys.argv[1]))"
    assert target in _python(program, group)
