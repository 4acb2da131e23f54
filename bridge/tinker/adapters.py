"""Several clients' adapters on one base: vLLM serves snapshots of them beside the base, each under its own name.

A snapshot is written into one of vLLM's slots when it is first sampled, and again if it has made room for another one
meanwhile; it never changes. Its folder, written in the background, keeps it until then. A model whose newest weights
are sampled (`inflight`) gets a snapshot at every step.
"""

import asyncio
import contextlib
import logging
import shutil
import uuid
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bridge.core.http_limits import Refusal
from bridge.engine.policy import Policy
from bridge.errors import BridgeError, UsageError
from bridge.modes.lora import AdapterSnapshot
from bridge.server.client import VllmClient
from bridge.tinker.paths import Checkpoints, SavedPath
from bridge.tinker.training import Model, SamplingClient, Trainer
from bridge.weights.stored_tensors import ADAPTER_WEIGHTS

logger = logging.getLogger(__name__)

PREFIX = "tinker-"
"""Prefix of the names under which vLLM serves snapshots."""
ALPHA = 32.0
"""Tinker's alpha, at any rank."""
DEFAULT_RANK = 32
"""The SDK's default rank of a training client."""
MOST_UNNAMED = 64
"""Maximum number of unnamed snapshots kept per model; live ones are kept while they are being sampled."""
PARTS = {"train_attn": True, "train_mlp": True}
"""Fields of the SDK's `LoraConfig` that choose modules, with their defaults."""


@dataclass
class Snapshot:
    """An adapter that vLLM may serve."""

    adapter: AdapterSnapshot
    model_id: str
    """The model it was taken of. Unnamed snapshots are dropped when their model is freed."""
    is_named: bool
    is_live: bool = False
    num_sampling: int = 0
    """Number of requests that are sampling from it."""
    num_loads: int = 0
    served_as: str | None = None
    """Name under which vLLM serves it, a new one each time; None: it does not."""


