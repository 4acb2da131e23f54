"""LoRA slots of a live server that this process fills, in turn, with adapters that are only sampled.

The server chooses a slot that no request uses (`bridge_patches.adapter_slots`), this process writes the adapter into
it through the exported handles, and the server serves it under a new name. Nothing is paused, nothing goes through a
file, and vLLM loads nothing.

Not covered: the slot of an adapter that is trained in place (`LoraMemory`).
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from bridge.errors import AttachError, BridgeError, UsageError
from bridge.server.client import BridgeClient
from bridge.weights.adapter import AdapterCopy
from bridge.weights.attach import AttachedModel, open_handles

Sides = tuple[Tensor, Tensor]
"""A and B of one module."""


class OpenSlots:
    """The slots that the server has opened for this process. Any thread may call its methods."""

    def __init__(self, attached: AttachedModel, client: BridgeClient, modules: Sequence[str], adapter: Path) -> None:
        """Let the server open its free slots for adapters of `modules`; `adapter` is the folder of any saved one.

        Raises:
            AttachError: the server has no slots for these modules, or no free one.
        """
        exported = attached.shard.lora_slots
        missing = [name for name in modules if name not in exported]
        if missing:
            raise AttachError(
                f"the server shares no slots for {len(missing)} modules, the first: {missing[0]}",
                hint="start it with bridge serve-vllm --max-lora-rank R, without --fully-sharded-loras",
            )
        self._client = client
        self._device = attached.device
        self._stream = torch.cuda.Stream(attached.device) if attached.device.type == "cuda" else None
        """Copies do not wait for the passes that the main thread has queued."""
        handles = {f"{name}.{side}": getattr(exported[name], side) for name in modules for side in ("lora_a", "lora_b")}
        opened = open_handles(handles, attached.device)
        self._all: dict[str, Sides] = {name: (opened[f"{name}.lora_a"], opened[f"{name}.lora_b"]) for name in modules}
        self._writing = threading.Lock()
        """Held while a slot is written."""
        self._is_closed = False
        self.numbers = client.open_slots(adapter)

    @property
    def max_rank(self) -> int:
        """Highest rank of an adapter that fits into a slot."""
        a, _ = next(iter(self._all.values()))
        return int(a.shape[2])

    def serve(self, name: str, adapter: AdapterCopy, *, keep: tuple[str, ...] = ()) -> None:
        """Write an adapter into a slot that no request uses, and let the server serve it as `name`, which is new.

        If requests use all slots, this waits until one is free. What the slot held is not served any more; the slots of
        the adapters in `keep` are not used.

        Raises:
            UsageError: the adapter does not fit into the slots.
            AttachError: the slots are open for another process.
            ServerUnreachableError: the server does not answer.
        """
        self._refuse_unfit(adapter)
        try:
            number = self._client.reserve_slot(name, keep)
        except AttachError:  # no slot was reserved
            raise
        except BaseException:  # the answer was lost, or the wait was interrupted: one may be reserved
            self._give_back(name)
            raise
        try:
            with self._writing:
                if self._is_closed:
                    raise AttachError("the policy was closed while a slot was to be written", hint="attach again")
                self._write(number, adapter)
            self._client.serve_slot(name)
        except BaseException:
            self._give_back(name)
            raise

    def close(self) -> None:
        """Give the slots back, once no thread writes one; a dead server has none."""
        with self._writing:
            self._is_closed = True
        with suppress(BridgeError):
            self._client.release_adapter()

    def holds(self, number: int) -> dict[str, Sides]:
        """Return each module's A and B in a slot: [max_rank, in] and [out, max_rank], B scaled."""
        return {name: (a[number, 0], b[number, 0]) for name, (a, b) in self._all.items()}

    def _give_back(self, name: str) -> None:
        with suppress(BridgeError):
            self._client.unload_adapter(name)

    def _write(self, number: int, adapter: AdapterCopy) -> None:
        r = adapter.settings.r
        scaling = adapter.settings.lora_alpha / r
        sides = adapter.sides()
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name, (slot_a, slot_b) in self.holds(number).items():
                if name not in sides or r < self.max_rank:
                    slot_a.zero_()
                    slot_b.zero_()
                if name in sides:
                    a, b = (side.to(self._device, non_blocking=True) for side in sides[name])
                    slot_a[:r].copy_(a)
                    slot_b[:, :r].copy_(b.double() * scaling)  # the same bits as in the model (`Adapter.load`)
            if self._stream is not None:
                self._stream.synchronize()

    def _refuse_unfit(self, adapter: AdapterCopy) -> None:
        r = adapter.settings.r
        sides = adapter.sides()
        if r > self.max_rank:
            raise UsageError(
                f"the adapter has rank {r}, and the server's slots have room for {self.max_rank}",
                hint=f"restart the server with --max-lora-rank {r}",
            )
        odd = [name for name, pair in sides.items() if name not in self._all or not _fits(self._all[name], pair, r)]
        if odd:
            message = (
                f"the adapter does not fit this model: {len(odd)} of {len(sides)} modules differ, the first: {odd[0]}"
            )
            raise UsageError(message, hint="sample from an adapter of this model")


def _fits(slots: Sides, sides: Sides, r: int) -> bool:
    (all_a, all_b), (a, b) = slots, sides
    return a.shape == (r, all_a.shape[3]) and b.shape == (all_b.shape[2], r)
