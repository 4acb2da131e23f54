"""`lora_only`: train an adapter on a frozen base, published through memory (`LoraMemory`) or disk (`LoraDisk`).

Through memory, the adapter's tensors are vLLM's slot, and publishing takes the fence. Through disk, each version is
saved, and the server loads it through vLLM's own route. This works with any vLLM and never pauses it: every version has
its own name, and in-flight requests keep the adapter that they named.

Not covered: how the server pins the slot (`patches/bridge_patches/placement.py`).
"""

import logging
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bridge.config import TrainConfig
from bridge.core.concurrency import in_thread
from bridge.core.interrupt import wait_until
from bridge.errors import AttachError, ManifestError, UsageError
from bridge.modes.mode import Mode, RunContext
from bridge.modes.open_slots import OpenSlots
from bridge.modes.shared_vllm import PatchedServer, manifest_of
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient, VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update, Window
from bridge.server.manifest import LoraSlot, Manifest
from bridge.server.protocol import ADAPTER
from bridge.weights import loaded, model_files, skeleton
from bridge.weights.adapter import Adapter, AdapterCopy, Matrices
from bridge.weights.attach import RESTART, AttachedModel, OpenedModel, attach, open_handles, reattach
from bridge.weights.stored_tensors import ADAPTER_WEIGHTS

logger = logging.getLogger(__name__)

MOST_SAVING = 4
"""Maximum number of adapters in host memory that are being saved; clients that train in turn save all at once."""


