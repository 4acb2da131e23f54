"""The general plugin and the sleep pool, over fakes of the modules of vLLM that they touch."""

import sys
from types import ModuleType
from typing import Any

import pytest

from bridge.errors import IncompatibleVersionError
from patches import compatibility, memory_pool, model_runner, plugin, prefix_cache, tether


class Pool:
    """A context that is not the null one."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Worker:
        def _maybe_get_memory_pool_context(self, tag: str) -> Pool:
            assert tag != "weights"
            return Pool()

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["vllm.v1.worker.gpu_worker"]).update(Worker=Worker)
    return Worker


def test_weights_stay_out_of_the_sleep_pool_and_the_cache_in_it(worker: Any) -> None:
    memory_pool.patch()
    once = worker._maybe_get_memory_pool_context
    memory_pool.patch()
    assert worker._maybe_get_memory_pool_context is once
    with worker()._maybe_get_memory_pool_context("weights") as nothing:
        assert nothing is None
    assert isinstance(worker()._maybe_get_memory_pool_context("kv_cache"), Pool)


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
    plugin.register()
    assert order == (["check", "tie", "runner", "pool", "cache"] if patched else [])


def test_nothing_is_patched_in_a_vllm_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise IncompatibleVersionError("0.1", remedy="another")

    monkeypatch.setattr(compatibility, "check_installed", refuse)
    monkeypatch.setattr(model_runner, "patch", lambda: pytest.fail("patched"))
    monkeypatch.setenv(plugin.ENABLE, "1")
    with pytest.raises(IncompatibleVersionError):
        plugin.register()
