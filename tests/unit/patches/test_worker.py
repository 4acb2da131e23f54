"""The sleep pool, with a fake of vLLM's: what stays out of it, and that waking up is all or nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bridge_patches import placement, wrap
from bridge_patches.worker import BridgeWorker

GIB = 2**30


@dataclass
class Allocation:
    """vLLM's `AllocationData`."""

    handle: tuple[int, int]
    tag: str = "kv_cache"
    cpu_backup_tensor: object = None
    is_asleep: bool = False


@dataclass
class Gpu:
    """A GPU's free memory and mappings; each address can be mapped at most once."""

    free_bytes: int
    mapped: set[int] = field(default_factory=set)
    fails_after: int = 99
    """Number of mappings after which CUDA refuses more, even if memory is free."""

    def map(self, handle: tuple[int, int]) -> None:
        address, num_bytes = handle
        if address in self.mapped:
            raise RuntimeError("CUDA Error: invalid argument")
        if num_bytes > self.free_bytes or self.fails_after == 0:
            raise RuntimeError("CUDA Error: out of memory")
        self.mapped.add(address)
        self.free_bytes -= num_bytes
        self.fails_after -= 1

    def unmap(self, handle: tuple[int, int]) -> None:
        self.mapped.remove(handle[0])
        self.free_bytes += handle[1]


class FakeWorker(BridgeWorker):
    """vLLM's worker and its pool as of 0.26: sleeping and waking always affect the entire pool."""

    def __init__(self, gpu: Gpu, allocations: dict[int, Allocation]) -> None:
        self.gpu, self.allocations = gpu, allocations
        for data in allocations.values():
            gpu.map(data.handle)

    def sleep(self, level: int = 1) -> None:
        assert level == 1, "a deeper sleep loses what vLLM could not restore"
        for data in self.allocations.values():
            self.gpu.unmap(data.handle)
            data.cpu_backup_tensor, data.is_asleep = (data.tag != "kv_cache" or None), True

    def wake_up(self, tags: list[str] | None = None) -> None:
        for data in self.allocations.values():
            self.gpu.map(data.handle)
            data.cpu_backup_tensor, data.is_asleep = None, False


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for vLLM's pool module, and return it."""
    for name in ("vllm", "vllm.device_allocator", "vllm.device_allocator.cumem"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return sys.modules["vllm.device_allocator.cumem"]


@pytest.fixture
def start(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeWorker]:
    def start(*sizes_gib: int, free_gib: int = 100, tag: str = "kv_cache") -> FakeWorker:
        gpu = Gpu(free_gib * GIB)
        worker = FakeWorker(
            gpu, {number: Allocation((number, size * GIB), tag) for number, size in enumerate(sizes_gib)}
        )
        pool = SimpleNamespace(pointer_to_data=worker.allocations)
        vllm.CuMemAllocator = SimpleNamespace(get_instance=lambda: pool)
        vllm.unmap_and_release = gpu.unmap
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gpu.free_bytes, 140 * GIB))
        return worker

    return start


def test_weights_and_slots_stay_out_of_the_sleep_pool(vllm: Any) -> None:
    entered: list[str | None] = []

    class CuMemAllocator:
        @contextmanager
        def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
            entered.append(tag)
            yield

    vllm.CuMemAllocator = CuMemAllocator
    wrap(CuMemAllocator, "use_memory_pool")(placement._use_memory_pool)
    for tag in ("weights", "runtime", "kv_cache", "workspace"):
        with CuMemAllocator().use_memory_pool(tag=tag):
            pass
    with CuMemAllocator().use_memory_pool():
        pass
    assert entered == ["kv_cache", "workspace", None]


def test_sleep_frees_the_memory_and_wake_maps_it_again(start: Callable[..., FakeWorker]) -> None:
    worker = start(20, 30)
    assert worker.bridge_wake() is None  # it is awake
    for _ in range(2):
        worker.bridge_sleep()
        assert (worker.gpu.free_bytes, worker.gpu.mapped) == (100 * GIB, set())
    for _ in range(2):
        assert worker.bridge_wake() is None
        assert (worker.gpu.free_bytes, worker.gpu.mapped) == (50 * GIB, {0, 1})


def test_failed_wake_reports_and_keeps_no_memory(start: Callable[..., FakeWorker]) -> None:
    worker = start(20, 30)
    worker.bridge_sleep()
    worker.gpu.free_bytes -= 60 * GIB
    for _ in range(2):
        reason = worker.bridge_wake()
        assert reason == "50.00 GiB are needed, and 40.00 GiB of the GPU are free (CUDA Error: out of memory)"
        assert (worker.gpu.free_bytes, worker.gpu.mapped) == (40 * GIB, set())
        assert all(data.is_asleep for data in worker.allocations.values())
    worker.gpu.free_bytes += 60 * GIB
    assert worker.bridge_wake() is None
    assert worker.gpu.mapped == {0, 1}


def test_restored_contents_are_not_unmapped(start: Callable[..., FakeWorker]) -> None:
    worker = start(1, 1, 1, tag="cudagraph")
    worker.bridge_sleep()
    worker.gpu.fails_after = 2
    assert worker.bridge_wake() is not None
    assert worker.gpu.mapped == {0, 1}
