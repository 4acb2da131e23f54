"""A server whose adapters are trained, for the tests of every way to hand an adapter over."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.modes.lora_runs import World, world_in


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world_in(tmp_path, monkeypatch) as world:
        yield world
