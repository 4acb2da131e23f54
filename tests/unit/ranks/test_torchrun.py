"""The environment variables that a launcher sets. Not covered: joining (`tests/cpu`)."""

import pytest

from bridge.errors import UsageError
from bridge.ranks import torchrun

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in torchrun.NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "host"}, WHOLE | {"WORLD_SIZE": "1"}])
def test_one_process_needs_no_launcher(unset: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        unset.setenv(name, value)
    assert (torchrun.world_size(), torchrun.rank()) == (1, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"MASTER_ADDR": None}, {"RANK": None}, {"RANK": "2"}, {"RANK": "-1"}, {"RANK": ""}, {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"}, {"MASTER_PORT": "x"}, {"MASTER_PORT": "0"},
    ],
)  # fmt: skip
def test_incomplete_launcher_environment_is_refused(unset: pytest.MonkeyPatch, wrong: dict[str, str | None]) -> None:
    """Each process would train independently, or wait for a rank that does not exist."""
    for name, value in (WHOLE | wrong).items():
        if value is not None:
            unset.setenv(name, value)
    with pytest.raises(UsageError, match="variables of a launcher are inconsistent"):
        torchrun.world_size()
