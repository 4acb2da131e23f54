"""All weights are trained, for one model at a time, in the server's memory: vLLM samples only the newest version."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bridge.core.http_limits import Refusal
from bridge.engine.policy import Policy
from bridge.errors import UsageError
from bridge.server.client import VllmClient
from bridge.server.protocol import InFlight
from bridge.tinker.paths import Checkpoints, SavedPath
from bridge.tinker.training import Model, SamplingClient, Trainer

logger = logging.getLogger(__name__)

REPLACED = "another model took its place: all weights are one copy, which has one model at a time"


class AllWeights(Trainer):
    """Trains all weights."""

    is_lora = False
    most_models = 1

    def __init__(self, policy: Policy, base: Path, base_name: str, checkpoints: Checkpoints) -> None:
        """Start new models from the weights in the folder `base`."""
        super().__init__(policy, base_name, checkpoints)
        self._base = base
        self.base_version: int | None = policy.version if policy.version == 0 else None
        """The version that has the base model's weights; None: a client has trained them."""
        self._served_paths: dict[str, int] = {}
        """Path of named sampler weights -> their version."""
        self.num_snapshots_sampling = 0
        """Number of requests in flight whose clients must not see newer weights."""
        with VllmClient(policy.url) as client:
            self._served_name = client.models()[0].id

    def _take(self, model: Model) -> None:
        """Do nothing: there is only one model."""

    def _start(self, model_id: str, lora: Mapping[str, Any]) -> Model:
        self._free_all()
        if self.base_version != self.policy.version:
            self.policy.load(self._base)
            self.base_version = self.policy.version
        rank = int(lora.get("rank", 0))
        if rank:
            logger.info(f"model {model_id}: all weights are trained, not an adapter of rank {rank}: use smaller rates")
        return Model(model_id, self._run_of(model_id), rank)

    def _start_from(self, model_id: str, path: SavedPath) -> Model:
        rank = int(self.checkpoints.about(path.run)["rank"])
        self._free_all()
        return Model(model_id, self._run_of(model_id), rank)

    def _free_all(self) -> None:
        for other in [*self.models]:
            self.free(other, REPLACED)

    def _weights_changed(self, model: Model) -> None:  # noqa: ARG002 - the base class's
        self.base_version = None

    def _in_flight(self) -> InFlight:
        # requests of a snapshot end with the weights that they began with; all others see the new ones
        return "wait" if self.num_snapshots_sampling else "keep"

    def _snapshot(self, model: Model) -> SamplingClient:  # noqa: ARG002 - the base class's
        return SamplingClient(version=self.policy.version)

    def _live(self, model: Model) -> SamplingClient:  # noqa: ARG002 - the base class's
        return SamplingClient()

    def _saved_for_sampler(self, path: str) -> None:
        self._served_paths[path] = self.policy.version

    def sampler(self, path: str | None, base_model: str | None) -> SamplingClient:
        if path is None:
            self._refuse_base(base_model)
            if self.base_version is None:
                raise Refusal(
                    f"{base_model} itself is not served any more: one copy of all weights has those of version"
                    f" {self.policy.version} alone, which a client has trained"
                )
            return SamplingClient(version=self.base_version)
        saved = SavedPath.parse(path)
        folder = self.checkpoints.found(saved)
        version = self._served_paths.get(str(saved))
        if version != self.policy.version:
            raise Refusal(
                f"{path} is an older checkpoint than the weights that are served: one copy of all weights has version"
                f" {self.policy.version} alone. Load it into a training client, or serve it by itself:"
                f" bridge serve-vllm --model {folder}"
            )
        return SamplingClient(version=version, path=path)

    @asynccontextmanager
    async def serving(self, client: SamplingClient) -> AsyncIterator[str]:
        self.check_sampled(client)
        self.num_snapshots_sampling += client.version is not None
        try:
            yield self._served_name
        finally:
            self.num_snapshots_sampling -= client.version is not None

    def check_sampled(self, client: SamplingClient) -> None:
        if client.version not in (None, self.policy.version):
            raise UsageError(
                f"this sampling client is a snapshot of version {client.version}, and one copy of all weights has"
                f" version {self.policy.version} alone",
                hint='make a new client after optim_step, or one of kind="inflight"',
            )
