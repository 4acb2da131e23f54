"""The trainer's end of vLLM's weight transfer: vLLM's own sender, in a process that does not serve requests.

Nothing is patched. Since 0.28, vLLM has a sender that makes every call of an update; earlier versions have its parts,
which `_Parts` calls in the same order.

Not covered: the servers (`bridge/server/receiver.py`), pausing them (`bridge/modes/transfer.py`).
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from bridge_patches import compatibility

PINS = """
vllm.distributed.weight_transfer.nccl_engine
    NCCLWeightTransferUpdateInfo: names, dtype_names, shapes
    NCCLWeightTransferEngine: init_info_cls, update_info_cls
    # Since 0.28.
    if NCCLTrainerInitInfo: NCCLTrainerInitInfo: master_address, master_port, world_size
    if NCCLTrainerInitInfo: call NCCLTrainerWeightTransferEngine.trainer_init(cls, init_info, client, source)
    if NCCLTrainerInitInfo: call NCCLTrainerWeightTransferEngine.send_weights()
    if NCCLTrainerInitInfo: NCCLTrainerWeightTransferEngine: model_update_group
    # Before.
    if NCCLTrainerSendWeightsArgs: NCCLTrainerSendWeightsArgs: group, packed
    if NCCLTrainerSendWeightsArgs: call NCCLWeightTransferEngine.trainer_send_weights(iterator, trainer_args)
    if NCCLTrainerSendWeightsArgs: NCCLWeightTransferUpdateInfo: packed
vllm.distributed.weight_transfer.nccl_common
    NCCLWeightTransferInitInfo: master_address, master_port, rank_offset, world_size
    call trainer_init(init_info)
vllm.distributed.weight_transfer.base: call ModuleSource.__init__(module)  # calls only module.named_parameters
vllm.distributed.device_communicators.pynccl: call PyNcclCommunicator.destroy()  # aborts a hanging broadcast
# The development routes of a stock server: the first module since 0.32, the second before that.
vllm.entrypoints.rl.online.api_router
    if update_weights: call async pause_generation(raw_request, mode)
    if update_weights: call async is_paused(raw_request)
    if update_weights: call async resume_generation(raw_request)
    if update_weights: call async init_weight_transfer_engine(raw_request, init_info)
    if update_weights: call async start_weight_update(raw_request)
    if update_weights: call async update_weights(raw_request, update_info)
    if update_weights: call async finish_weight_update(raw_request)
    if weight_info: call async update_weight_version(raw_request, new_version)
    if weight_info: call async weight_info(raw_request)
vllm.entrypoints.serve.dev.rlhf.api_router
    if update_weights: call async pause_generation(raw_request, mode)
    if update_weights: call async is_paused(raw_request)
    if update_weights: call async resume_generation(raw_request)
    if update_weights: call async init_weight_transfer_engine(raw_request)
    if update_weights: call async start_weight_update(raw_request)
    if update_weights: call async update_weights(raw_request)
    if update_weights: call async finish_weight_update(raw_request)
vllm.entrypoints.serve.dev.cache.api_router: call async reset_prefix_cache(raw_request, reset_running_requests)
vllm.entrypoints.serve.dev.server_info.api_router: call async show_server_info(raw_request, config_format)
vllm.config.parallel: ParallelConfig: world_size, data_parallel_size
"""
DEVICE = "cuda"
"""Type of device that NCCL sends from."""


version = compatibility.check_installed


def open_sender(tensors: Mapping[str, torch.Tensor], client: Any, address: str, port: int, workers: int) -> Any:
    """Connect to all `workers` of the servers at `address`; return a sender of `tensors` from the current device.

    `tensors` are named as in the model's files. vLLM calls `client`, a `VLLMWeightSyncClient`, to reach the servers.
    The sender has `send_weights`, which returns once every worker has loaded every tensor, and `model_update_group`,
    whose `destroy` aborts a hanging broadcast.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for data
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.distributed.weight_transfer import base, nccl_engine

    meeting = {"master_address": address, "master_port": port, "world_size": workers + 1}
    if not hasattr(nccl_engine, "NCCLTrainerInitInfo"):
        return _Parts(tensors, client, meeting)
    module: Any = SimpleNamespace(named_parameters=tensors.items)
    info = nccl_engine.NCCLTrainerInitInfo(rank=0, **meeting)
    return nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
        info, client=client, source=base.ModuleSource(module)
    )


class _Parts:
    """The sender for vLLM before 0.28."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], client: Any, meeting: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer import nccl_common

        self._tensors = tensors
        self._client = client
        with ThreadPoolExecutor(1) as pool:  # both ends wait for each other to join
            joined = pool.submit(client.init_weight_transfer_engine, {**meeting, "rank_offset": 1})
            self.model_update_group = nccl_common.trainer_init(meeting)
            joined.result()

    def send_weights(self) -> None:
        from vllm.distributed.weight_transfer import nccl_engine

        update = {
            "names": [*self._tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors.values()],
            "shapes": [[*tensor.shape] for tensor in self._tensors.values()],
            "packed": True,
        }
        self._client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        received = pool.submit(self._client.update_weights, update)
        pool.shutdown(wait=False)
        chosen = nccl_engine.NCCLTrainerSendWeightsArgs(group=self.model_update_group, packed=True)
        nccl_engine.NCCLWeightTransferEngine.trainer_send_weights(iter(self._tensors.items()), chosen)
        received.result()
        self._client.finish_weight_update()
