"""A training step touches few files."""

from pathlib import Path

from tests.architecture import step_files

MOST_FILES = 50
LONGEST_CHAIN = 9


def test_a_step_passes_through_few_files(tmp_path: Path) -> None:
    measured = step_files.measure(tmp_path)
    assert 20 < len(measured.files) <= MOST_FILES  # on a CPU without instructions for bf16
    assert 5 < len(measured.chain) <= LONGEST_CHAIN
