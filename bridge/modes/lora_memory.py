"""`lora_only --lora-handover memory`: the adapter's tensors are vLLM's slot; to publish is to pass the fence.

With several parts each one trains in the slot of its rank of the server.

Not covered: how the server keeps the slot in place (`patches/bridge_patches/placement.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bridge.config import TrainConfig
from bridge.errors import AttachError, ManifestError, UsageError
from bridge.modes.mode import RunContext
from bridge.modes.patched_server import PatchedServer, manifest_of
from bridge.server import manifest
from bridge.server.fence import FenceTimes, Update
from bridge.server.manifest import LoraSlot
from bridge.server.protocol import ADAPTER
from bridge.weights import model_folder
from bridge.weights.adapter import Adapter, Matrices
from bridge.weights.attach import RESTART, open_handles
from bridge.weights.opened_model import OpenedModel


class LoraMemory(PatchedServer):
    """An adapter in a slot of one live server, trained on that server's base, by a process for each part of it."""

    checkpoint_prefix = "adapter_step_"

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        try:
            found = manifest.load(config.server.config_path)
        except ManifestError as error:
            if config.server.config_path is not None:
                raise
            raise UsageError(
                f"--lora-handover memory trains the adapter in vLLM's own memory, and {error.message}",
                remedy="bridge serve-vllm --max-lora-rank R on this host, or --lora-handover disk",
            ) from error
        super().__init__(config, run, manifest_of(config, found), writes="adapter")

    def open(self) -> OpenedModel:
        """Attach to the server's base, add an adapter to it, and move the adapter into a slot."""
        model_folder.tokenizer_files(self._config.model_name)  # checkpoints need them
        base = self.attach()
        self._adapter = Adapter(base.model, self._config, cuts=base.cuts, tp_group=self._run.ranks.tp_group)
        self._move_in(takeover=self._run.resumes)
        self._run.note("the base is the server's own, 0 bytes of it here")
        return replace(base, lr_factors=self._adapter.lr_factors(), cuts=self._adapter.cuts)

    def publish(self, update: Update) -> FenceTimes:
        """Run `update` inside the fence; until there is a checkpoint, the first adapter repairs a torn server."""
        return super().publish(replace(update, last_checkpoint=update.last_checkpoint or self._run.scratch / ADAPTER))

    def pass_on(self) -> None:
        self._adapter.pass_on()

    def save(self, folder: Path) -> None:
        self._adapter.save(folder)
        model_folder.copy_tokenizer(self._config.model_name, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        self._adapter.check(checkpoint)  # before the server pauses
        self.overwrite(lambda: self._adapter.load(checkpoint), checkpoint, version)

    def revive(self, checkpoint: Path | None) -> None:  # noqa: ARG002 - the protocol's
        """Restart the dead server with the base, and move the adapter, which this process still has, into a slot again.

        The servers of other ranks get the next version, too.
        """
        is_lost = self._run.ranks.tp_group.run_on_rank_zero(lambda: self._run.has_lost(self.client))
        if is_lost:
            self.restart(self._config.model_name)
        version = self._newest() + 1
        if is_lost:
            self._move_in(takeover=True, version=version)
        else:
            self.publish(Update(lambda: None, version=version, takeover=True))

    def _move_in(self, *, takeover: bool, version: int | None = None) -> None:
        """Let the server load the adapter into a slot, and move the adapter's tensors there; AttachError: none fits."""
        ranks, ours = self._run.ranks, self._adapter.modules
        ranks.tp_group.run_on_all(self._refuse_unfit_slots)
        ranks.tp_group.run_on_all(self._hand_over if ranks.is_tp_rank_zero else self._adapter.pass_on)
        number = ranks.tp_group.run_on_rank_zero(self._seat)
        slots = ranks.tp_group.run_on_all(lambda: self._open_slots(number))

        @torch.no_grad()
        def write() -> None:
            for name, slot in slots.items():
                for here, there in ((ours[name].lora_a, slot.lora_a), (ours[name].lora_b, slot.lora_b)):
                    there.copy_(here)
                    here.data = there.data

        self.publish(Update(write, takeover=takeover, version=version))

    def _hand_over(self) -> None:
        self._run.saved(ADAPTER, self._adapter.save)

    def _seat(self) -> int:
        """Let the server load what was saved, and return the slot's number."""
        try:
            return self.client.seat_adapter(self._run.scratch / ADAPTER)
        except AttachError:
            self._run.discard(ADAPTER)
            raise

    def _refuse_unfit_slots(self) -> None:
        slots, rank = self._slots, self._config.lora.r
        if not slots:
            raise AttachError(
                "the server takes no adapters, or none whose slots can be shared",
                remedy=f"bridge serve-vllm --max-lora-rank {rank}, without --fully-sharded-loras",
            )
        missing = sorted(self._adapter.modules.keys() - slots.keys())
        if missing:
            raise AttachError(
                f"vLLM has no slot that can be shared for {len(missing)} modules, the first: {missing[0]}",
                remedy="leave them out with --lora-target-modules, or --lora-handover disk",
            )
        found = next(iter(slots.values())).lora_a.shape[2]
        if found != rank:
            raise AttachError(
                f"the server's slots have rank {found}, and the adapter has rank {rank}: in memory they must be equal",
                remedy=f"--lora-r {found}; or bridge serve-vllm --max-lora-rank {rank}, if vLLM has slots of that rank;"
                " or --lora-handover disk",
            )
        odd = [name for name, ours in self._adapter.modules.items() if not _fits(slots[name], ours)]
        if odd:
            raise ManifestError(
                f"the slots of {len(odd)} modules have other shapes than the weights that they are for, the first:"
                f" {odd[0]}: the manifest was edited",
                remedy=RESTART,
            )

    def _open_slots(self, number: int) -> dict[str, Matrices]:
        ours = self._adapter.modules
        slots = {name: self._open_slot(name, number) for name in ours}
        if not all(_hold(slot, ours[name]) for name, slot in slots.items()):
            raise AttachError(
                "the server's slot does not hold the adapter that the server has loaded", remedy="restart the server"
            )
        return slots

    def _open_slot(self, name: str, number: int) -> Matrices:
        handles = self._slots[name]
        opened = open_handles({"a": handles.lora_a, "b": handles.lora_b}, self._attached.device)
        return Matrices(nn.Parameter(opened["a"][number, 0]), nn.Parameter(opened["b"][number, 0]))

    @property
    def _slots(self) -> Mapping[str, LoraSlot]:
        return self._attached.shard.lora_slots


def _fits(slot: LoraSlot, ours: Matrices) -> bool:
    pairs = (slot.lora_a, ours.lora_a), (slot.lora_b, ours.lora_b)
    return all(there.shape[2:] == here.shape for there, here in pairs)


def _hold(slot: Matrices, ours: Matrices) -> bool:
    """Compare up to rounding: B is divided by the scaling on saving, and multiplied by it on loading."""
    pairs = (slot.lora_a, ours.lora_a), (slot.lora_b, ours.lora_b)
    return all(torch.allclose(one.float(), other.float(), rtol=1 / 64, atol=1e-6) for one, other in pairs)
