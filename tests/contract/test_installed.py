"""The installed vLLM fits, and each patch pins what it imports from vLLM."""

import ast
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridge.rollouts.distribution import WHOLE
from bridge_patches import pins
from bridge_patches.compatibility import TESTED_VERSIONS, check_installed, read_installed

ROOT = Path(__file__).parents[2]
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM is installed")


@needs_vllm
def test_every_pinned_symbol_of_the_installed_version_fits() -> None:
    assert check_installed()


@needs_vllm
def test_checking_imports_neither_vllm_nor_torch() -> None:
    program = (
        "import sys; from bridge_patches.compatibility import check_installed; check_installed(); "
        "print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@needs_vllm
def test_a_module_that_vllm_does_not_have_reads_as_none() -> None:
    assert read_installed("vllm.no.such.module") is None
    assert read_installed("vllm.plugins"), "a package resolves to its __init__.py"


@pytest.mark.parametrize("file", sorted((ROOT / "patches").rglob("*.py")), ids=lambda file: file.name)
def test_a_patch_pins_what_it_imports_from_vllm(file: Path) -> None:
    pinned = {(pin.module, pin.parts()["name"].partition(".")[0]) for pin in pins.of_file(file)}
    modules = {module for module, _ in pinned}
    imported = {pair for pair in pins.imports_of(ast.parse(file.read_text())) if f"{pair[0]}.".startswith("vllm.")}
    unpinned = {pair for pair in imported if pair not in pinned and ".".join(pair).strip(".") not in modules}
    assert not unpinned, f"add these to the file's PINS: {sorted(unpinned)}"


def test_bridge_names_every_sampling_parameter_that_a_model_has_defaults_for() -> None:
    (known,) = [pin.parts()["names"].split(", ") for pin in pins.collect() if " lists " in pin.statement]
    assert set(known) == {*WHOLE, "temperature", "max_new_tokens", "skip_special_tokens"}


def test_the_package_asks_for_the_range_that_was_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor, _ = TESTED_VERSIONS[-1].split(".")
    assert extras["gpu"] == [f"vllm>={TESTED_VERSIONS[0].removesuffix('.0')},<{major}.{int(minor) + 1}"]
