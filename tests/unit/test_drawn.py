"""Which slow tests `make test-drawn` runs."""

from typing import cast

import pytest

from tests.conftest import NUM_DRAWN, drawn


class FakeItem:
    """A test with these markers."""

    def __init__(self, *markers: str) -> None:
        self.markers = markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def items(*markers: str, count: int = 100) -> list[pytest.Item]:
    return [cast(pytest.Item, FakeItem(*markers)) for _ in range(count)]


def test_seeds_draw_every_slow_test_in_order() -> None:
    slow = items("slow")
    assert drawn(slow, "a") == drawn(slow, "a") != drawn(slow, "b")
    assert len(drawn(slow, "a")) == NUM_DRAWN
    assert drawn(slow, "a") == sorted(drawn(slow, "a"), key=slow.index)
    everything = [*items("slow", "core"), *slow, *items("cpu")]
    assert {id(item) for seed in range(200) for item in drawn(everything, str(seed))} == {id(item) for item in slow}
    assert len(drawn(items("slow", count=2), "a")) == 2
