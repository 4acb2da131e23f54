"""Hand an adapter over by memory: its tensors are vLLM's slot, and the fence is all that is left to do.

Not covered: the fence (`bridge/server/fence.py`), how the server keeps the slot (`patches/lora_slots.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bridge.config import TrainConfig
from bridge.errors import AttachError
from bridge.modes.handover import discard, saved, seat
from bridge.modes.served import PatchedServer
from bridge.run.run_directory import RunDirectory
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.server.manifest import Manifest
from bridge.server.protocol import ADAPTER
from bridge.weights.adapter import Adapter, Matrices
from bridge.weights.attach import open_handles


class MemoryHandover:
    """The adapter in a slot of one live server."""

    def __init__(self, config: TrainConfig, run: RunDirectory, manifest: Manifest) -> None:
        self._config = config
        self._server = PatchedServer(config, run, manifest, writes="adapter")
        self._given = run.served / ADAPTER
        """The adapter as the server got it: what mends one that is left torn before the first checkpoint."""

    @property
    def version(self) -> int:
        """Version of the adapter."""
        return self._server.version

    @property
    def can_sleep(self) -> bool:
        """Whether the server was started so that it can free its KV cache."""
        return self._server.can_sleep

    @property
    def endpoint(self) -> Endpoint:
        """The server, which tells its version with each answer."""
        return replace(self._server.endpoint, model=ADAPTER)

    def take(self, adapter: Adapter) -> None:
        """Let the server put the adapter into a slot, and move the adapter's tensors there.

        Raises:
            AttachError: the server has no slots, none for one of the modules, or of another rank.
        """
        self._refuse_missing_slots(adapter)
        slot = self._seat(adapter)
        slots = {name: self._open_slot(name, slot, adapter) for name in adapter.modules}
        if not all(_hold(there, adapter.modules[name]) for name, there in slots.items()):
            raise AttachError(
                "the server's slot does not hold the adapter that it was given", remedy="restart the server"
            )
        self._pass_fence(lambda: _move(adapter, slots))

    def beside_bytes(self, adapter: Adapter) -> int:
        """Return 0: the adapter lies in the server."""
        del adapter
        return 0

    def publish(
        self,
        adapter: Adapter,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare` and `write` inside the fence."""
        del adapter  # it is there already
        last = last_checkpoint or self._given
        return self._server.update(write, prepare=prepare, sleep=sleep, last_checkpoint=last)

    def restore(self, adapter: Adapter, write: Callable[[], None], *, version: int) -> None:
        """Run `write` inside a fence that a torn server grants too."""
        del adapter
        self._server.restore(write, version=version, last_checkpoint=self._given)

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _pass_fence(self, write: Callable[[], None]) -> None:
        """Run `write`, which sets the whole adapter; going on from a checkpoint, a torn server grants it too."""
        if self._config.resume:
            self._server.restore(write, version=0, last_checkpoint=self._given)
        else:
            self._server.update(write, last_checkpoint=self._given)

    def _seat(self, adapter: Adapter) -> int:
        """Let the server load the adapter, and return its slot; one that it refuses leaves no trace."""
        try:
            return seat(self._server.client, saved(adapter, self._given))
        except AttachError:
            discard(self._given)
            raise

    def _refuse_missing_slots(self, adapter: Adapter) -> None:
        slots = self._server.manifest.shard(0).lora_slots
        if not slots:
            raise AttachError(
                "the server takes no adapters", remedy=f"bridge serve-vllm --max-lora-rank {self._config.lora_r}"
            )
        missing = sorted(adapter.modules.keys() - slots.keys())
        if missing:
            raise AttachError(
                f"vLLM has no slot that could be shared for {len(missing)} modules, the first: {missing[0]}",
                remedy="leave them out with --lora-target-modules, or --lora-handover disk",
            )
        rank = next(iter(slots.values())).lora_a.shape[2]
        if rank != self._config.lora_r:
            raise AttachError(
                f"the server's slots have rank {rank}, and the adapter has rank {self._config.lora_r}: in memory they"
                " have to be the same",
                remedy=f"--lora-r {rank}; or bridge serve-vllm --max-lora-rank {self._config.lora_r}, if vLLM has that"
                " size; or --lora-handover disk",
            )

    def _open_slot(self, name: str, slot: int, adapter: Adapter) -> Matrices:
        handles = self._server.manifest.shard(0).lora_slots[name]
        device = adapter.modules[name].lora_a.device
        opened = open_handles({"a": handles.lora_a, "b": handles.lora_b}, device)
        return Matrices(nn.Parameter(opened["a"][slot, 0]), nn.Parameter(opened["b"][slot, 0]))


def _hold(there: Matrices, ours: Matrices) -> bool:
    """Tell whether a slot holds our matrices, but for the rounding of dividing and multiplying by the scaling."""
    pairs = (there.lora_a, ours.lora_a), (there.lora_b, ours.lora_b)
    return all(torch.allclose(one.float(), other.float(), rtol=1 / 64, atol=1e-6) for one, other in pairs)


def _move(adapter: Adapter, slots: dict[str, Matrices]) -> None:
    """Copy the adapter into its slots and let its parameters lie there from now on."""
    with torch.no_grad():
        for name, ours in adapter.modules.items():
            for here, there in ((ours.lora_a, slots[name].lora_a), (ours.lora_b, slots[name].lora_b)):
                there.copy_(here)
                here.data = there.data
