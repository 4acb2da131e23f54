"""The page of families is generated from the results, and the docs are up to date."""

from pathlib import Path
from typing import Any

import pytest

from bridge.core.process import ProcessIdentity
from tests import family_results
from tests.family_results import PAGE, Result, page
from tests.unit.checks_sample import dead_server


def test_page_in_docs_is_generated_from_results() -> None:
    assert PAGE.read_text() == page(*map(family_results.load, family_results.RESULTS))


def result(**fields: Any) -> Result:
    known: dict[str, Any] = {
        "transformers_class": "A", "vllm_class": "B", "together": ("q k v",), "before": 0.01, "after": 0.02,
        "moved": 0.5, "versions": "v 1", "num_parameters": 123_000_000,
    }  # fmt: skip
    return Result(**known | fields)


def test_family_row_has_a_dash_for_missing_runs() -> None:
    cpu, gpu, parts = (
        {"Qwen3": vars(result())},
        {"Qwen3": vars(result(after=0.03)), "OLMo 3": vars(result())},
        {"Qwen3": {"2": 4e-6}},
    )
    both = page(cpu, gpu, parts)
    of_cpu = "| Qwen3 | A | B | `q k v` | 0.0100 | 0.0200 | 0.5000 | 4e-06 | - |"
    assert f"{of_cpu} 123,000,000 | 0.0100 | 0.0300 | 0.5000 |" in both
    assert "| OLMo 3 | A | B | `q k v` | - | - | - | - | - | 123,000,000 | 0.0100 | 0.0200 | 0.5000 |" in both
    assert f"{of_cpu} - | - | - | - |" in page(cpu, {}, parts)


@pytest.fixture
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {device: tmp_path / f"{device}.json" for device in family_results.RESULTS}
    monkeypatch.setattr(family_results, "RESULTS", files)
    monkeypatch.setattr(family_results, "PAGE", tmp_path / "page.md")


@pytest.mark.usefixtures("_own_files")
def test_processes_claim_families_and_lose_no_result(tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    names = "Qwen3", "Qwen2, Qwen2.5", "Gemma 3 (text)"
    assert all(family_results.claim(name, file) for name in names)
    assert not any(family_results.claim(name, file) for name in names), "this process still runs"
    for name in names[:2]:
        family_results.write(name, result(), file)
    family_results.collect(file)
    assert [*family_results.load("gpu")] == ["Qwen2, Qwen2.5", "Qwen3"]
    assert "| Qwen3 | A | B |" in family_results.PAGE.read_text()


@pytest.mark.usefixtures("_own_files")
def test_family_of_a_dead_process_is_claimed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.jsonl"
    dead = dead_server()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessIdentity, "current", lambda: dead)
        assert family_results.claim("Qwen3", file)
    assert family_results.claim("Qwen3", file)
    assert not family_results.claim("Qwen3", file)
    family_results.write("Qwen3", result(), file)
    family_results.collect(file)
    assert [*family_results.load("gpu")] == ["Qwen3"]
