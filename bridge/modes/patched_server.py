"""A patched server whose memory this process writes to: the base of the modes that train in place."""

import shlex
from collections.abc import Callable
from pathlib import Path

from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, ManifestError, UsageError
from bridge.modes.mode import RunContext
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes, Update
from bridge.server.manifest import Manifest
from bridge.server.protocol import ADAPTER, Holder, Status, Written
from bridge.weights import skeleton
from bridge.weights.attach import OpenedModel, attach, attach_again


class PatchedServer:
    """One live server, whose lease this process holds, together with the other parts of its replica."""

    def __init__(
        self, config: TrainConfig, run: RunContext, manifest: Manifest, *, writes: Written = "weights"
    ) -> None:
        self._config, self._run, self._writes = config, run, writes
        self._starts = 0
        self.version = self._connect(manifest)

    def attach(self) -> OpenedModel:
        """Return a model whose parameters are the server's weights, after a restart too."""
        ranks = self._run.ranks
        self._attached = attach(self.manifest, ranks.part, num_parts=ranks.num_parts)
        self._compare_replicas()
        return self._attached.opened()

    def publish(self, update: Update) -> FenceTimes:
        in_flight = "keep" if update.takeover else self._config.publishing.in_flight
        served = None if update.takeover else self.version
        with deferred_interrupt():  # the new version is known before an interrupt acts
            times = fence.publish(
                self._client, update, in_flight=in_flight, keep_kv=self._keeps_kv, served=served, writes=self._writes,
                ranks=self._run.ranks,
            )  # fmt: skip
            self.version = times.version
        return times

    def overwrite(self, write: Callable[[], None], checkpoint: Path, version: int | None) -> FenceTimes:
        """Publish `write`, which sets everything to what is in `checkpoint`; the server may be torn."""
        return self.publish(Update(write, version=version, takeover=True, last_checkpoint=checkpoint))

    def catch_up(self) -> None:
        """Do nothing: every update is published."""

    def restart(self, model: str | Path) -> None:
        """Restart the dead server with `model`, and point the attached parameters at its memory."""
        self.close()
        self._run.ranks.within.led(lambda: self._run.restart_server(model))
        self._starts += 1
        self._connect(manifest.load(self._config.server.config_path))
        self._attached = attach_again(self._attached, self.manifest)

    def revive(self, checkpoint: Path | None) -> None:
        """Restart the dead server with a checkpoint, and raise the versions of all ranks' servers above the last one.

        A single replica's server is dead.
        """
        if self._run.ranks.within.led(lambda: self._run.has_lost(self.client)):
            self.restart(checkpoint or self._config.model_name)
        self.publish(Update(lambda: None, version=self._newest() + 1, takeover=True))

    def _newest(self) -> int:
        """Return the newest version of all ranks' servers: others may have published what this one did not."""
        ranks = self._run.ranks
        if ranks.size == 1:
            return self.version
        return max(self.version, *ranks.agreed(lambda: self.client.status().version if ranks.speaks else 0))

    def close(self) -> None:
        """Return the lease, and disconnect."""
        if self._client is not None:
            self._client.close()

    @property
    def client(self) -> BridgeClient:
        """The client of the first part of a replica, which alone talks to the server."""
        assert self._client is not None, self._run.ranks.rank
        return self._client

    def _connect(self, manifest: Manifest) -> int:
        """Take the lease and return the served version.

        Raises:
            AttachError: another trainer has the lease, or something is half-written that this run does not rewrite.
            UsageError: the server cannot do what was chosen.
        """
        self.manifest, self.max_model_len = manifest, manifest.max_model_len
        url, within = self._config.server.url(manifest.url), self._run.ranks.within
        holder = Holder(processes=tuple(within.told(ProcessIdentity.current())))
        timeout_s, self._client = self._config.sampling.request_timeout_s, None
        if self._run.ranks.speaks:
            self._client = BridgeClient(manifest, timeout_s=timeout_s, url=url, holder=holder)
        try:
            status = within.led(lambda: fence.when_free(lambda: self.client.take_lease(self._run.name)))
            if not (self._run.resumes and status.writes == self._writes):
                status.refuse_torn()
            self._keeps_kv = self._may_keep_kv(status)
            model = ADAPTER if self._writes == "adapter" else None
            self.endpoint = Endpoint(url=url, model=model, kv_tokens=status.kv_tokens, starts=self._starts)
        except BaseException:
            self.close()
            raise
        self.can_sleep = status.can_sleep
        return status.version

    def _compare_replicas(self) -> None:
        """Refuse replicas that differ: no step would make them equal.

        Raises:
            AttachError: they differ.
        """
        ranks = self._run.ranks
        if ranks.num_replicas == 1:
            return

        def digests() -> dict[tuple[int, str], str]:
            each = (self.client.digests(part) for part in range(ranks.num_parts if ranks.speaks else 0))
            return {(part, name): text for part, own in enumerate(each) for name, text in own.items()}

        first, *others = ranks.of_replicas(ranks.agreed(digests))
        for number, other in enumerate(others, start=1):
            if differing := [name for (part, name), text in first.items() if other.get((part, name)) != text]:
                raise AttachError(
                    f"the servers of replicas 0 and {number} differ in {len(differing)} tensors, the first:"
                    f" {differing[0]}",
                    remedy="start all servers with the same model, dtype and flags",
                )

    def _may_keep_kv(self, status: Status) -> bool:
        """Return whether requests in flight keep their keys and values; UsageError if they should and cannot."""
        chosen = self._config.publishing.in_flight_kv
        wanted = chosen == "keep" or (chosen == "auto" and self._config.rollouts.max_staleness > 0)
        if wanted and not status.can_keep_kv:
            why = "the server's KV connector would store what older weights computed, and find it by its tokens"
            if chosen == "keep":
                raise UsageError(f"--in-flight-kv keep: {why}", remedy="serve without a KV connector, or recompute")
            self._run.note(f"requests in flight recompute their keys and values at every update: {why}")
        return wanted and status.can_keep_kv


def manifest_of(config: TrainConfig, found: Manifest | None = None) -> Manifest:
    """Return the manifest of the server that serves the model to train; `found` if it is loaded already.

    Raises:
        ManifestError: there is none, it cannot be used, or another model is served.
    """
    found = found or manifest.load(config.server.config_path)
    wanted = skeleton.absolute(config.model_name)
    if wanted != found.model:
        raise ManifestError(
            f"the server serves {found.model}, expected {wanted} (--model-name)",
            remedy=f"--model-name {shlex.quote(found.model)}, or start another server: "
            f"bridge serve-vllm --model {shlex.quote(config.model_name)}",
        )
    return found