class _LoraMode(Mode):
    """A mode that trains and saves an adapter."""

    checkpoint_prefix = "adapter_step_"
    _adapter: Adapter

    def _add_adapter(self, base: OpenedModel) -> OpenedModel:
        """Add a new adapter to the base, and return the model with only the adapter trainable."""
        config = self._config
        self._adapter = Adapter(
            base.model, config.lora, seed=config.seed, base_name=skeleton.absolute(config.model_name),
            cuts=base.cuts, tp_group=self._run.ranks.tp_group,
        )  # fmt: skip
        return replace(
            base, lr_factors=self._adapter.lr_factors(), cuts=self._adapter.cuts, adapter=self._adapter
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        self._adapter.save(folder)
        self._log_missing(model_files.copy_beside_adapter(self._config.model_name, folder))


class LoraMemory(_LoraMode, PatchedServer):
    """Train an adapter in a slot of a live server, on that server's base, with one process per server rank."""

    writes = "adapter"

    def _connect(self) -> None:
        try:
            exported = manifest.load(self._config.server.config_path)
        except ManifestError as error:
            if self._config.server.config_path is not None:
                raise
            raise UsageError(
                f"--lora-handover memory trains the adapter in vLLM's own memory, but {error.message}",
                hint="bridge serve-vllm --max-lora-rank R on this host, or --lora-handover disk",
            ) from error
        self._take_lease(manifest_of(self._config.server, self._config.model_name, exported))

    def open(self) -> OpenedModel:
        """Attach to the server's base, add an adapter to it, and move the adapter into a slot."""
        opened = self._add_adapter(super().open())
        self._move_into_slot(takeover=self._run.resumes)
        logger.info("the base model is the server's own: this process holds 0 bytes of it")
        return opened

    @contextmanager
    def publish(self, update: Update) -> Iterator[Window]:
        """Let the block write inside the fence. Without a checkpoint, the initial adapter repairs a torn server."""
        repair = update.last_checkpoint or self._run.scratch / ADAPTER
        with super().publish(replace(update, last_checkpoint=repair)) as window:
            yield window

    def send_parts(self) -> None:
        self._adapter.send_parts()

    def restore(self, checkpoint: Path, *, version: int) -> None:
        self._adapter.check(checkpoint)  # before the server pauses
        with self.publish(Update(version=version, takeover=True, last_checkpoint=checkpoint)):
            self._adapter.load(checkpoint)

    def revive(self, checkpoint: Path | None) -> None:  # noqa: ARG002 - the base class's
        """Restart the dead server with the base, and move the adapter, which this process still holds, to a new slot.

        The servers of other ranks also advance to the next version.
        """
        is_lost = self._run.ranks.tp_group.run_on_rank_zero(lambda: self._run.server_is_lost(self.client))
        if is_lost:
            self.restart(self._config.model_name)
        version = self._newest() + 1
        if is_lost:
            self._move_into_slot(takeover=True, version=version)
        else:
            self.publish_as(version)

    def _move_into_slot(self, *, takeover: bool, version: int | None = None) -> None:
        """Let the server load the adapter into a slot, and move its tensors there; AttachError if no slot fits."""
        ranks = self._run.ranks
        ours = self._adapter.modules
        ranks.tp_group.run_on_all(self._refuse_unfit_slots)
        hand_over = partial(self._run.saved, ADAPTER, self._adapter.save)
        ranks.tp_group.run_on_all(hand_over if ranks.is_tp_rank_zero else self._adapter.send_parts)
        number = ranks.tp_group.run_on_rank_zero(self._load_into_slot)
        slots = ranks.tp_group.run_on_all(lambda: self._open_slots(number))
        with self.publish(Update(takeover=takeover, version=version)), torch.no_grad():
            for name, slot in slots.items():
                for here, there in ((ours[name].lora_a, slot.lora_a), (ours[name].lora_b, slot.lora_b)):
                    there.copy_(here)
                    here.data = there.data

    def _load_into_slot(self) -> int:
        """Let the server load the saved adapter, and return the slot's number."""
        try:
            return self.client.load_into_slot(self._run.scratch / ADAPTER)
        except AttachError:
            self._run.discard(ADAPTER)
            raise

    def _refuse_unfit_slots(self) -> None:
        slots = self._attached.shard.lora_slots
        rank = self._config.lora.r
        if not slots:
            raise AttachError(
                "the server does not accept adapters, or its slots cannot be shared",
                hint=f"bridge serve-vllm --max-lora-rank {rank}, without --fully-sharded-loras",
            )
        missing = sorted(self._adapter.modules.keys() - slots.keys())
        if missing:
            raise AttachError(
                f"vLLM has no slot to share for {len(missing)} modules, the first: {missing[0]}",
                hint="leave them out with --lora-target-modules, or use --lora-handover disk; for slots of experts,"
                " start bridge serve-vllm with --lora-experts",
            )
        slot_rank = next(iter(slots.values())).lora_a.shape[2]
        if slot_rank != rank:
            raise AttachError(
                f"the server's slots have rank {slot_rank}, but the adapter has rank {rank}, expected the same",
                hint=f"use --lora-r {slot_rank}; or bridge serve-vllm --max-lora-rank {rank}, if vLLM supports that"
                " rank; or --lora-handover disk",
            )
        odd = [name for name, ours in self._adapter.modules.items() if not _fits(slots[name], ours)]
        if odd:
            raise ManifestError(
                f"the slots of {len(odd)} modules do not match the shapes of the modules' weights, the first:"
                f" {odd[0]}; the manifest was edited",
                hint=RESTART,
            )

    def _open_slots(self, number: int) -> dict[str, Matrices]:
        opened = dict[str, Matrices]()
        for name, ours in self._adapter.modules.items():
            slot = self._attached.shard.lora_slots[name]
            held = open_handles({"a": slot.lora_a, "b": slot.lora_b}, self._attached.device)
            a = held["a"][number].view_as(ours.lora_a)
            b = held["b"][number].view_as(ours.lora_b)
            opened[name] = Matrices(nn.Parameter(a), nn.Parameter(b))
            if not _stored_equal(opened[name], ours):
                raise AttachError(
                    "the server's slot does not hold the adapter that it has loaded", hint="restart the server"
                )
        return opened


class LoraDisk(_LoraMode):
    """Train an adapter that the server loads from disk for each version, without a pause."""

    version = -1

    def _connect(self) -> None:
        self._why_copied = ""
        """Why the base had to be loaded as a second copy."""
        self._exported = self._find_manifest()
        self._attached: AttachedModel | None = None
        self._served: list[str] = []
        """Names of the adapters that the server has loaded, oldest first."""
        self._client = self._open_client()
        self.max_model_len = max_model_len(self._client.url) if self._exported is None else self._exported.max_model_len

    @property
    def shared(self) -> tuple[AttachedModel, BridgeClient] | None:
        """The base in the server's memory, and the server; None: the base is a second copy."""
        if self._attached is None or not isinstance(self._client, BridgeClient):
            return None
        return self._attached, self._client

    @property
    def endpoint(self) -> Endpoint:
        """The server and the newest adapter, whose name contains the version."""
        model = f"{ADAPTER}-{self.version}"
        return Endpoint(url=self._client.url, model=model, version=self.version, starts=self._num_starts)

    def open(self) -> OpenedModel:
        """Attach to the server's base or load a copy, add an adapter to it, and let the server load the adapter.

        Versions continue after those that earlier runs left. vLLM looks up cached keys and values by the adapter's
        name, since 0.32 also by its path: for a name that was served before, it would find a different adapter's.
        """
        base = self._open_base()
        opened = self._add_adapter(base)
        self.version = max(self._run.ranks.run_and_gather(self._newest_served))
        self._serve_first()
        if self._attached is not None:
            logger.info("the base model is the server's own: this process holds 0 bytes of it")
        else:
            size = f"{base.weight_bytes / 2**30:.2f} GiB on {base.device}"
            logger.info(f"the base model is a second copy, {size}: {self._why_copied}")
        return replace(opened, weight_bytes=base.weight_bytes + self._adapter.num_bytes())

    def publish(self, update: Update) -> AbstractContextManager[Window]:
        """Let the block write without a pause, then let the server load the result."""
        assert not update.sleep, "nothing pauses the server, so nothing would wake it"
        return fence.run(update, lambda: self._serve_next(self.version + 1), ranks=self._run.ranks)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        self._adapter.load(checkpoint)
        self._serve_next(max(version, self.version + 1))

    def revive(self, checkpoint: Path | None) -> None:  # noqa: ARG002 - the base class's
        """Restart the dead server with the base, and let it load the adapter, which this process still has.

        The servers of other ranks also load it as the next version.
        """
        newest = max(self._run.ranks.all_gather_object(self.version))  # other ranks may have served a later version
        if not self._run.server_is_lost(self._client):
            self._serve_next(newest + 1)
            return
        self.version = newest
        self._client.close()
        self._run.restart_server(self._config.model_name)
        self._num_starts += 1
        if self._exported is not None:  # the new server has a new token
            self._exported = manifest.load(self._config.server.config_path)
            if self._attached is not None:
                self._attached = reattach(self._attached, self._exported)
        self._client = self._open_client()
        self._serve_first()

    def close(self) -> None:
        self._client.close()

    def _find_manifest(self) -> Manifest | None:
        """Return the server's manifest, or None; ManifestError if the user named a manifest that cannot be used."""
        server = self._config.server
        model_name = self._config.model_name
        if server.config_path is not None:
            return manifest_of(server, model_name)
        try:
            exported = manifest.load()
        except ManifestError as error:
            self._why_copied = error.message
            return None
        url = server.url(exported.url)
        if url != exported.url:
            self._why_copied = f"the manifest found here belongs to the server at {exported.url}, not {url}"
            return None
        return manifest_of(server, model_name, exported)

    def _open_client(self) -> VllmClient:
        """Connect to the server, and take its lease if it has one; AttachError if another trainer holds it."""
        exported = self._exported
        timeout_s = self._config.sampling.request_timeout_s
        if exported is None:
            return VllmClient(self._config.server.url(), timeout_s=timeout_s)
        client = BridgeClient(exported, timeout_s=timeout_s, url=self._config.server.url(exported.url))
        fence.when_free(lambda: client.take_lease(self._run.name))
        return client

    def _open_base(self) -> OpenedModel:
        server_class = ""
        if self._exported is not None:
            server_class = self._exported.shards[0].model_class
            try:
                self._attached = attach(self._exported)
            except AttachError as error:
                self._why_copied = error.message
            else:
                return self._attached.opened()
        name = self._config.model_name
        device = self._config.trainer_device
        return loaded.load(name, device=device, max_model_len=self.max_model_len, server_class=server_class)

    def _serve_first(self) -> None:
        """Let the server load the adapter, and unload those of earlier runs; AttachError if the server is torn."""
        if isinstance(self._client, BridgeClient) and self._exported is not None:
            self._client.status().refuse_torn()  # this mode rewrites no weights, so it could not repair them
            if self._exported.shards[0].lora_slots:  # an earlier run may have trained in one of them
                self._client.release_adapter()
        earlier = self._client.earlier_adapters()
        self._served.clear()
        shutil.rmtree(self._run.scratch, ignore_errors=True)  # a dead server may have left a version there
        self._serve(self.version + 1)
        for name in earlier:  # last: if this is interrupted, the next run must still find the highest version
            self._client.unload_adapter(name)

    def _newest_served(self) -> int:
        """Return the highest adapter version on the server, or -1."""
        suffixes = [name.removeprefix(f"{ADAPTER}-") for name in self._client.earlier_adapters()]
        return max([int(suffix) for suffix in suffixes if suffix.isdecimal()], default=-1)

    def _serve_next(self, version: int) -> int:
        """Let the server load the adapter, then unload the versions that in-flight requests can no longer use."""
        self._serve(version)
        while len(self._served) > 1 + self._config.rollouts.max_staleness:  # vLLM may read the files after it returns
            before = self._served.pop(0)
            self._client.unload_adapter(before)
            self._run.discard(before)
        return version

    def _serve(self, version: int) -> None:
        folder = self._run.saved(f"{ADAPTER}-{version}", self._adapter.save)
        try:
            self._client.load_adapter(folder.name, folder)
        except UsageError:  # leave nothing behind
            self._run.discard(folder.name)
            raise
        self._served.append(folder.name)
        self.version = version


class AdapterSnapshot:
    """An adapter as it was at some moment: in a folder, or in host memory until it has been written there."""

    def __init__(self, folder: Future[Path], copied: AdapterCopy | None = None) -> None:
        self.folder = folder
        """Its folder, once it has been written; the UsageError that says why not."""
        self._copied = copied
        self._written: tuple[int, int] | None = None
        """The file of the weights that the snapshot is of, if others may write it again."""
        folder.add_done_callback(self._forget_copy)

    @classmethod
    def of_saved(cls, folder: Path) -> "AdapterSnapshot":
        """Return the adapter that is saved in `folder` now. OSError: there is none."""
        saved = Future[Path]()
        saved.set_result(folder)
        made = cls(saved)
        made._written = _file_of(folder)
        return made

    def read(self) -> AdapterCopy:
        """Return the adapter. UsageError: its folder has no readable one, or another one by now."""
        copied = self._copied
        if copied is not None:
            return copied
        read = AdapterCopy.read(self.folder.result())
        self.refuse_rewritten()
        return read

    def refuse_rewritten(self) -> None:
        """Raise UsageError if the folder was deleted or written again."""
        if self._written is None:
            return
        folder = self.folder.result()
        try:
            is_same = _file_of(folder) == self._written
        except OSError:
            is_same = False
        if not is_same:
            raise UsageError(
                f"the adapter in {folder} was deleted or written again, and the earlier one was to be sampled",
                hint="create another sampling client for the path",
            )

    def _forget_copy(self, folder: Future[Path]) -> None:
        error = folder.exception()
        if error is None:
            self._copied = None
        elif self._copied is not None:
            logger.warning("a snapshot of the adapter stays in memory, because it cannot be saved: %s", error)


class LoraOnRequest(LoraDisk):
    """Train several adapters on one base in turn; the server serves a version of one only when it is sampled.

    What is sampled is written into one of the server's slots. If they cannot be shared, vLLM loads it from a folder.
    """

    served: int | None = None
    """Version under which the server serves the adapter that is in the model; None: it does not."""
    is_changed = False
    """Whether the adapter has changed since then."""

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        self._saving = deque[Future[Path]]()
        self._slots: OpenSlots | None = None
        self._pid = os.getpid()
        self._sampled = Counter[str | None]()
        """Name of an adapter -> number of calls that are sending requests to it."""
        self._has_ended = threading.Condition()
        super().__init__(config, run)

    @property
    def num_starts(self) -> int:
        """Number of times that this process has restarted the server."""
        return self._num_starts

    @property
    def endpoint(self) -> Endpoint:
        """The server and the adapter that is in the model, as `catch_up` has served it."""
        version = self.version if self.served is None else self.served
        return Endpoint(url=self._client.url, model=f"{ADAPTER}-{version}", version=version)

    def catch_up(self) -> None:
        """Let the server serve the adapter that is in the model, unless it does."""
        if self.served is not None and not self.is_changed and self._is_served(f"{ADAPTER}-{self.served}"):
            return
        before = self.served
        self._serve(self.version + 1)
        self.served = self.version
        self.is_changed = False
        if before is not None:
            self._forget(before)

    @contextmanager
    def sampling(self, model: str | None) -> Iterator[None]:
        with self._has_ended:
            self._sampled[model] += 1
        try:
            yield
        finally:
            with self._has_ended:
                self._sampled[model] -= 1
                self._sampled += Counter()  # drops those without calls
                self._has_ended.notify_all()

    def publish(self, update: Update) -> AbstractContextManager[Window]:
        """Let the block write; nothing is sent to the server."""
        assert not update.sleep, "nothing pauses the server, so nothing would wake it"
        return fence.run(update, self._advance, ranks=self._run.ranks)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        self._adapter.load(checkpoint)
        self.version = max(version, self._advance())

    def restart(self) -> None:
        """Start the server again. UsageError: this process did not start it."""
        if self._run.process is None:
            raise UsageError(
                f"the server at {self._client.url} was started by another process, which would have to restart it",
                hint="start it again, and attach again",
            )
        self.revive(None)

    def snapshot(self, name: str) -> AdapterSnapshot:
        """Copy the adapter, and let a separate thread save the copy in a scratch folder."""
        while len(self._saving) >= MOST_SAVING:
            wait([self._saving.popleft()])
        copied = self._adapter.copied()
        saving = in_thread(lambda: self._run.saved(name, copied.save), "adapter snapshot")
        self._saving.append(saving)
        return AdapterSnapshot(saving, copied)

    def serve_snapshot(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Let the server serve a snapshot as `name`, which is new each time. Any thread may call this."""
        if self._slots is not None:
            self._slots.serve(name, snapshot.read())
            return
        self._client.load_adapter(name, snapshot.folder.result())
        try:
            snapshot.refuse_rewritten()  # the server may have read the later one
        except UsageError:
            self._client.unload_adapter(name)
            raise

    def unload(self, name: str) -> None:
        """Stop serving a snapshot, unless it made room for another one already. Any thread may call this."""
        if self._is_served(name):
            self._client.unload_adapter(name)

    def close(self) -> None:
        if self._pid == os.getpid():  # a forked process has neither the threads that write nor the slots
            wait(self._saving)  # what is written is removed with the run's folder
            if self._slots is not None:
                self._slots.close()
        super().close()

    def _advance(self) -> int:
        self.version += 1
        self.is_changed = True
        return self.version

    def _add_adapter(self, base: OpenedModel) -> OpenedModel:
        lora = self._config.lora
        opened = super()._add_adapter(base)
        # the optimizer is laid out by learning rates, and B's may differ from A's in any later adapter
        factors = {name: 2.0 if ".lora_B." in name else 1.0 for name in opened.lr_factors}
        if lora.has_experts:
            raise UsageError(
                "several adapters cannot include routed experts", hint="leave experts out of lora_target_modules"
            )
        return replace(opened, lr_factors=factors)

    def _serve_first(self) -> None:
        """Unload the adapters of earlier runs; AttachError if the server is torn. Snapshots outlive a dead server."""
        if isinstance(self._client, BridgeClient) and self._exported is not None:
            status = self._client.status()
            status.refuse_torn()
            if status.version and status.writes == "weights":
                logger.warning(
                    "the server was trained before: adapters are trained on its weights, version %d, not on those of"
                    " %s",
                    status.version, self._exported.model,
                )  # fmt: skip
            if self._exported.shards[0].lora_slots:
                self._client.release_adapter()
        for name in self._served:
            self._run.discard(name)
        self._served.clear()
        self._client.unload_earlier_adapters()
        self.served = None
        self.version = max(self.version, 0)
        self._open_slots()

    def _open_slots(self) -> None:
        """Open the server's slots, if they can be shared; log why not."""
        slots = None
        if self.shared is not None:  # otherwise the log says why the base is a second copy
            attached, client = self.shared
            folder = self._run.saved(ADAPTER, self._adapter.save)
            try:
                slots = OpenSlots(attached, client, [*self._adapter.modules], folder)
            except AttachError as error:
                logger.warning(
                    "vLLM loads adapters from folders, which takes longer: %s (%s)", error.message, error.hint
                )
            finally:
                self._run.discard(folder.name)
        self._slots = slots  # until now, other threads get errors of the dead server's slots

    def _is_served(self, name: str) -> bool:
        """Return whether the server serves an adapter as `name`: any snapshot may have taken its slot."""
        return self._slots is None or any(model.id == name for model in self._client.models())

    def _serve(self, version: int) -> None:
        if self._slots is None:
            super()._serve(version)
            return
        name = f"{ADAPTER}-{version}"
        self.version = version  # if this fails, too: the server may have served the name
        num_slots = len(self._slots.numbers)
        with self._has_ended:
            wait_until(lambda limit_s: self._has_ended.wait_for(lambda: len(self._sampled) < num_slots, limit_s))
            keep = tuple(str(model) for model in self._sampled)
        self._slots.serve(name, self._adapter.copied(), keep=keep)
        self._served.append(name)

    def _forget(self, version: int) -> None:
        name = f"{ADAPTER}-{version}"
        self._served.remove(name)
        if self._slots is None or name not in self._sampled:  # otherwise its slot is used again after its requests
            self.unload(name)
        self._run.discard(name)


def _file_of(folder: Path) -> tuple[int, int]:
    """Return what identifies the file with an adapter's weights."""
    status = (folder / ADAPTER_WEIGHTS).stat()
    return status.st_ino, status.st_mtime_ns


def _fits(slot: LoraSlot, ours: Matrices) -> bool:
    pairs = (slot.lora_a, ours.lora_a), (slot.lora_b, ours.lora_b)
    return all(there.shape[1:] == (1, *here.shape)[-3:] for there, here in pairs)


def _stored_equal(slot: Matrices, ours: Matrices) -> bool:
    """Compare up to rounding: saving divides B by the scaling, and loading multiplies B by it."""
    pairs = (slot.lora_a, ours.lora_a), (slot.lora_b, ours.lora_b)
    return all(torch.allclose(theirs.float(), held.float(), rtol=1 / 64, atol=1e-6) for theirs, held in pairs)