class Adapters(Trainer):
    """Trains several adapters, one at a time, each with its own optimizer."""

    is_lora = True

    def __init__(self, policy: Policy, base_name: str, checkpoints: Checkpoints, *, most_models: int) -> None:
        """Use a policy that was attached with `several_adapters`; clients may have `most_models` models at a time."""
        super().__init__(policy, base_name, checkpoints)
        self.most_models = most_models
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        """Name -> snapshot, oldest first."""
        self._loading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._filling = asyncio.Lock()
        """Held while a snapshot waits for a slot: one thread is enough for that."""
        self._client = VllmClient(policy.url)
        models = self._client.models()
        self._served_base = models[0].id
        for left in models:
            if left.id.startswith(PREFIX):  # by a command that was killed
                self._client.unload_adapter(left.id)
        self._try_server()

    def _try_server(self) -> None:
        """Let the server serve a snapshot for a moment. UsageError: it does not accept adapters."""
        name = f"{PREFIX}try"
        snapshot = self.policy.snapshot(name)
        try:
            self.policy.serve_snapshot(name, snapshot)
            self.policy.unload_snapshot(name)
        finally:
            shutil.rmtree(snapshot.folder.result(), ignore_errors=True)

    def _take(self, model: Model) -> None:
        assert model.adapter is not None
        self.policy.use(model.adapter)

    def _start(self, model_id: str, lora: Mapping[str, Any]) -> Model:
        rank = int(DEFAULT_RANK if lora.get("rank") is None else lora["rank"])
        parts = {name: bool(lora.get(name, default)) for name, default in PARTS.items()}
        seed = lora.get("seed")
        if lora.get("train_unembed", True):
            logger.info("model %s: train_unembed has no effect, because the head gets no adapter", model_id)
        return self._new(model_id, rank, parts, zlib.crc32(model_id.encode()) if seed is None else int(seed))

    def _start_from(self, model_id: str, path: SavedPath) -> Model:
        about = self.checkpoints.about(path.run)
        return self._new(model_id, int(about["rank"]), about.get("parts", PARTS), 0)

    def _new(self, model_id: str, rank: int, parts: Mapping[str, bool], seed: int) -> Model:
        most = self.policy.config.lora.r
        if not 1 <= rank <= most:
            every = "all weights are trained with --all-weights" if rank == 0 else f"--max-lora-rank {rank}"
            raise UsageError(
                f"the adapter's rank is {rank}, expected 1 to {most}", hint=f"bridge tinker --model MODEL: {every}"
            )
        modules = [name for name in self._modules() if parts["train_attn" if _is_attention(name) else "train_mlp"]]
        if not modules:
            raise UsageError("the adapter has no modules to train", hint="train_attn=True, or train_mlp=True")
        adapter = self.policy.new_adapter(r=rank, alpha=ALPHA, seed=seed, modules=modules)
        return Model(model_id, self._run_of(model_id), rank, adapter=adapter, parts=dict(parts))

    def _modules(self) -> list[str]:
        adapter = self.policy.opened.adapter
        assert adapter is not None
        return [*adapter.modules]

    def _about(self, model: Model) -> dict[str, Any]:
        return {**super()._about(model), "parts": model.parts}

    def _weights_changed(self, model: Model) -> None:
        if model.live is not None:
            self._live(model)

    def _snapshot(self, model: Model) -> SamplingClient:
        return SamplingClient(snapshot=self._add_snapshot(model, is_live=False))

    def _live(self, model: Model) -> SamplingClient:
        model.live = self._add_snapshot(model, is_live=True)
        return SamplingClient(follows=model.id)

    def _add_snapshot(self, model: Model, *, is_live: bool) -> str:
        name = f"{PREFIX}{uuid.uuid4()}"
        taken = self.policy.snapshot(name)
        self._snapshots[name] = Snapshot(taken, model.id, is_named=False, is_live=is_live)
        return name

    # Sampling, in the event loop.

    def sampler(self, path: str | None, base_model: str | None) -> SamplingClient:
        if path is None:
            self._refuse_base(base_model)
            return SamplingClient()
        saved = SavedPath.parse(path)
        folder = self.checkpoints.found(saved)
        weights = folder / ADAPTER_WEIGHTS
        if not weights.is_file():
            raise Refusal(f"{path} has no adapter, but all weights: serve it by bridge serve-vllm --model {folder}")
        # the same path may be deleted and written again
        name = f"{PREFIX}{saved.run}/{saved.kind}/{saved.name}@{weights.stat().st_mtime_ns}"
        if name not in self._snapshots:
            self._snapshots[name] = Snapshot(AdapterSnapshot.of_saved(folder), saved.run, is_named=True)
        return SamplingClient(path=path, snapshot=name)

    @asynccontextmanager
    async def serving(self, client: SamplingClient) -> AsyncIterator[str]:
        name = client.snapshot
        if client.follows is not None:
            model = self.models.get(client.follows)
            if model is None:
                raise UsageError(
                    f"model {client.follows}: {self.why_gone(client.follows)}", hint="sample from a saved checkpoint"
                )
            name = model.live
        if name is None:
            yield self._served_base
            return
        snapshot = self._snapshots.get(name)
        if snapshot is None:
            raise UsageError(
                f"this snapshot is gone: {MOST_UNNAMED} newer ones of its model were made, or its client has ended",
                hint='save_weights_for_sampler("NAME") keeps one',
            )
        snapshot.num_sampling += 1
        try:
            await asyncio.shield(self._drop_old())  # canceled midway, it would leave folders behind
            # canceled midway, it would let a second thread wait for a slot, and fill one that nobody knows
            yield await asyncio.shield(self._served(name, snapshot))
        finally:
            snapshot.num_sampling -= 1

    async def _served(self, name: str, snapshot: Snapshot) -> str:
        """Return the name under which vLLM serves a snapshot, after it has got a slot."""
        snapshot.num_sampling += 1  # a canceled request does not drop it before it is served
        try:
            async with self._loading[name]:
                if snapshot.served_as is None:
                    snapshot.num_loads += 1
                    served_as = name if snapshot.num_loads == 1 else f"{name}~{snapshot.num_loads}"
                    async with self._filling:
                        await asyncio.to_thread(self.policy.serve_snapshot, served_as, snapshot.adapter)
                    snapshot.served_as = served_as
                return snapshot.served_as
        finally:
            snapshot.num_sampling -= 1

    async def is_served(self, name: str) -> bool:
        served = await asyncio.to_thread(self._client.models)
        if any(model.id == name for model in served):
            return True
        for snapshot in self._snapshots.values():
            if snapshot.served_as == name:
                snapshot.served_as = None
        return False

    def restart_server(self) -> bool:
        try:
            self.policy.restart_server()
        except UsageError as error:  # it was started by another process
            logger.warning("vLLM is not restarted: %s", error.message)
            return False
        for snapshot in [*self._snapshots.values()]:
            snapshot.served_as = None
        logger.info("vLLM was restarted; %d models and their optimizers are unchanged", len(self.models))
        return True

    def forget_samplers(self, model_ids: set[str]) -> None:
        for snapshot in [*self._snapshots.values()]:
            if snapshot.model_id in model_ids and not snapshot.is_named:
                snapshot.is_live = True  # dropped once nobody samples from it

    async def _drop_old(self) -> None:
        """Unload the snapshots that no client can sample any more, and delete their folders."""
        kept: defaultdict[str, int] = defaultdict(int)
        for name, snapshot in reversed([*self._snapshots.items()]):
            if snapshot.is_named or snapshot.num_sampling:
                continue
            model = self.models.get(snapshot.model_id)
            is_newest = model is not None and model.live == name
            if not snapshot.is_live:
                kept[snapshot.model_id] += 1
            if is_newest or (not snapshot.is_live and kept[snapshot.model_id] <= MOST_UNNAMED):
                continue
            if self._snapshots.pop(name, None) is None:  # another request dropped it while this one unloaded others
                continue
            self._loading.pop(name, None)
            try:
                if snapshot.served_as is not None:
                    await asyncio.to_thread(self.policy.unload_snapshot, snapshot.served_as)
            except BridgeError as error:  # no request depends on it
                logger.warning("vLLM does not unload %s: %s", name, error.message)
            with contextlib.suppress(Exception):  # it was not written
                folder = await asyncio.wrap_future(snapshot.adapter.folder)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _is_attention(module: str) -> bool:
    return any("attn" in part or "attention" in part for part in module.split("."))
