"""The page of families is generated from the results, and the docs are up to date."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import family_results
from tests.family_results import PAGE, Result, page


def test_the_page_in_the_docs_is_the_one_that_the_results_make() -> None:
    assert PAGE.read_text() == page(*map(family_results.load, family_results.RESULTS))


def result(**fields: Any) -> Result:
    known: dict[str, Any] = {
        "transformers_class": "A", "vllm_class": "B", "together": ("q k v",), "before": 0.01, "after": 0.02,
        "moved": 0.5, "versions": "v 1", "num_parameters": 123_000_000,
    }  # fmt: skip
    return Result(**known | fields)


def test_a_family_has_one_row_with_a_dash_for_what_did_not_run() -> None:
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


def test_versions_are_named_once_or_with_their_families() -> None:
    one = page({"Qwen3": vars(result()), "OLMo 3": vars(result())}, {}, {})
    assert "- On the CPU: v 1\n" in one
    two = page({"Qwen3": vars(result()), "OLMo 3": vars(result(versions="v 2"))}, {}, {})
    assert "- On the CPU: v 1: Qwen3\n- On the CPU: v 2: OLMo 3\n" in two


def test_a_row_says_who_reads_a_familys_folders() -> None:
    found = {"folders": 6, "transformers_4": 2e-7, "vllm": "the same", "source": 0.98, "versions": "v 1"}
    absent = found | {"folders": 3, "transformers_4": None, "source": None}
    text = page({}, {}, {}, {"Qwen3": found, "Gemma 4 (text)": absent})
    assert "| Qwen3 | 6 | 2e-07 | the same | 1 |\n| Gemma 4 (text) | 3 | - | the same | - |" in text
    assert text.endswith("\n- v 1\n")


@pytest.fixture
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {device: tmp_path / f"{device}.json" for device in family_results.RESULTS}
    monkeypatch.setattr(family_results, "RESULTS", files)
    monkeypatch.setattr(family_results, "PAGE", tmp_path / "page.md")


@pytest.mark.usefixtures("_own_files")
def test_processes_share_the_families_and_lose_no_result(tmp_path: Path) -> None:
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
def test_what_a_cut_off_process_began_is_proved_again(tmp_path: Path) -> None:
    file, code = tmp_path / "found.jsonl", "from pathlib import Path; import sys; from tests import family_results;"
    argv: list[str | Path] = [
        sys.executable,
        "-c",
        f"{code} assert family_results.claim('Qwen3', Path(sys.argv[1]))",
        file,
    ]
    subprocess.run(argv, check=True)
    assert family_results.claim("Qwen3", file)
    assert not family_results.claim("Qwen3", file)
    family_results.write("Qwen3", result(), file)
    family_results.collect(file)
    assert [*family_results.load("gpu")] == ["Qwen3"]


@pytest.mark.usefixtures("_own_files")
def test_a_line_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    """As on a full disk."""
    file = tmp_path / "found.jsonl"
    family_results.write("Qwen3", result(), file)
    with file.open("a") as opened:
        opened.write('{"family": "OLMo 3", "res')
    assert family_results.claim("OLMo 3", file)
    family_results.write("OLMo 3", result(), file)
    family_results.collect(file)
    assert [*family_results.load("gpu")] == ["Qwen3", "OLMo 3"]


@pytest.mark.usefixtures("_own_files")
def test_a_file_that_is_missing_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        family_results.collect(tmp_path / "typo.jsonl")
    assert not (tmp_path / "typo.jsonl").exists()
