"""`lora_only --lora-handover disk`: each adapter is saved, and the server loads it through vLLM's own route.

Works with any vLLM, and pauses nothing: every version has its own name, and in-flight requests keep the adapter that
they named. The base is the server's own if the server exports it, else a second copy.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from bridge.config import TrainConfig
from bridge.errors import AttachError, ManifestError, UsageError
from bridge.modes.mode import RunContext
from bridge.modes.patched_server import manifest_of
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient, VllmClient, max_model_len
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update
from bridge.server.manifest import Manifest
from bridge.server.protocol import ADAPTER
from bridge.weights import loaded, model_folder
from bridge.weights.adapter import Adapter
from bridge.weights.attach import AttachedModel, OpenedModel, attach, attach_again


class LoraDisk:
    """An adapter that one server loads again and again."""

    checkpoint_prefix = "adapter_step_"
    can_sleep = False
    """The server generates while this process trains."""

    def __init__(self, config: TrainConfig, run: RunContext) -> None:
        self._config, self._run = config, run
        self._manifest, self._why_copied = _find_manifest(config)
        self._attached: AttachedModel | None = None
        self.version = -1
        self._starts = 0
        self._served: list[str] = []
        """Adapters that the server has, the oldest first."""
        self._client = self._connect()
        found = self._manifest
        self.max_model_len = max_model_len(self._client.url) if found is None else found.max_model_len

    @property
    def endpoint(self) -> Endpoint:
        """The server and the newest adapter, whose name contains the version."""
        return Endpoint(url=self._client.url, model=_versioned(self.version), version=self.version, starts=self._starts)

    def open(self) -> OpenedModel:
        """Attach to the server's base or load one, add an adapter to it, and let the server load the adapter."""
        model_folder.tokenizer_files(self._config.model_name)  # checkpoints need them
        base = self._open_base()
        self._adapter = Adapter(base.model, self._config)
        self._serve_first()
        if self._attached is not None:
            self._run.note("the base is the server's own, 0 bytes of it here")
        else:
            size = f"{base.weight_bytes / 2**30:.2f} GiB on {base.device}"
            self._run.note(f"the base is a second copy, {size}: {self._why_copied}")
        held = base.weight_bytes + self._adapter.num_bytes()
        return replace(base, lr_factors=self._adapter.lr_factors(), weight_bytes=held)

    def publish(self, update: Update) -> FenceTimes:
        """Run `update` without a fence, and let the server load the result."""
        assert not update.sleep, "nothing pauses the server, so nothing would wake it"
        return fence.run(update, lambda: self._serve_next(self.version + 1), ranks=self._run.ranks)

    def catch_up(self) -> None:
        """Do nothing: every update is published."""

    def pass_on(self) -> None:
        """Do nothing: what is trained is whole."""

    def save(self, folder: Path) -> None:
        self._adapter.save(folder)
        model_folder.copy_tokenizer(self._config.model_name, folder)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        self._adapter.load(checkpoint)
        self._serve_next(max(version, self.version + 1))

    def revive(self, checkpoint: Path | None) -> None:  # noqa: ARG002 - the protocol's
        """Restart the dead server with the base, and let it load the adapter, which this process still has.

        The servers of other ranks load it as the next version, too.
        """
        newest = max(self._run.ranks.told(self.version))  # others may have served what this one did not
        if not self._run.has_lost(self._client):
            self._serve_next(newest + 1)
            return
        self.version = newest
        self._client.close()
        self._run.restart_server(self._config.model_name)
        self._starts += 1
        if self._manifest is not None:  # the new server has another token
            self._manifest = manifest.load(self._config.server.config_path)
            if self._attached is not None:
                self._attached = attach_again(self._attached, self._manifest)
        self._client = self._connect()
        self._serve_first()

    def close(self) -> None:
        """Return the lease, and disconnect; the server keeps serving the adapter."""
        self._client.close()

    def _connect(self) -> VllmClient:
        """Connect to the server, and take its lease if it has one; AttachError: another trainer has it."""
        exported, timeout_s = self._manifest, self._config.sampling.request_timeout_s
        if exported is None:
            return VllmClient(self._config.server.url(), timeout_s=timeout_s)
        client = BridgeClient(exported, timeout_s=timeout_s, url=self._config.server.url(exported.url))
        fence.when_free(lambda: client.take_lease(self._run.name))
        return client

    def _open_base(self) -> OpenedModel:
        if self._manifest is not None:
            try:
                self._attached = attach(self._manifest)
            except AttachError as error:
                self._why_copied = error.message
            else:
                return self._attached.opened()
        name, device = self._config.model_name, self._config.trainer_device
        server_class = "" if self._manifest is None else self._manifest.shard(0).model_class
        return loaded.load(name, device=device, max_model_len=self.max_model_len, server_class=server_class)

    def _serve_first(self) -> None:
        """Let the server load the adapter in place of what an earlier run left; AttachError: the server is torn."""
        if isinstance(self._client, BridgeClient) and self._manifest is not None:
            self._client.status().refuse_torn()  # resuming does not repair it: nothing is written in place
            if self._manifest.shard(0).lora_slots:  # an earlier run may have trained in one of them
                self._client.release_adapter()
        self._client.unload_earlier_adapters()
        self._served.clear()
        shutil.rmtree(self._run.scratch, ignore_errors=True)  # a dead server may have left a version there
        self._serve(self.version + 1)

    def _serve_next(self, version: int) -> int:
        """Let the server load the adapter, then drop the versions that no request in flight may name any more."""
        self._serve(version)
        while len(self._served) > 1 + self._config.rollouts.max_staleness:  # vLLM may read a file later than it loads
            before = self._served.pop(0)
            self._client.unload_adapter(before)
            self._run.discard(before)
        return version

    def _serve(self, version: int) -> None:
        folder = self._run.saved(_versioned(version), self._adapter.save)
        try:
            self._client.load_adapter(folder.name, folder)
        except UsageError:  # a refused run leaves nothing behind
            self._run.discard(folder.name)
            raise
        self._served.append(folder.name)
        self.version = version


def _find_manifest(config: TrainConfig) -> tuple[Manifest | None, str]:
    """Return the manifest of the server, or None and the reason why there is none.

    Raises:
        ManifestError: the one that the user named cannot be used, or another model is served.
    """
    if config.server.config_path is not None:
        return manifest_of(config), ""
    try:
        found = manifest.load()
    except ManifestError as error:
        return None, error.message
    url = config.server.url(found.url)
    if url != found.url:
        return None, f"the manifest found here is of the server at {found.url}, not {url}"
    return manifest_of(config, found), ""


def _versioned(version: int) -> str:
    return f"{ADAPTER}-{version}"
