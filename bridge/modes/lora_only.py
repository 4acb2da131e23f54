"""`lora_only`: a LoRA adapter is trained on a frozen base, and handed over to vLLM's LoRA slot.

The base is vLLM's own wherever the server exports it: then there is one copy of it. The two ways of handing the adapter
over are files of their own.

Not covered: the adapter itself (`bridge/weights/adapter.py`), full-parameter training (`shared_vllm.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import AttachError, ManifestError, UsageError
from bridge.modes import served
from bridge.modes.disk_handover import DiskHandover
from bridge.modes.handover import Handover
from bridge.modes.memory_handover import MemoryHandover
from bridge.modes.mode import Engine
from bridge.rollouts import limits
from bridge.run.run_directory import RunDirectory
from bridge.server import manifest
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.server.manifest import Manifest
from bridge.weights import loaded
from bridge.weights.adapter import Adapter
from bridge.weights.attach import AttachedModel, attach, attach_again
from bridge.weights.opened_model import OpenedModel


@dataclass(frozen=True, kw_only=True)
class _Base:
    """The frozen model, and where it came from."""

    model: PreTrainedModel
    device: torch.device
    open_s: float
    weight_bytes: int
    attached: AttachedModel | None
    note: str


class LoraOnly:
    """One adapter, trained beside one server."""

    checkpoint_prefix = "adapter_step_"
    ends = False

    def __init__(self, config: TrainConfig, run: RunDirectory, engine: Engine | None = None) -> None:
        del engine  # it is needed when the server died, and given then
        self._config, self._run = config, run
        self._manifest, self._why_not = _find_manifest(config)
        if self._manifest is None and config.lora_handover == "memory":
            raise UsageError(
                f"--lora-handover memory trains the adapter in vLLM's own memory, and {self._why_not}",
                remedy="bridge serve-vllm --max-lora-rank R on this host, or --lora-handover disk",
            )

    def open(self) -> OpenedModel:
        """Attach to the server's base or load one, put the adapter in, and hand it over for the first time."""
        self._handover = self._open_handover()  # first: a server that another trainer updates is left alone
        base = self._open_base()
        self._attached = base.attached
        base.model.requires_grad_(False)  # before the adapter is there, which is trained
        self._adapter = Adapter(base.model, self._config)
        self._handover.take(self._adapter)
        self._run.note(base.note)
        return OpenedModel(
            model=base.model,
            device=base.device,
            lr_factors=self._adapter.lr_factors(),
            open_s=base.open_s,
            weight_bytes=base.weight_bytes + self._handover.beside_bytes(self._adapter),
        )

    @property
    def endpoint(self) -> Endpoint:
        """The server, asked for the adapter."""
        return self._handover.endpoint

    @cached_property
    def max_model_len(self) -> int | None:
        """What the manifest or, without one, the server itself says."""
        if self._manifest is not None:
            return self._manifest.max_model_len
        return limits.max_model_len(self._config.server.url())

    @property
    def version(self) -> int:
        """Version of the adapter that the server serves."""
        return self._handover.version

    @property
    def can_sleep(self) -> bool:
        """Whether the server can free its KV cache, and the adapter is handed over by memory."""
        return self._handover.can_sleep

    def publish(
        self,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare` and `write`, and hand the result over."""
        return self._handover.publish(
            self._adapter, write, prepare=prepare, sleep=sleep, last_checkpoint=last_checkpoint
        )

    def catch_up(self) -> None:
        """Do nothing: every update is published at once."""

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT and stock vLLM load it."""
        self._adapter.save(folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        """Load a saved adapter, here and in the server."""
        self._adapter.check(checkpoint)
        self._handover.restore(self._adapter, lambda: self._adapter.load(checkpoint), version=version)

    def revive(self, engine: Engine, checkpoint: Path | None) -> None:
        """Restart the server with the base, attach to it anew, and hand over the adapter as it is here."""
        del checkpoint  # the adapter is whole in this process
        version = self.version
        self._handover.close()
        engine.restart(self._config.model_name)
        if self._manifest is not None:  # the new server has a token of its own
            self._manifest = manifest.load(self._config.vllm_config_path)
            if self._attached is not None:
                self._attached = attach_again(self._attached, self._manifest)
        self._handover = self._open_handover()
        self._handover.take(self._adapter)
        self._handover.restore(self._adapter, lambda: None, version=version + 1)

    def close(self) -> None:
        """Give the lease back, and close the connection; the server keeps serving the adapter."""
        if hasattr(self, "_handover"):
            self._handover.close()

    def _open_base(self) -> _Base:
        if self._manifest is not None:
            try:
                attached = attach(self._manifest)
            except AttachError as error:
                if self._config.lora_handover == "memory":
                    raise
                self._why_not = error.message
            else:
                note = "the base is the server's own, 0 bytes of it here: its manifest lets us attach"
                return _Base(
                    model=attached.model, device=attached.device, open_s=attached.attach_s,
                    weight_bytes=attached.weight_bytes(), attached=attached, note=note,
                )  # fmt: skip
        own = loaded.load(
            self._config.model_name,
            device=self._config.trainer_device,
            max_model_len=self.max_model_len,
            server_class="" if self._manifest is None else self._manifest.shard(0).model_class,
        )
        return _Base(
            model=own.model, device=own.device, open_s=own.load_s, weight_bytes=own.weight_bytes, attached=None,
            note=f"the base is a second copy, {own.weight_bytes / 2**30:.2f} GiB on {own.device}: {self._why_not}",
        )  # fmt: skip

    def _open_handover(self) -> Handover:
        if self._config.lora_handover == "memory":
            assert self._manifest is not None, "refused before"
            return MemoryHandover(self._config, self._run, self._manifest)
        url = self._config.server.url(None if self._manifest is None else self._manifest.url)
        return DiskHandover(self._config, self._run, url, self._manifest)


def _find_manifest(config: TrainConfig) -> tuple[Manifest | None, str]:
    """Return the manifest of the server to train beside, or None and why there is none.

    Raises:
        ManifestError: a path was given and cannot be used, or another model is served.
    """
    if config.vllm_config_path is None:
        try:
            found = manifest.load()
        except ManifestError as error:
            return None, error.message
        if config.lora_handover == "disk" and config.server.url(found.url) != found.url:
            return None, f"the manifest found here is of the server at {found.url}, not {config.server.url(found.url)}"
    return served.find(config), ""
