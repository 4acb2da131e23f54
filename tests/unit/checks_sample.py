"""Facts and manifests on which tests of the checks are based; each test changes one thing."""

from typing import Any

from bridge.checks.probe import Facts, Gpu
from bridge.core.process import ProcessIdentity, boot_id
from bridge.server.manifest import CudaHandle, Manifest, SharedMemoryHandle, View
from bridge.server.protocol import Holder

GIB = 2**30
UUID = "GPU-11111111-2222-3333-4444-555555555555"

CPU_FACTS = Facts(
    torch="2.13.0+cpu",
    cuda_error="torch is a CPU build",
    imports={"torch": None, "transformers": None},
)


def gpu_facts(*, free_gib: float = 130, driver_cuda: str | None = "13.0", uuid: str = UUID) -> Facts:
    gpu = Gpu(uuid=uuid, name="NVIDIA H200", total_bytes=140 * GIB, free_bytes=int(free_gib * GIB))
    return Facts(
        torch="2.11.0+cu130",
        torch_cuda="13.0",
        driver_cuda=driver_cuda,
        gpus=(gpu,),
        imports={"torch": None, "transformers": None},
    )


def shared_memory_handle(path: str = "/nowhere", size: int = 16) -> SharedMemoryHandle:
    return SharedMemoryHandle(
        path=path, storage_size=size, storage_offset=0, shape=(size // 4,), stride=(1,), dtype="float32"
    )


def cuda_handle() -> CudaHandle:
    return CudaHandle(
        storage_size=16, storage_offset=0, shape=(4,), stride=(1,), dtype="float32", device_index=0,
        ipc_handle_b64="", ref_counter_handle_b64="", ref_counter_offset=0,
        event_handle_b64="", event_sync_required=False,
    )  # fmt: skip


def manifest(**changes: Any) -> Manifest:
    """A manifest whose server is this process, with its weights in main memory, and with the changes of `edited`."""
    exported = Manifest(
        rank=0,
        gpu_uuid=None,
        ipc_handles={"w": shared_memory_handle()},
        param_mappings={"w": View(parameter="w", offset=0, shape=(4,), stride=(1,))},
        padding={},
        other_shards=(),
        model="tiny",
        dtype="float32",
        backend="shared_memory",
        tp_degree=1,
        dp_shard_degree=1,
        num_params=4,
        param_names=("w",),
        shared_weights_enabled=True,
        single_copy_enabled=True,
        host="here",
        boot_id=boot_id(),
        server=ProcessIdentity.current(),
        url="http://127.0.0.1:9",
        token="secret",
        versions={"bridge": "0.1.0", "torch": "2.13.0+cpu", "vllm": "0.32.0", "transformers": "5.19.0"},
    )
    return edited(exported, **changes)


def edited(exported: Manifest, **changes: Any) -> Manifest:
    """The manifest with changed fields, of the server or of its first rank."""
    return Manifest.model_validate({**exported.model_dump(), **changes})


def dead_server() -> ProcessIdentity:
    """This process's pid, as used by an earlier process."""
    return ProcessIdentity.current().model_copy(update={"start_ticks": 1})


def holder_of(*pids: int) -> Holder:
    """A holder with live processes, the leader first."""
    return Holder(processes=tuple(map(ProcessIdentity.of, pids)))


def elsewhere() -> Holder:
    """A holder in another PID namespace."""
    return Holder(processes=(ProcessIdentity.current().model_copy(update={"pid_namespace": "pid:[1]"}),))


def dead_holder() -> Holder:
    """A holder that is gone."""
    return Holder(processes=(dead_server(),))
