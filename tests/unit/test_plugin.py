"""The general plugin: when it patches this process, and in which order."""

import pytest

from bridge.errors import IncompatibleVersionError
from patches import compatibility, memory_pool, model_runner, plugin, prefix_cache, tether


@pytest.mark.parametrize(("value", "patched"), [(None, False), ("0", False), ("", False), ("1", True), ("True", True)])
def test_vllm_is_patched_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, value: str | None, patched: bool) -> None:
    order: list[str] = []
    monkeypatch.setattr(compatibility, "check_installed", lambda: order.append("check"))
    monkeypatch.setattr(tether, "tie", lambda: order.append("tie"))
    monkeypatch.setattr(model_runner, "patch", lambda: order.append("runner"))
    monkeypatch.setattr(memory_pool, "patch", lambda: order.append("pool"))
    monkeypatch.setattr(prefix_cache, "patch", lambda: order.append("cache"))
    monkeypatch.delenv(plugin.ENABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.ENABLE, value)
    envs = pytest.importorskip("vllm.envs")
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    plugin.register()
    for name in ("VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_SKIP_WEIGHT_DAEMON"):
        assert (name in envs.environment_variables) is patched
    assert order == (["check", "tie", "runner", "pool", "cache"] if patched else [])


def test_nothing_is_patched_in_a_vllm_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise IncompatibleVersionError("0.1", remedy="another")

    monkeypatch.setattr(compatibility, "check_installed", refuse)
    monkeypatch.setattr(model_runner, "patch", lambda: pytest.fail("patched"))
    monkeypatch.setenv(plugin.ENABLE, "1")
    with pytest.raises(IncompatibleVersionError):
        plugin.register()
