"""A training step touches few files."""

from pathlib import Path

from tests.architecture import step_files

MOST_FILES = 49
LONGEST_CHAIN = 9


def test_a_step_passes_through_few_files(tmp_path: Path) -> None:
    found = step_files.measure(tmp_path)
    assert 20 < len(found.files) <= MOST_FILES  # on a CPU without instructions for bf16
    assert 5 < len(found.chain) <= LONGEST_CHAIN
