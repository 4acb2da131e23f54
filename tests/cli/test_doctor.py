"""`bridge doctor` output as text and JSON, and its exit codes."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from bridge.checks import Check, failed, passed, probe, skipped, software, warned
from bridge.server import manifest as manifests
from bridge_cli import console, doctor
from tests.unit.checks_sample import CPU_FACTS, UUID, dead_server, gpu_facts, manifest

app = typer.Typer()
app.command()(doctor.doctor)

SECTIONS = [
    ("Software", [passed("Python", "3.12", "3.11 or 3.12"), skipped("GPU", "none here", "a GPU")]),
    (
        "Server",
        [
            warned("Memory", "1 GiB", "4 GiB", "stop others"),
            failed("Manifest", "word " * 40, "expected " * 20, "hint " * 20),
        ],
    ),
]


@pytest.fixture(autouse=True)
def nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the probe report a CPU, and limit the search for manifests to empty folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", tmp_path / "default")
    for name in ("LOGDIR", "BRIDGE_PORT", "BRIDGE_VLLM_PORT", "BRIDGE_VLLM_CONFIG_PATH", "BRIDGE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe, "ask", lambda *_, **__: CPU_FACTS)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def checks_of(result: Result) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in map(json.loads, result.stdout.splitlines())}


def printed(monkeypatch: pytest.MonkeyPatch, width: int = 80, *, color: bool = False) -> str:
    page = io.StringIO()
    people = Console(file=page, width=width, highlight=False, soft_wrap=True, force_terminal=color)
    monkeypatch.setattr(console, "people", people)
    doctor.report(SECTIONS)
    return page.getvalue()


def test_json_prints_one_record_per_line_on_stdout() -> None:
    result = run("--json", "--device", "cpu", "--port", "1")
    fields = [field.name for field in dataclasses.fields(Check)]
    checks = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(checks) > 10
    assert all(list(check) == fields for check in checks)
    assert "Software" not in result.stdout


def test_report_on_stderr_ends_with_counts() -> None:
    result = run("--device", "cpu", "--port", "1")
    assert result.stdout == ""
    assert "no server yet" in result.stderr
    assert " PASS, " in result.stderr.splitlines()[-1]


def test_exit_code_is_3_only_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: SECTIONS)
    assert (run().exit_code, run("--json").exit_code) == (3, 3)
    warnings = [("Server", [warned("Memory", "1 GiB", "4 GiB", "stop others")])]
    monkeypatch.setattr(doctor, "examine", lambda *_: warnings)
    assert run().exit_code == 0


def test_given_manifest_that_is_missing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--json", "--device", "cpu", "--vllm-config-path", str(tmp_path / "none.json"))
    assert (result.exit_code, checks_of(result)["Manifest"]["status"]) == (3, "FAIL")
    monkeypatch.setenv("BRIDGE_VLLM_CONFIG_PATH", str(tmp_path / "none.json"))
    assert checks_of(run("--json", "--device", "cpu"))["Manifest"]["status"] == "FAIL"


def test_server_of_a_stale_manifest_gets_no_request(tmp_path: Path) -> None:
    manifests.write(manifest(server=dead_server()), tmp_path / manifests.MANIFEST_NAME)
    checks = checks_of(run("--json", "--device", "cpu"))
    assert (checks["Manifest"]["status"], checks["Server process"]["status"]) == ("PASS", "FAIL")
    assert "Server health" not in checks


def test_live_manifest_leads_to_its_server_and_port(tmp_path: Path) -> None:
    manifests.write(manifest(url="http://127.0.0.1:9"), tmp_path / manifests.MANIFEST_NAME)
    checks = checks_of(run("--json", "--device", "cpu"))
    names = "Server process", "Server health", "Server's weights", "Port 9"
    assert [checks[name]["status"] for name in names] == ["PASS", "FAIL", "FAIL", "FAIL"]


def test_requested_gpu_that_is_missing_fails() -> None:
    checks = checks_of(run("--json", "--device", "cuda"))
    assert [checks[name]["status"] for name in ("torch", "GPU", "CUDA IPC")] == ["FAIL", "FAIL", "SKIP"]


def test_model_is_checked_if_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert "Model" not in checks_of(run("--json", "--device", "cpu"))
    checks = checks_of(run("--json", "--device", "cpu", "--model", str(tmp_path)))
    assert checks["Model, shared_vllm"]["status"] == "FAIL"


def test_trial_runs_on_the_servers_visible_gpu() -> None:
    assert doctor.trial_gpu(gpu_facts(), None) == UUID
    assert doctor.trial_gpu(gpu_facts(), manifest(gpu_uuid=UUID)) == UUID
    assert doctor.trial_gpu(gpu_facts(), manifest(gpu_uuid="GPU-else")) == UUID
    assert doctor.trial_gpu(CPU_FACTS, manifest(gpu_uuid=UUID)) is None


def test_half_installed_environment_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed_version", lambda name: None if name == "httpx" else "99")
    monkeypatch.setattr(software, "our_requirements", lambda: ["httpx>=0.27", "rich>=13"])
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    ((title, checks),) = doctor.examine(None, None, "auto")
    assert (title, [check.status for check in checks]) == ("Software", ["PASS", "FAIL"])
    assert checks[-1].found == "httpx not installed"


def test_unsupported_operating_system_gets_only_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    sections = list(doctor.examine(None, None, "auto"))
    assert [check.status for _, checks in sections for check in checks] == ["FAIL"]


def test_patch_for_a_different_vllm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge_patches.compatibility.installed_version", lambda: "0.99.0")
    check = doctor.patches_fit()
    assert (check.status, "0.99.0" in check.found) == ("FAIL", True)


def test_report_fits_80_columns_and_shows_the_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    page = printed(monkeypatch)
    assert max(len(line) for line in page.splitlines()) <= 80
    assert all(line == line.rstrip() for line in page.splitlines())
    assert "expected  4 GiB" in page
    assert "fix       stop others" in page
    assert "3.11 or 3.12" not in page
    assert page.splitlines()[-1] == "1 PASS, 1 WARN, 1 FAIL, 1 SKIP"
    path = "/a" * 60
    lines = [line.plain for line in doctor.lines(passed("Manifest", f"found {path}", "x"), 80)]
    assert any(path in line for line in lines), "a word wider than the page is not cut"


def test_no_color_prints_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mFAIL" in printed(monkeypatch, color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    page = printed(monkeypatch, color=True)
    assert "FAIL" in page
    assert "31m" not in page
