"""`lora_only --lora-handover memory`: the adapter's tensors are vLLM's slot; to publish is to pass the fence.

Not covered: how the server keeps the slot in place (`patches/lora_slots.py`).
"""

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
from bridge.server.protocol import ADAPTER
from bridge.weights import model_folder
from bridge.weights.adapter import Adapter, Matrices
from bridge.weights.attach import open_handles
from bridge.weights.opened_model import OpenedModel


class LoraMemory(PatchedServer):
    """An adapter in a slot of one live server, trained on that server's base."""

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
        self._adapter = Adapter(base.model, self._config)
        self._move_in(takeover=self._run.resumes)
        self._run.note("the base is the server's own, 0 bytes of it here")
        return replace(base, lr_factors=self._adapter.lr_factors())

    def publish(self, update: Update) -> FenceTimes:
        """Run `update` inside the fence; until there is a checkpoint, the first adapter repairs a torn server."""
        return super().publish(replace(update, last_checkpoint=update.last_checkpoint or self._run.scratch / ADAPTER))

    def pass_on(self) -> None:
        """Do nothing: what is trained is whole."""

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
        if self._run.has_lost(self.client):
            self.restart(self._config.model_name)
            self._move_in(takeover=True, version=self.version + 1)
        else:
            self.publish(Update(lambda: None, version=self.version + 1, takeover=True))

    def _move_in(self, *, takeover: bool, version: int | None = None) -> None:
        """Let the server load the adapter into a slot, and move the adapter's tensors there; AttachError: none fits."""
        self._refuse_unfit_slots()
        self._run.saved(ADAPTER, self._adapter.save)
        try:
            number = self.client.seat_adapter(self._run.scratch / ADAPTER)
        except AttachError:
            self._run.discard(ADAPTER)
            raise
        ours = self._adapter.modules
        slots = {name: self._open_slot(name, number) for name in ours}
        if not all(_hold(slot, ours[name]) for name, slot in slots.items()):
            raise AttachError(
                "the server's slot does not hold the adapter that the server has loaded", remedy="restart the server"
            )

        @torch.no_grad()
        def write() -> None:
            for name, slot in slots.items():
                for here, there in ((ours[name].lora_a, slot.lora_a), (ours[name].lora_b, slot.lora_b)):
                    there.copy_(here)
                    here.data = there.data

        self.publish(Update(write, takeover=takeover, version=version))

    def _refuse_unfit_slots(self) -> None:
        slots, rank = self.manifest.shard(0).lora_slots, self._config.lora.r
        if not slots:
            raise AttachError("the server takes no adapters", remedy=f"bridge serve-vllm --max-lora-rank {rank}")
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

    def _open_slot(self, name: str, number: int) -> Matrices:
        handles = self.manifest.shard(0).lora_slots[name]
        opened = open_handles({"a": handles.lora_a, "b": handles.lora_b}, self._attached.device)
        return Matrices(nn.Parameter(opened["a"][number, 0]), nn.Parameter(opened["b"][number, 0]))


def _hold(slot: Matrices, ours: Matrices) -> bool:
    """Compare up to rounding: B is divided by the scaling on saving, and multiplied by it on loading."""
    pairs = (slot.lora_a, ours.lora_a), (slot.lora_b, ours.lora_b)
    return all(torch.allclose(one.float(), other.float(), rtol=1 / 64, atol=1e-6) for one, other in pairs)
