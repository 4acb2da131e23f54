"""The general plugin: when it patches this process, and in which order."""

from collections.abc import Iterator

import pytest

from bridge.errors import IncompatibleVersionError
from bridge_patches import (
    compatibility,
    engine_outputs,
    loading,
    placement,
    plugin,
    prefix_cache,
)


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    plugin.register.cache_clear()
    yield
    plugin.register.cache_clear()


@pytest.mark.parametrize(("value", "patched"), [(None, False), ("0", False), ("", False), ("1", True), ("True", True)])
def test_vllm_is_patched_once_and_only_on_request(
    monkeypatch: pytest.MonkeyPatch, value: str | None, patched: bool
) -> None:
    order: list[str] = []
    monkeypatch.setattr(compatibility, "check_installed", lambda: order.append("check"))
    monkeypatch.setattr(plugin, "end_with_parent", lambda: order.append("tie"))
    for module in (loading, placement, prefix_cache, engine_outputs):
        monkeypatch.setattr(module, "patch", lambda name=module.__name__: order.append(name.rpartition(".")[2]))
    monkeypatch.delenv(plugin.ENABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.ENABLE, value)
    envs = pytest.importorskip("vllm.envs")
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    for _ in range(3):
        plugin.register()
    for name in ("VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_SKIP_WEIGHT_DAEMON"):
        assert (name in envs.environment_variables) is patched
    everything = ["check", "tie", "loading", "placement", "prefix_cache", "engine_outputs"]
    assert order == (everything if patched else [])


def test_nothing_is_patched_in_a_vllm_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise IncompatibleVersionError("0.1", remedy="another")

    monkeypatch.setattr(compatibility, "check_installed", refuse)
    monkeypatch.setattr(loading, "patch", lambda: pytest.fail("patched"))
    monkeypatch.setattr(placement, "patch", lambda: pytest.fail("patched"))
    monkeypatch.setenv(plugin.ENABLE, "1")
    for _ in range(2):
        with pytest.raises(IncompatibleVersionError):
            plugin.register()
