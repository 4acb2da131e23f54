"""`shared_vllm`: the trainer's parameters are vLLM's weights. Nothing is copied; publishing takes the fence.

`PatchedServer` is the base of every mode that writes into a server's memory.
"""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from bridge.config import ServerConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError, ManifestError, UsageError
from bridge.modes.mode import Mode
from bridge.server import fence, manifest
from bridge.server.client import BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import Update, Window
from bridge.server.manifest import Manifest
from bridge.server.protocol import ADAPTER, Holder, Status, Written
from bridge.weights import fp8, model_folder, skeleton
from bridge.weights.attach import AttachedModel, OpenedModel, attach, reattach
from bridge.weights.rank_parts import Parts

logger = logging.getLogger(__name__)


class PatchedServer(Mode):
    """One live server, whose lease this process holds together with the other ranks of its replica."""

    version = 0
    writes: ClassVar[Written] = "weights"
    """Kind of weights that an update writes."""

    def open(self) -> OpenedModel:
        """Return a model whose parameters are the server's weights, and remain so after a restart."""
        ranks = self._run.ranks
        self._attached = attach(self.manifest, ranks.tp_rank, num_parts=ranks.tp_size)
        self._compare_replicas()
        return self._attached.opened()

    @contextmanager
    def publish(self, update: Update) -> Iterator[Window]:
        in_flight = update.in_flight or ("keep" if update.takeover else self._config.publishing.in_flight)
        served = None if update.takeover else self.version
        with deferred_interrupt():  # an interrupt takes effect only once the new version is recorded
            with fence.publish(
                self._client, update, in_flight=in_flight, keep_kv=self._keeps_kv, served=served, writes=self.writes,
                ranks=self._run.ranks,
            ) as window:  # fmt: skip
                try:
                    yield window
                except BaseException:
                    self.is_half_written = not window.is_resumed
                    raise
            self.version = window.times.version
            self.is_half_written = False

    def publish_as(self, version: int) -> None:
        """Publish the same weights again, as `version`."""
        with self.publish(Update(version=version, takeover=True)):
            pass

    def restart(self, model: str | Path) -> None:
        """Restart the dead server with `model`, and point the attached parameters at its memory."""
        self.close()
        self._run.ranks.tp_group.run_on_rank_zero(lambda: self._run.restart_server(model))
        self._num_starts += 1
        self._take_lease(manifest.load(self._config.server.config_path))
        self._attached = reattach(self._attached, self.manifest)

    def _newest(self) -> int:
        """Return the highest version of all ranks' servers: one of them may be ahead of this rank's."""
        ranks = self._run.ranks
        if ranks.world_size == 1:
            return self.version
        return max(
            self.version, *ranks.run_and_gather(lambda: self.client.status().version if ranks.is_tp_rank_zero else 0)
        )

    def close(self) -> None:
        """Return the lease, and disconnect."""
        if self._client is not None:
            self._client.close()

    @property
    def client(self) -> BridgeClient:
        """The client of a replica's first rank, the only one that calls the server."""
        assert self._client is not None, self._run.ranks.rank
        return self._client

    @property
    def attached(self) -> AttachedModel:
        """The model whose parameters are the server's."""
        return self._attached

    def refuse_torn(self) -> None:
        if self._client is not None:
            self._client.status().refuse_torn()

    @property
    def endpoint(self) -> Endpoint:
        model = ADAPTER if self.writes == "adapter" else None
        return Endpoint(
            url=self._url, model=model, kv_tokens=self._status.kv_tokens, starts=self._num_starts,
            reports_experts=self.replayed_experts is not None,
        )  # fmt: skip

    @property
    def can_sleep(self) -> bool:
        return self._status.can_sleep

    @property
    def replayed_experts(self) -> tuple[int, int] | None:
        is_replayed = self._config.compute.router_replay is not False and self._config.rollouts.samples_here
        return self._status.experts if is_replayed else None

    def _connect(self) -> None:
        """Find the server and take its lease; AttachError if another trainer holds it, or its weights are torn."""
        self._take_lease(manifest_of(self._config.server, self._config.model_name))

    def _take_lease(self, manifest: Manifest) -> None:
        """Take the lease of the manifest's server, and record its capabilities and state.

        Half-written weights are refused unless this run will rewrite them.
        """
        self.manifest = manifest
        self.max_model_len = manifest.max_model_len
        self._url = self._config.server.url(manifest.url)
        self._client: BridgeClient | None = None
        ranks = self._run.ranks
        holder = Holder(processes=tuple(ranks.tp_group.all_gather_object(ProcessIdentity.current())))
        if ranks.is_tp_rank_zero:
            timeout_s = self._config.sampling.request_timeout_s
            self._client = BridgeClient(manifest, timeout_s=timeout_s, url=self._url, holder=holder)
        try:
            self._status = ranks.tp_group.run_on_rank_zero(self._learn_status)
            if not (self._run.resumes and self._status.writes == self.writes):
                self._status.refuse_torn()
            self.version = max(self.version, self._status.version)
            self.is_paused_by_us = self._status.holder == holder
            self._keeps_kv = self._may_keep_kv(self._status)
            self._note_quantization(manifest)
            if self._config.compute.router_replay and self._status.experts is None:
                raise UsageError(
                    "--router-replay: the server does not report the experts of each token",
                    hint="leave it out, or serve a mixture-of-experts model without --speculative-config or a KV"
                    " connector (on a CPU, with vLLM 0.30 or later)",
                )
        except BaseException:
            self.close()
            raise

    def _learn_status(self) -> Status:
        """Take the lease, unless this process only reads, and return the server's status."""
        if self._run.reads_only:
            return self.client.status()
        return fence.when_free(lambda: self.client.take_lease(self._run.name))

    def _note_quantization(self, manifest: Manifest) -> None:
        how = next(iter(manifest.quantized.values()), None)
        if how is not None and self._config.loss.mismatch == "none":
            logger.info(
                f"--mismatch none: the server samples with {how} weights, and nothing corrects for the difference"
                " (logprob_diff_mean, mismatch_kl)"
            )

    def _compare_replicas(self) -> None:
        """Raise AttachError if the replicas' weights differ; otherwise give all replicas the same version."""
        ranks = self._run.ranks
        if ranks.dp_size == 1:
            return

        def digests() -> dict[tuple[int, str], str]:
            parts = range(ranks.tp_size if ranks.is_tp_rank_zero else 0)
            return {
                (part, name + suffix): text
                for part in parts
                for suffix, of_fp8 in fp8.DIGESTED.items()
                for name, text in self.client.digests(part, quantized=of_fp8).items()
            }

        first, *others = ranks.one_per_replica(ranks.run_and_gather(digests))
        for number, other in enumerate(others, start=1):
            keys = sorted(first.keys() | other.keys())
            if differing := [name for part, name in keys if first.get((part, name)) != other.get((part, name))]:
                raise AttachError(
                    f"the servers of replicas 0 and {number} differ in {len(differing)} tensors, the first:"
                    f" {differing[0]}",
                    hint="start all servers with the same model, dtype and flags",
                )
        if len({*ranks.all_gather_object(self.version)}) > 1:
            self.publish_as(self._newest() + 1)  # earlier runs left the servers at different versions

    def _may_keep_kv(self, status: Status) -> bool:
        """Return whether in-flight requests keep their keys and values; UsageError if they must but cannot."""
        chosen = self._config.publishing.in_flight_kv
        wanted = chosen == "keep" or (chosen == "auto" and self._config.rollouts.max_staleness > 0)
        if wanted and not status.can_keep_kv:
            why = "the server's KV connector would store keys and values of older weights and reuse them"
            if chosen == "keep":
                raise UsageError(f"--in-flight-kv keep: {why}", hint="serve without a KV connector, or recompute")
            logger.info(f"in-flight requests recompute their keys and values at every update: {why}")
        return wanted and status.can_keep_kv


