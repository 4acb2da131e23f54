"""A short soak on the real vLLM; `make soak` is a long one.

Not covered: each fault in each phase (`tests/cli/test_fault_matrix.py`).
"""

from pathlib import Path

import pytest

from tests import soak

SEED, FAULTS = 0, 8


@pytest.mark.slow
def test_random_faults_leave_only_published_versions(tmp_path: Path) -> None:
    lines: list[str] = []
    with soak.ground_of_vllm(tmp_path) as ground:
        outcomes = soak.soak(ground, SEED, lambda number: number >= FAULTS, lines.append)
    assert outcomes.total() == FAULTS
    assert not outcomes[soak.VIOLATION], "\n".join(lines)
