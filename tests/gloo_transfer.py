"""vLLM's NCCL weight transfer over gloo, so that the real vLLM can receive weights on a CPU.

Both ends are vLLM's own classes. Only what needs a GPU is replaced: the rendezvous, and the broadcast. A server gets
its end from a plugin (`install`), a trainer from `send_over_gloo`.
"""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

LIMIT = timedelta(seconds=60)


class Group:
    """The part of vLLM's NCCL communicator that vLLM uses."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        distributed: Any = torch.distributed
        self._store = distributed.TCPStore(address, port, world_size, rank == 0, timeout=LIMIT)
        self._gloo = distributed.ProcessGroupGloo(self._store, rank, world_size, LIMIT)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor` from rank 0, or fill it."""
        self._gloo.broadcast(tensor.detach(), 0).wait()

    def destroy(self) -> None:
        self._gloo.abort()


def install(site: Path) -> None:
    """Make `site`, a folder on PYTHONPATH, offer `register` to vLLM as a plugin."""
    metadata = site / "gloo_transfer-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-transfer\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo = tests.gloo_transfer:register\n")


def register() -> None:
    """Let the workers of this server receive over gloo."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory._registry["nccl"] = _receiving


def _receiving() -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class Receiving(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            rank = init_info.rank_offset + self.parallel_config.rank
            self.group = Group(init_info.master_address, init_info.master_port, rank, init_info.world_size)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            info = self.parse_update_info(update_info)
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast(weight)
                self.model.load_weights([(name, weight)])

    return Receiving


def send_over_gloo(dies_after: int | None = None, *, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make this process send over gloo; with `dies_after`, kill it after this many tensors of its second transfer.

    `replace` is a test's `monkeypatch.setattr`, in a process that continues afterwards.
    """
    from vllm.distributed.weight_transfer import nccl_engine

    from bridge_patches import sender

    def meet(info: Any) -> Group:
        return Group(info.master_address, info.master_port, 0, info.world_size)

    replace(sender, "DEVICE", "cpu")
    nccl: Any = nccl_engine
    replace(nccl, "open_trainer_endpoint", meet)

    class Sending(nccl.NCCLTrainerWeightTransferEngine):
        num_transfers = 0

        def _broadcast(self, source: Any, meta: Any) -> None:
            self.num_transfers += 1
            for number, (_, tensor) in enumerate(self._checked_iter(source, meta)):
                if (self.num_transfers, number) == (2, dies_after):
                    os.kill(os.getpid(), signal.SIGKILL)
                self.model_update_group.broadcast(tensor.contiguous())

    replace(nccl, "NCCLTrainerWeightTransferEngine", Sending)