class SharedVllm(PatchedServer):
    """`shared_vllm`: a trainer attached to one live server, with one process per server rank."""

    def save(self, folder: Path) -> None:
        model = self._attached.model
        source = self._config.model_name
        self._log_missing(model_folder.save(model, source, folder, self._parts))

    def send_parts(self) -> None:
        if self._parts is not None:
            model_folder.send_parts(self._attached.model, self._parts)

    def restore(self, checkpoint: Path, *, version: int) -> None:
        model = self._attached.model
        parts = self._parts
        model_folder.check(model, checkpoint, parts)  # before the server pauses
        with self.publish(Update(version=version, takeover=True, last_checkpoint=checkpoint)):  # even a torn server
            model_folder.load_into(model, checkpoint, parts)

    def revive(self, checkpoint: Path | None) -> None:
        """Restart the dead server with a checkpoint, and move all ranks' servers to a version above the last one.

        With several replicas, this rank's server may still be alive.
        """
        if self._run.ranks.tp_group.run_on_rank_zero(lambda: self._run.server_is_lost(self.client)):
            self.restart(checkpoint or self._config.model_name)
        self.publish_as(self._newest() + 1)

    @property
    def _parts(self) -> Parts | None:
        ranks = self._run.ranks
        return Parts(cuts=self._attached.cuts, tp_group=ranks.tp_group) if ranks.tp_size > 1 else None


def manifest_of(server: ServerConfig, model_name: str, exported: Manifest | None = None) -> Manifest:
    """Return the manifest of the server that serves the model to train; `exported` if it is already loaded.

    Raises:
        ManifestError: no manifest is found, it cannot be used, or the server serves a different model.
    """
    exported = exported or manifest.load(server.config_path)
    wanted = skeleton.absolute(model_name)
    if wanted != exported.model:
        raise ManifestError(
            f"the server serves {exported.model}, expected {wanted} (--model-name)",
            hint=f"--model-name {shlex.quote(exported.model)}, or start a second server: "
            f"bridge serve-vllm --model {shlex.quote(model_name)}",
        )
    return exported
